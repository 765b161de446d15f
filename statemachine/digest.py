"""Digest: 64 bits that say whether two states are the same state.

The sum modulo 2^64 of xxh3_64 over one line of canonical bytes for each entry of a state
(sequences, table entries, blocks, queue positions, index entries, pins, counters). A
sum can be kept while the state changes; `recompute` does it from nothing and must agree.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

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
_pack_5, _pack_6 = packer(5), packer(6)


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


def table_line(seq: int, group: int, index: int, block: int) -> int:
    """One block's place in one table."""
    return xxh3_64_intdigest(_pack_5(TABLE, seq, group, index, block))


def block_line(group: int, number: int, block: Block) -> int:
    """One held or published block."""
    return xxh3_64_intdigest(_pack_6(BLOCK, group, number, block.refs, block.pins, block.entry))


def entry_line(entry: Entry) -> int:
    """One index entry."""
    data = _pack_5(ENTRY, entry.id, entry.parent, entry.key, entry.children) + entry.tokens
    for ids in entry.blocks:
        data += _packers[1 + len(ids)](len(ids), *ids)
    return xxh3_64_intdigest(data + _names(entry.namespace))


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
    return sum(_lines(state)) & MASK


def _lines(state: State) -> Iterator[int]:
    yield scalars_line(state)
    for sequence in state.sequences.values():
        yield sequence_line(sequence)
        for group, table in enumerate(sequence.tables):
            for index, block in enumerate(table):
                if block != NO_BLOCK:
                    yield table_line(sequence.id, group, index, block)
    for number, group_state in enumerate(state.groups):
        for block, record in group_state.blocks.items():
            yield block_line(number, block, record)
        for position, block in group_state.free.items.items():
            yield line(FREE, number, position, block)
        for position, block in group_state.cached.items.items():
            yield line(CACHED, number, position, block)
    for entry in state.entries.values():
        yield entry_line(entry)
    for step, pins in state.pins.items():
        for group, block in pins:
            yield pin_line(step, group, block)
