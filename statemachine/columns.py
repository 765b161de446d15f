"""Columns: tuples of numbers as packed bytes, for the rows that make up most of a tape.

Every pack function has an unpack function that gives back exactly what was packed; a column that
no packed form fits stays a tuple of msgpack numbers. Little-endian everywhere.
Never looks at what the numbers mean.
"""

from __future__ import annotations

import functools
import itertools
import operator
import struct

from .errors import CodecError

Column = bytes | tuple[int, ...]
"""A packed column (its first byte names the form), or the numbers themselves."""
FloatColumn = bytes | tuple[float, ...]

# Form byte -> struct code. Widths of unsigned numbers, narrowest first.
_WIDTHS = {1: "B", 2: "H", 4: "I", 8: "Q"}
_FORMS = {form: bytes([form]) for form in (*_WIDTHS, 0x10)}
_ASCENDING = 0x10
_PLAIN_BELOW = 3
"""Shorter columns are left to msgpack, which is no longer and needs no packing."""


@functools.lru_cache(maxsize=4096)
def _layout(count: int, code: str) -> struct.Struct:
    return struct.Struct(f"<{count}{code}")


def pack_ints(values: tuple[int, ...]) -> Column:
    """Numbers in the narrowest unsigned width that holds them all; others stay as they are."""
    count = len(values)
    if count < _PLAIN_BELOW:
        return values
    for form, code in _WIDTHS.items():
        try:
            return _FORMS[form] + _layout(count, code).pack(*values)
        except struct.error:
            continue
    return values


def pack_ids(values: tuple[int, ...]) -> Column:
    """Numbers that mostly grow by a little: the first in 8 bytes, then one byte a step."""
    if len(values) < _PLAIN_BELOW:
        return values
    try:
        steps = bytes(map(operator.sub, values[1:], values))
        return _FORMS[_ASCENDING] + values[0].to_bytes(8, "little") + steps
    except (ValueError, OverflowError):
        return pack_ints(values)


def unpack_ints(column: Column) -> tuple[int, ...]:
    """The numbers of `pack_ints` or `pack_ids`. Raises CodecError where the bytes are no column."""
    if isinstance(column, tuple):
        return column
    form = column[0] if column else 0
    if form == _ASCENDING and len(column) >= 9:
        first = int.from_bytes(column[1:9], "little")
        return tuple(itertools.accumulate(column[9:], initial=first))
    code = _WIDTHS.get(form)
    if code is None or (len(column) - 1) % form:
        raise CodecError("a packed column of numbers has a form that format 1 does not know")
    return _layout((len(column) - 1) // form, code).unpack_from(column, 1)


def pack_floats(values: tuple[float, ...]) -> FloatColumn:
    """float32 where that loses nothing, else the float64 numbers themselves."""
    layout = _layout(len(values), "f")
    try:
        data = layout.pack(*values)
    except OverflowError:
        return values
    return data if layout.unpack(data) == values else values


def unpack_floats(column: FloatColumn) -> tuple[float, ...]:
    """The numbers of `pack_floats`. Raises CodecError where the bytes are no column."""
    if isinstance(column, tuple):
        return column
    if len(column) % 4:
        raise CodecError("a packed column of float32 numbers has a cut end")
    return _layout(len(column) // 4, "f").unpack(column)


def pack_changes(values: tuple[int, ...], expected: list[int]) -> tuple[Column, Column] | None:
    """Where `values` differ from `expected` (of equal length): None, or (places, values there)."""
    if values == tuple(expected):
        return None
    places = tuple(itertools.compress(itertools.count(), map(operator.ne, values, expected)))
    return pack_ids(places), pack_ints(tuple(values[at] for at in places))


def unpack_changes(changes: tuple[Column, Column] | None, expected: list[int]) -> tuple[int, ...]:
    """The values of `pack_changes`. Raises CodecError where a place is outside of `expected`."""
    if changes is None:
        return tuple(expected)
    places, values = unpack_ints(changes[0]), unpack_ints(changes[1])
    restored = list(expected)
    if len(places) != len(values) or any(not 0 <= at < len(restored) for at in places):
        raise CodecError("changed entries of a column lie outside of it")
    for at, value in zip(places, values, strict=True):
        restored[at] = value
    return tuple(restored)
