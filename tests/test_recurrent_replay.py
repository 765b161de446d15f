"""Tapes of models that keep states: every depth re-runs them, also where a step failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from replay.run import FOLD, FORWARD, PLAN, REFERENCE

from .faults import loads, real
from .faults.loads import LFM2, MAMBA2
from .faults.runner import record, replay
from .faults.states import ALONE, MIXED
from .incidents.asking import flips

DEPTHS = (FOLD, PLAN, FORWARD, REFERENCE)
KERNELS = [(LFM2, MIXED), (MAMBA2, ALONE)]
"""With K and V in pages beside the states, and with states alone."""
FAILING_STEP = 6


@pytest.mark.parametrize(("kernel", "load"), KERNELS)
def test_a_run_that_shares_prefixes_is_right_at_every_depth(
    kernel: str, load: loads.Load, tmp_path: Path
) -> None:
    asked, tape = evolve(load, kernel=kernel), tmp_path / "tape.log"
    played = record(asked, tape)
    assert played.adopted_rows > 0
    for request, answer in zip(asked.requests, played.answers, strict=True):
        assert flips(kernel, request.tokens, answer) == 0
    assert {depth: replay(asked, tape, depth) for depth in DEPTHS} == dict.fromkeys(DEPTHS)


@pytest.mark.parametrize(("kernel", "load"), KERNELS)
def test_a_build_that_failed_moves_no_state_when_it_is_run_again(
    kernel: str, load: loads.Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, tape = evolve(load, kernel=kernel), tmp_path / "tape.log"
    real.model(kernel)  # loads MLX behind its BLAS
    from kernel.model_kernel import ModelKernel

    build = ModelKernel._build

    def fails_once(kernel: Any, batch: Any) -> Any:
        if batch.step == FAILING_STEP:
            raise RuntimeError("a failure on order")
        return build(kernel, batch)

    with monkeypatch.context() as patch:
        patch.setattr(ModelKernel, "_build", fails_once)
        played = record(asked, tape)
    assert (played.failed_steps, set(played.reasons)) == (1, {"length"})
    for request, answer in zip(asked.requests, played.answers, strict=True):
        assert flips(kernel, request.tokens, answer) == 0
    assert {depth: replay(asked, tape, depth) for depth in DEPTHS} == dict.fromkeys(DEPTHS)
