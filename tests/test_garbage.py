"""Python's collector in a server: nothing that is there at the start is walked while it serves."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from kernel.fake import FakeKernel
from server import engine as engine_module
from server import garbage
from server.engine import Engine
from server.parts import Parts
from server.submission import Submission
from statemachine.records import Parameters
from statemachine.state import new_state
from statemachine.supply import Supply

from .sim import POLICY, SMALL

WAIT_S = 20.0


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def settled() -> Iterator[None]:
    """As in a server, and as before afterwards: conftest.py has put things aside too."""
    gc.disable()
    gc.unfreeze()
    garbage.settle()
    yield
    garbage._settled = False
    gc.enable()


@pytest.mark.usefixtures("settled")
def test_what_is_there_when_a_server_starts_is_walked_no_more_and_later_garbage_is_found() -> None:
    assert gc.get_freeze_count() > 10_000
    assert len(gc.get_objects()) < 1_000
    late = weakref.ref(Cycle())
    assert late() is not None
    garbage.tidy()
    assert late() is None


def test_a_program_that_is_no_server_is_left_alone() -> None:
    gc.disable()
    try:
        late = weakref.ref(Cycle())
        garbage.tidy()
        assert late() is not None
    finally:
        gc.enable()


def test_an_engine_tidies_once_whenever_nothing_is_left_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tidied, ended = threading.Semaphore(0), threading.Event()
    monkeypatch.setattr(engine_module, "IDLE_S", 0.01)
    monkeypatch.setattr(engine_module, "tidy", tidied.release)
    engine = Engine(lambda: Parts(FakeKernel(SMALL), POLICY))
    engine.start()
    try:
        assert tidied.acquire(timeout=WAIT_S)
        assert not tidied.acquire(timeout=0.1)
        engine.submit(
            Submission((1, 2, 3), Parameters(5)),
            lambda update: ended.set() if update.finish_reason else None,
        )
        assert ended.wait(WAIT_S)
        assert tidied.acquire(timeout=WAIT_S)
        assert not tidied.acquire(timeout=0.1)
    finally:
        engine.stop(WAIT_S)


@pytest.mark.usefixtures("settled")
def test_what_a_plan_takes_blocks_from_goes_with_the_plan_and_not_with_a_collection() -> None:
    supply = Supply(new_state(SMALL), 0)
    assert supply.take(2) == (0, 1)
    held = weakref.ref(supply)
    del supply
    assert held() is None
