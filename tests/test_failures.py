"""Containment: what an error ends, wherever it is raised, with a step in flight and without.

test_engine_failures.py has errors of a step that nothing flies beside; here each is raised in plan,
build, eval, sampling, text, capture and sink, under lookahead and drafts too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from msgspec import structs

from kernel.batch import Batch
from kernel.fake import Failure, FakeKernel
from replay.reader import Tape
from replay.run import CLEAN, Options, replay
from server.capture import CaptureWriter
from server.engine import Engine
from server.loop import FAILURES_MAX, Parts
from server.policy import Policy
from server.submission import EngineStopped, Submission, Update
from statemachine.events import Closed, PoolReset
from statemachine.records import Gap, Parameters, StepFailed, TapeEnded

from .follow import AHEAD, GUESSING, Letters, clean, follow, outline
from .sim import POLICY, SMALL, Inbox, MemoryCapture, Sim, answer_alone, header

BOTH = structs.replace(GUESSING, lookahead=True)
POLICIES = pytest.mark.parametrize("policy", [POLICY, AHEAD, BOTH], ids=["plain", "ahead", "both"])
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Errors on order are not rendered: that takes longer than all the steps of a test."""
    with structlog.testing.capture_logs():
        yield


def expected(count: int, max_tokens: int = 6) -> list[tuple[int, ...]]:
    return [answer_alone([n] * 5, max_tokens) for n in range(count)]


def start(sim: Sim, count: int, max_tokens: int = 6) -> list[Inbox]:
    return [sim.submit([n] * 5, max_tokens) for n in range(count)]


def all_whole(sim: Sim, count: int) -> list[Inbox]:
    """So many requests, each of which has its whole answer."""
    inboxes = start(sim, count)
    sim.run()
    assert [inbox.tokens for inbox in inboxes] == expected(count)
    return inboxes


class Once:
    """Raises at the call of a number, counted from 1, and passes all others on."""

    def __init__(self, call: Callable[..., Any], at: int, error: Exception) -> None:
        self.call, self.at, self.error = call, at, error
        self.calls = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return self.call(*args, **options)


def test_a_plan_that_raises_once_beside_a_step_in_flight_ends_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim = Sim(policy=AHEAD)
    inboxes = start(sim, 2)
    sim.step()
    with monkeypatch.context() as patch:
        patch.setattr("server.scheduler.plan_decode", None)
        sim.step()
    assert sim.engine.view.flights == ()
    sim.run()
    assert [inbox.tokens for inbox in inboxes] == expected(2)
    assert sim.records(StepFailed) == []
    clean(sim, plans_raised=1)


def test_a_plan_that_raises_again_with_nothing_in_flight_ends_what_is_live_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim = Sim(policy=AHEAD)
    inboxes = start(sim, 2)
    sim.step()
    with monkeypatch.context() as patch:
        patch.setattr("server.scheduler.plan_decode", None)
        sim.step()
        sim.step()
    assert [inbox.reason for inbox in inboxes] == ["error", "error"]
    assert [inbox.tokens for inbox in inboxes] == [tokens[:1] for tokens in expected(2)]
    again = start(sim, 1)
    sim.run()
    assert outline(sim).startswith("P1 D1 P2 F2 P3")
    assert [record.stage for record in sim.records(StepFailed)] == ["plan"]
    assert again[0].tokens == expected(1)[0]
    assert not sim.engine._loop.busy  # type: ignore[union-attr]


def test_a_close_that_raises_with_a_step_behind_it_ends_what_is_live_and_voids_that_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim = Sim(policy=AHEAD)
    inboxes = start(sim, 2)
    sim.step()
    with monkeypatch.context() as patch:
        patch.setattr("server.scheduler.close_step", None)
        sim.step()
    assert [inbox.reason for inbox in inboxes] == ["error", "error"]
    assert sim.engine.view.flights == ()
    again = start(sim, 1)
    sim.run()
    assert [(r.step, r.stage) for r in sim.records(StepFailed)] == [(1, "close"), (2, "void")]
    assert outline(sim).startswith("P1 P2 F1 F2 P3")
    assert again[0].tokens == expected(1)[0]
    assert sim.kernel.resets == 1
    assert sim.idle_counts()["held"] == 0


