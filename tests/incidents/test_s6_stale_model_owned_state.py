"""S6: opening a sequence resets the model's own caches; two runs in a row equal two fresh runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from msgspec import structs

from replay.reader import Tape
from statemachine.events import PoolReset
from statemachine.records import StepFailed

from ..faults import loads
from ..faults.fault import Witness, replaced
from ..faults.loads import EXAONE4, LONGCAT, MAMBA, Load, Request
from ..faults.model_owned import FAULTS, in_a_row
from ..faults.runner import record, run
from . import asking
from .asking import flips
from .fingerprints import Sample, by_request

NAMED = ("exaone4", "gpt_oss", "ministral3", "step3p5", "mellum", "laguna")
"""Those that the incident was seen in."""

OTHERS = ("mamba", "mamba2", "qwen3_next", "gemma3_text", "nemotron-nas", "longcat_flash_ngram")
"""State without a length, both kinds together, slots that are never written, two sub-layers."""

DEPTHS = ("fold", "plan", "forward", "reference")
BUILD, EVAL = "build", "eval"


def _only(load: Load, number: int) -> Load:
    """A load with one of its requests, which nobody cancels."""
    return evolve(load, requests=(evolve(load.requests[number], at=1, cancel_at=None),))


def _alone(load: Load, number: int, tape: Path) -> list[Sample]:
    """What a request gives in a fresh run of its own."""
    record(_only(load, number), tape)
    return by_request(tape)[0]


@pytest.mark.parametrize("kernel", NAMED + OTHERS)
def test_two_runs_in_a_row_equal_two_fresh_runs_and_replay_agrees_at_every_depth(
    kernel: str, tmp_path: Path, capsys: Any
) -> None:
    load, tape = in_a_row(kernel), tmp_path / "tape.log"
    played = record(load, tape)
    fresh = {number: _alone(load, number, tmp_path / f"{number}.log") for number in (0, 1)}
    assert by_request(tape) == fresh
    for request, answer in zip(load.requests, played.answers, strict=True):
        assert len(answer) == request.max_tokens
        assert flips(kernel, request.tokens, answer) == 0
    codes = {depth: asking.replayed(tape, kernel, depth, capsys)[0] for depth in DEPTHS}
    assert codes == dict.fromkeys(DEPTHS, 0)


CANCELS = {"between two pieces of its prompt": 2, "in the middle of its answer": 5}


@pytest.mark.parametrize("cancel_at", CANCELS.values(), ids=CANCELS)
@pytest.mark.parametrize("kernel", [EXAONE4, MAMBA, LONGCAT])
def test_what_a_cancelled_request_left_is_dropped_by_the_next_open(
    kernel: str, cancel_at: int, tmp_path: Path
) -> None:
    calm, tape = in_a_row(kernel), tmp_path / "tape.log"
    first, second = calm.requests
    load = evolve(calm, requests=(evolve(first, cancel_at=cancel_at), second))
    played = record(load, tape)
    assert played.reasons == ("cancelled", "length")
    assert by_request(tape)[1] == _alone(calm, 1, tmp_path / "alone.log")


@contextmanager
def raising(stage: str, steps: set[int]) -> Iterator[None]:
    """MLX itself raises in these steps, after some layers' caches have moved."""
    import mlx.core as mx

    now = 0

    def note(original: Any) -> Callable[..., Any]:
        def issue(kernel: Any, batch: Any) -> Any:
            nonlocal now
            now = batch.step
            return original(kernel, batch)

        return issue

    def fail(original: Any) -> Callable[..., Any]:
        def feed(caches: Any, model: Any, tokens: Any) -> Any:
            logits = original(caches, model, tokens)
            if now not in steps:
                return logits
            if stage == BUILD:
                mx.zeros((2, 3)) @ mx.zeros((2, 3))
            return logits + mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)[0, 0]

        return feed

    with (
        replaced("kernel.model_owned:ModelOwnedKernel.issue", note),
        replaced("kernel.model_owned:OwnedCaches.feed", fail),
    ):
        yield


def _failures(tape: Path) -> list[StepFailed]:
    return [item for item in Tape(str(tape)) if isinstance(item, StepFailed)]


