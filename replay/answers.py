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

    kept: tokens of the answer that a Finished input keeps, if one came. most: with how many samples
    it is over at the latest; 0 where the next one is the last.
    """

    arrived: RequestArrived
    before: tuple[int, ...] = ()
    samples: list[Sampled] = []
    kept: int | None = None
    most: int = 0

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
    """Follows a tape; `live` by request id.

    capacity: tokens of prompt and answer that context and pool hold; None: not asked.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.live: dict[int, Answer] = {}
        self._capacity = capacity

    def begin(self, record: Record) -> None:
        """Inputs, and the requests of a checkpoint that nothing came before."""
        if isinstance(record, RequestArrived):
            self.live[record.request] = self._answer(record)
        elif isinstance(record, Finished) and record.request in self.live:
            answer = self.live[record.request]
            answer.kept, answer.most = record.tokens_kept, 0
        elif isinstance(record, Checkpoint) and not self.live:
            self.live = {
                it.arrived.request: self._answer(it.arrived, it.output) for it in record.requests
            }

    def _answer(self, arrived: RequestArrived, before: tuple[int, ...] = ()) -> Answer:
        parameters = arrived.parameters
        most = parameters.max_tokens
        if self._capacity is not None:
            most = min(most, self._capacity - len(arrived.tokens))
        return Answer(arrived, before, most=0 if parameters.embed else most - len(before))

    def done(self, record: StepDone, pieces: Pieces) -> list[int]:
        """The tokens of a step join their answers: drafts as far as they were accepted, the one
        sampled behind them, and nothing behind an end of the answer. An end token is judged too.
        Returns the sequences whose answers came to their end.
        """
        step, live, seqs = record.step, self.live, pieces.seqs
        over: list[int] = []
        columns = zip(record.sampled, record.tokens, record.logits, record.margins, strict=True)
        if len(set(record.sampled)) == len(record.sampled):  # no drafts, as in most steps
            for piece, token, logit, margin in columns:
                answer = live.get(seq := seqs[piece])
                if answer is None:
                    continue  # it ended while this step was in flight
                samples = answer.samples
                samples.append(Sampled(step, piece, token, logit, margin))
                if len(samples) >= answer.most or token in answer.arrived.parameters.end_tokens:
                    over.append(seq)
            return over
        drawn: dict[int, list[Sampled]] = {}
        for piece, token, logit, margin in columns:
            drawn.setdefault(piece, []).append(Sampled(step, piece, token, logit, margin))
        for piece, samples in drawn.items():
            answer = live.get(seqs[piece])
            if answer is None:
                continue
            guesses = [row.token for row in pieces.sequences[piece].speculative[1:]]
            stood = _stood(samples, guesses) if len(samples) > 1 else samples
            ends = answer.arrived.parameters.end_tokens
            for it in stood[: max(answer.left, 1)]:
                answer.samples.append(it)
                if it.token in ends:
                    break
            if len(answer.samples) >= answer.most or answer.samples[-1].token in ends:
                over.append(seqs[piece])
        return over

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
