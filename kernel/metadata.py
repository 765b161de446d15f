"""A step's metadata: where every row goes and what it may read, once, as host numpy.

Owns the step from lengths to positions, slots, tables and bounds, and the observation that is read
back from those arrays. Holds no MLX: the fake kernel uses it too. Never decides a length.

Rows of a batch, in batch order (T rows, P pieces, G groups):

    row        0 1 2 3 4 | 5 | 6 7          piece 0 prefills five rows, piece 1 decodes one
    piece      0 0 0 0 0 | 1 | 2 2
    position   0 1 2 3 4 | 9 | 3 4
    slot       block * block_size + position % block_size, in each group
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from attrs import frozen
from xxhash import xxh3_64_intdigest

from statemachine.events import NO_BLOCK, BlockCopied
from statemachine.geometry import Geometry, Group
from statemachine.observing import offsets
from statemachine.records import Observation

from . import states
from .batch import Batch, Piece

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

_NOTHING = NO_BLOCK.to_bytes(1, "little", signed=True)
"""Each byte of NO_BLOCK."""
_packed: dict[int, tuple[tuple[int, ...], bytes]] = {}
"""Block tables as int32, by the identity of the tuple, which is kept so that no other gets it: a
sequence's stays the same one until it takes a block or gives one back.
"""


class BadBatch(ValueError):
    """A batch that cannot be laid out; `seq` is the sequence at fault; wished: see BuildFailed."""

    def __init__(self, message: str, seq: int, wished: bool = False) -> None:
        super().__init__(message)
        self.seq = seq
        self.wished = wished


@frozen(eq=False)
class StepMetadata:
    """Host arrays of one step; every MLX index of the forward is made from these.

    seqs, first, start, rows, end: [P], the piece's sequence, its first row in the batch, first
    position, rows (pads included) and end position. tokens, positions, until: [T]; a row reads
    keys [live_from, until) and the group's sinks. slots, live_from: [G, T]. tables: per group
    [P, W], NO_BLOCK where there is none; covers: [P], how many blocks reach to the piece's end.
    state_reads, state_writes: [G, P], slots of recurrent groups: the one whose state a piece goes
    on from, NO_BLOCK where it begins afresh, and the one that its last row's state is put into.
    pending_rows: [Q] rows that are fed what the step before sampled last for their sequence, and
    that have token 0 here; pending: [Q] their pieces. sample_rows: [S] rows whose logits are
    sampled; sampled: [S] their pieces, each as often as it has samples; sample_positions: [S] the
    positions that the samples take. score_rows: [N] rows that predict the pieces' targets.
    """

    step: int
    geometry: Geometry
    seqs: tuple[int, ...]
    first: Longs
    start: Longs
    rows: Longs
    end: Longs
    tokens: Ints
    positions: Ints
    until: Ints
    slots: Ints
    live_from: Ints
    tables: tuple[Ints, ...]
    covers: Longs
    state_reads: Ints
    state_writes: Ints
    pending_rows: Longs
    pending: tuple[int, ...]
    sample_rows: Longs
    sampled: tuple[int, ...]
    sample_positions: tuple[int, ...]
    score_rows: Longs
    copies: tuple[BlockCopied, ...]

    @property
    def total_rows(self) -> int:
        """T."""
        return len(self.positions)

    def slots_of(self, group: int, pieces: Longs, positions: Longs) -> Longs:
        """Physical rows of `positions` of `pieces`, read through the tables; -1 where none is."""
        size = self.geometry.block_size
        table = self.tables[group]
        index = positions // size
        inside = index < table.shape[1]
        blocks = table[pieces, np.where(inside, index, 0)].astype(np.int64)
        return np.where(inside & (blocks >= 0), blocks * size + positions % size, NO_BLOCK)

    def first_slots(self, group: int, pieces: Longs, rows: int) -> Ints:
        """Physical rows of positions [0, rows) of `pieces`, negative where none is: [B, rows].

        What slots_of says, without a division for each row.
        """
        size = self.geometry.block_size
        blocks = self.tables[group][pieces, : -(-rows // size)]
        begins = np.where(blocks < 0, -size, blocks * size)
        slots = begins[:, :, None] + np.arange(size, dtype=np.int32)
        return slots.reshape(len(pieces), -1)[:, :rows]


@frozen(eq=False)
class CacheUse:
    """What one layer's cache object counted in one forward; see records.Observation."""

    offset_reads: int
    updates: int
    rows_updated: int
    attends: int
    strangers: int


