"""S13: an error at eval throws the pages away unread; one at build is unwound; nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from replay.reader import Tape
from statemachine.events import PoolReset, Preempted, Trimmed
from statemachine.records import StepFailed

from ..faults.fault import replaced
from ..faults.loads import SMOLLM2, TINY, Load, Request
from ..faults.runner import record
from . import asking
from .asking import flips, load

BUILD, EVAL = "build", "eval"

pytestmark = pytest.mark.model


def _asked(kernel: str) -> Load:
    lengths = (17, 37, 5, 20)
    requests = (Request(asking.of_length(kernel, rows), 6) for rows in lengths)
    return load(kernel, tuple(evolve(it, at=1 + n) for n, it in enumerate(requests)))


@contextmanager
def raising(stage: str, steps: set[int]) -> Iterator[None]:
    """MLX itself raises in these steps: shapes that do not fit, or the inverse of zeros."""
    import mlx.core as mx

    def make(original: Any) -> Callable[..., Any]:
        def hidden(forward: Any, context: Any, pages: Any) -> Any:
            rows, seen = original(forward, context, pages)
            if context.metadata.step not in steps:
                return rows, seen
            if stage == BUILD:
                mx.zeros((2, 3)) @ mx.zeros((2, 3))
            return rows + mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)[0, 0], seen

        return hidden

    with replaced("kernel.forward:Forward.hidden", make):
        yield


def _failures(tape: Path) -> list[StepFailed]:
    return [item for item in Tape(str(tape)) if isinstance(item, StepFailed)]


@pytest.mark.parametrize("kernel", [TINY, SMOLLM2])
def test_after_a_real_error_at_eval_all_is_computed_again_and_nothing_is_sent_twice(
    kernel: str, tmp_path: Path, capsys: Any
) -> None:
    calm = record(_asked(kernel), tmp_path / "calm.log")
    tape = tmp_path / "tape.log"
    with raising(EVAL, {3, 6}):
        played = record(_asked(kernel), tape)
    failed = _failures(tape)
    assert [(it.step, it.stage, it.blamed) for it in failed] == [(3, EVAL, ()), (6, EVAL, ())]
    assert all(it.events == (PoolReset(),) for it in failed)
    assert all(it.error for it in failed)
    assert played.answers == calm.answers
    assert set(played.reasons) == {"length"}
    for request, answer in zip(_asked(kernel).requests, played.answers, strict=True):
        assert flips(kernel, request.tokens, answer) == 0
    codes = {it: asking.replayed(tape, kernel, it, capsys)[0] for it in ("plan", "forward")}
    assert codes == {"plan": 0, "forward": 0}


@pytest.mark.parametrize("kernel", [TINY, SMOLLM2])
def test_after_a_real_error_at_build_each_is_tried_alone_and_nothing_is_lost(
    kernel: str, tmp_path: Path, capsys: Any
) -> None:
    calm = record(_asked(kernel), tmp_path / "calm.log")
    tape = tmp_path / "tape.log"
    with raising(BUILD, {3}):
        played = record(_asked(kernel), tape)
    (failed,) = _failures(tape)
    assert (failed.step, failed.stage, failed.blamed) == (3, BUILD, ())
    trimmed = [(it.seq, it.rows) for it in failed.events if isinstance(it, Trimmed)]
    assert trimmed == [(0, 1), (1, 1), (2, 5)]
    assert "matmul" in failed.error
    assert played.answers == calm.answers
    codes = {it: asking.replayed(tape, kernel, it, capsys)[0] for it in ("plan", "forward")}
    assert codes == {"plan": 0, "forward": 0}


def test_a_request_that_is_alone_in_a_step_that_cannot_be_built_fails_and_no_other(
    tmp_path: Path,
) -> None:
    asked = load(TINY, (Request(asking.of_length(TINY, 9), 4), Request((5, 6, 7), 4, at=9)))
    tape = tmp_path / "tape.log"
    with raising(BUILD, {1}):
        played = record(asked, tape)
    assert [it.blamed for it in _failures(tape)] == [(0,)]
    assert played.reasons == ("error", "length")
    assert played.answers[0] == ()
    assert flips(TINY, (5, 6, 7), played.answers[1]) == 0


@pytest.mark.parametrize("kernel", [TINY, SMOLLM2])
def test_with_the_fault_in_replay_names_the_step_and_the_pool_reset_that_is_missing(
    kernel: str, tmp_path: Path, capsys: Any
) -> None:
    tape = tmp_path / "tape.log"
    with raising(EVAL, {4}):
        _, witness = asking.with_fault("S13", _asked(kernel), tape)
    code, report = asking.replayed(tape, kernel, "fold", capsys)
    found = report["divergence"]
    assert code == 1
    assert (found["class"], found["step"], found["record"]) == ("fold", 4, "StepFailed")
    assert witness.first is not None
    assert (witness.first.step, witness.first.record) == (4, "StepFailed")
    assert "(PoolReset)" in found["summary"]
    assert '"Trimmed"' in found["event"]
    assert found["sequence"] == 0


def test_a_pool_reset_means_that_every_live_sequence_is_preempted(tmp_path: Path) -> None:
    tape = tmp_path / "tape.log"
    with raising(EVAL, {4}):
        played = record(_asked(TINY), tape)
    assert played.preemptions == 0  # it is one event, which names nobody
    assert not [it for it in _failures(tape)[0].events if isinstance(it, Preempted)]
