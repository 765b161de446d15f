"""Again: what came into a server, given once more to the engine of this version.

Owns the inputs of a tape (arrivals, cancels and flushes by the step that saw them, sampled tokens
by request and position, steps that failed) and a run of the real scheduler and loop over them. The
kernel is the fake one, which says what the tape says was sampled and has real metadata and shadow
tags; or the real model. No event of the tape is used: what happens is decided anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen
from msgspec import structs

from statemachine.codec import TapeDecoder, decode_state
from statemachine.errors import CodecError
from statemachine.observing import FULL
from statemachine.records import (
    Checkpoint,
    Finished,
    FlushRequested,
    Header,
    Record,
    RequestArrived,
    RequestCancelled,
    StepDone,
    StepFailed,
    StepPlanned,
)

from .answers import Answer, Answers
from .divergence import Diverged
from .errors import Unusable
from .fold import AT_END, Fold
from .observed import Pieces
from .plan import policy_of

if TYPE_CHECKING:
    from kernel.batch import Kernel

STAGES = ("build", "eval")
"""Of the failures that a kernel has; others follow from these, or are the engine's own."""
_TURNS_SPARE = 10_000

Input = RequestArrived | RequestCancelled | FlushRequested


@frozen
class Broke:
    """A step that failed: where, whom the kernel named, and (sequence, first position) of pieces
    that were in it.
    """

    stage: str
    seq: int | None
    pieces: frozenset[tuple[int, int]]


@define
class Inputs:
    """See the module. given: inputs and the step that was planned next. ends: by request, answer
    tokens up to a stop string. told: token by (request, position). last: newest step that was
    planned.
    """

    header: Header
    given: list[tuple[int, Input]] = field(factory=list)
    ends: dict[int, int] = field(factory=dict)
    told: dict[tuple[int, int], int] = field(factory=dict)
    broke: list[Broke] = field(factory=list)
    checkpoints: list[int] = field(factory=list)
    last: int = 0

    def only(self, requests: frozenset[int]) -> Inputs:
        """Those of some requests."""
        given = [
            (step, it)
            for step, it in self.given
            if isinstance(it, FlushRequested) or it.request in requests
        ]
        broke = []
        for it in self.broke:
            mine = frozenset(piece for piece in it.pieces if piece[0] in requests)
            if mine:
                broke.append(_fewer(it, mine))
        return Inputs(self.header, given, self.ends, self.told, broke, [], self.last)


def _fewer(broke: Broke, pieces: frozenset[tuple[int, int]]) -> Broke:
    """The failure of a step with fewer pieces."""
    seq = broke.seq if any(piece[0] == broke.seq for piece in pieces) else None
    return Broke(broke.stage, seq, pieces)


def inputs_of(records: Iterable[Record]) -> Inputs:
    """The inputs of a tape that begins with an empty pool. Raises Unusable for another one.

    What is on tape behind a place where it does not fold is taken as far as it can be read.
    """
    reader = _Reader()
    for record in records:
        reader.feed(record)
    if reader.inputs is None:
        raise Unusable("the tape does not begin with a header and a state")
    for answer in reader.answers.live.values():
        reader.keep(answer)
    # Inputs that no plan saw came before what would have been the next step.
    reader.inputs.given += [(reader.inputs.last + 1, it) for it in reader.waiting]
    return reader.inputs


class _Reader:
    """Follows a tape for its inputs."""

    def __init__(self) -> None:
        self.inputs: Inputs | None = None
        self.answers = Answers()
        self.waiting: list[Input] = []
        self._fold: Fold | None = Fold(AT_END)
        self._pieces: dict[int, Pieces] = {}

    def feed(self, record: Record) -> None:
        if isinstance(record, Header) and self.inputs is None:
            if record.redacted:
                raise Unusable("the tape is redacted: there are no tokens to run again")
            # What a draft model guesses changes when tokens come, and no token.
            self.inputs = Inputs(structs.replace(record, draft=None))
        assert self.inputs is not None, "a reader yields the header first"
        if isinstance(record, Checkpoint) and self._fold and self._fold.counts.records == 1:
            _require_start(record)
        self.answers.begin(record)
        if isinstance(record, RequestArrived | RequestCancelled | FlushRequested):
            self.waiting.append(record)
        elif isinstance(record, Checkpoint) and record.step:
            self.inputs.checkpoints.append(record.step)
        elif isinstance(record, Finished):
            self.inputs.ends[record.request] = record.tokens_kept
        elif isinstance(record, StepPlanned):
            self.inputs.given += [(record.step, it) for it in self.waiting]
            self.waiting, self.inputs.last = [], record.step
        elif isinstance(record, StepDone) and record.step in self._pieces:
            pieces = self._pieces.pop(record.step)
            if all(number < len(pieces.seqs) for number in record.sampled):
                self.answers.done(record, pieces)
        elif isinstance(record, StepFailed) and record.step in self._pieces:
            self._broke(record, self._pieces.pop(record.step))
        self._follow(record)
        for answer in self.answers.ended(record):
            self.keep(answer)

    def _follow(self, record: Record) -> None:
        if self._fold is None:
            return
        try:
            self._fold.feed(record)
        except Diverged:
            self._fold = None
            return
        if isinstance(record, StepPlanned):
            self._pieces[record.step] = self._fold.pieces[record.step]

    def _broke(self, record: StepFailed, pieces: Pieces) -> None:
        assert self.inputs is not None
        if record.stage in STAGES:
            seq = record.blamed[0] if len(record.blamed) == 1 else None
            places = frozenset(zip(pieces.seqs, pieces.starts, strict=True))
            self.inputs.broke.append(Broke(record.stage, seq, places))

    def keep(self, answer: Answer) -> None:
        """An answer is over: remember what was sampled for it."""
        assert self.inputs is not None
        first = len(answer.arrived.tokens) + len(answer.before)
        for at, sample in enumerate(answer.samples):
            self.inputs.told[answer.arrived.request, first + at] = sample.token


