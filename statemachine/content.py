"""Content: a sequence's committed tokens, as full blocks with keys and a tail."""

from __future__ import annotations

from msgspec import structs

from .geometry import Geometry
from .sequence import Sequence, pack
from .tags import row_tag

_TOKEN_BYTES = 8


def extend(geometry: Geometry, sequence: Sequence, tokens: tuple[int, ...]) -> Sequence:
    """The sequence with more committed tokens; each block that they fill gets its key."""
    block_bytes = geometry.block_size * _TOKEN_BYTES
    tail = sequence.tail + pack(tokens)
    committed = sequence.committed + len(tokens)
    if len(tail) < block_bytes:
        return structs.replace(sequence, committed=committed, tail=tail)
    packed, keys, key = list(sequence.packed), list(sequence.keys), sequence.parent_key
    while len(tail) >= block_bytes:
        block, tail = tail[:block_bytes], tail[block_bytes:]
        key = row_tag(geometry, key, block)
        packed.append(block)
        keys.append(key)
    return structs.replace(
        sequence, committed=committed, tail=tail, packed=tuple(packed), keys=tuple(keys)
    )


def retract(geometry: Geometry, sequence: Sequence, committed: int) -> Sequence:
    """The sequence with only its first `committed` committed tokens."""
    if committed == sequence.committed:
        return sequence
    full, rows = divmod(committed, geometry.block_size)
    return structs.replace(
        sequence,
        committed=committed,
        tail=sequence.block_tokens(full)[: rows * _TOKEN_BYTES],
        packed=sequence.packed[:full],
        keys=sequence.keys[:full],
    )