@pytest.mark.parametrize("kernel", [EXAONE4, MAMBA, LONGCAT])
def test_a_request_whose_caches_an_error_took_is_preempted_and_starts_again_from_nothing(
    kernel: str, tmp_path: Path, capsys: Any
) -> None:
    load, tape = in_a_row(kernel), tmp_path / "tape.log"
    calm = record(load, tmp_path / "calm.log")
    with raising(EVAL, {4, 8}):
        played = record(load, tape)
    failed = _failures(tape)
    assert [(it.step, it.stage, it.events) for it in failed] == [
        (4, EVAL, (PoolReset(),)),
        (8, EVAL, (PoolReset(),)),
    ]
    # Recomputed in other pieces, so the scores may differ in their last bits: tokens do not.
    assert played.answers == calm.answers
    for request, answer in zip(load.requests, played.answers, strict=True):
        assert flips(kernel, request.tokens, answer) == 0
    codes = {depth: asking.replayed(tape, kernel, depth, capsys)[0] for depth in DEPTHS}
    assert codes == dict.fromkeys(DEPTHS, 0)


@pytest.mark.parametrize("kernel", [EXAONE4, MAMBA, LONGCAT])
def test_a_request_that_cannot_be_built_fails_and_leaves_nothing_to_the_next(
    kernel: str, tmp_path: Path, capsys: Any
) -> None:
    load, tape = in_a_row(kernel), tmp_path / "tape.log"
    with raising(BUILD, {4}):
        played = record(load, tape)
    (failed,) = _failures(tape)
    assert (failed.step, failed.stage, failed.blamed) == (4, BUILD, (0,))
    assert played.reasons == ("error", "length")
    assert by_request(tape)[1] == _alone(load, 1, tmp_path / "alone.log")
    codes = {depth: asking.replayed(tape, kernel, depth, capsys)[0] for depth in DEPTHS}
    assert codes == dict.fromkeys(DEPTHS, 0)


@pytest.mark.parametrize("name", ["S6", "S6-state"])
def test_with_the_fault_in_replay_names_the_first_step_of_the_second_request(
    name: str, tmp_path: Path, capsys: Any
) -> None:
    fault = next(it for it in FAULTS.faults if it.name == name)
    tape, witness = tmp_path / "tape.log", Witness()
    played = record(fault.load, tape, fault, witness)
    assert played.reasons == ("length", "length"), "the engine itself noticed"
    assert by_request(tape)[1] != _alone(fault.load, 1, tmp_path / "alone.log")
    code, report = asking.replayed(tape, fault.load.kernel, "fold", capsys)
    found = report["divergence"]
    rows = len(fault.load.requests[0].tokens) + fault.load.requests[0].max_tokens - 1
    assert code == 1
    assert (found["class"], found["step"], found["sequence"]) == ("observation", 7, 1)
    assert found["summary"] == f"sequence 1: the caches saw start {rows}, where the state has 0"
    assert '"Appended"' in found["event"]
    assert witness.first is not None
    assert (witness.first.step, witness.first.sequence) == (7, 1)


@pytest.mark.parametrize("name", [fault.name for fault in FAULTS.faults])
def test_every_fault_of_these_models_is_found_at_its_first_wrong_event(
    name: str, tmp_path: Path
) -> None:
    assert run(next(it for it in FAULTS.faults if it.name == name), tmp_path).holds


def test_a_long_prompt_in_many_pieces_is_right_at_every_depth(tmp_path: Path, capsys: Any) -> None:
    asked = (Request(loads.tokens(300, 1), 4), Request(loads.tokens(270, 2), 4))
    load = in_a_row("gemma3_text")
    policy = structs.replace(load.policy, context_tokens=400)
    tape = tmp_path / "tape.log"
    played = record(evolve(load, requests=asked, policy=policy), tape)
    for request, answer in zip(asked, played.answers, strict=True):
        assert flips("gemma3_text", request.tokens, answer) == 0
    codes = {depth: asking.replayed(tape, "gemma3_text", depth, capsys)[0] for depth in DEPTHS}
    assert codes == dict.fromkeys(DEPTHS, 0)
