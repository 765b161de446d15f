"""Following: a tape's state and requests, record by record, for looking at them. Compares nothing.

Where an event cannot be applied, the state stays as it was before that record, and `broken` says
why; what follows on tape is then followed no more.
"""

from __future__ import annotations

from msgspec import Struct

from statemachine.codec import decode_state
from statemachine.errors import CodecError, InvariantBroken
from statemachine.events import Closed, Event, Opened, PoolReset, Preempted
from statemachine.records import (
    Checkpoint,
    Gap,
    Header,
    Record,
    RequestArrived,
    StepDone,
    StepFailed,
    StepPlanned,
)
from statemachine.state import State, new_state
from statemachine.transitions import apply_all

from .answers import Answers
from .errors import Unusable
from .fold import issued
from .observed import Pieces
from .soundness import require_sound

UNKNOWN = -1


class Visit(Struct):
    """A live request's way so far; UNKNOWN where it lies before the tape's start.

    arrived: the step that was planned last when it came. preempted: how often.
    """

    arrived: int = UNKNOWN
    preempted: int = 0


class Following:
    """Feed it a tape's records in order. flights: batches of steps that are not answered yet."""

    def __init__(self) -> None:
        self.header: Header | None = None
        self.flights: dict[int, Pieces] = {}
        self.answers = Answers()
        self.visits: dict[int, Visit] = {}
        self.broken = ""
        self.step = 0
        self._state: State | None = None
        self._start = True

    @property
    def state(self) -> State:
        """The state so far. Raises Unusable before the header."""
        if self._state is None:
            raise Unusable("the tape does not begin with a header and a state")
        return self._state

    def feed(self, record: Record) -> None:
        """One record on. Raises Unusable where the tape's start makes no sense."""
        if self.broken:
            return
        self.answers.begin(record)
        if isinstance(record, Header):
            self._begin(record)
        elif isinstance(record, Checkpoint):
            self._checkpoint(record)
        elif isinstance(record, Gap):
            self._start = True
        elif isinstance(record, RequestArrived):
            self.visits[record.request] = Visit(self.step)
        elif isinstance(record, StepPlanned):
            self._planned(record)
        elif isinstance(record, StepDone):
            self._answered(record)
        elif isinstance(record, StepFailed):
            self.flights.pop(record.step, None)
            self._apply(record.step, record.events)
        for answer in self.answers.ended(record):
            self.visits.pop(answer.arrived.request, None)

    def _begin(self, record: Header) -> None:
        if self.header is not None:
            return
        self.header = record
        try:
            self._state = new_state(record.geometry)
        except ValueError as error:
            raise Unusable(f"the tape's header makes no sense: {error}") from error

    def _checkpoint(self, record: Checkpoint) -> None:
        if not self._start:
            return
        self._start = False
        try:
            state = decode_state(record.state)
        except CodecError as error:
            raise Unusable(f"the checkpoint after step {record.step}: {error}") from error
        require_sound(state, record.step)
        self._state, self.step = state, record.step
        self.flights.clear()
        self.visits = {it.arrived.request: Visit() for it in record.requests}

    def _planned(self, record: StepPlanned) -> None:
        self.step, self._start = record.step, False
        if not self._apply(record.step, record.events):
            return
        seqs, rows, places = issued(record.events)
        sequences = self.state.sequences
        if all(seq in sequences for seq in seqs):
            found = [sequences[seq] for seq in seqs]
            self.flights[record.step] = Pieces(seqs, rows, found, places, record.events)

    def _answered(self, record: StepDone) -> None:
        pieces = self.flights.pop(record.step, None)
        columns = (record.tokens, record.logits, record.margins)
        fits = all(len(column) == len(record.sampled) for column in columns)
        count = 0 if pieces is None else len(pieces.seqs)
        if pieces is not None and fits and all(0 <= it < count for it in record.sampled):
            self.answers.done(record, pieces)
        self._apply(record.step, record.events)

    def _apply(self, step: int, events: tuple[Event, ...]) -> bool:
        before = self.state.sequences
        try:
            self._state = apply_all(self.state, events)
        except InvariantBroken as error:
            self.broken = f"at step {step} an event cannot be applied: {error}"
            return False
        for event in events:
            if isinstance(event, Preempted):
                self.visits.setdefault(event.seq, Visit()).preempted += 1
            elif isinstance(event, PoolReset):
                for seq in before:
                    self.visits.setdefault(seq, Visit()).preempted += 1
            elif isinstance(event, Opened):
                self.visits.setdefault(event.seq, Visit())
            elif isinstance(event, Closed):
                self.visits.pop(event.seq, None)
        return True
