"""State: a pool's blocks, its sequences and its prefix index, as one frozen value.

Each event makes a new one (transitions.py); persistent maps share what did not change. Per group, a
block is

    held      in a table, or pinned by a copy that is not written yet
    cached    published (findable in the prefix index) and not held
    free      neither: in the free queue, or never used

free + cached + held = all. Queues are ordered by position, so that nothing depends on map order.
"""

from __future__ import annotations

from immutables import Map
from msgspec import Struct, structs

from .digest import recompute
from .events import Namespace
from .geometry import Geometry, check
from .sequence import Sequence

NO_ENTRY = 0
"""No index entry: the block is not published. Also the parent of a namespace's first block."""


class Block(Struct, frozen=True, gc=False):
    """A held or published block: entries in tables, pins, and the index entry that names it."""

    refs: int = 0
    pins: int = 0
    entry: int = NO_ENTRY


class Queue(Struct, frozen=True, gc=False):
    """Blocks in order of arrival: `items` by position, `places` by block. Taken from `head` on."""

    items: Map[int, int] = Map()
    places: Map[int, int] = Map()
    head: int = 0
    tail: int = 0


class GroupState(Struct, frozen=True, gc=False):
    """One group's blocks. Blocks from `unused` on were never taken; the others' free ones queue."""

    blocks: Map[int, Block] = Map()
    unused: int = 0
    free: Queue = Queue()
    cached: Queue = Queue()


class Entry(Struct, frozen=True, gc=False):
    """One block of tokens that can be found: exact namespace, parent entry and tokens.

    blocks: per group, the blocks that hold these rows, oldest first. It stays while it has blocks
    or children.
    """

    id: int
    parent: int
    namespace: Namespace
    tokens: bytes
    key: int
    blocks: tuple[tuple[int, ...], ...]
    children: int = 0


class State(Struct, frozen=True):
    """All that the events of a pool have led to.

    by_key: entries that share a key (several only where hashes collide). pins: by step, the
    (group, block) pairs that its copies read. issued_step, written_step: the newest step that
    appended, and that was written. last_seq: the greatest id ever opened.
    """

    geometry: Geometry
    groups: tuple[GroupState, ...]
    sequences: Map[int, Sequence] = Map()
    entries: Map[int, Entry] = Map()
    by_key: Map[int, tuple[int, ...]] = Map()
    pins: Map[int, tuple[tuple[int, int], ...]] = Map()
    issued_step: int = 0
    written_step: int = 0
    last_seq: int = -1
    next_entry: int = 1
    digest: int = 0

    def free_blocks(self, group: int = 0) -> int:
        """Blocks of a group that are neither held nor published."""
        state = self.groups[group]
        return self.geometry.groups[group].num_blocks - state.unused + len(state.free.items)

    def cached_blocks(self, group: int = 0) -> int:
        """Blocks of a group that are published and not held: they can be evicted."""
        return len(self.groups[group].cached.items)

    def held_blocks(self, group: int = 0) -> int:
        """Blocks of a group in a table, or pinned."""
        state = self.groups[group]
        return len(state.blocks) - len(state.cached.items)

    def published_blocks(self, group: int = 0) -> int:
        """Blocks of a group that the prefix index names. Walks the index: for reports."""
        return sum(len(entry.blocks[group]) for entry in self.entries.values())

    def paged_groups(self) -> range | list[int]:
        """Numbers of the groups that hold blocks."""
        return [number for number, spec in enumerate(self.geometry.groups) if spec.paged]


def new_state(geometry: Geometry) -> State:
    """An empty pool. Raises ValueError where the geometry makes no sense."""
    check(geometry)
    state = State(geometry=geometry, groups=tuple(GroupState() for _ in geometry.groups))
    return structs.replace(state, digest=recompute(state))
