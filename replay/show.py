"""Show: what a tape says about one step or one sequence, as text. Compares nothing."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from statemachine.events import Closed, Event, PoolReset
from statemachine.records import (
    Finished,
    Record,
    RequestArrived,
    RequestCancelled,
    StepDone,
    StepFailed,
    StepPlanned,
    StepTimed,
)
from statemachine.sequence import NO_TOKEN

from .arguments import TAPE_HELP, number
from .divergence import Diverged, concerns, text_for
from .errors import Unusable
from .fold import AT_END, Fold
from .reader import Tape

_TOKENS_SHOWN = 12


def main(arguments: list[str]) -> int:
    """`replay show`."""
    parser = argparse.ArgumentParser(
        prog="replay show", description="What a tape says about a step or a sequence."
    )
    parser.add_argument("tape", help=TAPE_HELP)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--at", type=number, metavar="STEP", help="a step's records")
    what.add_argument("--seq", type=number, metavar="ID", help="a sequence's events")
    given = parser.parse_args(arguments)
    lines: Iterable[str] = (
        step_lines(given.tape, given.at)
        if given.at is not None
        else sequence_lines(given.tape, given.seq)
    )
    for line in lines:
        print(line)
    return 0


def step_lines(path: str, step: int) -> Iterator[str]:
    """All records of a step, and the sequences of its batch after its opening events."""
    tape, fold, found = Tape(path), Fold(AT_END), False
    for record in tape:
        number = getattr(record, "step", None)
        if number is not None and number > step:
            break
        failure = _feed(fold, record)
        if number == step and isinstance(record, StepPlanned | StepDone | StepFailed | StepTimed):
            found = True
            yield from _record_lines(record, None)
            if isinstance(record, StepPlanned) and not failure:
                yield from _sequence_lines(fold, step)
        if failure:
            yield f"  the tape does not fold here: {failure}"
            break
    if not found:
        raise Unusable(f"{path} has no step {step}: {_extent(fold)}")


def sequence_lines(path: str, seq: int) -> Iterator[str]:
    """Every record and event that concerns a sequence, in order."""
    tape, found, live = Tape(path), False, False
    for record in tape:
        if isinstance(record, RequestArrived | RequestCancelled | Finished):
            if record.request == seq:
                found = True
                yield from _record_lines(record, seq)
        elif isinstance(record, StepPlanned | StepDone | StepFailed):
            named = [it for it in record.events if concerns(it, seq)]
            if all(isinstance(it, PoolReset) for it in named) and not live:
                continue
            found = True
            live = not any(isinstance(it, Closed) for it in named)
            if named:
                yield f"step {record.step} {type(record).__name__}"
                yield from _event_lines(record.events, seq)
    if not found:
        raise Unusable(f"{path} knows of no sequence {seq}")


def _feed(fold: Fold, record: Record) -> str:
    try:
        fold.feed(record)
    except Diverged as diverged:
        return diverged.divergence.summary
    return ""


def _extent(fold: Fold) -> str:
    return f"it has {fold.counts.steps} steps up to there"


def _record_lines(record: Record, seq: int | None) -> Iterator[str]:
    if isinstance(record, RequestArrived):
        tokens = _some(record.tokens)
        yield f"request {record.request} arrived, {len(record.tokens)} tokens: {tokens}"
        yield f"  {record.parameters}"
    elif isinstance(record, RequestCancelled):
        yield f"request {record.request} cancelled: {record.reason}"
    elif isinstance(record, Finished):
        yield f"request {record.request} ends after {record.tokens_kept} tokens: {record.reason}"
    elif isinstance(record, StepTimed):
        parts = ", ".join(f"{name} {time}" for name, time in record.parts_us.items())
        yield f"step {record.step} took, in microseconds: {parts}"
    elif isinstance(record, StepPlanned):
        yield f"step {record.step} planned, state {record.digest:016x}"
        yield from _event_lines(record.events, seq)
    elif isinstance(record, StepFailed):
        yield f"step {record.step} failed at {record.stage}: {record.error}"
        yield from _event_lines(record.events, seq)
    elif isinstance(record, StepDone):
        yield from _done_lines(record, seq)


def _done_lines(record: StepDone, seq: int | None) -> Iterator[str]:
    yield f"step {record.step} done, state {record.digest:016x}"
    seen = record.observation
    for piece, (start, rows, visible) in enumerate(
        zip(seen.starts, seen.rows, seen.visible, strict=False)
    ):
        yield f"  piece {piece} observed: start {start}, rows {rows}, visible rows {list(visible)}"
    columns = zip(record.sampled, record.tokens, record.logits, record.margins, strict=False)
    for piece, token, logit, margin in columns:
        yield f"  piece {piece} sampled token {token}, logit {logit:.6g}, margin {margin:.6g}"
    if record.shadow.found:
        yield f"  {record.shadow.found} rows in the pages are not their sequences'"
    yield from _event_lines(record.events, seq)


def _event_lines(events: tuple[Event, ...], seq: int | None) -> Iterator[str]:
    for index, event in enumerate(events):
        if seq is None or concerns(event, seq):
            text = text_for(event, -1 if seq is None else seq)
            yield f"  [{index}] {text}"


def _sequence_lines(fold: Fold, step: int) -> Iterator[str]:
    for piece, sequence in enumerate(fold.pieces[step].sequences):
        drafts = sum(row.token != NO_TOKEN for row in sequence.speculative)
        yield (
            f"  piece {piece}: sequence {sequence.id}, offset {sequence.offset} "
            f"(committed {sequence.committed}, speculative {len(sequence.speculative)}, of them "
            f"{drafts} drafts, pads {sequence.pads}), tables {[list(t) for t in sequence.tables]}"
        )


def _some(tokens: tuple[int, ...]) -> str:
    shown = " ".join(str(token) for token in tokens[:_TOKENS_SHOWN])
    return shown if len(tokens) <= _TOKENS_SHOWN else shown + " ..."
