"""Show: what a tape says about a moment, a sequence or a block. Compares nothing.

The command line of `replay show`, and the raw form of its answers: records and events as they
stand on tape (`--events`). What the questions come to is in moment.py, life.py and block_life.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from msgspec import Struct

from statemachine.events import Closed, Event, PoolReset
from statemachine.records import (
    BlocksOffered,
    Finished,
    FlushRequested,
    Record,
    RequestArrived,
    RequestCancelled,
    StepDone,
    StepFailed,
    StepPlanned,
    StepTimed,
)

from .arguments import TAPE_HELP, number, place
from .block_life import BlockReport, block_lines, block_of
from .divergence import Happened, concerns, event_text, text_for
from .errors import Unusable
from .following import Following
from .life import LifeReport, life_lines, life_of
from .moment import MomentReport, last_step, moment_of
from .moment_text import moment_lines, step_lines
from .progress import progress
from .reader import STDIN, Tape, keep_stdin
from .report import json_text
from .words import tokens_text

__all__ = ["BlockReport", "EventsReport", "LifeReport", "MomentReport", "main"]

EXAMPLES = """examples:
  replay show capture.log --at 9            the pool, the batch, the queue, and all of step 9
  replay show captures/ --at -1             the same of the last step
  replay show capture.log --seq 3           from arrival to end: queue, prefill, decode, ...
  replay show capture.log --seq 3 --events  every event of it, as on tape
  replay show capture.log --block 12        who held block 12 and wrote into it
