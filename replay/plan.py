"""Plan: run the scheduler again from the recorded inputs and tokens; it must decide the same.

Owns the comparison of a step's opening and closing events with those that the scheduler of this
version emits. Needs no model: sampled tokens are the recorded ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from server import scheduler
from server.draft_model import (
    begin_draft,
    close_draft,
    fail_draft,
    settle_draft,
    void_draft,
)
from server.draft_pool import DraftStep
from server.draft_round import plan_draft
from server.failing import CLOSE, VOID
from server.failing import PLAN as PLAN_STAGE
from server.policy import Policy, check
from server.view import StepPlan, View, checkpoint, initial, receive, restore
from statemachine.errors import CodecError, StateMachineError
from statemachine.events import Event
from statemachine.records import (
    BlocksOffered,
    Checkpoint,
    Drafted,
    Finished,
    FlushRequested,
    Gap,
    Header,
    Record,
    RequestArrived,
    RequestCancelled,
    RequestSnapshot,
    StepDone,
    StepFailed,
    StepPlanned,
)
from statemachine.state import State
from statemachine.transitions import apply_all

from .divergence import PLAN, Diverged, Divergence, Values, event_text
from .drafted import NOT_NAMED, told_at
from .errors import Unusable
from .fold import Fold
from .requests import Requests

_IMPOSSIBLE = (ValueError, KeyError, StateMachineError)
"""What the scheduler raises where the records before a step do not lead to it."""


def policy_of(header: Header) -> Policy:
    """The scheduler's settings of a tape. Raises Unusable where this version has no such ones."""
    try:
        policy = msgspec.convert(header.policy, Policy)
        check(policy)
    except (msgspec.ValidationError, ValueError) as error:
        raise Unusable(f"the tape's policy is not one of this version: {error}") from error
    unknown = sorted(set(header.policy) - set(Policy.__struct_fields__))
    if unknown:
        raise Unusable(
            f"the tape's policy has settings that this version does not know: {', '.join(unknown)}"
        )
    return policy


