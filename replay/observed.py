"""Observed: what the caches of a forward saw, against the lengths and tables of the state.

What the caches should see is derived in statemachine/observing.py, which a running server's guard
uses too; here is what differs, in words, for a report.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import NoReturn, TypeVar

from msgspec import Struct

from statemachine.events import Event
from statemachine.geometry import Geometry
from statemachine.observing import NO_ROWS, OFF, Deriver, Seen, offsets, table_hash
from statemachine.records import StepDone
from statemachine.sequence import Sequence

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


class Pieces(Struct):
    """The batch of a step: sequences as they stood after its opening events, and their rows.

    places: by the number of pieces that were there after it, the index of the event that made them.
    ends: offset of each sequence after its rows.
    """

    seqs: list[int]
    rows: list[int]
    sequences: list[Sequence]
    places: dict[int, int]
    events: tuple[Event, ...]
    ends: list[int] = []

    def __post_init__(self) -> None:
        self.ends = offsets(self.sequences)

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
        self._deriver = Deriver(geometry)

    def compare(self, record: StepDone, pieces: Pieces) -> None:
        """Raises Diverged at the first piece that the caches saw otherwise."""
        seen = record.observation
        if not pieces.seqs:
            if seen != NO_ROWS:
                self._differs(record, pieces, -1, "rows seen", 0, len(seen.rows), "")
            return
        due = self._deriver.seen(pieces.sequences, pieces.rows, pieces.ends)
        self._compare_columns(record, pieces, due)
        self._compare_counters(record, pieces)
        if record.shadow.found:
            self._content(record, pieces)
        self._compare_checked(record, pieces, due)
        sampled = record.sampled
        if not _are_pieces(sampled, pieces.rows):
            wanted = f"some of the pieces below {len(pieces.seqs)}, in order"
            self._differs(record, pieces, -1, "samples of pieces", wanted, sampled, "")
        if not len(sampled) == len(record.tokens) == len(record.logits) == len(record.margins):
            self._differs(
                record, pieces, -1, "sampled tokens", len(sampled), len(record.tokens), ""
            )
        scored = record.scored
        if scored and not _are_pieces(scored, pieces.rows):
            wanted = f"some of the pieces below {len(pieces.seqs)}, in order"
            self._differs(record, pieces, -1, "scores of pieces", wanted, scored, "")
        if len(scored) != len(record.scores):
            self._differs(record, pieces, -1, "scores", len(scored), len(record.scores), "")

    def _compare_columns(self, record: StepDone, pieces: Pieces, due: Seen) -> None:
        seen, only = record.observation, self._only
        if (
            due.starts == seen.starts
            and due.rows == seen.rows
            and due.visible == seen.visible
            and due.tables == seen.tables
        ):
            return
        columns: tuple[tuple[str, tuple[Value, ...], tuple[Value, ...]], ...] = (
            ("start", due.starts, seen.starts),
            ("rows", due.rows, seen.rows),
            ("visible rows", due.visible, seen.visible),
            ("table", due.tables, seen.tables),
        )
        for name, derived, found in columns:
            if derived == found:
                continue
            if len(derived) != len(found):
                self._differs(record, pieces, -1, "pieces", len(derived), len(found), "")
            for piece, (wanted, saw) in enumerate(zip(derived, found, strict=True)):
                if wanted != saw and only in (None, pieces.seqs[piece]):
                    self._piece_differs(record, pieces, piece, name, wanted, saw)

    def _compare_checked(self, record: StepDone, pieces: Pieces, due: Seen) -> None:
        """The sanitizer compared as many rows as its mode asks for."""
        checked = record.shadow.checked
        wanted, exact = self._deriver.due_checks(self._sanitize, pieces.sequences, due)
        if checked < wanted or (exact and checked > wanted):
            least = "" if exact else "at least "
            what = f"{checked} rows in the pages were compared, and {least}{wanted} are due"
            values = (Values("rows compared", checked, wanted, None),)
            self._raise(record, pieces, -1, what, values, "", kind=CONTENT)

    def _compare_counters(self, record: StepDone, pieces: Pieces) -> None:
        """Each layer's cache took all rows in one update, and used this step's metadata."""
        wrong = self._deriver.wrong_use(record.observation, sum(pieces.rows))
        if wrong is not None:
            self._layers_differ(record, pieces, *wrong)

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
        visible = self._deriver.visible(pieces.ends)[piece]
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
