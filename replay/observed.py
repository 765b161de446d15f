"""Observed: what the caches of a forward saw, against the lengths and tables of the state.

The kernel reads its observations off the arrays that its layers used; the expected values here come
from the sequences alone, so that both sides share no computation but the hash of a table.
"""

from __future__ import annotations

import struct
from collections import Counter
from itertools import pairwise
from typing import NoReturn, TypeVar

from msgspec import Struct
from xxhash import xxh3_64_intdigest

from statemachine.events import Event
from statemachine.geometry import WINDOW, Geometry
from statemachine.records import Observation, StepDone
from statemachine.sequence import Sequence, visible_at

from .divergence import (
    CONTENT,
    OBSERVATION,
    Diverged,
    Divergence,
    History,
    Neighbour,
    Value,
    Values,
    neighbours,
    text_for,
)

_T = TypeVar("_T")

OFF = "off"
"""The sanitizer's mode in which no row is compared (kernel/shadow.py)."""
FULL = "full"
"""The one in which each row that is read is compared."""

_NO_ROWS = Observation((0, 0), (0, 0), (0, 0), (0, 0), 0, (), (), (), ())


class Pieces(Struct):
    """The batch of a step: sequences as they stood after its opening events, and their rows.

    places: by the number of pieces that were there after it, the index of the event that made them.
    """

    seqs: list[int]
    rows: list[int]
    sequences: list[Sequence]
    places: dict[int, int]
    events: tuple[Event, ...]

    @property
    def ends(self) -> list[int]:
        """Offset of each sequence after its rows."""
        return [it.committed + len(it.speculative) + it.pads for it in self.sequences]

    @property
    def starts(self) -> list[int]:
        """Position of each piece's first row."""
        return [end - rows for end, rows in zip(self.ends, self.rows, strict=True)]

    def neighbours(self) -> tuple[Neighbour, ...]:
        return neighbours(self.seqs, self.starts, self.rows)

    def event_of(self, piece: int) -> int:
        """Index of the event that issued a piece's rows."""
        return next((at for count, at in self.places.items() if count > piece), -1)


