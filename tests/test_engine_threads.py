"""The engine on a thread of its own: clients on others, its stop, and what ends it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kernel.fake import Failure, FakeKernel
from server.engine import Engine
from server.loop import Parts
from server.submission import EngineStopped, Submission, Update
from statemachine.records import (
    Parameters,
    TapeEnded,
)

from .sim import (
    POLICY,
    SMALL,
    TIGHT,
    Inbox,
    MemoryCapture,
    answer_alone,
    header,
    prompts,
)

WAIT_S = 30.0


@pytest.fixture
def served() -> Iterator[tuple[Engine, MemoryCapture]]:
    capture = MemoryCapture()
    kernel = FakeKernel(TIGHT)
    engine = Engine(lambda: Parts(kernel, POLICY, capture, header(TIGHT, POLICY)))
    engine.start()
    yield engine, capture
    engine.stop(WAIT_S)


class Waiter(Inbox):
    """An inbox that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = threading.Event()
        self.ended = threading.Event()

    def __call__(self, update: Update) -> None:
        super().__call__(update)
        self.first.set()
        if update.finish_reason is not None:
            self.ended.set()


def test_threads_submit_and_cancel_while_the_engine_runs(
    served: tuple[Engine, MemoryCapture],
) -> None:
    engine, _ = served
    given = prompts(24, seed=8)
    waiters = [Waiter() for _ in given]

    def client(numbers: range) -> None:
        for n in numbers:
            request = engine.submit(Submission(given[n], Parameters(8)), waiters[n])
            if n % 4 == 3:
                engine.cancel(request)

    threads = [threading.Thread(target=client, args=(range(k, 24, 3),)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    for n, waiter in enumerate(waiters):
        assert waiter.ended.wait(WAIT_S)
        if waiter.reason == "length":
            assert waiter.tokens == answer_alone(given[n], 8)
        else:
            assert waiter.reason == "cancelled"
    assert engine.healthy


def test_stop_ends_live_requests_and_the_tape(served: tuple[Engine, MemoryCapture]) -> None:
    engine, capture = served
    waiter = Waiter()
    engine.submit(Submission((1, 2, 3), Parameters(50)), waiter)
    assert waiter.first.wait(WAIT_S)
    engine.stop(WAIT_S)
    assert waiter.reason in ("cancelled", "length")
    assert capture.closed
    assert isinstance(capture.records[-1], TapeEnded)
    assert not engine.healthy
    assert engine.status()["held"] == 0
    with pytest.raises(EngineStopped):
        engine.submit(Submission((1, 2, 3), Parameters(5)), Inbox())


def test_an_engine_that_fails_eight_times_ends_its_requests_with_an_error_on_its_own() -> None:
    kernel = FakeKernel(SMALL, fail={step: Failure("eval") for step in range(1, 20)})
    engine = Engine(lambda: Parts(kernel, POLICY))
    engine.start()
    waiter = Waiter()
    engine.submit(Submission((1, 2, 3), Parameters(5)), waiter)
    assert waiter.ended.wait(WAIT_S)
    assert (waiter.reason, "a failure on order" in waiter.error) == ("error", True)
    engine.stop(WAIT_S)
    assert not engine.healthy


def test_a_kernel_whose_pages_cannot_be_reset_ends_the_engine_and_every_request() -> None:
    class Broken(FakeKernel):
        def reset_pages(self) -> None:
            raise MemoryError("no room")

    kernel = Broken(SMALL, fail={1: Failure("eval")})
    engine = Engine(lambda: Parts(kernel, POLICY))
    engine.start()
    waiter = Waiter()
    engine.submit(Submission((1, 2, 3), Parameters(5)), waiter)
    assert waiter.ended.wait(WAIT_S)
    assert waiter.reason == "error"
    engine.stop(WAIT_S)


def test_a_kept_thread_sleeps_on_once_the_engine_is_done() -> None:
    engine = Engine(lambda: Parts(FakeKernel(SMALL), POLICY), keep_thread=True)
    engine.start()
    engine.stop(WAIT_S)
    assert not engine.healthy
    assert engine._thread is not None
    assert engine._thread.is_alive()


def test_what_making_the_kernel_raises_is_raised_by_start() -> None:
    def make() -> Parts:
        raise ValueError("no such model")

    engine = Engine(make)
    with pytest.raises(ValueError, match="no such model"):
        engine.start()
    with pytest.raises(EngineStopped):
        engine.submit(Submission((1,), Parameters(1)), Inbox())
