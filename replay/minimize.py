"""Minimize: `replay minimize capture.log -o small.log`, the smallest tape that diverges the same.

Owns the command: reading the tape as often as it takes, writing the small one, saying what became
of it. search.py looks for it. Never changes the tape that it is given.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from attrs import evolve
from msgspec import Struct

from statemachine.codec import TapeEncoder
from statemachine.records import (
    Record,
    RequestArrived,
    StepPlanned,
)

from .arguments import TAPE_HELP, margin, tell
from .decide import PlanSearch, checkpoint_of
from .divergence import PLAN as PLAN_CLASS
from .errors import Unusable
from .pytestfile import decision, wrong_again
from .reader import STDIN, Tape
from .rewrite import check_place
from .run import DEPTHS, FOLD, PLAN, Options, checker_for
from .search import Search, Source
from .subset import batch_of
from .survey import Size, Survey, survey


class MinimizeReport(Struct, frozen=True):
    """What `replay minimize` did. format: of this report. path, output: the tapes.

    diverges: class of the divergence, which is that of both. step, summary: of the small tape's.
    before, after: their sizes. how: what the small tape is made of. tried: candidates that were
    replayed. notes: what is to be known besides.
    """

    format: int
    path: str
    output: str
    depth: str
    diverges: str
    step: int
    summary: str
    before: Size
    after: Size
    how: str
    tried: int
    notes: tuple[str, ...] = ()


def main(arguments: list[str]) -> int:
    """`replay minimize`; 0 where a smaller or equal tape was written."""
    parser = argparse.ArgumentParser(
        prog="replay minimize",
        description="Write the smallest tape that still diverges in the same way.",
    )
    parser.add_argument("tape", help=TAPE_HELP)
    parser.add_argument("-o", "--output", required=True, metavar="SMALL", help="the file to write")
    parser.add_argument(
        "--depth", choices=DEPTHS, help="default: fold, and plan where the tape folds"
    )
    parser.add_argument("--model", metavar="PATH", help="the model, if not the tape's own name")
    parser.add_argument("--margin", type=margin, metavar="X", help="as for `replay`")
    parser.add_argument(
        "--short",
        action="store_true",
        help="begin at a checkpoint right before the divergence: fewer steps, but `replay test` "
        "cannot run such a tape",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="the fault is in the code of this version: keep what it takes to diverge anew, so "
        "that `replay test` of the small tape fails now",
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    given = parser.parse_args(arguments)
    options = Options(depth=given.depth or "", model=given.model, margin=given.margin, tell=tell)
    if given.short and given.again:
        parser.error(
            "--again runs a tape from its start, which --short leaves out: give one of them"
        )
    report = minimize(given.tape, given.output, options, short=given.short, again=given.again)
    print(msgspec.json.encode(report).decode() if given.json else as_text(report))
    return 0


def as_text(report: MinimizeReport) -> str:
    """The report for a person."""
    was, now = report.before, report.after
    lines = [
        f"{report.output}: {now.requests} of {was.requests} requests still diverge "
        f"({report.diverges}, step {report.step}): {report.summary}",
        "",
        f"{'':<10}{'before':>12}{'after':>12}",
    ]
    for name in Size.__struct_fields__:
        lines.append(f"{name:<10}{getattr(was, name):>12}{getattr(now, name):>12}")
    lines += ["", f"made of   {report.how}", f"tried     {report.tried} candidates"]
    lines += [f"note      {note}" for note in report.notes]
    return "\n".join(lines)


def minimize(
    path: str, output: str, options: Options, *, short: bool = False, again: bool = False
) -> MinimizeReport:
    """Write the smallest tape that diverges like the one at `path`.

    Depth "": fold, then plan. short: begin at a checkpoint. again: see `Search`. Raises Unusable
    where the tape cannot be read, is redacted, or does not diverge (again, if that is asked), and
    where the output cannot be written.
    """
    check_place(path, output)
    with _readable(path) as (source, size_of):
        options, about = _surveyed(path, source, size_of, options)
        search = Search(source, options, about, again)
        if again:
            _check_again(path, source, about)
        by_plan = search.found.kind == PLAN_CLASS
        small = PlanSearch(search).run() if by_plan else search.run()
        if short:
            small = search.shortened(small)
    data = TapeEncoder().encode(small.records)
    _write(output, data)
    return MinimizeReport(
        format=1,
        path=path,
        output=output,
        depth=options.depth,
        diverges=small.found.kind,
        step=small.found.step,
        summary=small.found.summary,
        before=about.size,
        after=_size(small.records, len(data)),
        how=small.how,
        tried=search.tried,
        notes=tuple(small.notes),
    )


def _check_again(path: str, source: Source, about: Survey) -> None:
    assert about.found is not None
    if not wrong_again(list(source()), decision(about.found)):
        raise Unusable(
            f"the inputs of {path}, run again by this version, lead to no divergence: the fault is "
            "not in this code, or not where such a run sees it; minimize without --again"
        )


@contextmanager
def _readable(path: str) -> Iterator[tuple[Source, Callable[[], int]]]:
    """A tape that can be read more than once, and its bytes once it was read."""
    with tempfile.TemporaryDirectory() as folder:
        place = path
        if path == STDIN:
            place = str(Path(folder) / "stdin")
            with open(place, "wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        sizes: dict[str, int] = {}

        def read() -> Iterator[Record]:
            tape = Tape(place)
            for record in tape:
                sizes[tape.source] = tape.position
                yield record

        yield read, lambda: sum(sizes.values())


def _surveyed(
    path: str, source: Source, size_of: Callable[[], int], options: Options
) -> tuple[Options, Survey]:
    """The depth at which a tape diverges, and what is known of it there."""
    depths = [options.depth] if options.depth else [FOLD, PLAN]
    for depth in depths:
        options = evolve(options, depth=depth)
        about = survey(source(), options, checker_for, size_of)
        if about.header is not None and about.header.redacted:
            raise Unusable(
                "the tape is redacted: without its tokens nothing can be taken out of it"
            )
        if about.found is not None:
            return options, about
    raise Unusable(
        f"{path} does not diverge at depth {' or '.join(depths)}: there is nothing to minimize"
        + ("" if options.depth == depths[0] and len(depths) == 1 else "; give a deeper --depth")
    )


def _size(records: list[Record], count: int) -> Size:
    requests = {it.request for it in records if isinstance(it, RequestArrived)}
    for it in checkpoint_of(records).requests:
        requests.add(it.arrived.request)
    plans = [it for it in records if isinstance(it, StepPlanned)]
    rows = sum(sum(batch_of(it.events)[1]) for it in plans)
    return Size(len(requests), len(plans), rows, count)


def _write(output: str, data: bytes) -> None:
    """Put a tape in a file that only its owner may read, as captures are."""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with os.fdopen(os.open(output, flags, 0o600), "wb") as file:
            file.write(data)
    except OSError as error:
        raise Unusable(f"{output} cannot be written: {error.strerror}") from error
