"""Buckets: how a step's rows are regrouped for attention, as host numpy.

Owns which query rows are attended together, which physical rows they read, and what a query may
not see of them. Reads only the step's metadata, so that what is observed is what is used. No MLX.

Decode rows of like lengths share a bucket, filled up to the longest; a prefill piece has its own,
cut into tiles of queries so that a tile reads no key beyond its last row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt
from attrs import frozen

from statemachine.events import NO_BLOCK
from statemachine.geometry import has_state

from .metadata import BadBatch, Ints, Longs, StepMetadata

Alone = Literal["", "pieces", "rows"]
"""What is never called for together with others: nothing, each piece, or each row."""
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

TILE_ROWS = 128
"""Queries of a prefill piece that are scored at once: the scores then stay in the CPU's cache."""
SHARED_ROWS_MAX = 8
"""Pieces of at most that many rows are attended together with others of the same number."""
MANY_QUERIES = 8
"""From that many on, scores are held [keys, queries]: maxima over columns are fast."""
CLEAR_KEYS_MIN = 512
"""So many keys that all of many queries see are scored apart: adding nothing to each score of them
is a third of the time that long prompts attend; for fewer, twice the operations cost as much.
"""
COMMON_KEYS_MIN = 128
"""So many rows that sequences share, as a system prompt's, are fetched and scored once for all."""
LIKE_LENGTH = 0.75
SLACK_ROWS = 32
HIDDEN = -1e30
"""Added to the score of a key that a query may not see; finite, so that no NaN can come of it."""


@frozen(eq=False)
class Tile:
    """Queries [begin, end) of each piece of a bucket, against its first `keys` keys.

    bias: of the keys from `clear` on, [B, end - begin, keys - clear], 0 or HIDDEN; None where every
    query sees every key. clear: keys that every query sees, where they are worth setting apart: the
    view's common ones, or those of many queries.
    """

    begin: int
    end: int
    keys: int
    bias: Floats | None
    clear: int = 0


@frozen(eq=False)
class View:
    """What a bucket reads in one group: slots [B, S] (physical rows; 0 where filled up).

    common: how many of the first are the same rows of the pages for all of several pieces, and seen
    by all queries, where they are worth setting apart.
    """

    slots: Longs | Ints
    tiles: tuple[Tile, ...]
    seen: _Seen
    common: int = 0

    def mask(self, window: int | None = None) -> Bools:
        """[B, n, S], True where a query sees a key; of `window` rows at the most."""
        count, keys = self.seen.rows.shape[1], self.seen.positions.shape[1]
        mask = self.seen.mask(0, count, keys)
        return mask if window is None else mask & self.seen.within(window)


@frozen(eq=False)
class Bucket:
    """Pieces of n rows each, attended together: rows [B, n] of the batch; a view per group that
    keeps K and V, by its number.

    contiguous: the rows stand in the batch as they stand here.
    """

    rows: Longs
    views: Mapping[int, View]
    contiguous: bool

    def pieces(self, metadata: StepMetadata) -> Longs:
        """Numbers of its pieces: [B]."""
        return np.searchsorted(metadata.first, self.rows[:, 0], side="right") - 1


def group_rows(metadata: StepMetadata, alone: Alone = "") -> tuple[Bucket, ...]:
    """Every row of the batch in exactly one bucket; one for each of what stands `alone`. Where
    states go from row to row only single rows share one, of sequences that go on. BadBatch where
    a row read has no block.
    """
    if alone == "rows":
        owners = np.repeat(np.arange(len(metadata.rows)), metadata.rows)
        return tuple(
            _rows_bucket(metadata, owners[row : row + 1], np.array([[row]]))
            for row in range(metadata.total_rows)
        )
    if alone:
        parts = list(np.arange(len(metadata.rows))[:, None])
    elif has_state(metadata.geometry):
        parts = _single_rows(metadata)
    else:
        parts = _partition(metadata)
    return tuple(_bucket(metadata, pieces) for pieces in parts)


def output_order(buckets: tuple[Bucket, ...]) -> Longs | None:
    """Where each batch row stands in the buckets' output, [T]; None where it stands right."""
    flat = np.concatenate([bucket.rows.reshape(-1) for bucket in buckets])
    order = np.argsort(flat, kind="stable")
    return None if (order == np.arange(len(order))).all() else order


def _partition(metadata: StepMetadata) -> list[Longs]:
    """Piece numbers of each bucket."""
    parts: list[Longs] = []
    for rows in np.unique(metadata.rows).tolist():
        pieces = np.flatnonzero(metadata.rows == rows)
        if rows > SHARED_ROWS_MAX:
            parts.extend(pieces[i : i + 1] for i in range(len(pieces)))
        else:
            for like in _by_beginning(metadata, pieces):
                parts.extend(_like_lengths(like, metadata.end[like]))
    return parts


