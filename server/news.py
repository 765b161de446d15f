"""News: what a closed step tells each of its requests: tokens, and what they asked for beside
them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernel.batch import StepResult

from .closing import Outcome
from .scoring import scored_by
from .submission import Update
from .view import StepPlan, View


def news(
    view: View, plan: StepPlan, result: StepResult, outcomes: tuple[Outcome, ...]
) -> Iterator[Update]:
    """Updates in batch order; `view` is the one that the step was closed from."""
    if result.logprobs or result.scores or result.embeddings:
        yield from _detailed(view, plan, result, outcomes)
        return
    for outcome in outcomes:
        cached = view.requests[outcome.seq].cached_tokens
        yield Update(outcome.seq, outcome.tokens, outcome.reason, cached)


def _detailed(
    view: View, plan: StepPlan, result: StepResult, outcomes: tuple[Outcome, ...]
) -> Iterator[Update]:
    found = {outcome.seq: outcome for outcome in outcomes}
    sample = 0
    for number, piece in enumerate(plan.pieces):
        first, sample = sample, sample + piece.samples
        request = view.requests.get(piece.seq)
        scores = result.scores.get(number, ())
        outcome = found.get(piece.seq)
        if request is None or not (scores or outcome is not None):
            continue
        outcome = outcome or Outcome(piece.seq, ())
        logprobs = result.logprobs[first : first + len(outcome.tokens)]
        at = scored_by(request, plan.state.sequences[piece.seq], piece)
        yield Update(
            piece.seq,
            outcome.tokens,
            outcome.reason,
            request.cached_tokens,
            logprobs=tuple(it for it in logprobs if it is not None),
            scores=scores,
            scores_at=at.start if scores else -1,
            embedding=result.embeddings.get(number, ()),
        )
