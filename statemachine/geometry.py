"""Geometry: the sizes of a paged pool. Constant for the life of a state."""

from __future__ import annotations

from msgspec import Struct

FULL = "full"
WINDOW = "window"
RECURRENT = "recurrent"
OPAQUE = "opaque"
PAGED = (FULL, WINDOW, RECURRENT)

RECURRENT_SPAN = 2
"""A row of a recurrent group needs the state behind the row before it, and makes its own."""

ROWS_MAX = (1 << 31) - 1
"""Rows of a group: kernels count them, positions and slots in 32 bits."""


class Group(Struct, frozen=True, omit_defaults=True):
    """Layers whose rows live alike.

    kind: `full` keeps all rows; `window` keeps the first `sink` rows and the last `window`;
    `recurrent` keeps the state behind the last row (of convolutions or a state space) in blocks
    that are slots of one state each; `opaque` holds no blocks, for the model owns its caches.

    A slot holds the state behind the last row written that falls in its block. So a piece of rows
    reads the slot of the row before it and writes the slot of its last row; where these are two,
    the one that was read stays, as a snapshot at a block's edge: a piece that begins inside of a
    block ends in it. Blocks that a piece passes over are holes. What a state went through cannot
    be taken back out of it.
    """

    kind: str = FULL
    num_blocks: int = 0
    window: int = 0
    sink: int = 0

    @property
    def paged(self) -> bool:
        return self.kind in PAGED

    @property
    def recurrent(self) -> bool:
        return self.kind == RECURRENT

    @property
    def moves(self) -> bool:
        """Whether rows are left behind as the sequence goes on."""
        return self.kind in (WINDOW, RECURRENT)

    @property
    def span(self) -> int:
        """Rows that the newest row needs, itself included, in a group that moves; else 0."""
        return RECURRENT_SPAN if self.kind == RECURRENT else self.window

    def new_blocks(self, held: int, wanted: int) -> int:
        """Blocks that a table of `held` places takes to grow to `wanted`: of slots, one at most."""
        if self.kind == RECURRENT:
            return int(wanted > held)
        return wanted - held if self.kind in PAGED else 0


class Geometry(Struct, frozen=True, omit_defaults=True):
    """`block_size` rows a block, in every group; block index = position // block_size.

    identity: the model's name for row identity (weights digest); part of every namespace's root.
    hash: `xxh3`, or `constant` (every key and tag collides: for tests).
    """

    block_size: int = 16
    groups: tuple[Group, ...] = (Group(),)
    identity: str = ""
    hash: str = "xxh3"

    def blocks_for(self, rows: int) -> int:
        """How many blocks cover `rows` rows."""
        return -(-rows // self.block_size)


def has_state(geometry: Geometry) -> bool:
    """Whether a group is recurrent: rows cannot be taken back, prefixes end at block edges."""
    return any(group.kind == RECURRENT for group in geometry.groups)


def has_gaps(geometry: Geometry) -> bool:
    """Whether blocks of a text may be findable though none before them ever was: all that its
    groups keep are states at some edges.
    """
    return all(group.kind == RECURRENT for group in geometry.groups)


def check(geometry: Geometry) -> None:
    """Raise ValueError, with one sentence, where the sizes make no sense."""
    if geometry.block_size < 1:
        raise ValueError(f"block_size must be at least 1, not {geometry.block_size}")
    if not geometry.groups:
        raise ValueError("geometry needs at least one group")
    if geometry.hash not in ("xxh3", "constant"):
        raise ValueError(f"hash must be xxh3 or constant, not {geometry.hash!r}")
    for number, group in enumerate(geometry.groups):
        _check_group(number, group, geometry.block_size)


def _check_group(number: int, group: Group, block_size: int) -> None:
    if group.kind not in (*PAGED, OPAQUE):
        raise ValueError(
            f"group {number}: kind must be full, window, recurrent or opaque, not {group.kind!r}"
        )
    if group.paged and group.num_blocks < 1:
        raise ValueError(f"group {number}: num_blocks must be at least 1, not {group.num_blocks}")
    if group.paged and group.num_blocks * block_size > ROWS_MAX:
        raise ValueError(
            f"group {number}: {group.num_blocks} blocks of {block_size} rows are more than "
            f"{ROWS_MAX} rows: give it fewer"
        )
    if max(group.window, group.sink) > ROWS_MAX:
        raise ValueError(f"group {number}: window and sink must be at most {ROWS_MAX} rows")
    if group.kind == WINDOW and group.window < 1:
        raise ValueError(f"group {number}: window must be at least 1, not {group.window}")
    if group.kind == RECURRENT and group.window:
        raise ValueError(f"group {number}: a recurrent group has no window, not {group.window}")
    if group.sink < 0 or (group.sink and group.kind != WINDOW):
        raise ValueError(
            f"group {number}: sink rows belong to a window group, and are not negative"
        )
