"""Content: a sequence's committed tokens, as full blocks with keys and a tail."""

from __future__ import annotations

from msgspec import structs

from .geometry import Geometry
from .sequence import Sequence, pack
from .tags import row_tag

_TOKEN_BYTES = 8


Content = tuple[tuple[int, ...], tuple[bytes, ...], bytes]
"""Keys of full blocks, their packed tokens, and the packed tokens after them."""


def grown(geometry: Geometry, sequence: Sequence, more: bytes) -> Content:
    """The sequence's content with more packed tokens; each block that they fill gets its key."""
    block_bytes = geometry.block_size * _TOKEN_BYTES
    keys, packed, tail = sequence.keys, sequence.packed, sequence.tail + more
    if len(tail) < block_bytes:
        return keys, packed, tail
    if len(tail) == block_bytes:
        return (*keys, row_tag(geometry, sequence.parent_key, tail)), (*packed, tail), b""
    whole = len(tail) - len(tail) % block_bytes
    blocks = [tail[at : at + block_bytes] for at in range(0, whole, block_bytes)]
    found, key = [], sequence.parent_key
    for block in blocks:
        key = row_tag(geometry, key, block)
        found.append(key)
    return (*keys, *found), (*packed, *blocks), tail[whole:]


def extend(geometry: Geometry, sequence: Sequence, tokens: tuple[int, ...]) -> Sequence:
    """The sequence with more committed tokens; each block that they fill gets its key."""
    keys, packed, tail = grown(geometry, sequence, pack(tokens))
    committed = sequence.committed + len(tokens)
    return structs.replace(sequence, committed=committed, tail=tail, packed=packed, keys=keys)


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
