"""Fold: apply a tape's events again, and compare what follows with all that was recorded.

For each step: do its events apply, is the state the recorded one (digest, offsets, checkpoints),
did the caches see the lengths, visible rows and tables that the state has, are the rows in the
pages those of their sequences. Needs no model. Raises Diverged at the first place where not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from msgspec import Struct

from statemachine.codec import decode_state
from statemachine.errors import CodecError, InvariantBroken
from statemachine.events import (
    Appended,
    AppendedEach,
    BlockEvicted,
    BlockPublished,
    Event,
    PoolReset,
    StepWritten,
)
from statemachine.invariants import check_all, check_step
from statemachine.records import (
    Checkpoint,
    Drafted,
    Gap,
    Header,
    Record,
    StepDone,
    StepFailed,
    StepPlanned,
    TapeEnded,
)
from statemachine.sequence import Sequence
from statemachine.state import State, new_state
from statemachine.transitions import apply, apply_all

from . import drafted
from .divergence import CRASH, FOLD, Diverged, Divergence, History, Values, event_text
from .errors import Unusable
from .flights import Flights
from .observed import Observer, Pieces
from .soundness import require_sound

_LENGTHS_STAY = frozenset({StepWritten, BlockPublished, BlockEvicted})
"""Events that move no offset: after only these, with nothing between a step's plan and its end,
offsets are those of before, for less work.
"""

REASONS_KEPT = 3
"""Of gaps, for the report."""
EVAL = "eval"
"""The stage of a StepFailed after which the pages hold garbage."""
EACH_EVENT = "event"
EACH_STEP = "step"
AT_END = "end"


class Counts(Struct):
    """What a replay went through, for its report."""

    records: int = 0
    steps: int = 0
    failed_steps: int = 0
    rows: int = 0
    events: int = 0
    gaps: int = 0
    lost_records: int = 0


class Fold:
    """Feed it a tape's records in order.

    state: after the last record. pieces: the batches of steps that are not answered yet.
    first_failed: the first step that raised, which is no divergence, but says what was wrong.
    applied: the last events that were applied as one, the digest of the state before, the state
    after.
    gap_reasons: the first few. only: a sequence; observations and content of others are not
    compared. newest_step: the last one that was planned. drafted: the same of the draft model's
    pool, where there is one.
    """

    def __init__(self, invariants: str = EACH_STEP, only: int | None = None) -> None:
        self.counts = Counts()
        self.history = History()
        self.pieces = Flights()
        self.first_failed: StepFailed | None = None
        self.applied: tuple[tuple[Event, ...], int, State] | None = None
        self.gap_reasons: list[str] = []
        self._invariants = invariants
        self._observer: Observer | None = None
        self._only = only
        self._state: State | None = None
        self._header: Header | None = None
        self._lost = False
        self._last_planned = -1
        self.newest_step = 0
        self.drafted: Fold | None = None

    @property
    def state(self) -> State:
        """The state so far. Raises Unusable before the header."""
        if self._state is None:
            raise Unusable("the tape does not begin with a header and a state")
        return self._state

    def feed(self, record: Record) -> None:
        """One record on. Raises Diverged, Unusable."""
        self.counts.records += 1
        handler = _HANDLERS.get(type(record))
        if handler is not None:
            handler(self, record)

    def finish(self) -> None:
        """The tape is at its end. Raises Diverged where an invariant does not hold there."""
        if self.drafted is not None:
            with drafted.told_at(self.newest_step):
                self.drafted.finish()
        if self._state is None or self._lost:
            return
        try:
            check_all(self._state)
        except InvariantBroken as error:
            step = self._state.issued_step
            raise Diverged(Divergence(FOLD, step, f"at the end of the tape, {error}")) from error

    def _header_seen(self, record: Header) -> None:
        if self.pieces and self._header is not None:
            self._crash(f"a new segment begins (number {record.segment})")
        if self._header is None:
            try:
                self._state = new_state(record.geometry)
            except ValueError as error:
                raise Unusable(f"the tape's header makes no sense: {error}") from error
            self._observer = Observer(record.geometry, self.history, self._only, record.sanitize)
            inner = drafted.header_of(record)
            if inner is not None:
                self.drafted = self.for_draft()
                self.drafted.feed(inner)
        self._header = record

    def for_draft(self) -> Fold:
        """A fold for the draft model's pool."""
        return Fold(self._invariants, self._only)

    def _draft(self, record: Drafted) -> None:
        if self.drafted is None:
            raise Unusable(drafted.NOT_NAMED)
        with drafted.told_at(self.newest_step + 1):
            self.drafted.feed(record.record)

    def _checkpoint(self, record: Checkpoint) -> None:
        try:
            state = decode_state(record.state)
        except CodecError as error:
            raise Unusable(f"the checkpoint after step {record.step}: {error}") from error
        if self._header is not None and state.geometry != self._header.geometry:
            raise Unusable(f"the checkpoint after step {record.step} is of another geometry")
        inner = drafted.checkpoint_of(record)
        if inner is not None and self.drafted is not None:
            with drafted.told_at(record.step):
                self.drafted.feed(inner)
        self.newest_step = record.step
        first = self.counts.records == 2
        if first or self._lost:
            require_sound(state, record.step)
            self._state, self._lost = state, False
            self.pieces.clear()
        elif state.digest != self.state.digest or record.digest != state.digest:
            self._fold(record.step, "Checkpoint", -1, None, _digests(record.digest, self.state))

    def _gap(self, record: Gap) -> None:
        self.counts.gaps += 1
        self.counts.lost_records += record.records
        if record.reason not in self.gap_reasons and len(self.gap_reasons) < REASONS_KEPT:
            self.gap_reasons.append(record.reason)
        self._lost = True
        self.pieces.clear()  # their answers are among what is missing
        if self.drafted is not None:
            self.drafted.feed(record)

    def _planned(self, record: StepPlanned) -> None:
        if record.step in self.pieces:
            self._crash(f"step {record.step} was planned again")
        wrong = self.pieces.wrong_plan()
        if wrong:
            self._fold(record.step, "StepPlanned", -1, None, wrong)
        self._apply(record.step, "StepPlanned", record.events)
        self._compare_digest(record.step, "StepPlanned", record.digest)
        self._last_planned = self.newest_step = record.step
        pieces = self._batch(record)
        self.pieces[record.step] = pieces
        self.counts.rows += sum(pieces.rows)

    def _batch(self, record: StepPlanned) -> Pieces:
        seqs, rows, places = issued(record.events)
        sequences = self.state.sequences
        try:
            found = [sequences[seq] for seq in seqs]
        except KeyError as error:
            what = f"sequence {error.args[0]} gets rows and is closed in one plan"
            self._fold(record.step, "StepPlanned", -1, None, what)
        return Pieces(seqs, rows, found, places, record.events)

    def _done(self, record: StepDone) -> None:
        pieces = self._answered(record.step, "StepDone")
        if self._observer is not None:
            self._observer.compare(record, pieces)
        self._apply(record.step, "StepDone", record.events)
        self._compare_offsets(record, pieces)
        self._last_planned = -1
        self._compare_digest(record.step, "StepDone", record.digest)
        self.counts.steps += 1

    def _answered(self, step: int, kind: str, stage: str = "") -> Pieces:
        """The batch of the step that a record answers."""
        wrong = self.pieces.wrong_answer(step, stage)
        if wrong:
            self._fold(step, kind, -1, None, wrong)
        return self.pieces.answered(step, stage)

    def _failed(self, record: StepFailed) -> None:
        self._answered(record.step, "StepFailed", record.stage)
        if record.stage == EVAL and PoolReset() not in record.events:
            what = "its eval failed, so the pages are lost, but the pool was not reset (PoolReset)"
            first = record.events[0] if record.events else None
            self._fold(record.step, "StepFailed", 0 if record.events else -1, first, what)
        self._apply(record.step, "StepFailed", record.events)
        self._compare_digest(record.step, "StepFailed", record.digest)
        self.counts.steps += 1
        self.counts.failed_steps += 1
        self.first_failed = self.first_failed or record

    def _ended(self, record: TapeEnded) -> None:
        if self.pieces:
            self._crash("the tape ends in order")
        if not self._lost and self.state.sequences:
            left = ", ".join(str(seq) for seq in sorted(self.state.sequences)[:8])
            what = f"the tape ends in order, and sequences are still open: {left}"
            raise Diverged(Divergence(FOLD, record.steps, what, "TapeEnded"))
        if self.drafted is not None:
            with drafted.told_at(record.steps):
                self.drafted.feed(record)

    def _apply(self, step: int, kind: str, events: tuple[Event, ...]) -> None:
        self.history.add(step, kind, events)
        self.counts.events += len(events)
        before = self.state
        try:
            if self._invariants == EACH_EVENT:
                self._apply_slowly(step, kind, events, check_all)
                return
            self._state = after = apply_all(before, events)
            if self._invariants == EACH_STEP:
                check_step(after)
            self.applied = events, before.digest, after
        except InvariantBroken as error:
            self._state = before
            self._apply_slowly(step, kind, events, check_step)
            self._fold(step, kind, -1, None, str(error))

    def _apply_slowly(
        self, step: int, kind: str, events: tuple[Event, ...], check: Callable[[State], None]
    ) -> None:
        """Event by event, to name the one that cannot be."""
        for index, event in enumerate(events):
            try:
                self._state = apply(self.state, event)
                check(self._state)
            except InvariantBroken as error:
                self._fold(step, kind, index, event, str(error))

    def _compare_digest(self, step: int, kind: str, recorded: int) -> None:
        if recorded != self.state.digest:
            self._fold(step, kind, -1, None, _digests(recorded, self.state))

    def _compare_offsets(self, record: StepDone, pieces: Pieces) -> None:
        alone = self._last_planned == record.step
        if alone and all(type(event) in _LENGTHS_STAY for event in record.events):
            offsets = tuple(pieces.ends)
        else:
            sequences = self.state.sequences
            offsets = tuple([_offset(sequences.get(seq)) for seq in pieces.seqs])
        if offsets == record.offsets:
            return
        if len(offsets) != len(record.offsets):
            what = f"{len(record.offsets)} offsets are recorded for {len(offsets)} pieces"
            self._fold(record.step, "StepDone", -1, None, what)
        for seq, derived, recorded in zip(pieces.seqs, offsets, record.offsets, strict=True):
            if derived != recorded:
                what = f"sequence {seq} is recorded at offset {recorded}, and stands at {derived}"
                values = (Values("offset", recorded, derived),)
                raise Diverged(
                    Divergence(
                        FOLD,
                        record.step,
                        what,
                        "StepDone",
                        sequence=seq,
                        values=values,
                        last_events=self.history.of(seq),
                        neighbours=pieces.neighbours(),
                    )
                )

    def _fold(self, step: int, kind: str, index: int, event: Event | None, what: str) -> NoReturn:
        seq = getattr(event, "seq", -1)
        where = f"event {index} of its {kind} cannot be applied"
        if index < 0:
            where = f"its {kind} does not fit"
        raise Diverged(
            Divergence(
                kind=FOLD,
                step=step,
                summary=f"{where}: {what}",
                record=kind,
                event_index=index,
                event="" if event is None else event_text(event),
                sequence=seq,
                group=getattr(event, "group", -1),
                values=self._lengths(seq),
                last_events=self.history.of(seq) if seq >= 0 else self.history.newest(step, kind),
            )
        )

    def _lengths(self, seq: int) -> tuple[Values, ...]:
        """Where a sequence stood before the event that cannot be applied."""
        sequence = self.state.sequences.get(seq)
        if sequence is None:
            return ()
        tables = [Values(f"table {g}", derived=t) for g, t in enumerate(sequence.tables)]
        return (Values("offset", derived=sequence.offset), *tables)

    def _crash(self, what: str) -> NoReturn:
        step, pieces = next(iter(self.pieces.items()))
        summary = f"step {step} was issued and never answered, yet {what}"
        raise Diverged(
            Divergence(CRASH, step, summary, "StepPlanned", neighbours=pieces.neighbours())
        )


