"""The engine's failing steps: what they lose, whom they end, and when the engine gives up."""

from __future__ import annotations

import pytest
from msgspec import structs

from server.engine import QueueFull
from server.loop import FAILURES_MAX
from server.submission import EngineStopped
from statemachine.events import (
    BlockCopied,
    PoolReset,
)
from statemachine.geometry import Geometry
from statemachine.records import (
    StepDone,
    StepFailed,
    StepPlanned,
    TapeEnded,
)

from .engine_runs import WINDOWS, alone, clean, failing
from .sim import (
    POLICY,
    SMALL,
    TIGHT,
    Sim,
    answer_alone,
    prompts,
)


def test_a_capture_that_raises_is_left_and_serving_goes_on() -> None:
    sim = Sim()

    def full(records: list[object]) -> None:
        raise OSError("no space")

    sim.step()
    sim.capture.write = full  # type: ignore[method-assign]
    inbox = sim.submit(range(5), 3)
    sim.run()
    assert inbox.reason == "length"
    assert sim.engine.status()["capture_failures"] == 1


@pytest.mark.parametrize("stage", ["build", "eval"])
@pytest.mark.parametrize("geometry", [TIGHT, WINDOWS], ids=["full", "window"])
def test_s13_a_failing_step_loses_nothing_and_sends_nothing_twice(
    stage: str, geometry: Geometry
) -> None:
    given = prompts(10, seed=3)
    # After a failed build sequences run alone, where a second failure would blame one.
    pinned = {"build": ((1,), (6,), (3, 14)), "eval": ((1,), (2, 3), (4, 9, 14))}
    for steps in pinned[stage]:
        policy = structs.replace(POLICY, prefill_tile=4)
        sim = Sim(geometry, policy, fail=failing(stage, None, *steps))
        inboxes = [sim.submit(prompt, 6) for prompt in given]
        sim.run()
        assert [inbox.tokens for inbox in inboxes] == alone(given, 6)
        assert [record.step for record in sim.records(StepFailed)] == list(steps)
        assert sim.kernel.resets == (len(steps) if stage == "eval" else 0)
        assert len(sim.events(PoolReset)) == sim.kernel.resets
        clean(sim)


def test_s13_a_build_that_fails_with_a_copy_in_it_computes_the_copied_rows_again() -> None:
    sim = Sim(SMALL, fail=failing("build", None, 2))
    first = sim.submit(range(8), 1)
    sim.run()
    again = sim.submit(range(8), 1)
    sim.submit([50] * 6, 1)
    sim.step()
    sim.run()
    (failed,) = sim.records(StepFailed)
    planned = next(r for r in sim.records(StepPlanned) if r.step == failed.step)
    assert any(isinstance(event, BlockCopied) for event in planned.events)
    assert again.tokens == first.tokens
    clean(sim)


def test_s13_the_request_that_cannot_be_built_fails_and_its_neighbours_do_not() -> None:
    sim = Sim(poison=63)
    inboxes = [sim.submit([n] * 5, 6) for n in (1, 2)]
    bad = sim.submit((1, 63, 3), 6)
    sim.run()
    assert bad.reason == "error"
    assert "a failure on order" in bad.error
    assert [i.tokens for i in inboxes] == [answer_alone([n] * 5, 6) for n in (1, 2)]
    assert [record.blamed for record in sim.records(StepFailed)] == [(), (2,)]
    clean(sim)


def test_s13_the_request_that_the_kernel_names_fails_at_once() -> None:
    sim = Sim(fail=failing("build", 1, 3))
    inboxes = [sim.submit([n] * 5, 6) for n in (1, 2, 3)]
    sim.run()
    assert [inbox.reason for inbox in inboxes] == ["length", "error", "length"]
    assert [record.blamed for record in sim.records(StepFailed)] == [(1,)]
    assert inboxes[1].tokens == answer_alone([2] * 5, 2)
    clean(sim)


def test_eight_failures_in_a_row_stop_the_engine_and_end_every_request() -> None:
    steps = range(2, 2 + FAILURES_MAX)
    sim = Sim(fail=failing("eval", None, *steps), policy=structs.replace(POLICY, max_running=2))
    inboxes = [sim.submit([n] * 5, 6) for n in (1, 2, 3)]
    for _ in range(FAILURES_MAX):
        sim.step()
        assert sim.engine.healthy
    sim.step()
    assert not sim.engine.healthy
    with pytest.raises(EngineStopped):
        sim.submit((1, 2))
    sim.engine.stop()
    assert len(sim.records(StepFailed)) == FAILURES_MAX
    assert [type(record) for record in sim.capture.records[-1:]] == [TapeEnded]
    assert {inbox.reason for inbox in inboxes} == {"cancelled"}


def test_seven_failures_and_a_success_start_the_count_anew() -> None:
    steps = [*range(1, 8), *range(9, 16)]
    sim = Sim(fail=failing("eval", None, *steps))
    inbox = sim.submit(range(5), 6)
    sim.run()
    assert inbox.tokens == answer_alone(range(5), 6)
    assert sim.engine.healthy


def test_a_bug_in_planning_ends_what_is_live_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim = Sim()
    inbox = sim.submit(range(5), 6)
    sim.step()
    with monkeypatch.context() as patch:
        patch.setattr("server.scheduler.admit", None)
        other = sim.submit(range(4), 6)
        sim.step()
    assert (inbox.reason, other.reason) == ("error", "error")
    clean(sim)
    again = sim.submit(range(5), 6)
    sim.run()
    assert again.tokens == answer_alone(range(5), 6)


def test_a_bug_in_closing_ends_what_is_live_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim = Sim()
    inbox = sim.submit(range(5), 6)
    waiting = sim.submit(range(7), 6)
    with monkeypatch.context() as patch:
        patch.setattr("server.scheduler.close_step", None)
        sim.step()
    assert (inbox.reason, waiting.reason) == ("error", "error")
    assert [record.stage for record in sim.records(StepFailed)] == []
    again = sim.submit(range(5), 6)
    sim.run()
    assert [record.stage for record in sim.records(StepFailed)] == ["close"]
    assert again.tokens == answer_alone(range(5), 6)
    clean(sim)


def test_a_step_that_cannot_even_be_undone_is_on_tape_before_the_engine_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim = Sim()
    sim.submit(range(5), 6)
    sim.step()
    with monkeypatch.context() as patch:
        patch.setattr("server.scheduler.close_step", None)
        patch.setattr("server.scheduler.fail_step", None)
        with pytest.raises(TypeError):
            sim.step()
    (failed,) = sim.records(StepFailed)
    assert (failed.step, failed.stage, failed.events) == (2, "close", ())
    assert failed.digest == sim.records(StepPlanned)[-1].digest
    assert [record.step for record in sim.records(StepDone)] == [1]


def test_more_requests_than_the_queue_holds_are_refused_and_the_rest_is_served() -> None:
    sim = Sim(waiting_max=3)
    inboxes = [sim.submit([n] * 4, 2) for n in range(3)]
    with pytest.raises(QueueFull, match="3 requests are waiting"):
        sim.submit(range(4))
    sim.run()
    assert [inbox.reason for inbox in inboxes] == ["length"] * 3
    assert sim.submit(range(4), 1).reason is None
