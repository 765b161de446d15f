"""S3, with lookahead off: a failed step unwinds exactly what it wrote; 5 of 5 match alone.

S15: shapes differ between a batch and a lone request, so tokens go by the margin rule, counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from msgspec import structs

from replay.fold import Fold
from replay.reader import Tape
from statemachine.records import StepFailed, StepPlanned

from ..faults.loads import TINY, Load, Request
from ..faults.runner import record
from . import asking
from .asking import flips, load
from .test_s13_eval_fails_late import BUILD, raising

LENGTHS = (15, 16, 33, 37, 48)
CHUNKED = structs.replace(asking.POLICY, prefill_chunk=24, max_batch_tokens=48)
"""Small chunks, so that prompts and decode rows share the steps."""


def _five() -> Load:
    return load(TINY, tuple(Request(asking.of_length(TINY, rows), 8) for rows in LENGTHS))


def test_five_of_five_at_once_answer_as_alone_and_flips_are_counted(
    tmp_path: Path, capsys: Any
) -> None:
    tape = tmp_path / "tape.log"
    played = record(_five(), tape)
    for request, answer in zip(_five().requests, played.answers, strict=True):
        assert flips(TINY, request.tokens, answer) == 0
    code, report = asking.replayed(tape, TINY, "reference", capsys)
    assert code == 0
    assert report["figures"]["tokens judged"] == 5 * 8
    assert report["figures"]["excused flips"] == 0


@pytest.mark.parametrize("step", [2, 4])
def test_a_step_that_cannot_be_built_leaves_offsets_and_tables_as_they_were(
    step: int, tmp_path: Path
) -> None:
    tape = tmp_path / "tape.log"
    chunked = evolve(_five(), policy=CHUNKED)
    with raising(BUILD, {step}):
        played = record(chunked, tape)
    assert played.answers == record(chunked, tmp_path / "calm.log").answers
    before: dict[int, tuple[int, Any]] = {}
    fold = Fold()
    for item in Tape(str(tape)):
        if isinstance(item, StepPlanned) and item.step == step:
            before = _lengths(fold)
        fold.feed(item)
        if isinstance(item, StepFailed):
            assert _lengths(fold) == before
            return
    raise AssertionError("no step failed")


def _lengths(fold: Fold) -> dict[int, tuple[int, Any]]:
    """Offset and tables of each sequence that has rows."""
    sequences = fold.state.sequences
    return {
        seq: (sequences[seq].offset, sequences[seq].tables)
        for seq in sorted(sequences)
        if sequences[seq].offset
    }
