"""Plans of attention through block tables: what paged_source/decode.h is told, as host numpy.

Owns the list of work items (a row's keys, split where rows are few and contexts long), what a
longer piece fetches, and the layout of both as ints. Reads only the step's metadata. No MLX.

A plan of rows is ITEM_INTS ints an item, then the tables of the pieces:

    table until live_from sink start fresh slot begin end splits first counter
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from attrs import frozen

from statemachine.events import NO_BLOCK

from .metadata import BadBatch, Ints, Longs, StepMetadata

Bools = npt.NDArray[np.bool_]

TILE = 16
"""Keys that a warp takes at a time; decode.h's TILE."""
ITEM_INTS = 12
ITEM_TILES = (32, 86)
"""No item is meant to be shorter or longer: a block has to pay for its start and for the merge of a
row's items, and the last blocks run beside idle ones.
"""
TABLE_STEP = 32
"""Blocks by which the tables of a roomy plan grow, while they are short."""
NOWHERE = 2**31 - 1
"""A start that no position reaches: all keys are in the pages."""


@frozen(eq=False)
class RowsPlan:
    """ints: [items * ITEM_INTS + tables]; rows: how many; splits: the most items of a row."""

    ints: Ints
    items: int
    rows: int
    splits: int


@frozen(eq=False)
class FetchPlan:
    """ints: rows read, sink, low, start, fresh, then the piece's table. rows: how many are read.

    mask: [n, rows], True where a query sees a row; None where that is the causal triangle.
    """

    ints: Ints
    rows: int
    mask: Bools | None


def plan_rows(
    metadata: StepMetadata,
    group: int,
    pieces: Longs,
    *,
    in_place: bool,
    columns: int,
    blocks: int,
    item_tiles: int | None = None,
    roomy: bool = False,
) -> RowsPlan:
    """Each row of `pieces` as items of about as many tiles.

    in_place: keys of this step are read from the step's own rows, and written by the items.
    columns: blocks that each item takes; blocks: how many keep the device busy. item_tiles: tiles
    of an item, chosen from these if None. roomy: filled up to one of few sizes, with items of
    nothing and tables that end in nothing. Raises BadBatch where a row read has no block.
    """
    number, rows = _rows(metadata, pieces)
    sink = metadata.geometry.groups[group].sink
    until = metadata.until[rows].astype(np.int64)
    live_from = metadata.live_from[group, rows].astype(np.int64)
    starts = metadata.start[pieces] if in_place else np.full(len(pieces), NOWHERE)
    width = metadata.tables[group].shape[1]
    tables = _tables(metadata, group, pieces, starts, _roomy(width, TABLE_STEP) if roomy else width)
    tiles = _tiles(until, live_from, sink)
    aim = item_tiles or _item_tiles(int(tiles.sum()), columns, blocks)
    # A row that is a little longer than an item stays whole: a merge costs more than the wait.
    splits = np.maximum(1, (tiles + aim // 2) // aim)
    first = splits.cumsum() - splits
    row = np.arange(len(rows)).repeat(splits)
    place = np.arange(len(row)) - first[row]
    count = _roomy(len(row), 1) if roomy else len(row)
    planned = np.zeros((count, ITEM_INTS), np.int32)
    items = planned[: len(row)]
    items[:, 0] = planned.size + number[row] * tables.shape[1]
    items[:, 1] = until[row]
    items[:, 2] = live_from[row]
    items[:, 3] = sink
    items[:, 4] = starts[number[row]]
    items[:, 5] = (rows - until + 1)[row]
    last = place == splits[row] - 1
    items[:, 6] = np.where(last & in_place, metadata.slots[group, rows][row], NO_BLOCK)
    items[:, 7] = place * tiles[row] // splits[row]
    items[:, 8] = (place + 1) * tiles[row] // splits[row]
    items[:, 9] = splits[row]
    items[:, 10] = first[row]
    items[:, 11] = row
    ints = np.concatenate([planned.ravel(), tables.ravel()])
    return RowsPlan(ints, count, len(rows), int(splits.max()))


def _rows(metadata: StepMetadata, pieces: Longs) -> tuple[Longs, Longs]:
    """Of each row of `pieces`, which of these it is of, and its number in the batch."""
    counts, first = metadata.rows[pieces], metadata.first[pieces]
    number = np.arange(len(pieces)).repeat(counts)
    if len(number) == len(pieces):  # one row each
        return number, first
    inside = np.arange(len(number)) - (counts.cumsum() - counts).repeat(counts)
    return number, first[number] + inside


def plan_fetch(metadata: StepMetadata, group: int, piece: int) -> FetchPlan:
    """What a piece of many rows reads, its own rows included. BadBatch where one has no block."""
    first, count = int(metadata.first[piece]), int(metadata.rows[piece])
    rows = slice(first, first + count)
    start, end = int(metadata.start[piece]), int(metadata.end[piece])
    live_from = metadata.live_from[group, rows]
    low = int(live_from[0])
    sink = min(metadata.geometry.groups[group].sink, low)
    width = metadata.tables[group].shape[1]
    table = _tables(metadata, group, np.array([piece]), np.array([start]), width)[0]
    read = end - low + sink
    head = np.array([read, sink, low, start, first - start], np.int32)
    mask = None
    if (live_from != low).any():
        index = np.arange(read)
        positions = np.where(index < sink, index, index - sink + low)
        near = (positions >= live_from[:, None]) | (
            positions < metadata.geometry.groups[group].sink
        )
        mask = near & (positions < metadata.until[rows][:, None])
    return FetchPlan(np.concatenate([head, table]), read, mask)


def _roomy(count: int, least: int) -> int:
    """The next of few sizes: at most a quarter more, or `least`."""
    step = max(least, 1 << max(0, count.bit_length() - 3))
    return -(-count // step) * step


def _tiles(until: Longs, live_from: Longs, sink: int) -> Longs:
    """How many tiles hold a key that a row sees: those of the sinks, then those of the rest."""
    ends = -(-until // TILE)
    sinks = np.minimum(-(-sink // TILE), ends)
    tiles: Longs = sinks + np.maximum(0, ends - np.maximum(live_from // TILE, sinks))
    return tiles


def _item_tiles(tiles: int, columns: int, blocks: int) -> int:
    """Tiles of an item, so that one go of `blocks` does all; several goes where these are long."""
    shortest, longest = ITEM_TILES
    return min(longest, max(shortest, -(-tiles * columns // blocks)))


def _tables(metadata: StepMetadata, group: int, pieces: Longs, starts: Longs, width: int) -> Ints:
    """The pieces' tables, [B, width] filled up with NO_BLOCK, checked: what is read before `starts`
    has a block.
    """
    known = metadata.tables[group][pieces]
    size = metadata.geometry.block_size
    begins = np.arange(known.shape[1]) * size
    reach = np.minimum(starts, metadata.end[pieces])[:, None]
    missing = (known < 0) & (begins < reach)
    if missing.any():  # unless windows have left them behind
        low = metadata.live_from[group, metadata.first[pieces]][:, None]
        sink = np.minimum(metadata.geometry.groups[group].sink, reach)
        missing &= (begins + size > low) | (begins < sink)
    if missing.any():
        place, block = np.argwhere(missing)[0].tolist()
        seq = metadata.seqs[int(pieces[place])]
        where = f"block {block} of sequence {seq}"
        raise BadBatch(f"group {group} would read {where}, which has none", seq)
    table = np.full((len(pieces), width), NO_BLOCK, np.int32)
    table[:, : known.shape[1]] = known
    return table
