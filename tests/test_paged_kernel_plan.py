"""Plans of attention through block tables: items, tables and fetches, number by number."""

from __future__ import annotations

import numpy as np
import pytest

from kernel.batch import Batch, Piece
from kernel.metadata import BadBatch, StepMetadata, build
from kernel.paged_plan import ITEM_INTS, NOWHERE, plan_fetch, plan_rows
from statemachine.events import NO_BLOCK, Namespace
from statemachine.geometry import WINDOW, Geometry, Group
from statemachine.sequence import Sequence


def step(group: Group, *pieces: tuple[int, int, tuple[int, ...]]) -> StepMetadata:
    """Pieces of (rows before, rows, table)."""
    made = []
    for seq, (start, rows, table) in enumerate(pieces):
        first = max(0, start - group.window + 1) if group.kind == WINDOW else 0
        sequence = Sequence(seq, Namespace(), 0, start + rows, tables=(table,), starts=(first,))
        made.append(Piece(sequence, (0,) * rows))
    return build(Batch(0, tuple(made)), Geometry(block_size=16, groups=(group,)))


def items(metadata: StepMetadata, in_place: bool = True, **wanted: int) -> list[list[int]]:
    given = {"columns": 1, "blocks": 1, "item_tiles": 4} | wanted
    pieces = np.arange(len(metadata.rows))
    plan = plan_rows(metadata, 0, pieces, in_place=in_place, **given)
    return plan.ints[: plan.items * ITEM_INTS].reshape(-1, ITEM_INTS).tolist()


TEN = tuple(range(10, 20))


def test_a_row_of_few_keys_is_one_item() -> None:
    metadata = step(Group(num_blocks=40), (20, 1, (5, 7)))
    # table until live_from sink start fresh slot begin end splits first counter
    assert items(metadata) == [[12, 21, 0, 0, 20, -20, 7 * 16 + 4, 0, 2, 1, 0, 0]]


def test_a_long_row_is_split_evenly_and_written_by_its_last_item() -> None:
    metadata = step(Group(num_blocks=40), (0, 1, (3,)), (150, 1, TEN))
    assert items(metadata) == [
        [48, 1, 0, 0, 0, 0, 48, 0, 1, 1, 0, 0],
        [58, 151, 0, 0, 150, -149, NO_BLOCK, 0, 3, 3, 1, 1],
        [58, 151, 0, 0, 150, -149, NO_BLOCK, 3, 6, 3, 1, 1],
        [58, 151, 0, 0, 150, -149, 19 * 16 + 6, 6, 10, 3, 1, 1],
    ]


def test_tables_stand_behind_the_items() -> None:
    metadata = step(Group(num_blocks=40), (0, 1, (3,)), (150, 1, TEN))
    plan = plan_rows(metadata, 0, np.arange(2), in_place=True, columns=1, blocks=1, item_tiles=4)
    assert plan.ints[48:].tolist() == [3, *[NO_BLOCK] * 9, *TEN]
    assert (plan.items, plan.rows, plan.splits) == (4, 2, 3)


def test_rows_of_a_piece_read_those_before_them_from_the_step() -> None:
    metadata = step(Group(num_blocks=40), (0, 1, (3,)), (30, 3, (5, 6, 7)))
    found = items(metadata)
    assert [row[1] for row in found] == [1, 31, 32, 33]
    assert [row[4] for row in found] == [0, 30, 30, 30]
    # The batch row of a position: row 1 of the batch has position 30.
    assert [row[5] for row in found] == [0, -29, -29, -29]
    assert [row[6] for row in found] == [48, 6 * 16 + 14, 6 * 16 + 15, 7 * 16]


def test_not_in_place_all_keys_are_in_pages_and_nothing_is_written() -> None:
    (item,) = items(step(Group(num_blocks=40), (20, 1, (5, 7))), in_place=False)
    assert item[4] == NOWHERE
    assert item[6] == NO_BLOCK


