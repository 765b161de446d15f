"""S4: a prompt that is found whole in the prefix index never adopts its last row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from msgspec import structs

from replay.reader import Tape
from statemachine.events import BlockCopied, PrefixAdopted
from statemachine.records import StepPlanned

from ..faults.loads import SMOLLM2, TINY, Request
from ..faults.runner import record
from . import asking
from .asking import POLICY, flips, load

pytestmark = pytest.mark.model


def _events(tape: Path, kind: type[Any]) -> list[Any]:
    planned = [item for item in Tape(str(tape)) if isinstance(item, StepPlanned)]
    return [event for item in planned for event in item.events if isinstance(event, kind)]


@pytest.mark.parametrize("kernel", [TINY, SMOLLM2])
@pytest.mark.parametrize("tile", [1, 32])
def test_a_repeat_adopts_all_rows_but_one_and_answers_the_same(
    kernel: str, tile: int, tmp_path: Path
) -> None:
    prompts = [asking.of_length(kernel, rows) for rows in (32, 48)]
    # The longer one is turned round, so that each shares a beginning with itself alone.
    asked = [Request(tuple(reversed(prompts[1])), 4, at=1), Request(prompts[0], 4, at=10)]
    asked += [evolve(asked[0], at=20), evolve(asked[1], at=30)]
    tape = tmp_path / "tape.log"
    policy = structs.replace(POLICY, prefill_tile=tile)
    played = record(load(kernel, tuple(asked), policy), tape)
    adopted = _events(tape, PrefixAdopted)
    assert [(it.prompt_rows, len(it.tokens)) for it in adopted] == [(48, 47), (32, 31)]
    # The block that is used in part is copied before its last row is written.
    assert [it.rows for it in _events(tape, BlockCopied)] == [15, 15]
    assert played.answers[2:] == played.answers[:2]
    for request, answer in zip(asked, played.answers, strict=True):
        assert flips(kernel, request.tokens, answer) == 0


@pytest.mark.parametrize("kernel", [TINY, SMOLLM2])
@pytest.mark.parametrize("rows", [32, 48])
def test_with_the_fault_in_replay_names_the_step_the_sequence_and_both_counts(
    kernel: str, rows: int, tmp_path: Path, capsys: Any
) -> None:
    prompt = asking.of_length(kernel, rows)
    tape = tmp_path / "tape.log"
    asked = load(kernel, (Request(prompt, 2), Request(prompt, 2, at=6)))
    _, witness = asking.with_fault("S4", asked, tape)
    code, report = asking.replayed(tape, kernel, "fold", capsys)
    found = report["divergence"]
    assert code == 1
    assert (found["class"], found["step"], found["sequence"]) == ("fold", 3, 1)
    assert witness.first is not None
    assert (witness.first.step, witness.first.sequence) == (3, 1)
    assert '"PrefixAdopted"' in found["event"]
    assert f"sequence 1 adopted {rows} rows of a prompt of {rows}" in found["summary"]
    assert f"at most {rows - 1} may be adopted" in found["summary"]
