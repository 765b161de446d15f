"""Serving: this server beside others, over HTTP, streamed, in turn on the same prompts.

    python -m tests.bench.serving --loads 1 4 16 --servers mlxtape llama --repeats 3

Every server stays started and is held still while another runs; a load goes to each server in turn,
then again, so that what else happens on the machine is spread over all. Rows are medians. Bias:
asking costs the machine some processor time too, the same for all; MLX servers run float32 weights,
llama.cpp its own 4-bit ones.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, field

from kernel.blas import load_blas

from .asking import Answer, Asker
from .figures import Figures, figures, median
from .loads import LOADS, Load, burst
from .peers import FOLDER, PEERS, Peer, Running, Unavailable, model_folder, started, versions
from .table import Table, about

DEFAULT_LOADS = ("1", "4", "16", "shared8")
REPEATS = 3
CUT_S = 45.0
"""A load that takes longer is given up; one whose repetitions would is not repeated."""
WARM_UP = burst(1, words=8, tokens=4)


class Row(Struct):
    """A phase of a load on a server. ratio: this server's output rate to this row's; 0: unknown.

    figures: medians; None where nothing came, and `why` says so. notes: sentences.
    """

    load: str
    phase: str
    server: str
    repeats: int = 0
    figures: Figures | None = None
    memory_mb: float = 0.0
    ratio: float = 0.0
    why: str = ""
    notes: list[str] = field(default_factory=list)


class Measured(Struct):
    """One turn: answers by phase, the peak of memory, and whether it was given up."""

    phases: dict[str, list[Answer]]
    memory_mb: float
    cut: bool


def seed_of(load: Load, number: int) -> str:
    """What makes the words of a load's repetition, the same for every server."""
    return f"{load.title}, {number}"


async def once(address: str, model: str, load: Load, number: int, cut_s: float) -> Measured:
    """A load on a server that runs at `address`; its memory is not looked at."""
    async with Asker(address, model) as asker:
        cut = False
        try:
            async with asyncio.timeout(cut_s):
                await load.run(asker, seed_of(load, number))
        except TimeoutError:
            cut = True
        phases: dict[str, list[Answer]] = {}
        for answer in asker.answers:
            phases.setdefault(answer.phase, []).append(answer)
        return Measured(phases, 0.0, cut)


def turn(running: Running, load: Load, number: int, cut_s: float) -> Measured:
    """A server's turn: it runs, is measured and is held again. Raises Unavailable."""
    running.ready(load.long)
    running.begin_peak()
    measured = asyncio.run(once(running.address, running.peer.model, load, number, cut_s))
    measured.memory_mb = running.peak_mb()
    if measured.cut or (running.process is not None and running.process.poll() is not None):
        running.stop()  # what was given up may still be worked on
    else:
        running.hold()
    return measured


class Bench:
    """Servers that are started, and what was found. A context: they end with it."""

    def __init__(self, repeats: int, cut_s: float) -> None:
        self._repeats = repeats
        self._cut_s = cut_s
        self._servers = contextlib.ExitStack()
        self._running: dict[str, Running] = {}
        self._missing: dict[str, str] = {}
        self.rows: list[Row] = []
        self.versions: dict[str, str] = {}

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._servers.close()

    def start(self, peer: Peer) -> None:
        """Install and start a server and let it answer once; where it cannot, its rows say why."""
        try:
            running = self._servers.enter_context(started(peer))
            self.versions[peer.name] = versions(peer, running.python)
            turn(running, WARM_UP, 0, self._cut_s)
        except Unavailable as error:
            self._missing[peer.name] = str(error)
        else:
            self._running[peer.name] = running

    def measure(self, load: Load) -> list[Row]:
        """All servers on a load, in turn, as often as it is repeated; the rows by phase."""
        runs: dict[str, list[Measured]] = {name: [] for name in (*self._running, *self._missing)}
        why = dict(self._missing)
        spent = dict.fromkeys(runs, 0.0)
        for number in range(1, 1 + self._repeats):
            for name, running in self._running.items():
                # One more, if it takes as long as those before it, must not take too long.
                if name in why or spent[name] * (number / max(1, number - 1)) > self._cut_s:
                    continue
                began_s = time.perf_counter()
                try:
                    runs[name].append(turn(running, load, number, self._cut_s))
                except Unavailable as error:
                    why[name] = str(error)
                spent[name] += time.perf_counter() - began_s
        rows = [
            row
            for name, each in runs.items()
            for row in rows_of(load, name, each, why.get(name, ""), self._cut_s)
        ]
        _compare(rows)
        self.rows += rows
        return rows


def rows_of(load: Load, server: str, runs: list[Measured], why: str, cut_s: float) -> list[Row]:
    """A row for each phase of a server's turns. why: what kept it from more of them."""
    phases = list(dict.fromkeys(phase for run in runs for phase in run.phases))
    if not phases:
        return [Row(load.title, "", server, why=why or "it was not asked")]
    rows = []
    for phase in phases:
        answers = [run.phases[phase] for run in runs if phase in run.phases]
        found = [each for each in map(figures, answers) if each is not None]
        row = Row(load.title, phase, server, len(found))
        row.memory_mb = max(run.memory_mb for run in runs)
        failures = [answer.failure for each in answers for answer in each if answer.failure]
        if found:
            row.figures = median(found)
            row.notes = _notes(row.figures, failures)
        else:
            row.why = failures[0] if failures else _empty(answers, cut_s)
        if any(run.cut for run in runs):
            row.notes.append(f"given up after {cut_s:.0f} s: figures are of what had come")
        rows.append(row)
    return rows