def test_a_window_has_the_tiles_of_its_sinks_and_of_its_live_rows() -> None:
    group = Group(WINDOW, 40, window=20, sink=4)
    table = (10, NO_BLOCK, NO_BLOCK, NO_BLOCK, 14, 15, 16)
    (item,) = items(step(group, (100, 1, table)))
    # Rows 81 to 100, in tiles 5 and 6, and rows 0 to 3, in tile 0.
    assert item[1:4] == [101, 81, 4]
    assert item[7:9] == [0, 3]


def test_sinks_that_meet_the_window_are_counted_once() -> None:
    group = Group(WINDOW, 40, window=20, sink=4)
    (item,) = items(step(group, (21, 1, (10, 11))))
    assert item[1:4] == [22, 2, 4]
    assert item[7:9] == [0, 2]


@pytest.mark.parametrize(
    ("rows", "keys", "splits"),
    [(1, 512, 1), (1, 32768, 33), (32, 1024, 1), (32, 8192, 6), (64, 512, 1)],
)
def test_rows_are_split_where_few_blocks_would_run_or_run_long(
    rows: int, keys: int, splits: int
) -> None:
    table = tuple(range(keys // 16))
    metadata = step(Group(num_blocks=keys), *[(keys - 1, 1, table)] * rows)
    plan = plan_rows(metadata, 0, np.arange(rows), in_place=True, columns=8, blocks=264)
    assert plan.items == rows * splits
    assert plan.splits == splits


@pytest.mark.parametrize("block", [0, 1])
def test_a_row_without_a_block_is_refused(block: int) -> None:
    table = tuple(NO_BLOCK if at == block else at for at in range(3))
    metadata = step(Group(num_blocks=40), (0, 1, (3,)), (33, 1, table))
    with pytest.raises(BadBatch, match=f"would read block {block} of sequence 1, which has none"):
        plan_rows(metadata, 0, np.arange(2), in_place=True, columns=1, blocks=1)


def test_a_fetch_reads_the_sinks_and_then_the_live_rows() -> None:
    group = Group(WINDOW, 40, window=20, sink=4)
    table = (10, NO_BLOCK, NO_BLOCK, NO_BLOCK, 14, 15, 16)
    metadata = step(group, (0, 1, (3,)), (90, 12, table))
    plan = plan_fetch(metadata, 0, 1)
    # rows read, sink, low, start, fresh
    assert plan.ints.tolist() == [4 + 102 - 71, 4, 71, 90, -89, *table]
    assert plan.rows == 35
    assert plan.mask is not None
    positions = [*range(4), *range(71, 102)]
    for query in range(12):
        at = 90 + query
        seen = [
            position for position, sees in zip(positions, plan.mask[query], strict=True) if sees
        ]
        assert seen == [*range(4), *range(at - 19, at + 1)]


def test_a_fetch_from_the_first_row_on_lets_later_rows_see_the_sinks() -> None:
    metadata = step(Group(WINDOW, 40, window=3, sink=2), (0, 6, (3,)))
    plan = plan_fetch(metadata, 0, 0)
    assert plan.mask is not None
    seen = [np.flatnonzero(row).tolist() for row in plan.mask]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 3, 4, 5]]


def test_a_fetch_of_all_rows_needs_no_mask_of_its_own() -> None:
    metadata = step(Group(num_blocks=40), (10, 20, (4, 9)))
    plan = plan_fetch(metadata, 0, 0)
    assert plan.ints.tolist() == [30, 0, 0, 10, -10, 4, 9]
    assert plan.mask is None


def test_a_fetch_of_a_row_without_a_block_is_refused() -> None:
    metadata = step(Group(num_blocks=40), (40, 20, (NO_BLOCK, 1, 2, 3)))
    with pytest.raises(BadBatch, match="would read block 0 of sequence 0"):
        plan_fetch(metadata, 0, 0)