def build(batch: Batch, geometry: Geometry) -> StepMetadata:
    """Lay a batch out. BadBatch where a piece cannot be: no rows, fewer than it has samples and
    targets, or rows without a block.
    """
    pieces = batch.pieces
    ends = offsets([piece.sequence for piece in pieces])
    counts = [len(piece.tokens) + piece.pending + piece.pads for piece in pieces]
    _check_rows(batch, ends, counts)
    _raise(states.refusal(batch, geometry))
    rows, end = np.array(counts, np.int64), np.array(ends, np.int64)
    start, first = end - rows, rows.cumsum() - rows
    positions = piece_positions(start, first, rows)
    tables = tuple([_table(pieces, group, geometry) for group in range(len(geometry.groups))])
    piece_of = np.arange(len(pieces)).repeat(rows)
    pending = tuple([i for i, piece in enumerate(pieces) if piece.pending])
    sampled = _sampled(pieces)
    state_reads, state_writes = states.slots(tables, start, end, geometry)
    _raise(states.missing(pieces, state_reads, state_writes, geometry))
    return StepMetadata(
        step=batch.step,
        geometry=geometry,
        seqs=tuple([piece.sequence.id for piece in pieces]),
        first=first,
        start=start,
        rows=rows,
        end=end,
        tokens=_tokens(pieces),
        positions=positions,
        until=positions + 1,
        slots=_slots(pieces, tables, piece_of, positions, geometry),
        live_from=_live_from(pieces, piece_of, positions, geometry),
        tables=tables,
        covers=-(-end // geometry.block_size),
        state_reads=state_reads,
        state_writes=state_writes,
        pending_rows=_pending_rows(pieces, first, pending),
        pending=pending,
        sample_rows=_sample_rows(pieces, first, sampled),
        sampled=sampled,
        sample_positions=tuple([at for piece in pieces for at in piece.sample_positions]),
        score_rows=_score_rows(pieces, first),
        copies=batch.copies,
    )


def _check_rows(batch: Batch, ends: list[int], counts: list[int]) -> None:
    for piece, end, count in zip(batch.pieces, ends, counts, strict=True):
        rows = count - piece.pads
        if not rows or count > end or piece.samples > rows or piece.targets:
            _check_piece(piece, batch.step, rows, end)


def _check_piece(piece: Piece, step: int, rows: int, end: int) -> None:
    seq = piece.sequence.id
    if not rows or rows + piece.pads > end:
        raise BadBatch(f"sequence {seq} has no rows to feed in step {step}", seq)
    if piece.samples > rows:
        what = f"{piece.samples} samples are asked of {rows} rows in step {step}"
        raise BadBatch(f"sequence {seq}: {what}", seq)
    if piece.targets and piece.target_rows.start < 0:
        what = f"{len(piece.targets)} scores are asked of {rows} rows in step {step}"
        raise BadBatch(f"sequence {seq}: {what}", seq)


def _raise(wrong: tuple[str, int] | None) -> None:
    """A message and a sequence at fault, where there are any."""
    if wrong is not None:
        raise BadBatch(*wrong)


def pending_sources(metadata: StepMetadata, newest: Mapping[int, int]) -> list[int]:
    """What `newest` has by sequence for each of the pending rows: [Q].

    Raises BadBatch for a sequence that the step before did not sample.
    """
    sources = []
    for number in metadata.pending:
        seq = metadata.seqs[number]
        source = newest.get(seq)
        if source is None:
            what = f"which the step before step {metadata.step} did not sample"
            raise BadBatch(f"a row waits for a token of sequence {seq}, {what}", seq)
        sources.append(source)
    return sources


def last_tokens(metadata: StepMetadata, tokens: Iterable[int]) -> dict[int, int]:
    """What a step sampled last for each sequence; `tokens`: [S]."""
    seqs = metadata.seqs
    return {seqs[i]: token for i, token in zip(metadata.sampled, tokens, strict=True)}


def piece_positions(start: Longs, first: Longs, rows: Longs) -> Ints:
    """RoPE position of each batch row: [T]."""
    total = int(rows.sum())
    return (np.arange(total) + (start - first).repeat(rows)).astype(np.int32)


def _tokens(pieces: tuple[Piece, ...]) -> Ints:
    """Token ids fed, [T]; pads feed token 0, and so do rows whose token is pending."""
    flat: list[int] = []
    for piece in pieces:
        flat += piece.tokens
        if piece.pending or piece.pads:
            flat += (0,) * (piece.pending + piece.pads)
    return np.array(flat, np.int32)


def _pending_rows(pieces: tuple[Piece, ...], first: Longs, pending: tuple[int, ...]) -> Longs:
    """The rows that are fed what the step before sampled: [Q]."""
    return first[list(pending)] + np.array([len(pieces[i].tokens) for i in pending], np.int64)


def _sampled(pieces: tuple[Piece, ...]) -> tuple[int, ...]:
    """Piece numbers, each as often as it has samples: [S]."""
    numbers: list[int] = []
    for number, piece in enumerate(pieces):
        if piece.samples == 1:
            numbers.append(number)
        elif piece.samples:
            numbers += (number,) * piece.samples
    return tuple(numbers)


def _sample_rows(pieces: tuple[Piece, ...], first: Longs, sampled: tuple[int, ...]) -> Longs:
    """The last rows that are a token's, of each piece that samples: [S]."""
    rows: list[int] = []
    begins = first.tolist()
    for number in dict.fromkeys(sampled):
        piece = pieces[number]
        end = begins[number] + len(piece.tokens) + piece.pending
        if piece.samples == 1:
            rows.append(end - 1)
        else:
            rows += range(end - piece.samples, end)
    return np.array(rows, np.int64)


def _score_rows(pieces: tuple[Piece, ...], first: Longs) -> Longs:
    rows: list[int] = []
    for number, piece in enumerate(pieces):
        if piece.targets:
            begin = int(first[number])
            rows.extend(begin + row for row in piece.target_rows)
    return np.array(rows, np.int64)


def _table(pieces: tuple[Piece, ...], group: int, geometry: Geometry) -> Ints:
    """Block tables up to each piece's end, [P, W] filled up with NO_BLOCK."""
    size, ends = geometry.block_size, offsets([piece.sequence for piece in pieces])
    covers = [-(-end // size) for end in ends]
    width = max(covers, default=1)
    if not geometry.groups[group].paged or not pieces:
        return np.full((len(pieces), width), NO_BLOCK, np.int32)
    if len(_packed) > 4 * len(pieces) + 64:
        _packed.clear()
    lines = []
    for piece, cover in zip(pieces, covers, strict=True):
        table = piece.sequence.tables[group]
        known = _packed.get(id(table))
        if known is None:
            data = struct.pack(f"{len(table)}i", *table)
            known = _packed[id(table)] = (table, data)
        lines.append(known[1][: 4 * cover].ljust(4 * width, _NOTHING))
    return np.frombuffer(bytearray(b"".join(lines)), np.int32).reshape(len(pieces), width)


def _slots(
    pieces: tuple[Piece, ...],
    tables: tuple[Ints, ...],
    piece_of: Longs,
    positions: Ints,
    geometry: Geometry,
) -> Ints:
    """Physical row of each batch row per group, [G, T]."""
    size = geometry.block_size
    slots = np.zeros((len(tables), len(positions)), np.int32)
    for number, (group, table) in enumerate(zip(geometry.groups, tables, strict=True)):
        if not group.paged or group.recurrent:
            continue
        blocks = table[piece_of, positions // size]
        slots[number] = blocks * size + positions % size
        bad = (blocks < 0) | (blocks >= group.num_blocks)
        if bad.any():
            row = int(np.argmax(bad))
            seq = pieces[int(piece_of[row])].sequence.id
            where = f"position {int(positions[row])} of sequence {seq}"
            message = f"group {number} has no block for {where} (block {int(blocks[row])})"
            raise BadBatch(message, seq)
    return slots


def _live_from(
    pieces: tuple[Piece, ...], piece_of: Longs, positions: Ints, geometry: Geometry
) -> Ints:
    """First key that each batch row reads per group, sinks apart: [G, T]."""
    live_from = np.zeros((len(geometry.groups), len(positions)), np.int32)
    for number, group in enumerate(geometry.groups):
        if not group.paged:
            continue
        starts = np.array([piece.sequence.starts[number] for piece in pieces], np.int32)
        live_from[number] = _first_key(group, starts[piece_of], positions)
    return live_from


def _first_key(group: Group, starts: Ints, positions: Ints) -> Ints:
    if not group.moves:
        return starts
    return np.maximum(starts, positions - group.span + 1)


def table_hash(blocks: Ints | Iterable[int]) -> int:
    """xxh3_64 of block ids as int32, little-endian: how a table stands on tape."""
    return xxh3_64_intdigest(np.asarray(blocks, "<i4").tobytes())


def observe(metadata: StepMetadata, uses: Iterable[CacheUse]) -> Observation:
    """What a forward saw: from the arrays that it used and its caches' counters."""
    listed = list(uses)
    first = metadata.first
    return Observation(
        offset_reads=_spread([use.offset_reads for use in listed]),
        updates=_spread([use.updates for use in listed]),
        rows_updated=_spread([use.rows_updated for use in listed]),
        attends=_spread([use.attends for use in listed]),
        strangers=sum([use.strangers for use in listed]),
        starts=tuple(metadata.positions[first].tolist()),
        rows=tuple([b - a for a, b in pairwise([*first.tolist(), metadata.total_rows])]),
        visible=_visible_columns(metadata),
        tables=_table_columns(metadata),
    )


def _spread(counts: list[int]) -> tuple[int, int]:
    return (min(counts), max(counts)) if counts else (0, 0)


def _visible_columns(metadata: StepMetadata) -> tuple[tuple[int, ...], ...]:
    """Visible rows of each piece's last row, a tuple of groups for each piece; one more where a
    piece goes on from a state though no row is before it.
    """
    last = metadata.first + metadata.rows - 1
    columns = []
    for number, group in enumerate(metadata.geometry.groups):
        live_from = metadata.live_from[number, last]
        seen = metadata.until[last] - live_from
        if group.sink:
            seen += np.minimum(group.sink, live_from)
        if group.recurrent:
            seen += (metadata.start == 0) & (metadata.state_reads[number] != NO_BLOCK)
        columns.append(seen.tolist())
    return tuple(zip(*columns, strict=True))


def _table_columns(metadata: StepMetadata) -> tuple[tuple[int, ...], ...]:
    """Hash of each piece's table, a tuple of groups for each piece; 0 for opaque groups. Of slots
    the table as it was used.
    """
    covers = metadata.covers.tolist()
    columns = []
    listed = zip(metadata.geometry.groups, metadata.tables, strict=True)
    for number, (group, table) in enumerate(listed):
        if not group.paged:
            columns.append([0] * len(covers))
            continue
        if group.recurrent:
            table = states.as_used(table, metadata, number)
        data, width = table.astype("<i4").tobytes(), table.shape[1] * 4
        begins = range(0, len(data), width)
        columns.append(
            [
                xxh3_64_intdigest(data[at : at + 4 * cover])
                for at, cover in zip(begins, covers, strict=True)
            ]
        )
    return tuple(zip(*columns, strict=True))
