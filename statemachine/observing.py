"""Observing: what the caches of a forward should see, from the lengths and tables of a state.

Owns the derived side of an observation, for a replay and for the guard of a running server alike.
The kernel reads the observed side off the arrays that its layers used, so that both sides share no
computation but the hash of a table. Compares nothing and decides nothing.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence as Items

from msgspec import Struct
from xxhash import xxh3_64_intdigest

from .geometry import Geometry
from .records import Observation
from .sequence import Sequence, visible_at

OFF = "off"
"""The sanitizer's mode in which no row is compared."""
FULL = "full"
"""The one in which each row that is read is compared."""

NO_ROWS = Observation((0, 0), (0, 0), (0, 0), (0, 0), 0, (), (), (), ())
"""What a step without rows sees."""


_Tables = tuple[tuple[int, ...], ...]


class Seen(Struct, frozen=True):
    """A step's columns as an observation should have them, one entry a piece, in batch order.

    ends: offset after each piece's rows, which no observation has. visible, tables: one entry a
    group in each.
    """

    ends: list[int]
    starts: tuple[int, ...]
    rows: tuple[int, ...]
    visible: tuple[tuple[int, ...], ...]
    tables: tuple[tuple[int, ...], ...]


class Deriver:
    """Derives columns from sequences; keeps the hashes of tables that steps have in common."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._paged = sum(group.paged for group in geometry.groups)
        self._hashes: dict[int, tuple[_Tables, tuple[int, ...]]] = {}

    def seen(
        self, sequences: Items[Sequence], rows: Items[int], ends: list[int] | None = None
    ) -> Seen:
        """The columns of a step; `sequences` as they stand after its opening events, `rows` of
        each, pads included; `ends`: their offsets, where the caller has them.
        """
        if ends is None:
            ends = offsets(sequences)
        return Seen(
            ends,
            tuple(map(operator.sub, ends, rows)),
            tuple(rows),
            self.visible(ends),
            self._tables(sequences),
        )

    def visible(self, ends: list[int]) -> tuple[tuple[int, ...], ...]:
        """Rows that each piece's last row attends to, by the group."""
        columns: list[list[int]] = []
        for group, spec in enumerate(self._geometry.groups):
            if spec.moves:
                # Not from the sequence's own start: the kernel goes by that.
                columns.append([visible_at(self._geometry, group, 0, end) for end in ends])
            else:
                columns.append(ends)
        return tuple(zip(*columns, strict=True))

    def _tables(self, sequences: Items[Sequence]) -> tuple[tuple[int, ...], ...]:
        """Hashes of each sequence's tables; those that it shares with its last record are known."""
        known, found = self._hashes, []
        for sequence in sequences:
            tables, held = sequence.tables, known.get(sequence.id)
            if held is None or held[0] is not tables:
                held = known[sequence.id] = (tables, self._hashed(tables))
            found.append(held[1])
        if len(known) > 4 * len(found) + 64:
            known.clear()
        return tuple(found)

    def _hashed(self, tables: _Tables) -> tuple[int, ...]:
        groups = zip(self._geometry.groups, tables, strict=True)
        return tuple([table_hash(table) if spec.paged else 0 for spec, table in groups])

    def wrong_use(self, seen: Observation, rows: int) -> tuple[str, int, tuple[int, int]] | None:
        """What layers did otherwise than to take all `rows` of a step in one update, with this
        step's metadata: its name, what is right, and the least and the most that a layer saw.
        """
        if not self._paged:
            return None
        if seen.rows_updated != (rows, rows):
            return "rows written", rows, seen.rows_updated
        if seen.updates != (1, 1):
            return "updates", 1, seen.updates
        if seen.offset_reads[0] < 1:
            return "reads of the offset", 1, seen.offset_reads
        if seen.attends[0] < 1:
            return "attention calls", 1, seen.attends
        if seen.strangers:
            return "uses of another step's metadata", 0, (seen.strangers,) * 2
        return None

    def due_checks(self, mode: str, sequences: Items[Sequence], due: Seen) -> tuple[int, bool]:
        """How many rows the sanitizer compares in a step, and whether that is exact: at the least
        the last row of each piece in each paged group; in its full mode each row that some row of
        a piece attends to; of a recurrent group the state that is read and the one that is made.
        """
        if mode == OFF:
            return 0, False
        if mode != FULL:
            return len(sequences) * self._paged, False
        count = 0
        for sequence, start, end in zip(sequences, due.starts, due.ends, strict=True):
            for group, spec in enumerate(self._geometry.groups):
                if spec.recurrent:
                    count += 1 + (start > 0)
                elif spec.paged:
                    low = sequence.starts[group]
                    if spec.moves:
                        low = max(low, start - spec.span + 1)
                    count += end - low + min(spec.sink, low)
        return count, True


def offsets(sequences: Items[Sequence]) -> list[int]:
    """The offset of each sequence: asked of each row of each step, so without a call for each."""
    return [
        it.committed + len(it.speculative) + it.pads if it.speculative or it.pads else it.committed
        for it in sequences
    ]


def table_hash(table: tuple[int, ...]) -> int:
    """xxh3_64 of block ids as int32, little-endian: how a table stands on tape (records.py)."""
    return xxh3_64_intdigest(struct.pack(f"<{len(table)}i", *table))
