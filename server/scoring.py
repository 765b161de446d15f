"""Scoring: which prompt tokens' log-probabilities a step gives, and what must be computed for them.

The row at position p predicts the token at p + 1, so that of position 0 has no log-probability, and
a request that is scored from position s on computes its rows from s - 1 on itself. Once it has an
answer, its prompt was scored, and it may share rows like any other. Pure.
"""

from __future__ import annotations

from statemachine.events import PROMPT
from statemachine.records import NO_SCORES
from statemachine.sequence import Sequence

from .view import PlannedPiece, RequestState


def scores_prompt(request: RequestState) -> bool:
    """Whether prompt tokens are still to be scored."""
    return request.arrived.parameters.score_from != NO_SCORES and not request.output_tokens


def shareable_rows(request: RequestState) -> int:
    """How many of its first rows a request may take from others."""
    length: int = request.stream.length
    if scores_prompt(request):
        length = min(length, request.arrived.parameters.score_from)
    return max(length - 1, 0)


def scored_positions(request: RequestState, sequence: Sequence, piece: PlannedPiece) -> range:
    """The prompt tokens that a piece's rows score; `sequence` is as its step's plan left it."""
    if piece.purpose != PROMPT or not scores_prompt(request):
        return range(0)
    end = sequence.committed
    begin = max(request.arrived.parameters.score_from, end - piece.rows + 1)
    return range(begin, max(begin, min(end, len(request.stream.prompt) - 1) + 1))
