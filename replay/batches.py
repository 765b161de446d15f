"""Batches: what the kernel was handed in each step of a tape, made again from the step's events.

Teacher-forced: a row that was issued before its token was read is fed the token that the tape says
the step before sampled. Knows the requests' parameters by the time at which a step was planned,
for some are over when it is answered. Never runs anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from server.scoring import scored_positions
from statemachine.events import LOOKAHEAD, PAD, Appended, AppendedEach, BlockCopied
from statemachine.records import Parameters, StepDone
from statemachine.sequence import Sequence

from .answers import Answer, Answers
from .errors import Unusable
from .observed import Pieces

if TYPE_CHECKING:
    from kernel.batch import Batch, Piece


class Wishes(Struct, frozen=True):
    """What the request of a piece asked for; answer: what was known of it, where it reads that."""

    parameters: Parameters
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    answered: bool


class Planned(Struct, frozen=True):
    """A step that is not answered yet; wishes: of each piece's request, None where it has none.

    A tape may begin behind the arrival of a request, or hold rows of sequences that are none's.
    """

    step: int
    pieces: Pieces
    wishes: tuple[Wishes | None, ...]


class Batches:
    """Follows a tape's steps; `newest`: what the last step sampled last, by sequence."""

    def __init__(self) -> None:
        self._planned: dict[int, Planned] = {}
        self._newest: dict[int, int] = {}

    def plan(self, step: int, pieces: Pieces, answers: Answers) -> None:
        """A step was planned, for requests that are live now."""
        found = [answers.live.get(seq) for seq in pieces.seqs]
        wishes = tuple(None if it is None else _wishes(it) for it in found)
        self._planned[step] = Planned(step, pieces, wishes)

    def take(self, step: int) -> Planned:
        """A step is answered."""
        return self._planned.pop(step)

    def done(self, record: StepDone, pieces: Pieces) -> None:
        """The samples of a step are known: the next step may have fed them."""
        if pieces.seqs:
            columns = zip(record.sampled, record.tokens, strict=True)
            self._newest = {pieces.seqs[piece]: token for piece, token in columns}

    def batch(self, planned: Planned, sampled: tuple[int, ...] | None) -> Batch:
        """What the kernel was handed; `sampled`: piece numbers, one for each sample; None for rows
        alone, of which nothing is told.

        Raises Unusable for a row whose token nobody sampled.
        """
        from kernel.batch import Batch

        pieces = planned.pieces
        fed = zip(*self._fed(planned), strict=True)
        built = []
        for number, (tokens, pads) in enumerate(fed):
            wishes = None if sampled is None else planned.wishes[number]
            samples = 0 if sampled is None else sampled.count(number)
            built.append(_piece(pieces.sequences[number], tokens, pads, samples, wishes))
        copies = tuple(event for event in pieces.events if isinstance(event, BlockCopied))
        return Batch(planned.step, tuple(built), copies)

    def _fed(self, planned: Planned) -> tuple[list[tuple[int, ...]], list[int]]:
        """Tokens and pads of each piece, as its appends have them."""
        places = {seq: number for number, seq in enumerate(planned.pieces.seqs)}
        tokens: list[tuple[int, ...]] = [()] * len(places)
        pads = [0] * len(places)
        for event in planned.pieces.events:
            if isinstance(event, AppendedEach):
                each = event.tokens
                if each is None:
                    each = tuple(self._sampled(planned.step, seq) for seq in event.seqs)
                for seq, token in zip(event.seqs, each, strict=True):
                    tokens[places[seq]] += (token,)
            elif isinstance(event, Appended):
                if event.purpose == PAD:
                    pads[places[event.seq]] += event.rows
                elif event.purpose == LOOKAHEAD:
                    tokens[places[event.seq]] += (self._sampled(planned.step, event.seq),)
                elif event.tokens is not None:
                    tokens[places[event.seq]] += event.tokens
        return tokens, pads

    def _sampled(self, step: int, seq: int) -> int:
        if seq not in self._newest:
            raise Unusable(
                f"step {step} feeds sequence {seq} a token of the step before it, which sampled "
                "none for it: without that token the step cannot be run again"
            )
        return self._newest[seq]


def _wishes(answer: Answer) -> Wishes:
    parameters = answer.arrived.parameters
    return Wishes(
        parameters,
        answer.arrived.tokens,
        answer.output if parameters.reads_answer else (),
        answer.length > len(answer.arrived.tokens),
    )


def _piece(
    sequence: Sequence, tokens: tuple[int, ...], pads: int, samples: int, wishes: Wishes | None
) -> Piece:
    """As scheduler.batch makes it."""
    from kernel.batch import Piece

    if wishes is None:
        return Piece(sequence, tokens, pads, samples=samples)
    parameters, prompt = wishes.parameters, wishes.prompt
    scored = scored_positions(
        parameters, wishes.answered, len(prompt), sequence.committed, len(tokens)
    )
    reads = samples and parameters.reads_answer
    return Piece(
        sequence,
        tokens,
        pads,
        samples=samples,
        parameters=parameters if samples or scored else None,
        answer=wishes.answer if reads else (),
        prompt=prompt if reads and parameters.reads_prompt else (),
        targets=prompt[scored.start : scored.stop] if scored else (),
    )