def _by_beginning(metadata: StepMetadata, pieces: Longs) -> list[Longs]:
    """Pieces that share their first COMMON_KEYS_MIN rows by themselves, and the others."""
    groups = metadata.geometry.groups
    whole = next((g for g, spec in enumerate(groups) if spec.paged and not spec.moves), None)
    last = -(-COMMON_KEYS_MIN // metadata.geometry.block_size) - 1
    if whole is None or metadata.tables[whole].shape[1] <= last:
        return [pieces]
    blocks, kinds, counts = np.unique(
        metadata.tables[whole][pieces, last], return_inverse=True, return_counts=True
    )
    kinds = np.where((counts > 1) & (blocks != NO_BLOCK), np.arange(len(blocks)), -1)[kinds]
    return [pieces[kinds == kind] for kind in np.unique(kinds)]


def _single_rows(metadata: StepMetadata) -> list[Longs]:
    """Piece numbers of each bucket: single rows together, all others and first ones alone."""
    together = (metadata.rows == 1) & (metadata.start > 0)
    parts: list[Longs] = list(np.flatnonzero(~together)[:, None])
    single = np.flatnonzero(together)
    return parts + (_like_lengths(single, metadata.end[single]) if len(single) else [])


def _like_lengths(pieces: Longs, lengths: Longs) -> list[Longs]:
    """Pieces cut into runs of like lengths: filling up costs less than one more set of calls."""
    order = np.argsort(-lengths, kind="stable")
    runs: list[list[int]] = []
    longest = 0
    for index in order.tolist():
        if not runs or lengths[index] < LIKE_LENGTH * longest - SLACK_ROWS:
            runs.append([])
            longest = int(lengths[index])
        runs[-1].append(index)
    return [pieces[np.sort(np.array(run))] for run in runs]


def _bucket(metadata: StepMetadata, pieces: Longs) -> Bucket:
    """All rows of pieces."""
    count = int(metadata.rows[pieces[0]])
    return _rows_bucket(metadata, pieces, metadata.first[pieces][:, None] + np.arange(count))


def _rows_bucket(metadata: StepMetadata, pieces: Longs, rows: Longs) -> Bucket:
    """Rows [B, n] of pieces [B]."""
    views = {
        group: _view(metadata, group, pieces, rows)
        for group, spec in enumerate(metadata.geometry.groups)
        if not spec.recurrent
    }
    return Bucket(rows, views, bool((np.diff(rows.reshape(-1)) == 1).all()))


def _view(metadata: StepMetadata, group: int, pieces: Longs, rows: Longs) -> View:
    """Keys of a bucket in one group: the sinks, then the live rows, in position order."""
    low = metadata.live_from[group, rows[:, 0]].astype(np.int64)
    sinks = np.minimum(metadata.geometry.groups[group].sink, low)
    counts = metadata.until[rows[:, -1]] - low + sinks
    index = np.arange(int(counts.max()))
    slots: Longs | Ints
    if low.any():
        positions = np.where(index < sinks[:, None], index, (low - sinks)[:, None] + index)
        positions = np.minimum(positions, metadata.until[rows[:, -1:]] - 1)
        slots = metadata.slots_of(group, pieces[:, None], positions)
    else:
        positions = index[None]
        slots = metadata.first_slots(group, pieces, len(index))
    valid = index < counts[:, None]
    missing = valid & (slots < 0)
    if metadata.geometry.groups[group].paged and missing.any():
        piece, key = np.argwhere(missing)[0].tolist()
        seq = metadata.seqs[int(pieces[piece])]
        where = f"row {key} of {int(counts[piece])} of sequence {seq}"
        raise BadBatch(f"group {group} would read {where}, which has no block", seq)
    seen = _Seen(metadata, group, rows, positions, valid)
    common = 0 if low.any() else _common(slots, int(metadata.until[rows[:, 0]].min()))
    return View(np.maximum(slots, 0), _tiles(seen, common), seen, common)


def _common(slots: Longs | Ints, seen: int) -> int:
    """How many of the first `seen` slots are the same for all pieces; 0 where that is not much."""
    if len(slots) == 1 or slots.shape[1] < COMMON_KEYS_MIN:
        return 0
    unlike = (slots[1:, :seen] != slots[0, :seen]).any(axis=0)
    common = int(unlike.argmax()) if unlike.any() else seen
    return common if common >= COMMON_KEYS_MIN else 0


@frozen(eq=False)
class _Seen:
    """What decides whether a query sees a key."""

    metadata: StepMetadata
    group: int
    rows: Longs
    positions: Longs
    valid: Bools

    def mask(self, begin: int, end: int, keys: int) -> Bools:
        """[B, end - begin, keys], True where the query sees the key."""
        rows = self.rows[:, begin:end]
        until: Ints = self.metadata.until[rows][:, :, None]
        positions = self.positions[:, None, :keys]
        mask: Bools = self.valid[:, None, :keys] & (positions < until)
        live_from: Ints = self.metadata.live_from[self.group, rows][:, :, None]
        if live_from.any():
            sink = self.metadata.geometry.groups[self.group].sink
            mask &= (positions >= live_from) | (positions < sink)
        return mask

    def within(self, window: int) -> Bools:
        """[B, n, S], True where the key is one of the last `window` rows that a query sees."""
        until: Ints = self.metadata.until[self.rows][:, :, None]
        near: Bools = self.positions[:, None] >= until - window
        return near


def _tiles(seen: _Seen, common: int) -> tuple[Tile, ...]:
    count, keys = seen.rows.shape[1], seen.positions.shape[1]
    tiles = []
    for begin in range(0, count, TILE_ROWS):
        end = min(count, begin + TILE_ROWS)
        # Only a bucket of one piece has several tiles: later rows' keys stand last in it.
        reach = keys - (count - end)
        mask = seen.mask(begin, end, reach)
        if mask.all():
            tiles.append(Tile(begin, end, reach, None, common))
            continue
        clear = common
        if not common and end - begin >= MANY_QUERIES:
            seen_by_all = int(mask.all(axis=(0, 1)).argmin())
            clear = seen_by_all if seen_by_all >= CLEAR_KEYS_MIN else 0
        bias = np.where(mask[:, :, clear:], 0.0, HIDDEN).astype(np.float32)
        tiles.append(Tile(begin, end, reach, bias, clear))
    return tuple(tiles)
