"""Answers: the live requests of a tape, with the tokens that were sampled for them so far."""

from __future__ import annotations

from msgspec import Struct

from statemachine.events import Closed
from statemachine.records import Checkpoint, Record, RequestArrived, RequestCancelled, StepDone

from .observed import Pieces


class Sampled(Struct, frozen=True):
    """One sampled token: its step, where it stood in the batch, and its fingerprint."""

    step: int
    piece: int
    token: int
    logit: float
    margin: float


class Answer(Struct):
    """A request and what was sampled for it; `before`: tokens from before the tape's start."""

    arrived: RequestArrived
    before: tuple[int, ...] = ()
    samples: list[Sampled] = []

    @property
    def length(self) -> int:
        """Tokens of prompt and answer: the position that the next sample fills."""
        return len(self.arrived.tokens) + len(self.before) + len(self.samples)

    @property
    def stream(self) -> tuple[int, ...]:
        """Prompt and answer."""
        sampled = tuple(sample.token for sample in self.samples)
        return (*self.arrived.tokens, *self.before, *sampled)


class Answers:
    """Follows a tape; `live` by request id."""

    def __init__(self) -> None:
        self.live: dict[int, Answer] = {}

    def begin(self, record: Record) -> None:
        """Inputs, and the requests of a checkpoint that nothing came before."""
        if isinstance(record, RequestArrived):
            self.live[record.request] = Answer(record)
        elif isinstance(record, Checkpoint) and not self.live:
            self.live = {
                it.arrived.request: Answer(it.arrived, it.output) for it in record.requests
            }

    def done(self, record: StepDone, pieces: Pieces) -> None:
        """The tokens of a step join their answers."""
        columns = zip(record.sampled, record.tokens, record.logits, record.margins, strict=True)
        for piece, token, logit, margin in columns:
            answer = self.live.get(pieces.seqs[piece])
            if answer is not None:
                answer.samples.append(Sampled(record.step, piece, token, logit, margin))

    def ended(self, record: Record) -> list[Answer]:
        """Requests that this record ends; they are forgotten."""
        gone = [event.seq for event in getattr(record, "events", ()) if isinstance(event, Closed)]
        if isinstance(record, RequestCancelled):
            gone.append(record.request)
        return [self.live.pop(seq) for seq in gone if seq in self.live]
