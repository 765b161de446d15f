"""Snapshot: a whole state as canonical bytes, for checkpoints, and back.

The same state gives the same bytes: persistent maps become pairs in order of their keys. What can
be worked out (a queue's places) is left out. A checksum says whether the bytes are whole, and the
digest, worked out again, whether they mean the state that they claim. Never writes a file.
"""

from __future__ import annotations

import struct
from operator import itemgetter
from typing import Any, get_type_hints

import msgspec
from immutables import Map
from msgspec import Struct
from xxhash import xxh3_64_intdigest

from .digest import recompute
from .errors import CodecError
from .geometry import Geometry
from .sequence import Sequence, Speculative
from .state import Block, Entry, GroupState, Queue, State

_CHECK = struct.Struct("<Q")

Pairs = tuple[tuple[int, int], ...]


def _array_of(kind: type[Struct], **changed: Any) -> type[Struct]:
    """An array with the fields of `kind`, the changed ones of another type."""
    hints = {**get_type_hints(kind), **changed}
    fields = [(name, hints[name]) for name in kind.__struct_fields__]
    return msgspec.defstruct(kind.__name__, fields, array_like=True, frozen=True)


_Speculative: Any = _array_of(Speculative)
_Sequence: Any = _array_of(Sequence, speculative=tuple[_Speculative, ...])
_Block: Any = _array_of(Block)
_Entry: Any = _array_of(Entry)


class _Queue(Struct, frozen=True, array_like=True):
    items: Pairs
    head: int
    tail: int


class _Group(Struct, frozen=True, array_like=True):
    blocks: tuple[tuple[int, _Block], ...]
    unused: int
    free: _Queue
    cached: _Queue


class _State(Struct, frozen=True, array_like=True):
    geometry: Geometry
    groups: tuple[_Group, ...]
    sequences: tuple[_Sequence, ...]
    entries: tuple[_Entry, ...]
    by_key: tuple[tuple[int, tuple[int, ...]], ...]
    pins: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    counters: tuple[int, int, int, int]
    digest: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_State)


def _pairs(items: Map[int, Any]) -> tuple[tuple[int, Any], ...]:
    return tuple(sorted(items.items(), key=itemgetter(0)))


def _copy(target: Any, value: Struct, **changed: Any) -> Any:
    """`value` as another type with the same fields, some of them changed."""
    names = value.__struct_fields__
    return target(**{**{name: getattr(value, name) for name in names}, **changed})


def _sequence_out(sequence: Sequence) -> Any:
    rows = tuple(_Speculative(row.token, row.step) for row in sequence.speculative)
    return _copy(_Sequence, sequence, speculative=rows)


def _sequence_in(packed: Any) -> Sequence:
    rows = tuple(Speculative(row.token, row.step) for row in packed.speculative)
    sequence: Sequence = _copy(Sequence, packed, speculative=rows)
    return sequence


def _group_out(group: GroupState) -> _Group:
    queues = [_Queue(_pairs(it.items), it.head, it.tail) for it in (group.free, group.cached)]
    blocks = tuple((number, _copy(_Block, block)) for number, block in _pairs(group.blocks))
    return _Group(blocks, group.unused, *queues)


def _queue_in(packed: _Queue) -> Queue:
    places = Map({block: place for place, block in packed.items})
    return Queue(Map(packed.items), places, packed.head, packed.tail)


def _group_in(packed: _Group) -> GroupState:
    blocks = Map({number: _copy(Block, block) for number, block in packed.blocks})
    return GroupState(blocks, packed.unused, _queue_in(packed.free), _queue_in(packed.cached))


def encode_state(state: State) -> bytes:
    """A state as bytes; equal states, equal bytes."""
    packed = _State(
        geometry=state.geometry,
        groups=tuple(_group_out(group) for group in state.groups),
        sequences=tuple(_sequence_out(it) for _, it in _pairs(state.sequences)),
        entries=tuple(_copy(_Entry, it) for _, it in _pairs(state.entries)),
        by_key=_pairs(state.by_key),
        pins=_pairs(state.pins),
        counters=(state.issued_step, state.written_step, state.last_seq, state.next_entry),
        digest=state.digest,
    )
    data = _encoder.encode(packed)
    return _CHECK.pack(xxh3_64_intdigest(data)) + data


def decode_state(data: bytes) -> State:
    """The state of `encode_state`. Raises CodecError where the bytes are none, or were changed."""
    body = memoryview(data)[_CHECK.size :]
    if len(data) < _CHECK.size or _CHECK.unpack_from(data)[0] != xxh3_64_intdigest(body):
        raise CodecError("a checkpoint's state does not fit its checksum")
    try:
        packed = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CodecError(f"a checkpoint's state cannot be read: {error}") from error
    issued, written, last_seq, next_entry = packed.counters
    state = State(
        geometry=packed.geometry,
        groups=tuple(_group_in(group) for group in packed.groups),
        sequences=Map({it.id: _sequence_in(it) for it in packed.sequences}),
        entries=Map({it.id: _copy(Entry, it) for it in packed.entries}),
        by_key=Map(packed.by_key),
        pins=Map(packed.pins),
        issued_step=issued,
        written_step=written,
        last_seq=last_seq,
        next_entry=next_entry,
        digest=packed.digest,
    )
    try:
        digest = recompute(state)
    except (struct.error, LookupError) as error:
        raise CodecError(f"a checkpoint's state makes no sense: {error}") from error
    if digest != state.digest:
        raise CodecError("a checkpoint's state does not have the digest that it claims")
    return state