class Planner:
    """Follows a tape with the scheduler, record by record."""

    def __init__(self) -> None:
        self.view: View | None = None
        self._begun: dict[int, StepPlan] = {}
        self._policy = Policy()
        self._finished: tuple[Finished, ...] = ()
        self._fresh = True
        self._requests: Requests | None = None

    def feed(self, record: Record) -> None:
        """One record on. Raises Diverged where the scheduler decides otherwise, Unusable."""
        if self._requests is not None:
            self._requests.begin(record)
        self._follow(record)
        if self._requests is not None:
            self._requests.ended(record)

    def _follow(self, record: Record) -> None:
        handler = _HANDLERS.get(type(record))
        if handler is not None:
            handler(self, record)

    def _header(self, record: Header) -> None:
        if self.view is None:
            self._policy = policy_of(record)
            self.view = initial(record.geometry, self._policy, record.draft)
            self._requests = Requests(record.geometry, self._policy)

    def _checkpoint(self, record: Checkpoint) -> None:
        if not self._fresh:
            self._compare_checkpoint(record)
            return
        try:
            self.view, self._fresh = restore(record, self._policy), False
            self._begun.clear()
        except CodecError as error:
            raise Unusable(f"the checkpoint after step {record.step}: {error}") from error

    def _compare_checkpoint(self, record: Checkpoint) -> None:
        """One in the middle says what the scheduler knows by then."""
        here = checkpoint(self._known())
        for name in ("step", "requests", "alone", "stuck", "flush", "offered"):
            told, known = getattr(record, name), getattr(here, name)
            if told != known:
                what = f"the checkpoint says other {name} than the records before it"
                values = (Values(name, _short(told), _short(known)),)
                raise Diverged(Divergence(PLAN, record.step, what, "Checkpoint", values=values))
        if record.draft != here.draft:
            what = "the checkpoint has another draft model's pool than the records before it"
            raise Diverged(Divergence(PLAN, record.step, what, "Checkpoint"))

    def _known(self) -> View:
        if self.view is None:
            raise Unusable("the tape does not begin with a header and a state")
        return self.view

    def _received(
        self, record: RequestArrived | RequestCancelled | FlushRequested | BlocksOffered
    ) -> None:
        try:
            self.view = receive(self._known(), record)
        except ValueError as error:
            step = self._known().step
            raise Diverged(Divergence(PLAN, step, str(error), type(record).__name__)) from error

    def _gap(self, _record: Gap) -> None:
        self._fresh = True

    def _ends(self, record: Finished) -> None:
        self._finished += (record,)

    def _drafted(self, record: Drafted) -> None:
        with told_at(self._known().step):
            self._draft_record(record.record)

    def _draft_record(self, record: StepPlanned | StepDone | StepFailed) -> None:
        """A step of the draft model: what it guesses is the tape's, all else is derived."""
        kind = type(record).__name__
        try:
            view, events = self._draft_step(record)
        except _IMPOSSIBLE as error:
            what = f"the scheduler cannot follow it: {_why(error)}"
            raise Diverged(Divergence(PLAN, record.step, what, kind)) from error
        _compare(record.step, kind, record.events, events)
        self.view = view

    def _draft_step(
        self, record: StepPlanned | StepDone | StepFailed
    ) -> tuple[View, tuple[Event, ...]]:
        """The view after it, and the events that it should have."""
        view = self._known()
        if view.draft is None:
            raise Unusable(NOT_NAMED)
        if isinstance(record, StepPlanned):
            step = self._next_draft(view, record.step)
            if step.idle or step.step != record.step:
                what = "no step of it is due" if step.idle else f"its next step is {step.step}"
                raise Diverged(Divergence(PLAN, record.step, what, "StepPlanned"))
            return begin_draft(view, step), step.events
        flights = view.draft.flights
        if not flights or flights[0].step != record.step:
            what = "it was never planned, or one before it is to be answered first"
            raise Diverged(Divergence(PLAN, record.step, what, type(record).__name__))
        if isinstance(record, StepDone):
            events = close_draft(view, record.tokens)
            return settle_draft(view, record.tokens, events), events
        if record.stage == VOID:
            return void_draft(view), ()
        return fail_draft(view)

    def _next_draft(self, view: View, step: int) -> DraftStep:
        """What the draft model is to do next."""
        try:
            return plan_draft(view, self._policy)
        except Exception as error:
            what = f"the scheduler raised {type(error).__name__} for the draft model: {error}"
            raise Diverged(Divergence(PLAN, step, what, "StepPlanned")) from error

    def _planned(self, record: StepPlanned) -> None:
        view = self._known()
        if view.draft is not None and not self._next_draft(view, record.step).idle:
            what = "the draft model has a step due before it, which the tape has not"
            raise Diverged(Divergence(PLAN, record.step, what, "StepPlanned"))
        try:
            plan = scheduler.plan_step(view, self._policy, self._apply)
        except Exception as error:
            # The engine answers a scheduler that raises with a step without events (loop.py).
            if record.events:
                what = f"the scheduler raised {type(error).__name__}: {error}"
                raise Diverged(Divergence(PLAN, record.step, what, "StepPlanned")) from error
            plan = StepPlan(view.step, (), (), view.state, self._policy, view.waiting, view.running)
        if plan.step != record.step:
            what = f"the scheduler is at step {plan.step}, and the tape at step {record.step}"
            raise Diverged(Divergence(PLAN, record.step, what, "StepPlanned"))
        _compare(record.step, "StepPlanned", record.events, plan.events)
        if self._requests is not None:
            self._requests.planned(plan)
        self._begun[plan.step] = plan
        self.view = scheduler.begin(view, plan)

    def _done(self, record: StepDone) -> None:
        view, plan = self._known(), self._answered(record.step, "StepDone")
        finished, self._finished = self._finished, ()
        sampling = _sampling(plan)
        if record.sampled != sampling:
            what = f"pieces {record.sampled} sampled, where pieces {sampling} end their streams"
            values = (Values("sampled pieces", record.sampled, sampling),)
            raise Diverged(Divergence(PLAN, record.step, what, "StepDone", values=values))
        try:
            outcomes = scheduler.outcomes(view, plan, record.tokens, finished)
            events = scheduler.close_step(view, plan, outcomes)
        except _IMPOSSIBLE as error:
            what = f"the scheduler cannot close the step: {_why(error)}"
            raise Diverged(Divergence(PLAN, record.step, what, "StepDone")) from error
        _compare(record.step, "StepDone", record.events, events)
        if self._requests is not None:
            self._requests.done(record, plan)
        after = self._apply(view.state, record.events)
        self.view = scheduler.settle(view, plan, outcomes, events, after)

    def _apply(self, state: State, events: tuple[Event, ...]) -> State:
        """The state after events."""
        return apply_all(state, events)

    def _failed(self, record: StepFailed) -> None:
        view, plan = self._known(), self._answered(record.step, "StepFailed")
        self._finished = ()
        if record.stage in (PLAN_STAGE, CLOSE):
            what = f"the scheduler raised at {record.stage}, which is a bug: {record.error}"
            raise Diverged(Divergence(PLAN, record.step, what, "StepFailed"))
        try:
            events = scheduler.fail_step(view, plan, record.stage, record.blamed)
        except _IMPOSSIBLE as error:
            what = f"the scheduler cannot undo the step: {_why(error)}"
            raise Diverged(Divergence(PLAN, record.step, what, "StepFailed")) from error
        _compare(record.step, "StepFailed", record.events, events)
        self.view = scheduler.settle_failed(view, plan, record.stage, record.blamed, events)

    def _answered(self, step: int, kind: str) -> StepPlan:
        plan = self._begun.pop(step, None)
        if plan is None:
            raise Diverged(Divergence(PLAN, step, "it was never planned", kind))
        return plan