def _require_start(record: Checkpoint) -> None:
    try:
        state = decode_state(record.state)
    except CodecError as error:
        raise Unusable(f"the checkpoint after step {record.step}: {error}") from error
    if state.sequences or state.entries or record.requests:
        raise Unusable(
            "the tape begins in the middle of a run: what its requests computed before is not on "
            "it, so that its inputs cannot be run again; give a tape from the server's start "
            "(`replay minimize` without --short keeps it)"
        )


class Memory:
    """A capture that keeps its records, and asks for checkpoints when the tape has some."""

    def __init__(self, header: Header, checkpoints: list[int]) -> None:
        self.records: list[Record] = []
        self._header = header
        self.position = self.gaps = self.bytes_written = 0
        self._due = list(checkpoints)
        self._step = 0

    @property
    def checkpoint_due(self) -> bool:
        """Whether the step before the next checkpoint on tape was planned."""
        return bool(self._due) and self._due[0] <= self._step

    def write(self, records: list[Record]) -> None:
        """Put records at the end."""
        for record in records:
            if isinstance(record, StepPlanned):
                self._step = record.step
            elif isinstance(record, Checkpoint) and record.step and self._due:
                self._due.pop(0)
                self.records.append(self._header)  # a new segment begins
            self.records.append(record)

    def close(self) -> None:
        """Nothing more will come."""


class _Text:
    """The text of an answer that ends where the tape says: its stop string at that token."""

    def __init__(self, stop: str, at: int) -> None:
        self._stop, self._left = stop, at

    def add(self, token: int) -> str:
        self._left -= 1
        return self._stop if self._left == 0 else ""

    def finish(self) -> str:
        return ""


def run_again(inputs: Inputs, kernel: Kernel | None = None) -> list[Record]:
    """Give the inputs to the engine of this version; returns the tape that it writes.

    kernel: the real one; without it the fake one. Raises what the engine raises, and Unusable where
    there is nothing that the fake kernel could run.
    """
    from server.logs import no_logs
    from server.loop import Loop
    from server.parts import Parts

    header, policy = inputs.header, policy_of(inputs.header)
    texts = iter(_texts(inputs))
    run_on = _fake(inputs) if kernel is None else kernel
    if kernel is None:
        header = structs.replace(header, sanitize=FULL)
    capture = Memory(header, inputs.checkpoints)
    ticks = iter(range(1 << 62))
    with no_logs():
        parts = Parts(run_on, policy, capture, header, lambda: next(texts))
        loop = Loop(parts, lambda: float(next(ticks)))
        _drive(loop, inputs)
        loop.end("cancelled")
    return capture.records


def _drive(loop: Any, inputs: Inputs) -> None:
    """Step a loop, with the inputs before the steps that saw them; sooner where it has no work."""
    from server.parts import Arrival

    due = sorted(inputs.given, key=lambda pair: pair[0])
    place, turns = 0, 0
    while not loop.broken:
        step, first = loop.view.step, place
        idle = not loop.busy
        while place < len(due) and (due[place][0] <= step or (idle and place == first)):
            idle_step = due[place][0]
            place += 1
            while place < len(due) and due[place][0] == idle_step:
                place += 1
        given = [
            Arrival(it, lambda update: None) if isinstance(it, RequestArrived) else it
            for _, it in due[first:place]
        ]
        if not loop.step(given) and place == len(due):
            return
        turns += 1
        if turns > 4 * inputs.last + len(inputs.told) + _TURNS_SPARE:
            raise Unusable("the inputs do not come to an end when they are run again")


def _texts(inputs: Inputs) -> Iterator[_Text]:
    """A text for each request with a stop string, in the order of their arrival."""
    for _, it in sorted(inputs.given, key=lambda pair: pair[0]):
        if isinstance(it, RequestArrived) and it.parameters.stop:
            yield _Text(it.parameters.stop[0], inputs.ends.get(it.request, 0))


def _fake(inputs: Inputs) -> Kernel:
    """The fake kernel, which samples what is on tape, and fails where that says so."""
    from kernel.batch import Batch
    from kernel.fake import Failure, FakeKernel, Ticket

    header = inputs.header
    if not any(group.paged for group in header.geometry.groups):
        raise Unusable(
            "the model holds its own caches, of which a run without it sees nothing: give --model"
        )
    ends = {
        it.request: it.parameters.end_tokens
        for _, it in inputs.given
        if isinstance(it, RequestArrived)
    }

    def say(seq: int, position: int) -> int:
        """What was sampled there; where nothing was, a token that does not end the answer."""
        token = inputs.told.get((seq, position))
        if token is not None:
            return token
        return next(it for it in range(position % 61, 1 << 32) if it not in ends.get(seq, ()))

    class Told(FakeKernel):
        """Fails a step that holds a piece of one that failed on tape."""

        def issue(self, batch: Batch) -> Ticket:
            places = {(it.sequence.id, it.start) for it in batch.pieces}
            for it in waiting:
                if places & it.pieces:
                    waiting.remove(it)
                    self._fail[batch.step] = Failure(it.stage, it.seq)
                    break
            return super().issue(batch)

    waiting = list(inputs.broke)
    return Told(header.geometry, sanitize=FULL, layers=header.layers or 1, script=say)


def records_of(data: bytes) -> list[Record]:
    """The records of a tape's bytes. Raises Unusable where they are none."""
    try:
        return list(TapeDecoder().feed(data))
    except CodecError as error:
        raise Unusable(f"these bytes are no tape: {error}") from error