_HANDLERS: dict[type, Callable[[Fold, Any], None]] = {
    Header: Fold._header_seen,
    Checkpoint: Fold._checkpoint,
    Gap: Fold._gap,
    StepPlanned: Fold._planned,
    Drafted: Fold._draft,
    StepDone: Fold._done,
    StepFailed: Fold._failed,
    TapeEnded: Fold._ended,
}


def _digests(recorded: int, state: State) -> str:
    return f"the recorded state has digest {recorded:016x}, the events lead to {state.digest:016x}"


def _offset(sequence: Sequence | None) -> int:
    if sequence is None:
        return -1
    return sequence.committed + len(sequence.speculative) + sequence.pads


def issued(events: tuple[Event, ...]) -> tuple[list[int], list[int], dict[int, int]]:
    """Sequences and rows of the batch that a plan's appends make; Pieces.places."""
    seqs: list[int] = []
    rows: list[int] = []
    places: dict[int, int] = {}
    for index, event in enumerate(events):
        if isinstance(event, AppendedEach):
            seqs += event.seqs
            rows += [1] * len(event.seqs)
            places[len(seqs)] = index
        elif isinstance(event, Appended):
            if seqs and seqs[-1] == event.seq:
                rows[-1] += event.rows
            else:
                seqs.append(event.seq)
                rows.append(event.rows)
            places[len(seqs)] = index
    return seqs, rows, places