@POLICIES
@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_whatever_a_kernel_raises_at_issue_resets_the_pages_and_loses_nothing(
    policy: Policy, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = Sim(policy=policy)
    raising = Once(sim.kernel.issue, at, TypeError("an array of another shape"))
    monkeypatch.setattr(sim.kernel, "issue", raising)
    all_whole(sim, 3)
    (failed,) = [record for record in sim.records(StepFailed) if record.stage != "void"]
    assert (failed.stage, failed.error) == ("eval", "an array of another shape")
    assert sim.kernel.resets == 1
    clean(sim)


@POLICIES
@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_an_error_in_sampling_resets_the_pages_and_loses_nothing(
    policy: Policy, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = Sim(policy=policy)
    raising = Once(sim.kernel.collect, at, ValueError("probabilities do not sum to one"))
    monkeypatch.setattr(sim.kernel, "collect", raising)
    inboxes = all_whole(sim, 3)
    told = [sum(len(update.tokens) for update in inbox.updates) for inbox in inboxes]
    assert told == [6, 6, 6]
    assert len(sim.events(PoolReset)) == 1
    clean(sim)


@POLICIES
def test_too_few_samples_are_a_failure_at_close_that_ends_what_is_live(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = Sim(policy=policy)
    collect = sim.kernel.collect

    def short(ticket: object) -> Any:
        return structs.replace(collect(ticket), tokens=())

    inboxes = start(sim, 2)
    with monkeypatch.context() as patch:
        patch.setattr(sim.kernel, "collect", short)
        sim.step()
        sim.step()
    assert {inbox.reason for inbox in inboxes} == {"error"}
    assert "samples, not 0" in inboxes[0].error
    all_whole(sim, 2)
    assert sim.idle_counts()["held"] == 0


@POLICIES
def test_a_detokeniser_that_raises_or_cannot_be_made_ends_its_request_only(
    policy: Policy,
) -> None:
    made = []

    def make() -> Letters:
        made.append(1)
        if len(made) == 2:
            raise OSError("no vocabulary")
        return Letters()

    sim = Sim(
        policy=policy,
        decoder=make,
        script=lambda seq, position: 60 if (seq, position) == (0, 7) else 7,
    )
    inboxes = [sim.submit([n] * 5, 6, stop=("never",)) for n in range(3)]
    sim.run()
    assert [inbox.reason for inbox in inboxes] == ["error", "error", "length"]
    assert "could not be delivered" in inboxes[0].error
    assert inboxes[0].tokens[:2] == (7, 7)
    assert inboxes[2].tokens == (7,) * 6
    clean(sim)


@POLICIES
@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_a_sink_that_raises_at_any_update_ends_its_request_only(policy: Policy, at: int) -> None:
    sim = Sim(policy=policy)
    heard: list[Update] = []

    def sink(update: Update) -> None:
        heard.append(update)
        if len(heard) == at:
            raise BrokenPipeError("the client went away")

    sim.engine.submit(Submission((9,) * 5, Parameters(6)), sink)
    all_whole(sim, 2)
    assert len(heard) == at, "nobody is told of a request that was given up"
    assert [e for e in sim.events(Closed) if e.seq == 0] == [Closed(0, "cancelled")]
    clean(sim)


@POLICIES
@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_a_capture_that_raises_at_any_write_is_left_and_every_answer_is_whole(
    policy: Policy, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = Sim(policy=policy)
    monkeypatch.setattr(sim.capture, "write", Once(sim.capture.write, at, OSError("no space")))
    all_whole(sim, 2)
    assert sim.engine.status()["capture_failures"] == 1
    sim.engine.stop()
    assert not sim.engine._loop.busy  # type: ignore[union-attr]


@pytest.mark.parametrize("policy", [AHEAD, BOTH], ids=["ahead", "both"])
@pytest.mark.parametrize("writes", [1, 3])
@pytest.mark.parametrize("first", [1, 2, 3, 5])
def test_a_full_disk_with_a_step_in_flight_leaves_a_gap_and_the_tape_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Policy, first: int, writes: int
) -> None:
    calls = {"writes": 0}
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        calls["writes"] += 1
        if first <= calls["writes"] < first + writes:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    path = tmp_path / "tape.log"
    kernel = FakeKernel(SMALL)
    capture = CaptureWriter(str(path))
    parts = Parts(kernel, policy, capture, header(SMALL, policy))
    engine = Engine(lambda: parts)
    engine.open()
    monkeypatch.setattr("server.capture.os.write", full)
    for _ in range(2):
        inboxes = [Inbox() for _ in range(3)]
        for number, inbox in enumerate(inboxes):
            engine.submit(Submission((number,) * 5, Parameters(6)), inbox)
        while engine.step():
            pass
        assert [inbox.tokens for inbox in inboxes] == expected(3)
        monkeypatch.undo()
    engine.stop()
    outcome = replay(str(path), Options(depth="plan"))
    assert outcome.exit_code == CLEAN, outcome.divergence
    assert sum(isinstance(record, Gap) for record in Tape(str(path))) == 1


def failing(stage: str, steps: range) -> dict[int, Failure]:
    return {step: Failure(stage) for step in steps}


@pytest.mark.parametrize("lookahead", [False, True])
def test_eight_failed_steps_in_a_row_stop_the_engine_and_seven_do_not(lookahead: bool) -> None:
    policy = structs.replace(POLICY, lookahead=lookahead)
    for failures in (FAILURES_MAX - 1, FAILURES_MAX):
        # With lookahead every second step is the void one behind a failed one.
        steps = 2 * failures if lookahead else failures
        sim = Sim(policy=policy, fail=failing("eval", range(1, steps + 1)))
        inboxes = start(sim, 2)
        for _ in range(2 * FAILURES_MAX):
            if sim.engine.healthy:
                sim.step()
        if failures < FAILURES_MAX:
            sim.run()
            assert [inbox.tokens for inbox in inboxes] == expected(2)
            assert sim.engine.status()["failed_steps"] == failures
            clean(sim)
            continue
        assert not sim.engine.healthy
        with pytest.raises(EngineStopped, match="restart the server"):
            sim.submit((1, 2))
        sim.engine.stop()
        assert sim.engine.status()["failed_steps"] == failures
        assert isinstance(sim.capture.records[-1], TapeEnded)
        assert {inbox.reason for inbox in inboxes} == {"cancelled"}
        follow(sim)


def test_a_step_without_rows_between_failures_does_not_start_the_count_anew() -> None:
    sim = Sim(fail=failing("eval", range(1, 40, 2)))
    for number in range(FAILURES_MAX):
        assert sim.engine.healthy
        start(sim, 1)
        sim.step()
        sim.engine.cancel(number)
        sim.step()
    assert outline(sim).startswith("P1 F1 P2 D2 P3 F3 P4 D4")
    assert not sim.engine.healthy


@POLICIES
def test_builds_that_keep_failing_end_their_requests_one_by_one_and_then_the_engine(
    policy: Policy,
) -> None:
    sim = Sim(policy=policy, fail=failing("build", range(2, 60)))
    inboxes = start(sim, 9)
    for _ in range(40):
        if sim.engine.healthy:
            sim.step()
    assert not sim.engine.healthy
    ended = [inbox for inbox in inboxes if inbox.reason == "error"]
    # The first failure blames nobody; the seven after it one request each.
    assert len(ended) >= FAILURES_MAX - 2
    sim.engine.stop()
    assert all(inbox.reason in ("error", "cancelled") for inbox in inboxes)
    follow(sim)


@pytest.fixture
def threaded() -> Iterator[Callable[..., tuple[Engine, MemoryCapture]]]:
    engines: list[Engine] = []

    def make(policy: Policy, **kernel: Any) -> tuple[Engine, MemoryCapture]:
        capture = MemoryCapture()
        parts = Parts(FakeKernel(SMALL, **kernel), policy, capture, header(SMALL, policy))
        engine = Engine(lambda: parts)
        engines.append(engine)
        engine.start()
        return engine, capture

    yield make
    for engine in engines:
        engine.stop(WAIT_S)


class Waiter:
    """A sink that another thread waits for."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.ended = threading.Event()

    def __call__(self, update: Update) -> None:
        self.updates.append(update)
        if update.finish_reason is not None:
            self.ended.set()


def test_an_engine_that_stopped_for_its_failures_says_why_and_takes_no_more(
    threaded: Callable[..., tuple[Engine, MemoryCapture]],
) -> None:
    engine, capture = threaded(AHEAD, fail=failing("eval", range(1, 99)))
    waiter = Waiter()
    engine.submit(Submission((1, 2, 3), Parameters(4)), waiter)
    assert waiter.ended.wait(WAIT_S)
    last = waiter.updates[-1]
    assert (last.finish_reason, last.tokens) == ("error", ())
    assert last.error == "the engine stopped: a failure on order"
    with pytest.raises(EngineStopped):
        engine.submit(Submission((1, 2, 3), Parameters(4)), Waiter())
    engine.stop(WAIT_S)
    assert isinstance(capture.records[-1], TapeEnded)


def test_a_stop_while_a_step_flies_ends_each_request_once(
    threaded: Callable[..., tuple[Engine, MemoryCapture]],
) -> None:
    flying, go_on = threading.Event(), threading.Event()

    def delay(batch: Batch) -> None:
        if batch.step == 3:
            flying.set()
            assert go_on.wait(WAIT_S)

    engine, capture = threaded(AHEAD, delay=delay)
    waiter = Waiter()
    engine.submit(Submission((5,) * 5, Parameters(9)), waiter)
    assert flying.wait(WAIT_S)
    stopper = threading.Thread(target=engine.stop, args=(WAIT_S,))
    stopper.start()
    while engine.healthy:
        pass
    go_on.set()
    stopper.join(WAIT_S)
    tokens = tuple(token for update in waiter.updates for token in update.tokens)
    assert tokens == answer_alone([5] * 5, 9)[: len(tokens)]
    assert len(tokens) == 3, "what step 3 sampled is told as well"
    assert [u.finish_reason for u in waiter.updates if u.finish_reason] == ["cancelled"]
    assert isinstance(capture.records[-1], TapeEnded)


def test_a_flush_of_nothing_lets_the_engines_thread_sleep(
    threaded: Callable[..., tuple[Engine, MemoryCapture]],
) -> None:
    engine, _ = threaded(AHEAD)
    engine.flush()
    waiter = Waiter()
    engine.submit(Submission((1, 2, 3), Parameters(2)), waiter)
    assert waiter.ended.wait(WAIT_S)
    assert engine.healthy