"""


class EventsReport(Struct, frozen=True):
    """What `replay show TAPE ... --events --json` prints: events as on tape, each as JSON."""

    format: int
    path: str
    events: tuple[Happened, ...]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="replay show",
        description="What a tape says about a moment, a sequence or a block.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tape", metavar="TAPE", help=TAPE_HELP)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--at",
        type=place,
        metavar="STEP",
        help="a step; negative ones from the end, -1 is the last",
    )
    what.add_argument("--seq", type=number, metavar="ID", help="a sequence (a request's id)")
    what.add_argument("--block", type=number, metavar="ID", help="a block of the pool")
    parser.add_argument(
        "--group", type=number, metavar="G", default=0, help="the block's group (default: 0)"
    )
    parser.add_argument(
        "--events", action="store_true", help="with --at or --seq: the raw events, as on tape"
    )
    parser.add_argument("--json", action="store_true", help="the answer as JSON")
    return parser


def main(arguments: list[str]) -> int:
    """`replay show`; the exit code is 0. Raises Unusable."""
    given = _parser().parse_args(arguments)
    if given.events and given.block is not None:
        raise Unusable("--events goes with --at or --seq, not with --block")
    if given.at is not None:
        report, lines = _moment(given.tape, given.at, given.events)
    elif given.seq is not None:
        report, lines = _life(given.tape, given.seq, given.events)
    else:
        with progress(tape := Tape(given.tape), "show") as records:
            found = block_of(tape.path, records, given.block, given.group)
        report, lines = found, block_lines(found)
    if given.json:
        print(json_text(report))
    else:
        for line in lines:
            print(line)
    return 0


def _moment(path: str, step: int, raw: bool) -> tuple[Struct, Iterable[str]]:
    if step < 0:
        if path == STDIN:
            keep_stdin()
        last = last_step(path)
        if last + 1 + step < 1:
            raise Unusable(f"{path} has no step {step} from the end: its last one is {last}")
        step = last + 1 + step
    following = Following()
    with progress(Tape(path, near=step), "show") as records:
        report, found = moment_of(path, records, step, following)
    if raw:
        events = EventsReport(1, path, report.events)
        return events, (line for record in found for line in raw_lines(record))
    return report, (*moment_lines(report, following.state.geometry), *step_lines(report))


def _life(path: str, seq: int, raw: bool) -> tuple[Struct, Iterable[str]]:
    with progress(Tape(path), "show") as records:
        if not raw:
            report = life_of(path, records, seq)
            return report, life_lines(report)
        happened: list[Happened] = []
        lines: list[str] = []
        live = False
        for record in records:
            kept, more, live = _events_of(record, seq, live)
            happened += kept
            lines += more
    if not lines:
        raise Unusable(f"{path} knows of no sequence {seq}")
    return EventsReport(1, path, tuple(happened)), lines


def _events_of(record: Record, seq: int, live: bool) -> tuple[list[Happened], list[str], bool]:
    """A record's events that concern a sequence, the same as lines, and whether it is live then: a
    pool that is lost concerns those that are.
    """
    if isinstance(record, RequestArrived | RequestCancelled | Finished):
        return [], list(raw_lines(record)) if record.request == seq else [], live
    if not isinstance(record, StepPlanned | StepDone | StepFailed):
        return [], [], live
    kind, kept = type(record).__name__, list[Happened]()
    for index, event in enumerate(record.events):
        if concerns(event, seq) and (live or not isinstance(event, PoolReset)):
            kept.append(Happened(record.step, kind, index, text_for(event, seq)))
            live = not isinstance(event, Closed)
    if not kept:
        return [], [], live
    lines = [f"step {record.step} {kind}", *(f"  [{it.index}] {it.event}" for it in kept)]
    return kept, lines, live


def raw_lines(record: Record) -> Iterator[str]:
    """A record as it stands on tape."""
    if isinstance(record, RequestArrived):
        tokens = tokens_text(record.tokens)
        yield f"request {record.request} arrived, {len(record.tokens)} tokens: {tokens}"
        yield f"  {record.parameters}"
    elif isinstance(record, RequestCancelled):
        yield f"request {record.request} cancelled: {record.reason}"
    elif isinstance(record, Finished):
        yield f"request {record.request} ends after {record.tokens_kept} tokens: {record.reason}"
    elif isinstance(record, BlocksOffered):
        yield f"request {record.request} may load kept blocks {record.first} to {record.end - 1}"
    elif isinstance(record, FlushRequested):
        yield f"flush requested: {record.reason}"
    elif isinstance(record, StepTimed):
        parts = ", ".join(f"{name} {time}" for name, time in record.parts_us.items())
        yield f"step {record.step} took, in microseconds: {parts}"
    elif isinstance(record, StepPlanned):
        yield f"step {record.step} planned, state {record.digest:016x}"
        yield from _event_lines(record.events)
    elif isinstance(record, StepFailed):
        yield f"step {record.step} failed at {record.stage}: {record.error}"
        yield from _event_lines(record.events)
    elif isinstance(record, StepDone):
        yield from _done_lines(record)


def _done_lines(record: StepDone) -> Iterator[str]:
    yield f"step {record.step} done, state {record.digest:016x}"
    seen = record.observation
    columns = zip(seen.starts, seen.rows, seen.visible, seen.tables, strict=False)
    for piece, (start, rows, visible, tables) in enumerate(columns):
        hashes = " ".join(f"{table:016x}" for table in tables)
        yield (
            f"  piece {piece} observed: start {start}, rows {rows}, visible rows {list(visible)}, "
            f"table {hashes}"
        )
    samples = zip(record.sampled, record.tokens, record.logits, record.margins, strict=False)
    for piece, token, logit, margin in samples:
        yield f"  piece {piece} sampled token {token}, logit {logit:.6g}, margin {margin:.6g}"
    for it in record.shadow.findings:
        yield (
            f"  sequence {it.seq}, group {it.group}, position {it.position}, block {it.block}: "
            f"holds {it.found:016x}, not {it.expected:016x}"
        )
    yield from _event_lines(record.events)


def _event_lines(events: tuple[Event, ...]) -> Iterator[str]:
    for index, event in enumerate(events):
        yield f"  [{index}] {event_text(event)}"
