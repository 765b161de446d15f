"""Renaming: blocks keep their numbers in a smaller tape, but where these cannot be taken there.

A pool that has served fewer requests has grown less far, and an event may skip only so many blocks.
"""

from __future__ import annotations

from msgspec import structs

from statemachine.draft import SKIPPED_MAX
from statemachine.events import (
    Appended,
    BlockCopied,
    BlockEvicted,
    BlockLoaded,
    BlockPublished,
    BlockStored,
    Event,
    PrefixAdopted,
)
from statemachine.state import State


class Names:
    """Numbers of here by (group, number on the large tape), of those that are not the same."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, int], int] = {}

    def __bool__(self) -> bool:
        return bool(self._names)

    def event(self, event: Event, state: State, last: bool) -> Event | None:
        """The event with its blocks' names of here; None for an eviction of what is not there."""
        if isinstance(event, BlockEvicted | BlockStored):
            block = self.of(event.group, event.block)
            there = last or _is_cached(state, event.group, block, event.key)
            return structs.replace(event, block=block) if there else None
        if isinstance(event, Appended) and any(event.blocks):
            blocks = [self._take(group, ids, state, last) for group, ids in enumerate(event.blocks)]
            return structs.replace(event, blocks=tuple(blocks))
        if isinstance(event, BlockCopied):
            source = self.of(event.group, event.source)
            (target,) = self._take(event.group, (event.target,), state, last)
            return structs.replace(event, source=source, target=target)
        if isinstance(event, BlockLoaded):
            (block,) = self._take(event.group, (event.block,), state, last)
            return structs.replace(event, block=block)
        if not self._names:
            return event
        if isinstance(event, PrefixAdopted):
            tables = [
                tuple(self.of(group, block) for block in table)
                for group, table in enumerate(event.blocks)
            ]
            return structs.replace(event, blocks=tuple(tables))
        if isinstance(event, BlockPublished):
            return structs.replace(event, block=self.of(event.group, event.block))
        return event

    def of(self, group: int, block: int) -> int:
        """A block's number here."""
        return self._names.get((group, block), block)

    def _take(
        self, group: int, blocks: tuple[int, ...], state: State, last: bool
    ) -> tuple[int, ...]:
        """Names for blocks that are taken: their own, but where the pool has grown less far here
        than events may skip, or another has the name.
        """
        if last or not 0 <= group < len(state.groups):
            return tuple(self.of(group, block) for block in blocks)
        record, taken = state.groups[group], list[int]()
        for block in blocks:
            far = block > record.unused + SKIPPED_MAX
            name = block
            if far or (self._names and (block in record.blocks or block in taken)):
                name = next(
                    it for it in range(block + 1) if it not in record.blocks and it not in taken
                )
            if name != block:
                self._names[group, block] = name
            else:
                self._names.pop((group, block), None)
            taken.append(name)
        return tuple(taken)


def _is_cached(state: State, group: int, block: int, key: int) -> bool:
    """Whether a block can be evicted, or stored before that, that is found under a key."""
    if not 0 <= group < len(state.groups):
        return False
    record = state.groups[group]
    cached = block in record.cached.places
    return cached and bool(state.entries[record.blocks[block].entry].key == key)
