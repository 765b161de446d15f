"""Html: a tape as one self-contained page: the verdict, and pool, batches and requests over steps.

Owns the page's template and what goes into it. The page loads nothing, from anywhere: its policy
allows its own script and style by their hash, and no connection. Everything that came from a tape
is either escaped by the template or packed (page_data.py) and written as text by the script. The
page holds no text of a prompt, and token ids only where that is asked for.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from msgspec import Struct

from statemachine.records import Record

from .arguments import TAPE_HELP, number
from .errors import Unusable
from .history import ROWS, STEPS_MAX, History
from .lanes import LIVE, MARKS, PHASES
from .page_data import PageData
from .page_report import hide_tokens, page_report
from .progress import progress
from .reader import Tape
from .report import json_text
from .rewrite import check_place
from .run import DEPTHS, FOLD, PLAN, Options, Outcome, replay_tape
from .words import group_text, plural

SCRIPTS = ("data.js", "bins.js", "stacks.js", "lanes.js", "input.js", "page.js")
STYLE = "page.css"
TEMPLATE = "page.html"


class HtmlReport(Struct, frozen=True):
    """What `replay html TAPE -o FILE --json` prints.

    verdict, exit_code, depth: of the replay that the page shows, as in `replay TAPE --json`.
    output: the page, bytes: its size. steps, requests: drawn.
    """

    format: int
    path: str
    output: str
    bytes: int
    depth: str
    verdict: str
    exit_code: int
    steps: int
    requests: int


def main(arguments: list[str]) -> int:
    """`replay html`; the exit code is that of the replay."""
    given = _parser().parse_args(arguments)
    if None not in (given.start, given.until) and given.until < given.start:
        raise Unusable(f"--until {given.until} is before --from {given.start}: nothing is between")
    _check_output(given.tape, given.output)
    options = Options(depth=given.depth, start=given.start, until=given.until, progress=True)
    outcome, history = _read(given.tape, options)
    page = page_of(outcome, history, given.tokens)
    _write(Path(given.output), page)
    report = HtmlReport(
        format=1,
        path=given.tape,
        output=given.output,
        bytes=len(page.encode()),
        depth=outcome.depth,
        verdict=page_report(outcome, tokens=True).verdict,
        exit_code=outcome.exit_code,
        steps=history.steps,
        requests=len(history.lanes.lanes),
    )
    print(json_text(report) if given.json else "\n".join(_lines(report)))
    return outcome.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="replay html",
        description="A tape as one page for a browser, with no network: the verdict, the pool, the "
        "batches and every request over the steps.",
        epilog="exit codes: of the replay that the page shows: 0 no divergence, 1 diverged, 3 "
        "clean but torn; 2 where no page could be made",
    )
    parser.add_argument("tape", metavar="TAPE", help=TAPE_HELP)
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the page")
    parser.add_argument(
        "--depth",
        choices=[depth for depth in DEPTHS if depth in (FOLD, PLAN)],
        default=FOLD,
        help="how the verdict is found (see replay --help)",
    )
    parser.add_argument(
        "--from",
        dest="start",
        type=number,
        metavar="STEP",
        help="begin at the last checkpoint before this step",
    )
    parser.add_argument("--until", type=number, metavar="STEP", help="stop after this step")
    parser.add_argument(
        "--tokens", action="store_true", help="show token ids, which stand for text of prompts"
    )
    parser.add_argument("--json", action="store_true", help="what was written, as JSON")
    return parser


def _check_output(tape: str, output: str) -> None:
    if os.path.isdir(output):
        raise Unusable(f"{output} is a folder: give the name of a file, like {output}/report.html")
    if not os.path.isdir(os.path.dirname(output) or "."):
        raise Unusable(f"{output} cannot be written: its folder does not exist")
    check_place(tape, output)


def _write(path: Path, page: str) -> None:
    """Whole or not at all: a page that was there before stays until the new one is."""
    beside = path.with_name(f".{path.name}.part")
    try:
        if path.exists() and not path.is_file():
            path.write_text(page, encoding="utf-8")  # a pipe, a device: nothing may take its place
            return
        beside.write_text(page, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise Unusable(f"{path} cannot be written: {error.strerror}") from error


class DrawnTape(Tape):
    """A tape that is read once for two: `history` takes each record in before whoever iterates has
    it, so that both know of the same ones while the tape grows. Who iterates anew goes on where
    it was left. failure: why nothing was taken in any more.
    """

    def __init__(self, path: str, options: Options) -> None:
        super().__init__(path, options.start)
        self.history = History(options.until)
        self.failure: Unusable | None = None
        self._left = self._taken_in()

    def __iter__(self) -> Iterator[Record]:
        return self._left

    def _taken_in(self) -> Iterator[Record]:
        for record in super().__iter__():
            if self.failure is None:
                try:
                    self.history.feed(record)
                except Unusable as error:
                    self.failure = error
            yield record


def _read(path: str, options: Options) -> tuple[Outcome, History]:
    """The verdict, and what is drawn: of a tape that diverged, as far as it can be read."""
    tape = DrawnTape(path, options)
    outcome, history = replay_tape(tape, options), tape.history
    if outcome.divergence is not None:
        _read_on(tape)
    if tape.failure is not None:
        if outcome.divergence is None or history.header is None or history.steps >= STEPS_MAX:
            raise tape.failure
        outcome.notes.append(f"the charts end where the tape cannot be read on: {tape.failure}")
    history.finish()
    return outcome, history


def _read_on(tape: DrawnTape) -> None:
    """What stands behind a divergence is drawn, too."""
    try:
        with progress(tape, "replay, page") as records:
            for _ in records:
                if tape.history.done or tape.failure is not None:
                    return
    except Unusable as error:
        tape.failure = error


def page_of(outcome: Outcome, history: History, tokens: bool = False) -> str:
    """The page, one string. tokens: whether token ids may be in it."""
    folder = files(__package__) / "page"
    script = "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    style = (folder / STYLE).read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((folder / TEMPLATE).read_text(encoding="utf-8"))
    return template.render(
        report=page_report(outcome, tokens),
        script=f"\n{script}",
        style=f"\n{style}",
        script_hash=_hash(f"\n{script}"),
        style_hash=_hash(f"\n{style}"),
        data=_data(outcome, history, tokens),
    )


def _hash(text: str) -> str:
    """As a content security policy names a script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data(outcome: Outcome, history: History, tokens: bool) -> str:
    """What the script draws."""
    data, lanes = PageData(), history.lanes
    for name, values in history.columns.items():
        data.add(f"step.{name}", values)
    reasons = sorted({lane.ended for lane in lanes.lanes} | {LIVE})
    numbered = {reason: at for at, reason in enumerate(reasons)}
    for name in (
        *("request", "prompt_tokens", "max_tokens", "parent", "start", "end", "adopted"),
        *("answer_tokens", "preemptions", "arrived"),
    ):
        data.add(f"lane.{name}", (int(getattr(lane, name)) for lane in lanes.lanes))
    data.add("lane.ended", (numbered[lane.ended] for lane in lanes.lanes))
    spans = _by_lane(lanes.spans, (0, 2))
    for at, name in enumerate(("lane", "phase", "first", "last")):
        data.add(f"span.{name}", spans[at])
    marks = _by_lane(lanes.marks, (0, 1))
    for at, name in enumerate(("lane", "place", "kind", "rows")):
        data.add(f"mark.{name}", marks[at])
    return data.text(_description(outcome, history, reasons, tokens))


