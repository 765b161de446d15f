"""Sequence: the one place where the lengths of a sequence live.

A frozen record, replaced by each event that concerns it. Rows stand in this order:

    | committed ............ | speculative | pads |
    0                        committed            offset = the next RoPE position

Everything else about a sequence (block counts, visible rows, tags, masks) is derived from here.
"""

from __future__ import annotations

import struct

from msgspec import Struct

from .errors import InvariantBroken
from .events import NO_BLOCK, Namespace
from .geometry import OPAQUE, Geometry

NO_TOKEN = -1
"""Stands for the token of a lookahead row, which is not known yet."""


class Speculative(Struct, frozen=True, gc=False):
    """A row that may be taken back: `token` is NO_TOKEN for lookahead; `step` issued it."""

    token: int
    step: int


class Sequence(Struct, frozen=True, gc=False):
    """A sequence's lengths, content and tables; see the module's picture.

    keys: the key of each full committed block; packed: its tokens, 8 bytes each.
    tail: packed tokens of the committed rows after the last full block.
    tables: per group, block id by block index, NO_BLOCK where released at the front.
    starts: per group, the first live row. marks: step and offset after it, of recent appends, flat;
    rows below the newest mark whose step was written are written.
    line: this record's share of the state's digest, kept so that it need not be hashed twice.
    """

    id: int
    namespace: Namespace
    root: int
    committed: int = 0
    speculative: tuple[Speculative, ...] = ()
    pads: int = 0
    keys: tuple[int, ...] = ()
    packed: tuple[bytes, ...] = ()
    tail: bytes = b""
    tables: tuple[tuple[int, ...], ...] = ()
    starts: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()
    adopted: int = 0
    preempted: bool = False
    line: int = 0

    @property
    def offset(self) -> int:
        """The next RoPE position: rows of all kinds."""
        return self.committed + len(self.speculative) + self.pads

    @property
    def parent_key(self) -> int:
        """Key of the last full committed block, the namespace's root where there is none."""
        return self.keys[-1] if self.keys else self.root

    @property
    def tokens(self) -> tuple[int, ...]:
        """The committed rows' tokens. Cost grows with the length: for reports and full checks."""
        return unpack(b"".join(self.packed) + self.tail)

    def block_tokens(self, index: int) -> bytes:
        """Packed tokens of the committed rows in block `index`."""
        return self.packed[index] if index < len(self.packed) else self.tail

    def block_parent(self, index: int) -> int:
        """Key of the block before block `index`."""
        return self.keys[index - 1] if index else self.root


_pack_one = struct.Struct("<Q").pack


def pack(tokens: tuple[int, ...] | list[int]) -> bytes:
    """Content ids as 8 little-endian bytes each. Raises InvariantBroken for what is no such id."""
    try:
        if len(tokens) == 1:
            return _pack_one(tokens[0])
        return struct.pack(f"<{len(tokens)}Q", *tokens)
    except struct.error as error:
        raise InvariantBroken("a token must be an unsigned 64-bit integer") from error


def unpack(data: bytes) -> tuple[int, ...]:
    """The content ids of `pack`."""
    return struct.unpack(f"<{len(data) // 8}Q", data)


def window_start(geometry: Geometry, group: int, offset: int) -> int:
    """First row that a query at position `offset` needs in `group`, sinks apart."""
    spec = geometry.groups[group]
    return max(0, offset - spec.span + 1) if spec.moves else 0


def visible(geometry: Geometry, sequence: Sequence, group: int) -> int:
    """Rows that the newest row attends to, sinks included: a report value."""
    spec = geometry.groups[group]
    if spec.kind == OPAQUE:
        return sequence.offset
    return visible_at(geometry, group, sequence.starts[group], sequence.offset)


def visible_at(geometry: Geometry, group: int, start: int, end: int) -> int:
    """Rows of [0, end) that the row at end - 1 attends to, where rows from `start` on live."""
    spec = geometry.groups[group]
    if not spec.moves:
        return end - start
    live = min(end - start, spec.span)
    return live + min(spec.sink, end - live)


def written_rows(sequence: Sequence, written_step: int) -> int:
    """Rows of the sequence whose issuing step was written."""
    marks = sequence.marks
    for at in range(len(marks) - 2, -1, -2):
        if marks[at] <= written_step:
            return marks[at + 1]
    return 0


def keeps_state(geometry: Geometry, sequence: Sequence, sure_step: int, rows: int) -> bool:
    """Whether every recurrent group holds the state behind the first `rows` rows: nothing was
    written after `sure_step`, which left it there, or it went on from a slot at that edge.
    """
    index, inside = divmod(rows, geometry.block_size)
    fresh = rows == written_rows(sequence, sure_step)
    for table, spec in zip(sequence.tables, geometry.groups, strict=True):
        at_edge = spec.recurrent and not inside and (not rows or table[index - 1] != NO_BLOCK)
        if spec.recurrent and not fresh and not at_edge:
            return False
    return True


def held_blocks(table: tuple[int, ...]) -> list[int]:
    """The blocks of a table, holes left out."""
    return [block for block in table if block != NO_BLOCK]