_HANDLERS: dict[type, Callable[[Planner, Any], None]] = {
    Header: Planner._header,
    Checkpoint: Planner._checkpoint,
    Gap: Planner._gap,
    Finished: Planner._ends,
    RequestArrived: Planner._received,
    RequestCancelled: Planner._received,
    FlushRequested: Planner._received,
    BlocksOffered: Planner._received,
    StepPlanned: Planner._planned,
    Drafted: Planner._drafted,
    StepDone: Planner._done,
    StepFailed: Planner._failed,
}


def _sampling(plan: StepPlan) -> tuple[int, ...]:
    """Numbers of a plan's pieces, each as often as it samples."""
    samples = [piece.samples for piece in plan.pieces]
    if samples == [1] * len(samples):
        return tuple(range(len(samples)))
    return tuple(at for at, count in enumerate(samples) for _ in range(count))


def _why(error: Exception) -> str:
    """An error in words: the scheduler looks requests up by their ids."""
    if isinstance(error, KeyError):
        return f"request {error.args[0]} is not live at that point of the tape"
    return str(error)


def _short(value: object) -> str:
    """A checkpoint's field in words: requests by their ids."""
    if isinstance(value, tuple):
        ids = [
            it.arrived.request
            if isinstance(it, RequestSnapshot)
            else it.request
            if isinstance(it, BlocksOffered)
            else it
            for it in value
        ]
        return ", ".join(str(number) for number in ids)
    return str(value)


def _compare(step: int, kind: str, recorded: tuple[Event, ...], derived: tuple[Event, ...]) -> None:
    if recorded == derived:
        return
    index = next(
        (at for at, pair in enumerate(zip(recorded, derived, strict=False)) if pair[0] != pair[1]),
        min(len(recorded), len(derived)),
    )
    texts = [
        event_text(events[index]) if index < len(events) else "no more events"
        for events in (recorded, derived)
    ]
    event: Any = _wrong(recorded[index:], derived[index:])
    raise Diverged(
        Divergence(
            kind=PLAN,
            step=step,
            summary=f"the scheduler emits another event {index} of {kind} than the tape has",
            record=kind,
            event_index=index,
            event=texts[0],
            sequence=getattr(event, "seq", -1),
            values=(Values("event", texts[0], texts[1]),),
        )
    )


def _wrong(recorded: tuple[Event, ...], derived: tuple[Event, ...]) -> Event:
    """The event to blame, of two lists that differ in their first: the one that is missing from
    the other list; of two such the recorded one.
    """
    if not recorded or (derived and recorded[0] in derived and derived[0] not in recorded):
        return derived[0]
    return recorded[0]


class PlanChecker(Planner):
    """The plan depth."""

    needs_fold = False

    def __init__(self, fold: Fold | None = None) -> None:
        """fold: one that is fed each record before this is."""
        super().__init__()
        self._fold = fold
        self._steps = 0

    def feed(self, record: Record) -> None:
        """One record on. Raises Diverged."""
        super().feed(record)
        self._steps += isinstance(record, StepPlanned)

    def _apply(self, state: State, events: tuple[Event, ...]) -> State:
        """The fold's where it has just applied the same events to an equal state."""
        applied = None if self._fold is None else self._fold.applied
        if applied is None or applied[1] != state.digest or applied[0] != events:
            return super()._apply(state, events)
        return applied[2]

    def finish(self) -> None:
        """Nothing is left to compare."""

    def figures(self) -> dict[str, int | float | str]:
        """How many steps were planned again."""
        return {"steps planned again": self._steps}