class Observer:
    """Compares observations and shadow reports with the state."""

    def __init__(
        self, geometry: Geometry, history: History, only: int | None, sanitize: str = OFF
    ) -> None:
        self._geometry = geometry
        self._sanitize = sanitize
        self._history = history
        self._only = only
        self._paged = any(group.paged for group in geometry.groups)
        self._hashes: list[dict[int, tuple[tuple[int, ...], int]]] = [{} for _ in geometry.groups]

    def compare(self, record: StepDone, pieces: Pieces) -> None:
        """Raises Diverged at the first piece that the caches saw otherwise."""
        seen = record.observation
        if not pieces.seqs:
            if seen != _NO_ROWS:
                self._differs(record, pieces, -1, "rows seen", 0, len(seen.rows), "")
            return
        ends = pieces.ends
        starts = [end - rows for end, rows in zip(ends, pieces.rows, strict=True)]
        self._compare_columns(record, pieces, starts, ends)
        self._compare_counters(record, pieces)
        if record.shadow.found:
            self._content(record, pieces)
        self._compare_checked(record, pieces)
        sampled = record.sampled
        if not _are_pieces(sampled, pieces.rows):
            wanted = f"some of the pieces below {len(pieces.seqs)}, in order"
            self._differs(record, pieces, -1, "samples of pieces", wanted, sampled, "")
        if not len(sampled) == len(record.tokens) == len(record.logits) == len(record.margins):
            self._differs(
                record, pieces, -1, "sampled tokens", len(sampled), len(record.tokens), ""
            )

    def _compare_columns(
        self, record: StepDone, pieces: Pieces, starts: list[int], ends: list[int]
    ) -> None:
        seen, only = record.observation, self._only
        columns: tuple[tuple[str, tuple[Value, ...], tuple[Value, ...]], ...] = (
            ("start", tuple(starts), seen.starts),
            ("rows", tuple(pieces.rows), seen.rows),
            ("visible rows", self._visible(pieces, ends), seen.visible),
            ("table", self._tables(pieces), seen.tables),
        )
        for name, derived, found in columns:
            if derived == found:
                continue
            if len(derived) != len(found):
                self._differs(record, pieces, -1, "pieces", len(derived), len(found), "")
            for piece, (wanted, saw) in enumerate(zip(derived, found, strict=True)):
                if wanted != saw and only in (None, pieces.seqs[piece]):
                    self._piece_differs(record, pieces, piece, name, wanted, saw)

    def _visible(self, pieces: Pieces, ends: list[int]) -> tuple[tuple[int, ...], ...]:
        columns: list[list[int]] = []
        for group, spec in enumerate(self._geometry.groups):
            if spec.kind == WINDOW:
                # Not from the sequence's own start: the kernel goes by that.
                columns.append([visible_at(self._geometry, group, 0, end) for end in ends])
            else:
                columns.append(ends)
        return tuple(zip(*columns, strict=True))

    def _tables(self, pieces: Pieces) -> tuple[tuple[int, ...], ...]:
        columns: list[list[int]] = []
        for group, spec in enumerate(self._geometry.groups):
            if not spec.paged:
                columns.append([0] * len(pieces.seqs))
                continue
            known = self._hashes[group]
            column = []
            for sequence in pieces.sequences:
                table = sequence.tables[group]
                held = known.get(sequence.id)
                if held is None or held[0] is not table:
                    held = known[sequence.id] = (table, table_hash(table))
                column.append(held[1])
            columns.append(column)
            if len(known) > 4 * len(column) + 64:
                known.clear()
        return tuple(zip(*columns, strict=True))

    def _compare_checked(self, record: StepDone, pieces: Pieces) -> None:
        """The sanitizer looked, at the least, at the last row of each piece in each paged group;
        in its full mode at each row that some row of a piece attends to.
        """
        if self._sanitize == OFF:
            return
        checked, full = record.shadow.checked, self._sanitize == FULL
        due = len(pieces.seqs) * sum(group.paged for group in self._geometry.groups)
        if full:
            due = self._read(pieces)
        if checked < due or (full and checked > due):
            least = "" if full else "at least "
            what = f"{checked} rows in the pages were compared, and {least}{due} are due"
            values = (Values("rows compared", checked, due, None),)
            self._raise(record, pieces, -1, what, values, "", kind=CONTENT)

    def _read(self, pieces: Pieces) -> int:
        """Rows that a step's attention reads, once for each piece and group."""
        count = 0
        columns = zip(pieces.sequences, pieces.starts, pieces.ends, strict=True)
        for sequence, start, end in columns:
            for group, spec in enumerate(self._geometry.groups):
                if spec.paged:
                    low = sequence.starts[group]
                    if spec.kind == WINDOW:
                        low = max(low, start - spec.window + 1)
                    count += end - low + min(spec.sink, low)
        return count

    def _compare_counters(self, record: StepDone, pieces: Pieces) -> None:
        """Each layer's cache took all rows in one update, and used this step's metadata."""
        if not self._paged:
            return
        seen, rows = record.observation, sum(pieces.rows)
        if seen.rows_updated != (rows, rows):
            self._layers_differ(record, pieces, "rows written", rows, seen.rows_updated)
        if seen.updates != (1, 1):
            self._layers_differ(record, pieces, "updates", 1, seen.updates)
        if seen.offset_reads[0] < 1:
            self._layers_differ(record, pieces, "reads of the offset", 1, seen.offset_reads)
        if seen.attends[0] < 1:
            self._layers_differ(record, pieces, "attention calls", 1, seen.attends)
        if seen.strangers:
            self._layers_differ(
                record, pieces, "uses of another step's metadata", 0, (seen.strangers,) * 2
            )

    def _layers_differ(
        self, record: StepDone, pieces: Pieces, name: str, wanted: int, saw: tuple[int, int]
    ) -> NoReturn:
        if saw[0] == saw[1]:
            self._differs(record, pieces, -1, name, wanted, saw[0], "every layer")
        what = f"some layers saw {saw[0]} {name} and others {saw[1]}, where {wanted} is right"
        self._raise(record, pieces, -1, what, (Values(name, None, wanted, saw),), "some layers")

    def _piece_differs(
        self, record: StepDone, pieces: Pieces, piece: int, name: str, wanted: Value, saw: Value
    ) -> NoReturn:
        group = -1
        if isinstance(wanted, tuple) and isinstance(saw, tuple):
            if len(wanted) != len(saw):
                self._differs(record, pieces, piece, "groups", len(wanted), len(saw), "")
            group = next(
                g for g, pair in enumerate(zip(wanted, saw, strict=True)) if pair[0] != pair[1]
            )
            wanted, saw = wanted[group], saw[group]
        self._differs(record, pieces, piece, name, wanted, saw, "every layer", group)

    def _differs(
        self,
        record: StepDone,
        pieces: Pieces,
        piece: int,
        name: str,
        wanted: Value,
        saw: Value,
        layer: str,
        group: int = -1,
    ) -> NoReturn:
        whose = f"sequence {pieces.seqs[piece]}: " if piece >= 0 else ""
        if name == "table":
            what = f"{whose}the caches read another block table than the sequence has"
        else:
            what = f"{whose}the caches saw {name} {saw}, where the state has {wanted}"
        values: tuple[Values, ...] = (Values(name, None, wanted, saw),)
        if piece >= 0:
            values = self._piece_values(record, pieces, piece)
        self._raise(record, pieces, piece, what, values, layer, group)

    def _piece_values(self, record: StepDone, pieces: Pieces, piece: int) -> tuple[Values, ...]:
        """Offset, visible rows and tables of one piece, as recorded, derived and observed."""
        seen, sequence, end = record.observation, pieces.sequences[piece], pieces.ends[piece]
        start = end - pieces.rows[piece]
        saw = _at(seen.starts, piece)
        rows = _at(seen.rows, piece)
        values = [
            Values("offset before the step", start, start, saw),
            Values("rows of the piece", pieces.rows[piece], pieces.rows[piece], rows),
        ]
        visible = self._visible(pieces, pieces.ends)[piece]
        for group in range(len(self._geometry.groups)):
            seen_visible = _at(_at(seen.visible, piece) or (), group)
            values.append(
                Values(f"visible rows (group {group})", None, visible[group], seen_visible)
            )
            table = sequence.tables[group] if self._geometry.groups[group].paged else ()
            values.append(Values(f"table (group {group})", None, table, None))
            seen_hash = _at(_at(seen.tables, piece) or (), group)
            derived = table_hash(table) if table else 0
            values.append(
                Values(f"hash of the table (group {group})", None, f"{derived:016x}",
                       None if seen_hash is None else f"{seen_hash:016x}")
            )  # fmt: skip
        return tuple(values)

    def _content(self, record: StepDone, pieces: Pieces) -> None:
        findings = record.shadow.findings
        if self._only is not None:
            findings = tuple(it for it in findings if it.seq == self._only)
            if not findings:
                return
        if not findings:
            what = f"{record.shadow.found} rows in the pages are not their sequences'"
            self._raise(record, pieces, -1, what, (), "", kind=CONTENT)
        it = findings[0]
        piece = pieces.seqs.index(it.seq) if it.seq in pieces.seqs else -1
        what = (
            f"sequence {it.seq}: position {it.position} in block {it.block} of group {it.group} "
            f"holds {tag_text(it.found)}, not {tag_text(it.expected)}"
        )
        values: tuple[Values, ...] = (
            Values("tag of the row", None, f"{it.expected:016x}", f"{it.found:016x}"),
            Values("rows found wrong in this step", None, 0, record.shadow.found),
        )
        if piece >= 0:
            values += self._piece_values(record, pieces, piece)
        self._raise(
            record,
            pieces,
            piece,
            what,
            values,
            "",
            it.group,
            CONTENT,
            it.position,
            it.seq,
            it.block,
        )

    def _raise(
        self,
        record: StepDone,
        pieces: Pieces,
        piece: int,
        what: str,
        values: tuple[Values, ...],
        layer: str,
        group: int = -1,
        kind: str = OBSERVATION,
        position: int = -1,
        seq: int = -1,
        block: int = -1,
    ) -> NoReturn:
        seq = pieces.seqs[piece] if piece >= 0 else seq
        index = pieces.event_of(piece) if piece >= 0 else -1
        event = "" if index < 0 else text_for(pieces.events[index], seq)
        raise Diverged(
            Divergence(
                kind=kind,
                step=record.step,
                summary=what,
                event_index=index,
                record="StepDone" if index < 0 else "StepPlanned",
                event=event,
                sequence=seq,
                group=group,
                block=block,
                layer=layer,
                position=position,
                values=values,
                last_events=self._history.of(seq) if seq >= 0 else (),
                neighbours=pieces.neighbours(),
            )
        )


def table_hash(table: tuple[int, ...]) -> int:
    """xxh3_64 of block ids as int32, little-endian: how a table stands on tape (records.py)."""
    return xxh3_64_intdigest(struct.pack(f"<{len(table)}i", *table))


def _are_pieces(numbers: tuple[int, ...], rows: list[int]) -> bool:
    """Whether these are numbers of pieces in order, none more often than the piece has rows."""
    count = len(rows)
    if numbers == tuple(range(count)):
        return True
    ordered = all(at <= to for at, to in pairwise((0, *numbers, count - 1)))
    return ordered and all(times <= rows[at] for at, times in Counter(numbers).items())


def tag_text(tag: int) -> str:
    """A row's tag in words."""
    return {0: "a row that was never written", 1: "a pad row"}.get(tag, f"the row {tag:016x}")


def _at(column: tuple[_T, ...] | list[_T], place: int) -> _T | None:
    return column[place] if 0 <= place < len(column) else None
