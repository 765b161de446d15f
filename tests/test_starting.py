"""Steps that another thread starts: the same answers, and what becomes of one that cannot start."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import pytest

from kernel import starting
from kernel.model_kernel import ModelKernel
from kernel.starting import Starter
from kernel.tiny import tiny_llama
from server.engine import Engine
from server.parts import Parts
from server.policy import Policy
from server.submission import Submission, Update
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters

from .test_compiled_steps import InGraph

GEOMETRY = Geometry(block_size=4, groups=(Group(num_blocks=64),))
POLICY = Policy(lookahead=True)


class Tokens:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.error = ""

    def __call__(self, update: Update) -> None:
        self.tokens += update.tokens
        self.error += update.error


def answers(kernel: ModelKernel) -> tuple[list[list[int]], Engine]:
    engine = Engine(lambda: Parts(kernel, POLICY))
    engine.open()
    sinks = [Tokens() for _ in range(3)]
    for number, sink in enumerate(sinks):
        drawn: dict[str, Any] = {"temperature": 1.0, "seed": 5} if number else {}
        submission = Submission((7, 8 + number), Parameters(max_tokens=20, **drawn))
        engine.submit(submission, sink)
    while engine.step():
        pass
    engine.stop()
    assert [sink.error for sink in sinks] == [""] * 3
    return [sink.tokens for sink in sinks], engine


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of arrays that were handed to another thread."""
    counts: list[int] = []
    start = Starter.start

    def counted(self: Starter, arrays: list[mx.array]) -> Any:
        counts.append(len(arrays))
        return start(self, arrays)

    monkeypatch.setattr(Starter, "start", counted)
    return counts


def kernel() -> ModelKernel:
    dialect: Any = InGraph()
    made = ModelKernel(tiny_llama(3), GEOMETRY, dialect=dialect, check=False, sanitize="full")
    assert made._forward.failure == ""
    return made


def test_steps_that_another_thread_starts_give_the_same_tokens(started: list[int]) -> None:
    alone = kernel()
    alone._starter = None
    wanted, _ = answers(alone)
    assert started == []
    found, engine = answers(kernel())
    assert found == wanted
    assert engine.status()["divergences"] == 0
    # Tokens, logits, margins, and the tokens for the next step; the first steps are started here.
    assert set(started) == {4}
    assert len(started) >= 15


def test_a_step_that_cannot_be_started_loses_the_pages_and_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start: Any = mx.async_eval
    calls: list[int] = []

    def failing(arrays: list[mx.array]) -> None:
        if threading.current_thread().name == "starting":
            calls.append(len(arrays))
            if len(calls) == 5:
                raise RuntimeError("no memory for it")
        start(arrays)

    monkeypatch.setattr(mx, "async_eval", failing)
    found, engine = answers(kernel())
    assert len(calls) > 5
    assert [len(it) for it in found] == [20] * 3
    assert engine.status()["failed_steps"] == 1


def test_the_thread_that_serves_waits_for_what_is_being_started() -> None:
    starter = Starter.of_thread()
    assert Starter.of_thread() is starter
    array = mx.zeros((4,)) + 1
    future = starter.start([array])
    starting.settle()
    assert future.done()
    assert future.result() == ""
    assert array.tolist() == [1.0] * 4
