"""S2: prompts of 17 and 50 that are prefilled together are 17 and 50, never 50 and 50."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from ..faults.loads import SMOLLM2, TINY, Request
from ..faults.runner import record
from . import asking
from .asking import POLICY, flips, load

COHORT = structs.replace(POLICY, prefill_cohort=True, prefix_cache=False)

pytestmark = pytest.mark.model


def _both(kernel: str) -> tuple[Request, ...]:
    return tuple(Request(asking.of_length(kernel, rows), 4) for rows in (17, 50))


@pytest.mark.parametrize("kernel", [TINY, SMOLLM2])
def test_a_padded_cohort_keeps_17_and_50_and_answers_as_each_does_alone(
    kernel: str, tmp_path: Path
) -> None:
    tape = tmp_path / "tape.log"
    played = record(load(kernel, _both(kernel), COHORT), tape)
    seen = list(asking.pieces(tape))
    prefill, decode = seen[:2], seen[2:4]
    assert [(it.start, it.rows, it.offset_after) for it in prefill] == [(0, 50, 17), (0, 50, 50)]
    assert {it.sequence: (it.start, it.visible) for it in decode} == {0: (17, 18), 1: (50, 51)}
    for number, request in enumerate(_both(kernel)):
        alone = record(load(kernel, (request,), COHORT), tmp_path / f"alone-{number}.log")
        assert played.answers[number] == alone.answers[0]
        assert flips(kernel, request.tokens, played.answers[number]) == 0


@pytest.mark.parametrize("kernel", [TINY, SMOLLM2])
def test_with_the_fault_in_replay_names_the_step_the_sequence_and_both_lengths(
    kernel: str, tmp_path: Path, capsys: Any
) -> None:
    tape = tmp_path / "tape.log"
    _, witness = asking.with_fault("S2", load(kernel, _both(kernel), COHORT), tape)
    code, report = asking.replayed(tape, kernel, "fold", capsys)
    found = report["divergence"]
    assert code == 1
    assert (found["class"], found["step"], found["sequence"]) == ("observation", 2, 0)
    assert witness.first is not None
    assert (witness.first.step, witness.first.sequence) == (2, 0)
    assert found["summary"] == "sequence 0: the caches saw start 50, where the state has 17"
    values = {value["name"]: (value["derived"], value["observed"]) for value in found["values"]}
    assert values["offset before the step"] == (17, 50)
    assert values["visible rows (group 0)"] == (18, 32)
