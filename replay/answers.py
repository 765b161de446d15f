"""Answers: the live requests of a tape, with the tokens that were sampled for them so far."""

from __future__ import annotations

from msgspec import Struct

from statemachine.events import Closed
from statemachine.records import (
    Checkpoint,
    Finished,
    Record,
    RequestArrived,
    RequestCancelled,
    StepDone,
)

from .observed import Pieces


class Sampled(Struct, frozen=True, gc=False):
    """One sampled token: its step, where it stood in the batch, and its fingerprint."""

    step: int
    piece: int
    token: int
    logit: float
    margin: float


class Answer(Struct):
    """A request and what was sampled for it; `before`: tokens from before the tape's start.

    kept: tokens of the answer that a Finished input keeps, if one came.
    """

    arrived: RequestArrived
    before: tuple[int, ...] = ()
    samples: list[Sampled] = []
    kept: int | None = None

    @property
    def left(self) -> int:
        """How many more tokens the answer may have."""
        most = self.arrived.parameters.max_tokens if self.kept is None else self.kept
        return most - len(self.before) - len(self.samples)

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.arrived.tokens) + len(self.before) + len(self.samples)

    def slice(self, first: int, end: int) -> tuple[int, ...]:
        """Tokens [first, end) of prompt and answer, as far as there are any."""
        prompt, before = self.arrived.tokens, self.before
        begin, stop = len(prompt), len(prompt) + len(before)
        found = prompt[first:end]
        if end > begin:
            found += before[max(first - begin, 0) : end - begin]
        if end > stop:
            found += tuple(it.token for it in self.samples[max(first - stop, 0) : end - stop])
        return found

    @property
    def output(self) -> tuple[int, ...]:
        """Tokens of the answer so far."""
        return (*self.before, *(sample.token for sample in self.samples))

    @property
    def stream(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return (*self.arrived.tokens, *self.output)


class Answers:
    """Follows a tape; `live` by request id."""

    def __init__(self) -> None:
        self.live: dict[int, Answer] = {}

    def begin(self, record: Record) -> None:
        """Inputs, and the requests of a checkpoint that nothing came before."""
        if isinstance(record, RequestArrived):
            self.live[record.request] = Answer(record)
        elif isinstance(record, Finished) and record.request in self.live:
            self.live[record.request].kept = record.tokens_kept
        elif isinstance(record, Checkpoint) and not self.live:
            self.live = {
                it.arrived.request: Answer(it.arrived, it.output) for it in record.requests
            }

    def done(self, record: StepDone, pieces: Pieces) -> None:
        """The tokens of a step join their answers: drafts as far as they were accepted, the one
        sampled behind them, and nothing behind an end of the answer. An end token is judged too.
        """
        step, live, seqs = record.step, self.live, pieces.seqs
        columns = zip(record.sampled, record.tokens, record.logits, record.margins, strict=True)
        if len(set(record.sampled)) == len(record.sampled):  # no drafts, as in most steps
            for piece, token, logit, margin in columns:
                sampler = live.get(seqs[piece])
                if sampler is not None:
                    sampler.samples.append(Sampled(step, piece, token, logit, margin))
            return
        drawn: dict[int, list[Sampled]] = {}
        for piece, token, logit, margin in columns:
            drawn.setdefault(piece, []).append(Sampled(step, piece, token, logit, margin))
        for piece, samples in drawn.items():
            answer = live.get(seqs[piece])
            if answer is None:
                continue  # it ended while this step was in flight
            guesses = [row.token for row in pieces.sequences[piece].speculative[1:]]
            stood = _stood(samples, guesses) if len(samples) > 1 else samples
            ends = answer.arrived.parameters.end_tokens
            for it in stood[: max(answer.left, 1)]:
                answer.samples.append(it)
                if it.token in ends:
                    break

    def ended(self, record: Record) -> list[Answer]:
        """Requests that this record ends; they are forgotten."""
        gone = [event.seq for event in getattr(record, "events", ()) if type(event) is Closed]
        if isinstance(record, RequestCancelled):
            gone.append(record.request)
        return [self.live.pop(seq) for seq in gone if seq in self.live]


def _stood(samples: list[Sampled], guesses: list[int]) -> list[Sampled]:
    """The samples whose row was fed what was sampled before it; `guesses` were fed from the second
    row on.
    """
    for place, (it, guess) in enumerate(zip(samples, guesses, strict=False)):
        if it.token != guess:
            return samples[: place + 1]
    return samples
