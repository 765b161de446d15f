"""States: which slots of recurrent groups a step reads and writes, as host numpy.

Owns the step from tables and positions to slots, and back to the table that they amount to. A slot
holds the state behind the last row that falls in its block. Holds no state and decides no length.

    position   0 1 2 3 | 4 5 6 7 | 8 9          blocks of 4 rows; rows 6 to 9 are a piece
    table         7    |    2    |  5           it goes on from slot 2 (the state behind row 5)
                                 ^              and leaves its own in slot 5
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from statemachine.events import NO_BLOCK
from statemachine.geometry import Geometry, has_state

from .batch import Batch, Piece

if TYPE_CHECKING:
    from .metadata import StepMetadata

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


def refusal(batch: Batch, geometry: Geometry) -> tuple[str, int] | None:
    """Why a piece cannot go through a state, and its sequence: nothing can be taken back out."""
    if not has_state(geometry):
        return None
    for piece in batch.pieces:
        seq = piece.sequence.id
        where = f"out of the state of sequence {seq} in step {batch.step}"
        if piece.pads:
            return f"{piece.pads} pad rows could not be taken back {where}", seq
        if piece.pending:
            return f"{piece.pending} rows without a token could not be taken back {where}", seq
    return None


def slots(tables: Items[Ints], start: Longs, end: Longs, geometry: Geometry) -> tuple[Ints, Ints]:
    """Slots that each piece goes on from and leaves its state in, per group: two [G, P].

    NO_BLOCK of groups that are not recurrent, and in the first where a piece begins afresh.
    """
    reads = np.full((len(tables), len(start)), NO_BLOCK, np.int32)
    writes = reads.copy()
    size, places = geometry.block_size, np.arange(len(start))
    for number, (group, table) in enumerate(zip(geometry.groups, tables, strict=True)):
        if group.recurrent:
            before = table[places, np.maximum(start - 1, 0) // size]
            reads[number] = np.where(start > 0, before, NO_BLOCK)
            writes[number] = table[places, (end - 1) // size]
    return reads, writes


def missing(
    pieces: Items[Piece], reads: Ints, writes: Ints, geometry: Geometry
) -> tuple[str, int] | None:
    """The first state that has no slot, in words, and its sequence."""
    for number, group in enumerate(geometry.groups):
        if not group.recurrent:
            continue
        for place, piece in enumerate(pieces):
            wanted = [(piece.sequence.offset - 1, int(writes[number, place]))]
            if piece.start:
                wanted.insert(0, (piece.start - 1, int(reads[number, place])))
            for position, slot in wanted:
                if not 0 <= slot < group.num_blocks:
                    seq = piece.sequence.id
                    where = f"the state behind position {position} of sequence {seq}"
                    return f"group {number} has no slot for {where} (slot {slot})", seq
    return None


def as_used(table: Ints, metadata: StepMetadata, group: int) -> Ints:
    """Tables [P, W] with the slots that the step read and wrote in their places; a slot that is not
    the table's where a piece uses two for the same block.
    """
    used, size = table.copy(), metadata.geometry.block_size
    used[np.arange(len(used)), (metadata.end - 1) // size] = metadata.state_writes[group]
    on = np.flatnonzero(metadata.start > 0)
    read, index = metadata.state_reads[group, on], (metadata.start[on] - 1) // size
    used[on, index] = np.where(read == table[on, index], used[on, index], read)
    return used
