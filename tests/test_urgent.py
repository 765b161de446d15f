"""An urgent request behind many that wait: what one plan opens for it, and whom that holds up."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from server import admission, scheduler
from server.policy import OPENS_MAX, PRIORITY, Policy
from server.settings import load_settings
from server.submission import CANCELLED
from server.view import View, initial, receive
from statemachine.events import Appended, Closed, Opened
from statemachine.records import Parameters, RequestArrived, RequestCancelled
from statemachine.transitions import apply_all

from .follow import clean, random_load, same_answers
from .sim import POLICY, SMALL, Sim, answer_alone

ONE = structs.replace(POLICY, scheduling=PRIORITY, max_running=1)
TWO = structs.replace(POLICY, scheduling=PRIORITY, max_running=2, opens_max=8)


def queued(policy: Policy, waiting: int) -> View:
    """Requests 0.. wait, and the last of them is urgent."""
    view = initial(SMALL, policy)
    for number in range(waiting):
        parameters = Parameters(max_tokens=2, priority=-int(number == waiting - 1))
        view = receive(view, RequestArrived(number, f"r{number}", (1, 2, 3), parameters))
    return view


def opened(events: tuple[Any, ...]) -> list[int]:
    return [event.seq for event in events if isinstance(event, Opened)]


def test_no_plan_opens_more_than_it_may_and_the_urgent_request_is_the_next_to_start() -> None:
    sim = Sim(policy=TWO)
    sim.submit([9] * 6, 40, priority=-5)
    sim.step()
    for _ in range(29):
        sim.submit([1] * 6, 2)
    sim.submit([2] * 6, 2)
    sim.submit([3] * 6, 2, priority=-9)
    plans = []
    while not sim.inboxes[31].tokens:
        before = len(sim.inboxes[0].tokens)
        sim.step()
        assert len(sim.inboxes[0].tokens) == before + 1
        (plan,) = [it.events for it in sim.capture.writes[-1] if hasattr(it, "events")][-1:]
        plans.append(opened(plan))
    assert plans == [[*range(1, 9)], [*range(9, 17)], [*range(17, 25)], [*range(25, 32)]]
    assert {event.seq for event in sim.events(Appended)} == {0, 31}
    sim.run()
    assert sim.inboxes[31].tokens == answer_alone([3] * 6, 2)
    assert sim.inboxes[30].tokens == answer_alone([2] * 6, 2)
    clean(sim)


def test_a_plan_that_only_opens_is_made_where_nothing_else_runs() -> None:
    policy = structs.replace(ONE, opens_max=8)
    view, plans = queued(policy, 20), []
    while not (plan := scheduler.plan_step(view, policy)).pieces:
        assert not plan.idle
        plans.append(opened(plan.events))
        view = scheduler.begin(view, plan)
        view = scheduler.settle(view, plan, (), ())
    assert plans == [[*range(8)], [*range(8, 16)]]
    assert plan.admitted == ((19, 0),)
    assert opened(plan.events) == [16, 17, 18, 19]


def test_requests_that_jump_the_queue_share_what_a_plan_may_open() -> None:
    policy = structs.replace(TWO, max_running=8)
    view = initial(SMALL, policy)
    for number, priority in enumerate((0, 0, 0, 0, -2, 0, 0, 0, 0, 0, -1)):
        parameters = Parameters(max_tokens=2, priority=priority)
        view = receive(view, RequestArrived(number, f"r{number}", (1, 2, 3), parameters))
    plan = scheduler.plan_step(view, policy)
    assert [request for request, _ in plan.admitted] == [4]
    assert opened(plan.events) == [*range(8)]


def test_a_tape_of_a_policy_without_the_bound_opens_all_at_once() -> None:
    plan = scheduler.plan_step(queued(ONE, 600), ONE)
    assert opened(plan.events) == [*range(600)]
    assert plan.admitted == ((599, 0),)


def test_servers_set_the_bound() -> None:
    assert load_settings({"model": "x"}, {}).policy().opens_max == OPENS_MAX
    assert Policy().opens_max == 0


def test_what_is_opened_on_the_way_makes_no_state_each(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(state: Any, events: Any) -> Any:
        made.append(len(events))
        return apply_all(state, events)

    monkeypatch.setattr(admission, "apply_all", counted)
    scheduler.plan_step(queued(ONE, 600), ONE)
    assert made == [600, 0]


def test_requests_that_are_cancelled_at_once_are_closed_in_order_by_one_plan() -> None:
    view = queued(ONE, 40)
    plan = scheduler.plan_step(view, ONE)
    view = scheduler.settle(scheduler.begin(view, plan), plan, (), ())
    for number in (7, 3, 31):
        view = receive(view, RequestCancelled(number, CANCELLED))
    made: list[int] = []

    def counted(state: Any, events: Any) -> Any:
        made.append(len(events))
        return apply_all(state, events)

    plan = scheduler.plan_step(view, ONE, counted)
    assert plan.events[:3] == tuple(Closed(number, CANCELLED) for number in (3, 7, 31))
    assert made[0] == 3


@pytest.mark.parametrize("seed", range(8))
def test_a_bound_on_what_is_opened_changes_no_answer_and_always_ends(seed: int) -> None:
    settings = {"opens_max": 1, "scheduling": PRIORITY, "lookahead": seed % 2 == 0}
    _, answers = random_load(seed, **settings)
    same_answers(random_load(seed)[1], answers)
