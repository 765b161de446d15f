"""What a step of many decode rows takes in one go is what each of them gives alone."""

from __future__ import annotations

import numpy as np
import pytest

from kernel.batch import Batch, Piece
from kernel.metadata import build
from statemachine import commands
from statemachine.events import LOOKAHEAD, NO_BLOCK
from statemachine.geometry import Geometry, Group
from statemachine.sequence import Sequence
from statemachine.state import State, new_state
from statemachine.tags import committed_tags, newest_tags, next_tags, pending_tags, sequence_tags
from statemachine.transitions import apply_all

BLOCK = 4


def _pool(rows: list[int], hash_name: str = "xxh3") -> State:
    """A sequence of each number of rows."""
    state = new_state(Geometry(BLOCK, (Group(num_blocks=1024),), hash=hash_name))
    for seq, count in enumerate(rows):
        state = apply_all(state, commands.open_sequence(state, seq))
        tokens = tuple(range(seq, seq + count))
        state = apply_all(state, commands.append(state, seq, 1, tokens))
    return apply_all(state, commands.step_written(state, 1))


def _sequences(state: State) -> list[Sequence]:
    return [state.sequences[seq] for seq in sorted(state.sequences)]


@pytest.mark.parametrize("hash_name", ["xxh3", "constant"])
def test_tags_of_many_rows_are_those_of_each(hash_name: str) -> None:
    state = _pool([1, 3, 4, 5, 8, 11], hash_name)
    geometry, before = state.geometry, _sequences(state)
    lasts = [committed_tags(geometry, it, it.committed - 1, it.committed)[0] for it in before]
    assert newest_tags(geometry, before) == lasts

    seqs, tokens = tuple(range(len(before))), tuple(range(40, 40 + len(before)))
    state = apply_all(state, commands.append_each(state, 2, seqs, None, LOOKAHEAD))
    ahead = _sequences(state)
    assert pending_tags(ahead) == [
        sequence_tags(geometry, it, it.committed, it.offset)[0] for it in ahead
    ]
    told = next_tags(geometry, ahead, tokens)
    state = apply_all(state, commands.commit_each(state, seqs, tokens))
    assert told == newest_tags(geometry, _sequences(state))


def test_tables_that_were_packed_before_are_packed_anew_once_they_grow() -> None:
    state = _pool([1 + seq % 7 for seq in range(40)])
    rng = np.random.default_rng(0)
    for step in range(2, 12):
        chosen = rng.choice(40, 12, replace=False).tolist()
        tokens = tuple(range(len(chosen)))
        state = apply_all(state, commands.append_each(state, step, chosen, tokens, "decode"))
        state = apply_all(state, commands.step_written(state, step))
        pieces = tuple(Piece(state.sequences[seq], (1,), samples=1) for seq in chosen)
        (table,) = build(Batch(step, pieces), state.geometry).tables
        for row, piece in zip(table.tolist(), pieces, strict=True):
            held = list(piece.sequence.tables[0])
            assert row == held + [NO_BLOCK] * (len(row) - len(held))