def _by_lane(flat: Any, order: tuple[int, int]) -> Any:
    """Rows of four numbers as four columns, sorted by two of them."""
    table = np.asarray(flat, dtype=np.int64).reshape(-1, 4)
    return table[np.lexsort((table[:, order[1]], table[:, order[0]]))].T


def _description(
    outcome: Outcome, history: History, reasons: list[str], tokens: bool
) -> dict[str, Any]:
    found, header = outcome.divergence, history.header
    groups = []
    if header is not None:
        for group in history.groups:
            spec = header.geometry.groups[group]
            text = group_text(header.geometry, group)
            groups.append({"group": group, "blocks": spec.num_blocks, "text": text})
    failures = [
        [it.place, it.stage, it.error if tokens else hide_tokens(it.error)]
        for it in history.failures
    ]
    divergence = None
    if found is not None:
        divergence = {
            "place": history.place_of(found.step),
            "step": found.step,
            "sequence": found.sequence,
            "kind": found.kind,
        }
    return {
        "rows": ROWS,
        "phases": PHASES,
        "marks": MARKS,
        "groups": groups,
        "names": [lane.name for lane in history.lanes.lanes],
        "reasons": reasons,
        "failures": failures,
        "divergence": divergence,
        "broken_at": history.broken_at,
        "broken": history.broken if tokens else hide_tokens(history.broken),
    }


def _lines(report: HtmlReport) -> list[str]:
    size = f"{report.bytes / 1e6:.1f} MB" if report.bytes >= 1e5 else f"{report.bytes:,} bytes"
    drawn = f"{plural(report.steps, 'step')}, {plural(report.requests, 'request')}"
    return [report.verdict, f"written   {report.output}: {drawn}, {size}"]
