"""Batches: what the kernel was handed in each step of a tape, made again from the step's events.

Teacher-forced: a row that was issued before its token was read is fed the token that the tape says
the step before sampled. Knows the requests' parameters by the time at which a step was planned,
for some are over when it is answered. Never runs anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from statemachine.events import LOOKAHEAD, PAD, Appended, AppendedEach, BlockCopied
from statemachine.records import Parameters, StepDone

from .answers import Answers
from .errors import Unusable
from .observed import Pieces

if TYPE_CHECKING:
    from kernel.batch import Batch


class Planned(Struct, frozen=True):
    """A step that is not answered yet; parameters: of each piece's request, None where it has none.

    A tape may begin behind the arrival of a request, or hold rows of sequences that are none's.
    """

    step: int
    pieces: Pieces
    parameters: tuple[Parameters | None, ...]


class Batches:
    """Follows a tape's steps; `newest`: what the last step sampled last, by sequence."""

    def __init__(self) -> None:
        self._planned: dict[int, Planned] = {}
        self._newest: dict[int, int] = {}

    def plan(self, step: int, pieces: Pieces, answers: Answers) -> None:
        """A step was planned, for requests that are live now."""
        found = [answers.live.get(seq) for seq in pieces.seqs]
        parameters = tuple(None if it is None else it.arrived.parameters for it in found)
        self._planned[step] = Planned(step, pieces, parameters)

    def take(self, step: int) -> Planned:
        """A step is answered."""
        return self._planned.pop(step)

    def done(self, record: StepDone, pieces: Pieces) -> None:
        """The samples of a step are known: the next step may have fed them."""
        if pieces.seqs:
            columns = zip(record.sampled, record.tokens, strict=True)
            self._newest = {pieces.seqs[piece]: token for piece, token in columns}

    def batch(self, planned: Planned, sampled: tuple[int, ...]) -> Batch:
        """What the kernel was handed; `sampled`: piece numbers, one for each sample.

        Raises Unusable for a row whose token nobody sampled.
        """
        from kernel.batch import Batch, Piece

        pieces = planned.pieces
        tokens, pads = self._fed(planned)
        built = [
            Piece(
                sequence=pieces.sequences[number],
                tokens=tokens[number],
                pads=pads[number],
                samples=sampled.count(number),
                parameters=planned.parameters[number] if number in sampled else None,
            )
            for number in range(len(pieces.seqs))
        ]
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
