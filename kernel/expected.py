"""Expected: the tags that rows of a sequence should carry, from the sequence alone.

Owns what is remembered of full blocks, so that they are not hashed at every step. Never looks at
a table or at what was written.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt
from msgspec import structs

from statemachine.geometry import Geometry
from statemachine.sequence import NO_TOKEN, Sequence, pack
from statemachine.tags import UNWRITTEN, committed_tags, pending_tag, row_tag, sequence_tags

Tags = npt.NDArray[np.uint64]

SEQUENCES_MAX = 256
"""Sequences whose tags are remembered in one piece, least recently asked for first out. Ended ones
are among them, at 8 bytes a row and their tokens; others are put together from BLOCKS_MAX.
"""
TOKEN_BYTES = 8
BLOCKS_MAX = 1 << 16
"""Full blocks whose tags are remembered by key."""


def is_pending(sequence: Sequence) -> bool:
    """Whether it ends in a row whose token it does not know."""
    rows = sequence.speculative
    return bool(rows) and rows[-1].token == NO_TOKEN and not sequence.pads


class Expected:
    """Tags that sequences should have, from the sequences alone."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._blocks: OrderedDict[tuple[int, int, bytes], Tags] = OrderedDict()
        self._runs: OrderedDict[int, tuple[tuple[int, ...], tuple[bytes, ...], Tags]]
        self._runs = OrderedDict()

    def rows(self, sequence: Sequence, first: int, end: int) -> list[int]:
        """Rows [first, end); a row beyond the sequence's offset should not be there at all."""
        inside = min(end, sequence.offset)
        tags = sequence_tags(self._geometry, sequence, first, inside) if first < inside else []
        return tags + [UNWRITTEN] * (end - max(first, inside))

    def row(self, sequence: Sequence, position: int) -> int:
        """One row, at most one hash where it is committed."""
        if position >= sequence.committed:
            if position == sequence.offset - 1 and is_pending(sequence):
                return pending_tag(sequence.id, position, sequence.speculative[-1].step)
            return self.rows(sequence, position, position + 1)[0]
        index, row = divmod(position, self._geometry.block_size)
        if row == self._geometry.block_size - 1:
            return sequence.keys[index]
        tokens = sequence.block_tokens(index)[: (row + 1) * TOKEN_BYTES]
        return row_tag(self._geometry, sequence.block_parent(index), tokens)

    def fed(self, sequence: Sequence, token: int) -> int:
        """The last speculative row, once it is known that `token` was fed there."""
        *before, last = sequence.speculative
        if not before:
            return row_tag(self._geometry, sequence.parent_key, sequence.tail + pack((token,)))
        rows = (*before, structs.replace(last, token=token))
        told = structs.replace(sequence, speculative=rows)
        end = sequence.committed + len(rows)
        return sequence_tags(self._geometry, told, end - 1, end)[0]

    def span(self, sequence: Sequence, first: int, end: int) -> Tags:
        """Rows [first, end) as an array; those in full blocks come from a cache by content."""
        known = self._full_blocks(sequence)
        head = known[first : min(end, len(known))]
        start = max(first, len(known))
        if start >= end:
            return head
        return np.concatenate([head, np.array(self.rows(sequence, start, end), np.uint64)])

    def _full_blocks(self, sequence: Sequence) -> Tags:
        """Tags of all rows in full committed blocks. What is remembered for the sequence's id is
        used as far as its content, keys and tokens, is still the same.
        """
        keys, packed = sequence.keys, sequence.packed
        old_keys, old_packed, tags = self._runs.pop(sequence.id, ((), (), np.empty(0, np.uint64)))
        if keys[: len(old_keys)] != old_keys or packed[: len(old_packed)] != old_packed:
            old_keys, tags = (), tags[:0]
        fresh = [self._block(sequence, index) for index in range(len(old_keys), len(keys))]
        if fresh:
            tags = np.concatenate([tags, *fresh])
        self._runs[sequence.id] = (keys, packed, tags)
        if len(self._runs) > SEQUENCES_MAX:
            self._runs.popitem(last=False)
        return tags

    def _block(self, sequence: Sequence, index: int) -> Tags:
        """Tags of a full committed block. The key names parent and tokens, and both are compared:
        a hash that collides is no excuse for another block's tags.
        """
        key = (sequence.keys[index], sequence.block_parent(index), sequence.block_tokens(index))
        tags = self._blocks.get(key)
        if tags is None:
            size = self._geometry.block_size
            span = committed_tags(self._geometry, sequence, index * size, (index + 1) * size)
            tags = self._blocks[key] = np.array(span, np.uint64)
            if len(self._blocks) > BLOCKS_MAX:
                self._blocks.popitem(last=False)
        else:
            self._blocks.move_to_end(key)
        return tags
