"""Drafting: rounds of a draft model's kernel between two plans, on the engine's thread.

Owns the kernel of the small model and the order of a round: a step is issued before the one before
it is read, as in loop.py. What is guessed and what its cache holds is draft_model.py's. Decides
nothing that the tape does not say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import structlog
from msgspec import Struct

from kernel.batch import BuildFailed, EvalFailed, Kernel, StepResult
from statemachine.observing import OFF
from statemachine.records import Drafted, DraftModel, Record, StepDone, StepFailed, StepPlanned

from .draft_model import (
    begin_draft,
    close_draft,
    draft_batch,
    fail_draft,
    settle_draft,
    void_draft,
)
from .draft_pool import DraftStep, pool_in
from .draft_round import plan_draft
from .failing import EVAL, VOID
from .flight import NOTHING
from .live_guard import LiveGuard
from .policy import Policy
from .view import View

Write = Callable[[list[Record]], None]

log = structlog.get_logger()


class DraftParts(Struct, frozen=True):
    """What a draft model runs on. model: as on tape."""

    kernel: Kernel
    model: DraftModel


class _Flight(Struct, frozen=True):
    """A step between its issue and its close; `error` where it could not be issued."""

    step: DraftStep
    ticket: Any
    error: Exception | None = None


class Drafting:
    """See the module. steps: how many there were."""

    def __init__(self, parts: DraftParts, policy: Policy, sanitize: str = OFF) -> None:
        self._kernel = parts.kernel
        self._policy = policy
        self._guard = LiveGuard(parts.kernel.geometry, sanitize)
        self._divergences: list[str] = []
        self._broken = False
        self.steps = 0

    def due(self, view: View) -> bool:
        """Whether there is something to do without any request: to close, or to flush."""
        state = pool_in(view.draft).state
        if self._broken:
            return False
        if view.flush and any(state.cached_blocks(group) for group in state.paged_groups()):
            return True
        return any(seq not in view.requests for seq in state.sequences)

    def take_divergences(self) -> list[str]:
        """The classes of what was found wrong since the last call, one for each step."""
        found, self._divergences = self._divergences, []
        return found

    def round(self, view: View, write: Write) -> tuple[View, list[Record]]:
        """A round, if one is due: the view after it, and records that are still to be written.

        write: puts records on tape, a step's plan before the kernel is handed it.
        """
        flights: deque[_Flight] = deque()
        unwritten: list[Record] = []
        while True:
            step = self._plan(view)
            if not step.idle:
                view = begin_draft(view, step)
                write([*unwritten, Drafted(StepPlanned(step.step, step.events, step.state.digest))])
                unwritten = []
                flights.append(self._issue(view, step))
            elif not flights:
                return view, unwritten
            while flights and (step.idle or len(flights) > 1 or flights[-1].error is not None):
                view, answers = self._land(view, flights)
                unwritten += answers

    def _plan(self, view: View) -> DraftStep:
        """The next step. Where none can be planned, which is a bug, nothing is guessed any more:
        the tape then lacks the step that was due.
        """
        if not self._broken:
            try:
                return plan_draft(view, self._policy)
            except Exception:
                self._broken = True
                log.exception("no step of the draft model can be planned: it guesses no more")
        pool = pool_in(view.draft)
        return DraftStep(pool.step, (), (), pool.state)

    def _issue(self, view: View, step: DraftStep) -> _Flight:
        """Hand a step to the kernel; what it raises is dealt with in its turn."""
        try:
            ticket = self._kernel.issue(draft_batch(view, step)) if step.pieces else None
        except Exception as error:
            return _Flight(step, None, error)
        return _Flight(step, ticket)

    def _land(self, view: View, flights: deque[_Flight]) -> tuple[View, list[Record]]:
        """Read the oldest flight, and close it."""
        flight = flights.popleft()
        try:
            if flight.error is not None:
                raise flight.error
            view, done = self._done(view, flight.step, flight.ticket)
        except Exception as error:
            behind = [it.step for it in flights]
            flights.clear()
            return self._failed(view, [flight.step, *behind], error)
        self.steps += 1
        return view, [Drafted(done)]

    def _done(self, view: View, step: DraftStep, ticket: Any) -> tuple[View, StepDone]:
        result: StepResult = self._kernel.collect(ticket) if step.pieces else NOTHING
        events = close_draft(view, result.tokens)
        after = settle_draft(view, result.tokens, events)
        self._look(view, step, result)
        sequences = pool_in(after.draft).state.sequences
        done = StepDone(
            step=step.step,
            observation=result.observation,
            shadow=result.shadow,
            sampled=result.sampled,
            tokens=result.tokens,
            logits=result.logits,
            margins=result.margins,
            events=events,
            offsets=tuple([sequences[piece.seq].offset for piece in step.pieces]),
            digest=pool_in(after.draft).state.digest,
        )
        return after, done

    def _look(self, view: View, step: DraftStep, result: StepResult) -> None:
        """A wrong cache here makes bad guesses and no wrong answer: it is told, and that is all."""
        seen: Any = step
        wrong = self._guard.look(seen, result)
        if wrong:
            self._divergences += sorted({it.kind for it in wrong})
            self._guard.act(view, seen, wrong, None)

    def _failed(
        self, view: View, steps: list[DraftStep], error: Exception
    ) -> tuple[View, list[Record]]:
        """The first of `steps` raised; what was in flight behind it is void."""
        said = str(error) or type(error).__name__
        expected = isinstance(error, BuildFailed | EvalFailed)
        log.error("draft step failed", step=steps[0].step, error=said, exc_info=not expected)
        view, events = fail_draft(view)
        digest = pool_in(view.draft).state.digest
        records: list[Record] = [Drafted(StepFailed(steps[0].step, EVAL, said, (), events, digest))]
        why = "a step before it lost the pages"
        for step in steps[1:]:
            view = void_draft(view)
            records.append(Drafted(StepFailed(step.step, VOID, why, (), (), digest)))
        self._kernel.reset_pages()
        if not pool_in(view.draft).guesses:
            log.error("the draft model failed too often: nothing is guessed any more")
        return view, records
