"""Digest: 64 bits that say whether two states are the same state.

The sum modulo 2^64 of xxh3_64 over one line of canonical bytes for each entry of a state
(sequences, table entries, blocks, queue positions, index entries, pins, counters). A
sum can be kept while the state changes; `recompute` does it from nothing and must agree.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from immutables import Map, MapMutation
from xxhash import xxh3_64_intdigest

from .events import NO_BLOCK, Namespace
from .sequence import Sequence, Speculative

if TYPE_CHECKING:
    from .state import Block, Entry, State

MASK = (1 << 64) - 1

SCALARS, SEQUENCE, TABLE, BLOCK, FREE, CACHED, ENTRY, PIN = range(1, 9)


class _Packers(dict[int, Callable[..., bytes]]):
    """Made when first asked for: steps in flight may give a sequence any number of marks."""

    def __missing__(self, count: int) -> Callable[..., bytes]:
        pack = self[count] = struct.Struct(f"<{count}Q").pack
        return pack


_packers = _Packers()
packer = _packers.__getitem__
"""By a count of values: packs as many unsigned 64-bit integers."""
_pack_4, _pack_5, _pack_6 = packer(4), packer(5), packer(6)


def line(*values: int) -> int:
    """Hash of one entry's values, each an unsigned 64-bit integer."""
    return xxh3_64_intdigest(_packers[len(values)](*values))


def sequence_line(sequence: Sequence) -> int:
    """A sequence's line; its block tables have lines of their own."""
    keys, speculative = sequence.keys, sequence.speculative
    values = (
        SEQUENCE,
        sequence.id,
        sequence.root,
        sequence.committed,
        len(speculative),
        sequence.pads,
        sequence.adopted * 2 + sequence.preempted,
        keys[-1] if keys else sequence.root,
        *sequence.starts,
        *sequence.marks,
    )
    data = _packers[len(values)](*values) + sequence.tail
    if speculative:
        data += b"".join(map(row_bytes, speculative))
    return xxh3_64_intdigest(data)


def row_bytes(row: Speculative) -> bytes:
    """A speculative row's share of its sequence's line."""
    return row.token.to_bytes(9, "little", signed=True) + row.step.to_bytes(8, "little")


# What follows is of many entries at once: a step changes some hundred, each for a few operations.


def table_lines(seq: int, group: int, first: int, blocks: Iterable[int]) -> int:
    """The sum for a table's blocks from place `first` on."""
    total = 0
    for index, block in enumerate(blocks, first):
        if block != NO_BLOCK:
            total += xxh3_64_intdigest(_pack_5(TABLE, seq, group, index, block))
    return total


def block_lines(
    group: int, numbers: Iterable[int], blocks: Map[int, Block] | MapMutation[int, Block]
) -> int:
    """The sum for those of `numbers` that are held or published."""
    total = 0
    for number in numbers:
        block = blocks.get(number)
        if block is not None:
            data = _pack_6(BLOCK, group, number, block.refs, block.pins, block.entry)
            total += xxh3_64_intdigest(data)
    return total


def queue_lines(kind: int, group: int, places: Iterable[tuple[int, int]]) -> int:
    """The sum for (position, block) pairs of a queue."""
    total = 0
    for position, block in places:
        total += xxh3_64_intdigest(_pack_4(kind, group, position, block))
    return total


def entry_lines(numbers: Iterable[int], entries: Map[int, Entry] | MapMutation[int, Entry]) -> int:
    """The sum for those of `numbers` that are in the index."""
    total, space, names = 0, None, b""
    for number in numbers:
        entry = entries.get(number)
        if entry is not None:
            if entry.namespace is not space:
                space, names = entry.namespace, _names(entry.namespace)
            data = _pack_5(ENTRY, number, entry.parent, entry.key, entry.children) + entry.tokens
            for ids in entry.blocks:
                data += _packers[1 + len(ids)](len(ids), *ids)
            total += xxh3_64_intdigest(data + names)
    return total


@functools.lru_cache(maxsize=256)
def _names(space: Namespace) -> bytes:
    return f"{len(space.adapter)}:{space.adapter}{space.version}:{space.salt}".encode()


def pin_line(step: int, group: int, block: int) -> int:
    """One pin."""
    return line(PIN, step, group, block)


def scalars_line(state: State) -> int:
    """The counters of a state and of its queues, as one line."""
    values = [SCALARS, state.issued_step, state.written_step, state.last_seq + 1, state.next_entry]
    for group in state.groups:
        free, cached = group.free, group.cached
        values += (group.unused, free.head, free.tail, cached.head, cached.tail)
    return line(*values)


def recompute(state: State) -> int:
    """The digest of a state from nothing."""
    total = scalars_line(state) + entry_lines(state.entries, state.entries)
    for sequence in state.sequences.values():
        total += sequence_line(sequence)
        for group, table in enumerate(sequence.tables):
            total += table_lines(sequence.id, group, 0, table)
    for number, held in enumerate(state.groups):
        total += block_lines(number, held.blocks, held.blocks)
        total += queue_lines(FREE, number, held.free.items.items())
        total += queue_lines(CACHED, number, held.cached.items.items())
    for step, pins in state.pins.items():
        for group, block in pins:
            total += pin_line(step, group, block)
    return total & MASK
