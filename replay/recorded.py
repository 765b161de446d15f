"""Recorded: what a tape says came in and was sampled, read only as far as somebody asks.

Owns inputs by the step that saw them, answer tokens by request and place, and the tally of the run
that was recorded. Memory grows with how far another run lags behind this one, not with the tape.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator

from msgspec import Struct

from statemachine.errors import CodecError
from statemachine.records import (
    Checkpoint,
    Finished,
    FlushRequested,
    Gap,
    Header,
    Record,
    RequestArrived,
    RequestCancelled,
    StepDone,
    StepFailed,
    StepPlanned,
)
from statemachine.snapshot import decode_state

from .answers import Answer
from .errors import Unusable
from .reader import Tape
from .tally import Tally

Input = RequestArrived | RequestCancelled | FlushRequested


class Due(Struct, frozen=True):
    """An input: the step that was planned next, and the newest one that was answered before it."""

    step: int
    answered: int
    given: Input


class Recorded:
    """Reads on as it is asked. tally: of what was read so far. start: a checkpoint that the tape
    begins with, where requests or cached blocks are in it. drained: steps before which a checkpoint
    stood, so that nothing was in flight.
    """

    def __init__(self, tape: Tape, records: Iterator[Record]) -> None:
        """Reads up to the first step. Raises Unusable."""
        self.tally = Tally()
        self.start: Checkpoint | None = None
        self.drained: set[int] = set()
        self.ends: dict[int, int] = {}
        self.over = False
        self.gap = False
        self._records = records
        self._inputs: deque[Due] = deque()
        self._unseen: list[tuple[int, Input]] = []
        self._answers: dict[int, Answer] = {}
        self._before: dict[int, tuple[int, ...]] = {}
        self._tokens: dict[int, array[int]] = {}
        self._planned = 0
        self._answered = 0
        self._begun = False
        self._forgotten: set[int] = set()
        self._header: Header | None = None
        while not self._planned and self._read():
            pass
        if self._header is None:
            raise Unusable(f"{tape.path} does not begin with a header")

    @property
    def header(self) -> Header:
        """The tape's."""
        assert self._header is not None, "a tape without one is refused"
        return self._header

    def due(self, step: int, landed: int) -> list[Input]:
        """Inputs that come before a step is planned, once; `landed`: the newest step that was
        answered.
        """
        while self._planned < step and self._read():
            pass
        found: list[Input] = []
        inputs = self._inputs
        while inputs and (
            inputs[0].step < step or (inputs[0].step == step and inputs[0].answered <= landed)
        ):
            found.append(inputs.popleft().given)
        return found

    def waits(self, step: int) -> bool:
        """Whether inputs for a step came once all before it were answered, which they are not."""
        return bool(self._inputs) and self._inputs[0].step <= step

    def next_step(self) -> int | None:
        """The step of the next input; None where no more will come."""
        while not self._inputs and self._read():
            pass
        return self._inputs[0].step if self._inputs else None

    def token(self, request: int, place: int) -> int | None:
        """A token of an answer, from place 0; None where the record ends before it."""
        while True:
            done = self._tokens.get(request)
            if done is not None:
                return done[place] if place < len(done) else None
            answer = self._answers.get(request)
            if answer is None:
                return None
            before = self._before.get(request, ())
            if place < len(before):
                return before[place]
            if place - len(before) < len(answer.samples):
                return answer.samples[place - len(before)].token
            if not self._read():
                return None

    def forget(self, request: int) -> None:
        """A request is over in the other run."""
        self.ends.pop(request, None)
        if self._tokens.pop(request, None) is None and request in self._answers:
            self._forgotten.add(request)

    def finish(self) -> None:
        """Read to the end, for the tally."""
        while self._read():
            pass

    def _read(self) -> bool:
        """One record more; False where there is none that can be used."""
        record = None if self.over else next(self._records, None)
        if record is None or self.gap:
            self._end()
            return False
        self.tally.feed(record)
        if self.tally.broken:
            self._end()
            return False
        live = self.tally.following.answers.live
        self._take(record, live)
        if len(self._answers) != len(live):
            for request in [it for it in self._answers if it not in live]:
                self._keep(request)
        return not self.over

    def _take(self, record: Record, live: dict[int, Answer]) -> None:
        if isinstance(record, Header):
            self._header = self._header or record
        elif isinstance(record, Checkpoint):
            self._checkpoint(record, live)
        elif isinstance(record, RequestArrived | RequestCancelled | FlushRequested):
            self._unseen.append((self._answered, record))
            if isinstance(record, RequestArrived):
                self._answers[record.request] = live[record.request]
        elif isinstance(record, Finished):
            self.ends[record.request] = record.tokens_kept
        elif isinstance(record, StepPlanned):
            self._plan(record.step)
        elif isinstance(record, StepDone | StepFailed):
            self._answered = record.step
        elif isinstance(record, Gap):
            self.gap = True
            self._end()

    def _plan(self, step: int) -> None:
        self._planned = step
        if -1 in self.drained:
            self.drained = (self.drained - {-1}) | {step}
        self._inputs += [Due(step, answered, it) for answered, it in self._unseen]
        self._unseen.clear()

    def _checkpoint(self, record: Checkpoint, live: dict[int, Answer]) -> None:
        if self._begun:
            self.drained.add(-1)  # the step that is planned next
            return
        self._begun = True
        try:
            state = decode_state(record.state)
        except CodecError as error:
            raise Unusable(f"the checkpoint after step {record.step}: {error}") from error
        if state.sequences or state.entries or record.requests or record.step:
            self.start = record
        self._answered = record.step
        for held in record.requests:
            request = held.arrived.request
            self._answers[request], self._before[request] = live[request], held.output

    def _keep(self, request: int) -> None:
        """An answer is whole: its tokens are kept, and nothing else of it."""
        answer = self._answers.pop(request)
        before = self._before.pop(request, ())
        if request in self._forgotten:
            self._forgotten.remove(request)
            return
        tokens = [*before, *(sample.token for sample in answer.samples)]
        self._tokens[request] = array("Q", tokens)

    def _end(self) -> None:
        """No more is read: what is live stays as it is."""
        if not self.over:
            self.over = True
            self._plan(self._planned + 1)
            for request in tuple(self._answers):
                self._keep(request)
