"""Geometry: the sizes of a paged pool. Constant for the life of a state."""

from __future__ import annotations

from msgspec import Struct

FULL = "full"
WINDOW = "window"
RECURRENT = "recurrent"
OPAQUE = "opaque"
PAGED = (FULL, WINDOW)

ROWS_MAX = (1 << 31) - 1
"""Rows of a group: kernels count them, positions and slots in 32 bits."""


class Group(Struct, frozen=True, omit_defaults=True):
    """Layers whose rows live alike.

    kind: `full` keeps all rows; `window` keeps the first `sink` rows and the last `window`;
    `opaque` holds no blocks, for the model owns its caches; `recurrent` is reserved.
    """

    kind: str = FULL
    num_blocks: int = 0
    window: int = 0
    sink: int = 0

    @property
    def paged(self) -> bool:
        return self.kind in PAGED


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
    if group.kind == RECURRENT:
        raise ValueError(f"group {number}: recurrent groups are reserved, not built yet")
    if group.kind not in (FULL, WINDOW, OPAQUE):
        raise ValueError(f"group {number}: kind must be full, window or opaque, not {group.kind!r}")
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
    if group.sink < 0 or (group.sink and group.kind != WINDOW):
        raise ValueError(
            f"group {number}: sink rows belong to a window group, and are not negative"
        )
