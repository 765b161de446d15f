"""S1: after a padded prefill, offset = visible rows = real prompt length, in every layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from server.policy import Policy
from statemachine.geometry import Geometry, Group

from ..faults.loads import SMOLLM2, TINY, Request, tokens
from ..faults.runner import record
from . import asking
from .asking import ANSWER, LENGTHS, POLICY, QUESTION_ROWS, ask, dense, flips, load

TIGHT = Geometry(block_size=4, groups=(Group(num_blocks=12),))
WIDE = structs.replace(POLICY, max_batch_tokens=1024, prefill_tile=32, prefix_cache=False)

pytestmark = pytest.mark.model


def test_the_question_has_37_tokens_and_mlx_lm_answers_paris() -> None:
    assert len(asking.question()) == QUESTION_ROWS
    assert asking.text(dense(SMOLLM2, asking.question(), 12)) == ANSWER


@pytest.mark.parametrize(
    ("chunk", "tile", "crowded"),
    [(128, 1, False), (16, 1, False), (128, 32, False), (16, 32, True), (128, 1, True)],
)
def test_the_answer_is_paris_whole_in_chunks_padded_crowded_and_on_a_prefix_hit(
    chunk: int, tile: int, crowded: bool, tmp_path: Path
) -> None:
    policy = structs.replace(POLICY, prefill_chunk=chunk, prefill_tile=tile)
    others = asking.neighbours() if crowded else ()
    asked = load(SMOLLM2, (*others, ask(), ask(at=30)), policy)
    played = record(asked, tmp_path / "tape.log")
    assert [asking.text(answer) for answer in played.answers[-2:]] == [ANSWER, ANSWER]
    assert played.adopted_rows == 32  # of the second time that it is asked; nobody else shares


@pytest.mark.parametrize("tile", [1, 8])
def test_the_answer_is_paris_before_and_after_a_preemption(tile: int, tmp_path: Path) -> None:
    policy = Policy(64, prefill_tile=tile, watermark_blocks=0, context_tokens=48, max_running=8)
    other = Request(tokens(5, 5), 12)
    asked = load(SMOLLM2, (other, ask(at=3)), policy, geometry=TIGHT)
    played = record(asked, tmp_path / "tape.log")
    assert played.preemptions >= 1
    assert asking.text(played.answers[1]) == ANSWER
    assert flips(SMOLLM2, other.tokens, played.answers[0]) == 0


@pytest.mark.parametrize(
    ("kernel", "chunk", "tile"),
    [(SMOLLM2, 128, 32), (SMOLLM2, 16, 32), (TINY, 128, 32), (TINY, 16, 32), (TINY, 16, 1)],
)
def test_prompts_of_all_lengths_answer_as_mlx_lm_does_and_no_layer_sees_a_pad(
    kernel: str, chunk: int, tile: int, tmp_path: Path
) -> None:
    prompts = [asking.of_length(kernel, rows) for rows in LENGTHS]
    policy = structs.replace(WIDE, prefill_chunk=chunk, prefill_tile=tile)
    tape = tmp_path / "tape.log"
    played = record(load(kernel, tuple(Request(it, 4) for it in prompts), policy), tape)
    excused = sum(
        flips(kernel, prompt, answer)
        for prompt, answer in zip(prompts, played.answers, strict=True)
    )
    print(f"{kernel}, chunk {chunk}, tile {tile}: {excused} of {4 * len(prompts)} tokens flipped")
    assert excused <= 2
    _check_lengths(tape, chunk, tile)


def _check_lengths(tape: Path, chunk: int, tile: int) -> None:
    """Offset = visible rows = rows of the prompt so far, after each piece."""
    lengths = asking.prompts_of(tape)
    assert sorted(lengths.values()) == sorted(LENGTHS)
    issued = dict.fromkeys(lengths, 0)
    for piece in asking.pieces(tape):
        seq, length = piece.sequence, lengths[piece.sequence]
        assert piece.start == issued[seq]
        if piece.start < length:
            assert piece.rows % tile == 0
            issued[seq] += min(chunk, length - piece.start)
        else:
            assert (piece.rows, piece.visible) == (1, piece.start + 1)
            issued[seq] += 1
        assert piece.offset_after in (issued[seq], -1)
    assert issued == {seq: length + 3 for seq, length in lengths.items()}


@pytest.mark.parametrize("kernel", [TINY, SMOLLM2])
def test_with_the_fault_in_replay_names_the_step_the_sequence_and_both_lengths(
    kernel: str, tmp_path: Path, capsys: Any
) -> None:
    prompt = asking.of_length(kernel, QUESTION_ROWS)
    tape = tmp_path / "tape.log"
    asked = load(kernel, (Request(prompt[:32], 4), Request(prompt, 6)), WIDE)
    played, witness = asking.with_fault("S1", asked, tape)
    code, report = asking.replayed(tape, kernel, "fold", capsys)
    found = report["divergence"]
    assert code == 1
    assert (found["class"], found["step"], found["sequence"]) == ("observation", 2, 1)
    assert witness.first is not None
    assert (witness.first.step, witness.first.sequence) == (2, 1)
    assert found["summary"] == "sequence 1: the caches saw start 64, where the state has 37"
    values = {value["name"]: (value["derived"], value["observed"]) for value in found["values"]}
    assert values["offset before the step"] == (37, 64)
    assert values["visible rows (group 0)"] == (38, 48)
    assert played.answers[0] == dense(kernel, prompt[:32], 4)
    assert played.answers[1] != dense(kernel, prompt, 6)
