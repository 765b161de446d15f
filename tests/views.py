"""Views: the scheduler's input made by hand, and one step of it."""

from __future__ import annotations

from server import scheduler
from server.policy import Policy
from server.view import View, initial, receive
from statemachine.geometry import Geometry
from statemachine.records import Parameters, RequestArrived


def arrived(request: int, rows: int, max_tokens: int = 8, first: int = 0) -> RequestArrived:
    """A request whose prompt counts up from `first`."""
    tokens = tuple(range(first, first + rows))
    return RequestArrived(request, "", tokens, Parameters(max_tokens))


def view_of(geometry: Geometry, *records: RequestArrived) -> View:
    """A fresh view in which these requests have arrived."""
    view = initial(geometry)
    for record in records:
        view = receive(view, record)
    return view


def run_step(view: View, policy: Policy, token: int = 7) -> tuple[View, scheduler.StepPlan]:
    """One step, planned and closed; who samples gets `token` and its sequence's number more."""
    plan = scheduler.plan_step(view, policy)
    view = scheduler.begin(view, plan)
    tokens = tuple(token + piece.seq for piece in plan.pieces if piece.samples)
    outcomes = scheduler.outcomes(view, plan, tokens, ())
    events = scheduler.close_step(view, plan, outcomes)
    return scheduler.settle(view, plan, outcomes, events), plan