def _empty(turns: list[list[Answer]], cut_s: float) -> str:
    """Why there are no figures of answers without a token: some end at once, as models like it."""
    ended = [it for each in turns for it in each if it.prompt_tokens and it.ended_s]
    if not ended:
        return f"no token came within {cut_s:.0f} s"
    longest = max(ended, key=lambda it: it.prompt_tokens)
    seconds = longest.ended_s - longest.sent_s
    return f"{longest.prompt_tokens} prompt tokens in {seconds:.1f} s, and an empty answer"


def _notes(found: Figures, failures: list[str]) -> list[str]:
    notes = []
    if failures:
        notes.append(f"{len(failures)} requests failed: {failures[0]}")
    if found.pieces != found.output_tokens:
        notes.append(f"{found.output_tokens:g} tokens came in {found.pieces:g} pieces")
    return notes


def _compare(rows: list[Row]) -> None:
    """How many times the others' output rate the first server has, phase by phase."""
    first = {row.phase: row.figures for row in rows if row.server == rows[0].server}
    for row in rows:
        ours = first.get(row.phase)
        if ours is not None and row.figures is not None and row.figures.output_rate:
            row.ratio = ours.output_rate / row.figures.output_rate


HEADINGS = (
    f"{'':<29}{'output':>8}{'decode':>8}{'prompt':>8}{'first piece':>16}{'between pieces':>20}"
    f"{'memory':>8}{'':>8}\n"
    f"{'':<29}{'tok/s':>8}{'tok/s':>8}{'tok/s':>8}{'ms (p95)':>16}{'ms (p95)':>20}{'MB':>8}"
    f"{'ratio':>8}"
)


def as_text(rows: list[Row]) -> str:
    """Rows of one load as lines."""
    lines = []
    for phase in dict.fromkeys(row.phase for row in rows if row.figures is not None):
        lines.append(", ".join(filter(None, (rows[0].load, phase))))
        lines += [_line(row) for row in rows if row.figures is not None and row.phase == phase]
    lines += [f"  {row.server}: no figures: {row.why}" for row in rows if row.figures is None]
    return "\n".join(lines)


def _line(row: Row) -> str:
    found = row.figures
    assert found is not None
    first = f"{found.first_ms:,.0f} ({found.first_p95_ms:,.0f})"
    between = f"{found.between_ms:,.1f} ({found.between_p95_ms:,.0f})"
    # What was given up has no usage, and what never decoded together no rate of that.
    decode = f"{found.decode_rate:.1f}" if found.decode_rate else "-"
    prompt = f"{found.prompt_rate:.0f}" if found.prompt_tokens else "-"
    line = (
        f"  {row.server:<27}{found.output_rate:>8.1f}{decode:>8}{prompt:>8}{first:>16}"
        f"{between:>20}{row.memory_mb:>8,.0f}{row.ratio:>7.2f}x"
    )
    return "\n".join([line, *(f"    {note}" for note in row.notes)])


def over_http(
    servers: list[Peer],
    loads: list[Load],
    *,
    path: Path,
    repeats: int = REPEATS,
    cut_s: float = CUT_S,
) -> list[Row]:
    """Measure, print as it comes, and keep a JSON file at `path`."""
    if any(peer.model == FOLDER for peer in servers):
        model_folder()
    with Bench(repeats, cut_s) as bench:
        for peer in servers:
            bench.start(peer)
        for name, said in bench.versions.items():
            print(f"{name}: {said}")
        print(f"\n{HEADINGS}")
        for load in loads:
            print(as_text(bench.measure(load)), flush=True)
    kept = {
        "about": about(load_blas()),
        "versions": bench.versions,
        "repeats": repeats,
        "rows": bench.rows,
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1))
    return bench.rows


def against_plain_loops(table: Table, rows: list[Row], plain: dict[int, float]) -> None:
    """This server's decode rates over HTTP against loops without a server, by rows at once."""
    for clients, rate in plain.items():
        for row in rows:
            if row.server == PEERS[0].name and row.load == burst(clients).title and row.figures:
                name = f"{clients} clients over HTTP, decode"
                table.add(name, row.figures.decode_rate, "tokens/s", rate, "plain loop")


def loads(names: Sequence[str] = DEFAULT_LOADS) -> list[Load]:
    """Loads by name; `all` is all of them."""
    return [LOADS[name] for name in (LOADS if "all" in names else names)]


def chosen(words: list[str]) -> list[Peer]:
    """Peers whose name begins with, or contains, one of the words; all without a word."""
    return [peer for peer in PEERS if not words or any(word in peer.name for word in words)]


def main(arguments: list[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.serving")
    parser.add_argument("--servers", nargs="*", default=[], help="parts of names; all without")
    parser.add_argument("--loads", nargs="*", default=DEFAULT_LOADS, choices=[*LOADS, "all"])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--cut", type=float, default=CUT_S, metavar="SECONDS")
    parser.add_argument(
        "--json", type=Path, default=Path(tempfile.gettempdir()) / "mlxtape-serving.json"
    )
    asked = parser.parse_args(arguments)
    print("\n".join(f"{name}: {value}" for name, value in about(load_blas()).items()))
    over_http(
        chosen(asked.servers),
        loads(asked.loads),
        path=asked.json,
        repeats=asked.repeats,
        cut_s=asked.cut,
    )
    print(f"\nkept in {asked.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
