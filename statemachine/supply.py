"""Supply: the blocks of a group in the order in which commands take them.

Freed ones first in, first out; then ones never used; then the least recently used cached ones,
whose evictions come first. Takes nothing itself: it says which, and what must be evicted for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from . import events as ev
from .errors import PoolExhausted
from .state import State


class Supply:
    """The blocks of one group in the order in which they are taken, across several appends."""

    def __init__(self, state: State, group: int, spared: frozenset[int] = frozenset()) -> None:
        """spared: cached blocks that are not evicted."""
        self._state = state
        self._group = group
        self.taken = 0
        self.evictions: list[ev.BlockEvicted] = []
        self._blocks = _walk(state, group, spared, self.evictions)

    def take(self, count: int) -> tuple[int, ...]:
        """The next `count` blocks. Raises PoolExhausted."""
        blocks: list[int] = []
        for _ in range(count):
            block = next(self._blocks, None)
            if block is None:
                free = self._state.free_blocks(self._group)
                cached = self._state.cached_blocks(self._group)
                raise PoolExhausted(self.taken + count - len(blocks), free, cached, self._group)
            blocks.append(block)
            self.taken += 1
        return tuple(blocks)

    def drain(self) -> list[ev.BlockEvicted]:
        """Evictions that are due before the next append."""
        due = self.evictions.copy()
        self.evictions.clear()
        return due


def _walk(
    state: State, number: int, spared: frozenset[int], evictions: list[ev.BlockEvicted]
) -> Iterator[int]:
    """Blocks of a group, with the evictions that they need. No method of what holds it: a cycle
    would keep a state of each step until Python collects garbage.
    """
    group = state.groups[number]
    for position in range(group.free.head, group.free.tail):
        block = group.free.items.get(position)
        if block is not None:
            yield block
    yield from range(group.unused, state.geometry.groups[number].num_blocks)
    for position in range(group.cached.head, group.cached.tail):
        block = group.cached.items.get(position)
        if block is not None and block not in spared:
            entry = state.entries[group.blocks[block].entry]
            evictions.append(ev.BlockEvicted(number, block, entry.key))
            yield block
