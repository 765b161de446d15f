"""Prefix index: which computed rows can be found again, and how many of them may be shared.

A hit compares the exact namespace, the parent entry and the tokens; the key only finds candidates.
So a collision is a miss, never a leak. Whole blocks match; a match that covers the whole prompt
uses its last block in part, for a prompt's last row is always computed: it yields the next token.
A recurrent group's state cannot be used in part: there a match ends at a block's edge.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from .events import NO_BLOCK, Namespace
from .geometry import FULL, OPAQUE, Geometry, has_state
from .sequence import pack, window_start
from .state import NO_ENTRY, Entry, State
from .tags import root_key, row_tag


class Hit(Struct, frozen=True):
    """What a look-up found: `rows` rows of `tokens`; `blocks` is one table a group, with holes."""

    namespace: Namespace
    tokens: tuple[int, ...]
    rows: int
    blocks: tuple[tuple[int, ...], ...]


def adoption_limit(prompt_rows: int) -> int:
    """The most rows of a prompt that may be adopted: its last row is always computed."""
    return prompt_rows - 1


def find(state: State, namespace: Namespace, parent: int, key: int, tokens: bytes) -> Entry | None:
    """The entry of exactly these tokens below exactly this parent entry."""
    for number in state.by_key.get(key, ()):
        entry: Entry = state.entries[number]
        if entry.parent == parent and entry.tokens == tokens and entry.namespace == namespace:
            return entry
    return None


def walk(state: State, namespace: Namespace, tokens: tuple[int, ...]) -> Iterator[Entry]:
    """Entries of the prompt's full blocks, from its start to the first that is not in the index."""
    size = state.geometry.block_size
    key, parent = root_key(state.geometry, namespace), NO_ENTRY
    for first in range(0, len(tokens) - size + 1, size):
        data = pack(tokens[first : first + size])
        key = row_tag(state.geometry, key, data)
        entry = find(state, namespace, parent, key, data)
        if entry is None:
            return
        yield entry
        parent = entry.id


def lookup(
    state: State, namespace: Namespace, tokens: tuple[int, ...], rows_max: int | None = None
) -> Hit:
    """The most rows, at most `rows_max`, at which every group holds what the next query needs."""
    limit = len(tokens) if rows_max is None else min(rows_max, len(tokens))
    geometry = state.geometry
    path: list[Entry] = []
    if not any(group.kind == OPAQUE for group in geometry.groups):
        for entry in walk(state, namespace, tokens):
            if not _held_by_full_groups(geometry, entry):
                break
            path.append(entry)
            if len(path) * geometry.block_size >= limit:
                break
    for count in range(len(path), 0, -1):
        rows = min(count * geometry.block_size, limit)
        if rows > 0 and _held_by_windows(geometry, path[:count], rows):
            return Hit(namespace, tokens, rows, _tables(geometry, path[:count], rows))
    return Hit(namespace, tokens, 0, tuple(() for _ in geometry.groups))


def _held_by_full_groups(geometry: Geometry, entry: Entry) -> bool:
    groups = zip(geometry.groups, entry.blocks, strict=True)
    return all(blocks for spec, blocks in groups if spec.kind == FULL)


def needed_indices(geometry: Geometry, group: int, rows: int) -> set[int]:
    """Block indices that a query at position `rows` reads in a group: its window, and the sinks."""
    size, sink = geometry.block_size, geometry.groups[group].sink
    first = window_start(geometry, group, rows) // size
    return {*range(first, geometry.blocks_for(rows)), *range(geometry.blocks_for(min(sink, rows)))}


def _held_by_windows(geometry: Geometry, path: list[Entry], rows: int) -> bool:
    if rows % geometry.block_size and has_state(geometry):
        return False
    return all(
        path[index].blocks[group]
        for group, spec in enumerate(geometry.groups)
        if spec.kind != FULL
        for index in needed_indices(geometry, group, rows)
    )


def _tables(geometry: Geometry, path: list[Entry], rows: int) -> tuple[tuple[int, ...], ...]:
    tables = []
    for group in range(len(geometry.groups)):
        needed = needed_indices(geometry, group, rows)
        tables.append(
            tuple(
                entry.blocks[group][0] if index in needed else NO_BLOCK
                for index, entry in enumerate(path)
            )
        )
    return tuple(tables)
