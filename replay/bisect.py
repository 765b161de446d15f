"""Bisect: `replay bisect FOLDER`, the first bad step of a long capture without folding all of it.

Each segment begins with a checkpoint, so that it can be judged alone: its records must lead from
its own checkpoint to the next one's. Bisecting takes it that what went wrong stays wrong; where the
last segment is clean that is not so, and segments are judged from the first on. Owns that search,
and the one over steps with a command of somebody else's as the judge (bisect_command.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec
from msgspec import Struct

from statemachine.records import Record, StepPlanned

from .arguments import TAPE_HELP
from .divergence import Diverged, Divergence
from .errors import Unusable
from .judge import Judge
from .reader import Tape, sources_of
from .run import CLEAN, DIVERGED, FOLD, PLAN, Options
from .words import plural

HEAD_RECORDS = 2
"""Header and checkpoint, with which each segment begins."""


class Probe(Struct, frozen=True):
    """Something that was judged: a segment's number and file, or steps up to `last_step`."""

    segment: int
    source: str
    first_step: int
    last_step: int
    bad: bool


class BisectReport(Struct, frozen=True, kw_only=True):
    """What `replay bisect --json` prints.

    step: the first bad one; -1 where there is none. segment: where it is, of `segments`; -1 with
    --command. kind, sequence, summary: of the divergence there. probes: what was judged, in order.
    trusted: segments that nobody looked at. in_order: whether segments were judged from the first
    on, so that none before the bad one is taken on trust.
    """

    format: int = 1
    verdict: str
    exit_code: int
    path: str
    step: int
    segment: int
    segments: int
    kind: str
    sequence: int
    summary: str
    probes: tuple[Probe, ...]
    trusted: int
    in_order: bool
    notes: tuple[str, ...]


class _Segments:
    """Judges segments of a tape, each once at most."""

    def __init__(self, sources: list[str], depth: str) -> None:
        self._sources = sources
        self._depth = depth
        self.found: dict[int, Divergence | None] = {}
        self.probes: list[Probe] = []

    def bad(self, number: int) -> bool:
        """Whether a segment's records do not lead to the next one's checkpoint."""
        if number not in self.found:
            steps = [-1, -1]
            self.found[number] = self._judge(self._records(number, steps))
            bad = self.found[number] is not None
            self.probes.append(Probe(number, self._sources[number], steps[0], steps[1], bad))
        return self.found[number] is not None

    def _judge(self, records: Iterable[Record]) -> Divergence | None:
        judge = Judge(Options(self._depth))
        try:
            for record in records:
                judge.feed(record)
            judge.finish()
        except Diverged as diverged:
            return diverged.divergence
        return None

    def _records(self, number: int, steps: list[int]) -> Iterator[Record]:
        """A segment's, and the head of the next one, whose checkpoint must agree."""
        for record in Tape(self._sources[number]):
            if isinstance(record, StepPlanned):
                steps[:] = [record.step if steps[0] < 0 else steps[0], record.step]
            yield record
        if number + 1 < len(self._sources):
            yield from islice(Tape(self._sources[number + 1]), HEAD_RECORDS)


def bisect(path: str, depth: str = FOLD, every: bool = False) -> BisectReport:
    """The first bad step of a tape of segments. every: judge all from the first on, up to it.
    Raises Unusable.
    """
    notes: list[str] = []
    sources = sources_of(path, notes)
    segments, last = _Segments(sources, depth), len(sources) - 1
    in_order = every or not segments.bad(last)
    first = _in_order(segments, last) if in_order else _search(segments, last)
    return _report(path, segments, sources, first, in_order, tuple(notes))


def _in_order(segments: _Segments, last: int) -> int | None:
    return next((number for number in range(last + 1) if segments.bad(number)), None)


def _search(segments: _Segments, last: int) -> int:
    """The last segment is bad: the first such one, if all behind the first are."""
    good, bad = -1, last
    while bad - good > 1:
        middle = (good + bad) // 2
        if segments.bad(middle):
            bad = middle
        else:
            good = middle
    return bad


def _report(
    path: str,
    segments: _Segments,
    sources: list[str],
    first: int | None,
    in_order: bool,
    notes: tuple[str, ...],
) -> BisectReport:
    found = None if first is None else segments.found[first]
    count, judged = len(sources), len(segments.probes)
    looked = f"{judged} of {plural(count, 'segment')} judged"
    if found is None:
        verdict = f"CLEAN: no segment is bad ({looked})"
    else:
        verdict = (
            f"FIRST BAD STEP {found.step}, in segment {first} ({looked}): {found.kind}: "
            f"{found.summary}"
        )
    return BisectReport(
        verdict=verdict,
        exit_code=CLEAN if found is None else DIVERGED,
        path=path,
        step=-1 if found is None else found.step,
        segment=-1 if first is None else first,
        segments=count,
        kind="" if found is None else found.kind,
        sequence=-1 if found is None else found.sequence,
        summary="" if found is None else found.summary,
        probes=tuple(segments.probes),
        trusted=count - judged,
        in_order=in_order,
        notes=notes,
    )


def as_text(report: BisectReport) -> str:
    """The report for a person."""
    lines = [report.verdict]
    for probe in report.probes:
        what = f"segment {probe.segment}, steps {probe.first_step} to {probe.last_step}"
        if probe.segment < 0:
            what = f"steps up to {probe.last_step}"
        lines.append(f"  {'bad ' if probe.bad else 'good'}  {what}")
    if report.trusted and report.step >= 0 and not report.in_order:
        lines.append(
            f"  {plural(report.trusted, 'segment')} not looked at: what went wrong is taken to "
            "stay wrong (--every judges all up to the first bad one)"
        )
    lines += [f"  note: {note}" for note in report.notes]
    if report.step >= 0:
        lines.append(f"  try: replay {report.path} --from {report.step} --until {report.step}")
        lines.append(f"       replay show {report.path} --at {report.step}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """`replay bisect`."""
    parser = argparse.ArgumentParser(
        prog="replay bisect",
        description="The first bad step of a capture of segments, by their checkpoints; or, with "
        "--command, the first step with which a command fails.",
        epilog="exit codes: 0 nothing is bad, 1 the first bad step was found, 2 unusable",
    )
    parser.add_argument("tape", metavar="TAPE", help=TAPE_HELP)
    parser.add_argument("--depth", choices=(FOLD, PLAN), default=FOLD, help="how to judge")
    parser.add_argument(
        "--every", action="store_true", help="judge every segment up to the first bad one"
    )
    parser.add_argument(
        "--command",
        action="append",
        default=[],
        metavar="CMD",
        help="judge beginnings of the tape by a command with {tape} in it: bad where it exits with "
        "1; given twice, such as for two versions: bad where one does and the other does not",
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    given = parser.parse_args(arguments)
    if given.command:
        if given.every or given.depth != FOLD:
            raise Unusable("with --command the command judges: leave out --depth and --every")
        from .bisect_command import bisect_command

        report = bisect_command(given.tape, given.command)
    else:
        report = bisect(given.tape, given.depth, given.every)
    text = msgspec.json.encode(report).decode() if given.json else as_text(report)
    sys.stdout.write(text + "\n")
    return report.exit_code
