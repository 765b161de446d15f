"""Recurrent groups without a model: which slots a step uses, and what the shadow says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from kernel import fake, shadow
from kernel.batch import Batch, BuildFailed, Piece, StepResult
from kernel.fake import BUILD, Failure, FakeKernel
from kernel.metadata import StepMetadata, build
from statemachine import commands
from statemachine.events import DECODE, PROMPT, BlockCopied
from statemachine.geometry import RECURRENT, Geometry, Group
from statemachine.records import Parameters
from statemachine.sequence import Sequence
from statemachine.state import new_state
from statemachine.tags import sequence_tags
from statemachine.transitions import apply_all

ALONE = Geometry(4, (Group(RECURRENT, num_blocks=6),))
HYBRID = Geometry(4, (Group(num_blocks=16), Group(RECURRENT, num_blocks=6)))
BARE = Geometry(4, (Group(num_blocks=16),))
TEXT = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)


class Hand:
    """A state and a kernel, moved by hand: one piece a step and sequence."""

    def __init__(self, geometry: Geometry, **kernel: Any) -> None:
        self.state = new_state(geometry)
        self.kernel = FakeKernel(geometry, vocab_size=1 << 30, **kernel)
        self.step = 0

    def open(self, *seqs: int) -> None:
        for seq in seqs:
            self.state = apply_all(self.state, commands.open_sequence(self.state, seq))

    def run(self, *fed: tuple[int, tuple[int, ...]], **changes: Any) -> StepResult:
        batch = self.batch(*fed, **changes)
        return self.kernel.collect(self.kernel.issue(batch))

    def batch(self, *fed: tuple[int, tuple[int, ...]], **changes: Any) -> Batch:
        self.step += 1
        pieces = []
        for seq, tokens in fed:
            purpose = PROMPT if len(tokens) > 1 else DECODE
            events = commands.append(self.state, seq, self.step, tokens=tokens, purpose=purpose)
            self.state = apply_all(self.state, events)
            given = Piece(self.sequence(seq), tokens, samples=1, parameters=Parameters(8))
            pieces.append(structs.replace(given, **changes))
        self.state = apply_all(self.state, commands.step_written(self.state, self.step))
        return Batch(self.step, tuple(pieces))

    def sequence(self, seq: int) -> Sequence:
        return self.state.sequences[seq]


def laid_out(hand: Hand, *fed: tuple[int, tuple[int, ...]]) -> StepMetadata:
    return build(hand.batch(*fed), hand.kernel.geometry)


def test_a_piece_reads_the_slot_of_the_row_before_it_and_writes_that_of_its_last_row() -> None:
    hand = Hand(HYBRID)
    hand.open(0, 1)
    first = laid_out(hand, (0, TEXT), (1, TEXT[:4]))
    before = [hand.sequence(seq).tables[1] for seq in (0, 1)]
    assert [len(table) for table in before] == [3, 1]
    assert before[0][:2] == (-1, -1), "blocks that a piece passes over have no slot"
    assert first.state_reads.tolist() == [[-1, -1], [-1, -1]]
    assert first.state_writes.tolist() == [[-1, -1], [before[0][2], before[1][0]]]
    second = laid_out(hand, (0, (11,)), (1, (5, 6)))
    after = hand.sequence(1).tables[1]
    assert second.state_reads[1].tolist() == [before[0][2], after[0]]
    assert second.state_writes[1].tolist() == [before[0][2], after[1]]
    assert after[0] == before[1][0] != after[1], "at an edge the state that was read stays"


@pytest.mark.parametrize("geometry", [ALONE, HYBRID])
def test_states_that_are_right_change_no_token_and_nothing_is_found(geometry: Geometry) -> None:
    hand, bare = Hand(geometry), Hand(BARE)
    for it in (hand, bare):
        it.open(0, 1)
    for fed in (((0, TEXT[:4]), (1, TEXT[:3])), ((0, TEXT[4:]),), ((0, (7,)), (1, (8,)))):
        seen, told = hand.run(*fed), bare.run(*fed)
        assert seen.tokens == told.tokens
        assert seen.shadow.found == 0
    assert (seen.shadow.checked, told.shadow.checked) == (
        (4, 15) if geometry is ALONE else (4 + 15, 15)
    ), "a piece's read state and its own, beside every row that attention reads"


def planted(monkeypatch: pytest.MonkeyPatch, change: Callable[[StepMetadata], object]) -> None:
    """The kernel lays its steps out otherwise."""

    def build_otherwise(batch: Batch, geometry: Geometry) -> StepMetadata:
        metadata = build(batch, geometry)
        change(metadata)
        return metadata

    monkeypatch.setattr(fake, "build", build_otherwise)


def findings(result: StepResult) -> list[tuple[int, int, int]]:
    """Sequence, position and block of each."""
    return [(it.seq, it.position, it.block) for it in result.shadow.findings]


def test_a_state_that_another_sequence_went_on_with_is_found_and_stays_in_every_later_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hand, bare = Hand(HYBRID), Hand(HYBRID)
    for it in (hand, bare):
        it.open(0, 1)
        it.run((0, (1, 2)), (1, (5, 6)))
    slots = [hand.sequence(seq).tables[1][0] for seq in (0, 1)]
    with monkeypatch.context() as patch:
        planted(patch, lambda it: it.state_reads.__setitem__(1, it.state_reads[1][::-1].copy()))
        wrong = hand.run((0, (3,)), (1, (7,)))
    right = bare.run((0, (3,)), (1, (7,)))
    assert findings(wrong) == [(0, 1, slots[1]), (1, 1, slots[0])]
    seen = zip(wrong.observation.tables, right.observation.tables, strict=True)
    assert [[a == b for a, b in zip(*pair, strict=True)] for pair in seen] == [[True, False]] * 2
    assert [a == b for a, b in zip(wrong.tokens, right.tokens, strict=True)] == [False] * 2
    again, told = hand.run((0, (9,))), bare.run((0, (9,)))
    assert again.shadow.found == 0, "the slot has the tag of its row"
    assert again.tokens != told.tokens, "and its state is still off"


def test_a_state_that_is_not_reset_for_a_new_sequence_is_observed_and_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hand, bare = Hand(HYBRID), Hand(HYBRID)
    for it in (hand, bare):
        it.open(0)
        it.run((0, (1, 2)))
        it.state = apply_all(it.state, commands.close(it.state, 0))
        it.open(1)
    planted(monkeypatch, lambda it: it.state_reads.__setitem__(1, it.state_writes[1]))
    wrong = hand.run((1, (5, 6)))
    monkeypatch.undo()
    right = bare.run((1, (5, 6)))
    assert (right.observation.visible, wrong.observation.visible) == (((2, 2),), ((2, 3),))
    slot = hand.sequence(1).tables[1][0]
    assert findings(wrong) == [(1, -1, slot)]
    assert wrong.tokens != right.tokens


def test_a_build_that_fails_leaves_every_state_as_it_was() -> None:
    hand, bare = Hand(HYBRID, fail={2: Failure(BUILD)}), Hand(HYBRID)
    for it in (hand, bare):
        it.open(0)
        it.run((0, (1, 2)))
    before = hand.state
    with pytest.raises(BuildFailed):
        hand.run((0, (3,)))
    hand.state = before
    bare.step += 1
    assert hand.run((0, (4,))) == bare.run((0, (4,)))


def test_a_copied_slot_is_gone_on_with_as_the_one_that_it_was_copied_from() -> None:
    hand, bare = Hand(ALONE), Hand(ALONE)
    for it in (hand, bare):
        it.open(0)
        it.run((0, (1, 2)))
    batch = hand.batch((0, (3,)))
    piece = batch.pieces[0]
    (slot,) = piece.sequence.tables[0]
    other = (slot + 3) % 6
    moved = structs.replace(piece.sequence, tables=((other,),))
    copied = BlockCopied(0, hand.step, 0, 0, slot, other, 2)
    moved_piece = structs.replace(piece, sequence=moved)
    batch = structs.replace(batch, pieces=(moved_piece,), copies=(copied,))
    result = hand.kernel.collect(hand.kernel.issue(batch))
    assert result.shadow.found == 0
    assert result.tokens == bare.run((0, (3,))).tokens


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"pads": 1}, "1 pad rows"), ({"pending": 1}, "1 rows without a token")],
)
def test_pads_and_rows_ahead_of_their_tokens_are_refused(
    changes: dict[str, int], what: str
) -> None:
    hand = Hand(HYBRID)
    hand.open(0)
    hand.run((0, (1, 2)))
    with pytest.raises(BuildFailed) as caught:
        hand.run((0, (3, 4)), **changes)
    said = f"{what} could not be taken back out of the state of sequence 0 in step 2"
    assert (str(caught.value), caught.value.seq) == (said, 0)


def test_a_state_without_a_slot_is_refused_and_named() -> None:
    hand = Hand(ALONE)
    hand.open(0)
    hand.run((0, (1, 2, 3, 4)))
    batch = hand.batch((0, (5,)))
    piece = batch.pieces[0]
    slot = piece.sequence.tables[0][1]
    for table, position, held in (((-1, slot), 3, -1), ((0, 6), 4, 6)):
        sequence = structs.replace(piece.sequence, tables=(table,))
        bad = structs.replace(batch, pieces=(structs.replace(piece, sequence=sequence),))
        with pytest.raises(BuildFailed) as caught:
            hand.kernel.issue(bad)
        assert str(caught.value) == (
            f"group 0 has no slot for the state behind position {position} of sequence 0 "
            f"(slot {held})"
        )


def test_the_shadow_has_one_tag_a_slot() -> None:
    hand = Hand(HYBRID)
    hand.open(0)
    hand.run((0, TEXT))
    held: list[np.ndarray] = hand.kernel._shadow.tags
    assert [len(tags) for tags in held] == [64, 6]
    sequence = hand.sequence(0)
    (tag,) = sequence_tags(HYBRID, sequence, 9, 10)
    assert held[1][sequence.tables[1][2]] == tag
    assert shadow.Shadow(HYBRID).tags[1].tolist() == [0] * 6
