"""Tags: the identity of a row, as 64 bits.

Row i's K and V are a function of (model, adapter and its version, salt, tokens 0..i). A row's tag
is xxh3_64(its block's parent key, the block's tokens up to it); a block's key is its last row's
tag; the first parent is the namespace's root. Equal tags are a claim, never a proof: whoever
shares rows compares tokens too (prefix.py).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from xxhash import xxh3_64_intdigest

from .events import Namespace
from .geometry import Geometry
from .sequence import NO_TOKEN, Sequence

UNWRITTEN = 0
"""A physical row that nothing was written to."""
PAD = 1
"""A physical row that holds padding."""

CONSTANT = 42
"""Every tag and key under `hash: constant`."""

_TOKEN_BYTES = 8
_pack_key = struct.Struct("<Q").pack
_pack_pending = struct.Struct("<cQQQ").pack


def _field(text: str) -> bytes:
    """A length-prefixed, typed field, so that "ab" + "c" is not "a" + "bc"."""
    data = text.encode()
    return b"s" + len(data).to_bytes(8, "little") + data


def root_key(geometry: Geometry, namespace: Namespace) -> int:
    """The parent key of a namespace's first block."""
    if geometry.hash == "constant":
        return CONSTANT
    version = b"i" + namespace.version.to_bytes(8, "little")
    data = _field(geometry.identity) + _field(namespace.adapter) + version
    return xxh3_64_intdigest(data + _field(namespace.salt))


def row_tag(geometry: Geometry, parent_key: int, block_tokens: bytes) -> int:
    """Tag of the last row of `block_tokens` (packed, from its block's first row on)."""
    if geometry.hash == "constant":
        return CONSTANT
    return xxh3_64_intdigest(_pack_key(parent_key) + block_tokens)


def pending_tag(seq: int, position: int, step: int) -> int:
    """Tag of a row whose token is not known yet."""
    return xxh3_64_intdigest(_pack_pending(b"p", seq, position, step))


# What follows is of the rows that a decode step has one each of: a call for each would cost more
# than the hash.


def pending_tags(sequences: Iterable[Sequence]) -> list[int]:
    """Tag of the last row of each, whose token is not known yet."""
    xxh3, pack = xxh3_64_intdigest, _pack_pending
    return [
        xxh3(pack(b"p", it.id, it.committed + len(it.speculative) - 1, it.speculative[-1].step))
        for it in sequences
    ]


def newest_tags(geometry: Geometry, sequences: Iterable[Sequence]) -> list[int]:
    """Tag of the last committed row of each; there must be one."""
    if geometry.hash == "constant":
        return [CONSTANT for _ in sequences]
    xxh3, pack = xxh3_64_intdigest, _pack_key
    return [
        xxh3(pack(it.keys[-1] if it.keys else it.root) + it.tail) if it.tail else it.keys[-1]
        for it in sequences
    ]


def next_tags(
    geometry: Geometry, sequences: Iterable[Sequence], tokens: Iterable[int]
) -> list[int]:
    """Tag of the row behind the committed ones of each, if a token of `tokens` is fed there."""
    if geometry.hash == "constant":
        return [CONSTANT for _ in sequences]
    xxh3, pack = xxh3_64_intdigest, _pack_key
    return [
        xxh3(pack(it.keys[-1] if it.keys else it.root) + it.tail + pack(token))
        for it, token in zip(sequences, tokens, strict=True)
    ]


def block_tags(geometry: Geometry, parent_key: int, block_tokens: bytes) -> list[int]:
    """Tags of all rows in one block; `block_tokens` may stop short of its end."""
    ends = range(_TOKEN_BYTES, len(block_tokens) + 1, _TOKEN_BYTES)
    return [row_tag(geometry, parent_key, block_tokens[:end]) for end in ends]


def sequence_tags(geometry: Geometry, sequence: Sequence, first: int, end: int) -> list[int]:
    """Tags that rows [first, end) of a sequence should carry, of all kinds, in position order."""
    tags = committed_tags(geometry, sequence, first, min(end, sequence.committed))
    for position in range(max(first, sequence.committed), end):
        tags.append(_uncommitted_tag(geometry, sequence, position))
    return tags


def committed_tags(geometry: Geometry, sequence: Sequence, first: int, end: int) -> list[int]:
    """Tags of committed rows [first, end). A block's last row is its key: no hash is needed."""
    size = geometry.block_size
    tags: list[int] = []
    position = first
    while position < end:
        index, row = divmod(position, size)
        stop = min(size, end - index * size)
        if row == size - 1:
            tags.append(sequence.keys[index])
        else:
            parent, tokens = sequence.block_parent(index), sequence.block_tokens(index)
            for count in range(row + 1, stop + 1):
                tags.append(row_tag(geometry, parent, tokens[: count * _TOKEN_BYTES]))
        position = index * size + stop
    return tags


def _uncommitted_tag(geometry: Geometry, sequence: Sequence, position: int) -> int:
    index = position - sequence.committed
    if index >= len(sequence.speculative):
        return PAD
    row = sequence.speculative[index]
    if row.token == NO_TOKEN:
        return pending_tag(sequence.id, position, row.step)
    return _draft_tag(geometry, sequence, index)


def _draft_tag(geometry: Geometry, sequence: Sequence, index: int) -> int:
    """Tag of a speculative row with a token: as if all rows before it were committed."""
    size = geometry.block_size
    parent, block = sequence.parent_key, sequence.tail
    for row in sequence.speculative[: index + 1]:
        if len(block) == size * _TOKEN_BYTES:
            parent, block = row_tag(geometry, parent, block), b""
        block += _pack_key(row.token)
    return row_tag(geometry, parent, block)
