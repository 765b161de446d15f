"""Scoring: which prompt tokens' log-probabilities a step gives, and what must be computed for them.

The row at position p predicts the token at p + 1, so that of position 0 has no log-probability, and
a request that is scored from position s on computes its rows from s - 1 on itself. Once it has an
answer, its prompt was scored, and it may share rows like any other. Pure.
"""

from __future__ import annotations

from statemachine.records import NO_SCORES, Parameters
from statemachine.sequence import Sequence

from .view import PlannedPiece, RequestState

NOTHING = range(0)


def scores_prompt(parameters: Parameters, answered: bool) -> bool:
    """Whether prompt tokens are still to be scored."""
    return parameters.score_from != NO_SCORES and not answered


def shareable_rows(request: RequestState) -> int:
    """How many of its first rows a request may take from others."""
    parameters, length = request.arrived.parameters, request.stream.length
    if scores_prompt(parameters, request.output_tokens > 0):
        length = min(length, parameters.score_from)
    return max(length - 1, 0)


def scored_positions(
    parameters: Parameters, answered: bool, prompt_rows: int, end: int, rows: int
) -> range:
    """The prompt tokens that a piece scores: the last `rows` of its sequence's `end` committed
    rows, as its step's plan left them. answered: some of the answer was known by then.
    """
    if not scores_prompt(parameters, answered):
        return NOTHING
    begin = max(parameters.score_from, end - rows + 1)
    return range(begin, max(begin, min(end, prompt_rows - 1) + 1))


def scored_by(request: RequestState, sequence: Sequence, piece: PlannedPiece) -> range:
    """The prompt tokens that a planned piece scores; `sequence` is as the plan left it."""
    parameters, prompt = request.arrived.parameters, len(request.stream.prompt)
    answered = request.output_tokens > 0
    return scored_positions(parameters, answered, prompt, sequence.committed, piece.rows)
