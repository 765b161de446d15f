"""Packing of a step's observation: only what the plan does not already say.

A column that no forward of a sound step would have is written in full, whatever its shape.
"""

from __future__ import annotations

import operator
from typing import Any

from . import records as rec
from . import wire
from .columns import Column, pack_changes, pack_ints, unpack_changes, unpack_ints
from .errors import CodecError
from .tracker import Pieces, Tracker

_Columns = list[tuple[int, ...]]


def _expected_counters(tracker: Tracker, pieces: Pieces) -> tuple[int, ...]:
    """The last step's counters, with the rows of this step."""
    rows, last = sum(pieces.rows), tracker.counters
    return (*last[:4], rows, rows, *last[6:])


def pack_observation(tracker: Tracker, pieces: Pieces, seen: rec.Observation) -> wire.Observation:
    """A StepDone's observation; the tracker remembers what was read."""
    counters: tuple[int, ...] | None = (
        *seen.offset_reads, *seen.updates, *seen.rows_updated, *seen.attends, seen.strangers
    )  # fmt: skip
    if counters == _expected_counters(tracker, pieces):
        counters = None
    else:
        tracker.counters = counters or ()
    visible = _transposed(tracker, pieces, seen.visible)
    tables = _transposed(tracker, pieces, seen.tables)
    return wire.Observation(
        counters,
        None if seen.starts == tuple(pieces.starts) else pack_ints(seen.starts),
        None if seen.rows == tuple(pieces.rows) else pack_ints(seen.rows),
        None if visible is None else _pack_visible(tracker, pieces, visible),
        None if tables is None else _pack_tables(tracker, pieces, tables),
        wire.Nested(seen.visible) if visible is None else None,
        wire.Nested(seen.tables) if tables is None else None,
    )


def _transposed(
    tracker: Tracker, pieces: Pieces, nested: tuple[tuple[int, ...], ...]
) -> _Columns | None:
    """A column a group, of a tuple a piece; None where it is no such table."""
    groups = len(tracker.groups)
    if not groups or len(nested) != len(pieces.seqs):
        return None
    if not nested:
        return [()] * groups
    try:
        columns = list(zip(*nested, strict=True))
    except ValueError:
        return None
    return columns if len(columns) == groups else None


def _ends(pieces: Pieces) -> list[int]:
    return list(map(operator.add, pieces.starts, pieces.rows))


def _pack_visible(
    tracker: Tracker, pieces: Pieces, columns: _Columns
) -> tuple[Column | None, ...] | None:
    ends = _ends(pieces)
    packed = tuple(
        None if column == tuple(tracker.expected_visible(group, ends)) else pack_ints(column)
        for group, column in enumerate(columns)
    )
    return packed if any(column is not None for column in packed) else None


def _unpack_visible(
    tracker: Tracker, pieces: Pieces, packed: tuple[Column | None, ...] | None
) -> _Columns:
    ends = _ends(pieces)
    return [
        tuple(tracker.expected_visible(group, ends)) if column is None else unpack_ints(column)
        for group, column in enumerate(_each_group(tracker, packed))
    ]


def _each_group(tracker: Tracker, packed: tuple[Any, ...] | None) -> tuple[Any, ...]:
    groups = len(tracker.groups)
    if packed is None:
        return (None,) * groups
    if len(packed) != groups:
        raise CodecError(f"an observation has {len(packed)} groups, and the header {groups}")
    return packed


def _pack_tables(
    tracker: Tracker, pieces: Pieces, columns: _Columns
) -> tuple[wire.Changes | None, ...] | None:
    packed: list[wire.Changes | None] = []
    for group, column in enumerate(columns):
        packed.append(pack_column(column, tracker.expected_tables(group, pieces)))
        if packed[-1] is not None:
            tracker.observed(pieces, group, column)
    return tuple(packed) if any(packed) else None


def _unpack_tables(
    tracker: Tracker, pieces: Pieces, packed: tuple[wire.Changes | None, ...] | None
) -> _Columns:
    columns: _Columns = []
    for group, changes in enumerate(_each_group(tracker, packed)):
        columns.append(unpack_column(changes, tracker.expected_tables(group, pieces)))
        if changes is not None:
            tracker.observed(pieces, group, columns[-1])
    return columns


def pack_column(values: tuple[int, ...], expected: list[int]) -> wire.Changes | None:
    """A column as what differs from the expected one."""
    if len(expected) != len(values):
        return wire.Changes(full=pack_ints(values))
    changes = pack_changes(values, expected)
    return None if changes is None else wire.Changes(*changes)


def unpack_column(packed: wire.Changes | None, expected: list[int]) -> tuple[int, ...]:
    """The column of `pack_column`."""
    if packed is None:
        return tuple(expected)
    if packed.full is not None:
        return unpack_ints(packed.full)
    return unpack_changes((packed.places, packed.values), expected)


def unpack_observation(
    tracker: Tracker, pieces: Pieces, packed: wire.Observation
) -> rec.Observation:
    """The observation of `pack_observation`."""
    counters = packed.counters
    if counters is None:
        counters = _expected_counters(tracker, pieces)
    else:
        tracker.counters = counters
    if len(counters) != 9:
        raise CodecError(f"an observation has {len(counters)} counters instead of 9")
    visible, tables = packed.visible_nested, packed.tables_nested
    a, b, c, d, e, f, g, h, strangers = counters
    return rec.Observation(
        (a, b),
        (c, d),
        (e, f),
        (g, h),
        strangers,
        tuple(pieces.starts) if packed.starts is None else unpack_ints(packed.starts),
        tuple(pieces.rows) if packed.rows is None else unpack_ints(packed.rows),
        tuple(zip(*_unpack_visible(tracker, pieces, packed.visible), strict=True))
        if visible is None
        else visible.rows,
        tuple(zip(*_unpack_tables(tracker, pieces, packed.tables), strict=True))
        if tables is None
        else tables.rows,
    )
