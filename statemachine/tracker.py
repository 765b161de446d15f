"""Tracker: what both ends of a tape know from the records so far, so that it is not written twice.

Follows, for each sequence, its *stream* (prompt tokens, then sampled ones) and its offset, and for
each planned step the pieces of its batch. The encoder and the decoder each hold one and walk it
through the same records, so that they agree; where a record differs from what is expected here, it
is written in full. This is a guess for the sake of size: it never decides whether a tape is right.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from .events import COMMITTED_AT_ONCE
from .geometry import WINDOW, Geometry, Group
from .records import Observation
from .sequence import Sequence

UNKNOWN = -1
"""Expected table hash of a sequence that was not seen yet; also the offset of a closed one."""


class Cursor:
    """One sequence: its stream, its offset, and how many rows at its end are not committed."""

    __slots__ = ("offset", "stream", "tail")

    def __init__(self, stream: list[int], offset: int = 0, tail: int = 0) -> None:
        self.stream = stream
        self.offset = offset
        self.tail = tail


class Pieces(Struct):
    """The batch of a planned step: sequence, first position and rows of each piece."""

    seqs: list[int]
    starts: list[int]
    rows: list[int]


class Tracker:
    """See the module. Methods are named after the records and events that they follow."""

    def __init__(self) -> None:
        self.groups: tuple[Group, ...] = ()
        self.steps: dict[int, Pieces] = {}
        self.counters: tuple[int, ...] = ()
        self.parts: tuple[str, ...] = ()
        self._cursors: dict[int, Cursor] = {}
        self._waiting: dict[int, list[int]] = {}
        self._tables: list[dict[int, int]] = []
        self._plan: Pieces | None = None

    def header(self, geometry: Geometry) -> None:
        """A tape or segment starts: nothing is known but the geometry."""
        self.__init__()  # type: ignore[misc]
        self.groups = geometry.groups
        self._tables = [{} for _ in geometry.groups]

    def checkpoint(
        self, streams: Iterable[tuple[int, list[int]]], sequences: Iterable[Sequence]
    ) -> None:
        """Start from a state: prompt and answer of its live requests, and its sequences."""
        self._waiting = dict(streams)
        self._cursors = {}
        self.steps = {}
        self._tables = [{} for _ in self.groups]
        for sequence in sequences:
            stream = self._waiting.pop(sequence.id, None)
            tail = sequence.offset - sequence.committed
            known = list(sequence.tokens) if stream is None else stream
            self._cursors[sequence.id] = Cursor(known, sequence.offset, tail)

    def arrived(self, request: int, tokens: tuple[int, ...]) -> None:
        self._waiting[request] = list(tokens)

    def cancelled(self, request: int) -> None:
        self._waiting.pop(request, None)

    def opened(self, seq: int) -> Cursor:
        """A new cursor; its stream is that of the request of the same id."""
        cursor = self._cursors[seq] = Cursor(self._waiting.pop(seq, []))
        return cursor

    def begin_plan(self, step: int) -> None:
        """The appends that follow, up to `end_plan`, make this step's batch."""
        self._plan = self.steps[step] = Pieces([], [], [])

    def end_plan(self) -> None:
        self._plan = None

    def cursor(self, seq: int) -> Cursor:
        return self._cursors.get(seq) or self.opened(seq)

    def next_tokens(self, seqs: tuple[int, ...]) -> tuple[int, ...]:
        """The stream's token at each sequence's offset; () where one of them is not known."""
        cursors = self._cursors
        try:
            return tuple([(it := cursors[seq]).stream[it.offset] for seq in seqs])
        except (KeyError, IndexError):
            return ()

    def appended_each(
        self, seqs: tuple[int, ...], unexpected: tuple[int, ...], purpose: str
    ) -> None:
        """One row each; `unexpected`: their tokens, where they are not the stream's."""
        cursors = [self.cursor(seq) for seq in seqs]
        if self._plan is not None:
            self._plan.seqs += seqs
            self._plan.starts += [cursor.offset for cursor in cursors]
            self._plan.rows += [1] * len(seqs)
        committed = purpose in COMMITTED_AT_ONCE
        if committed:
            for cursor, token in zip(cursors, unexpected, strict=False):
                _overwrite(cursor.stream, cursor.offset, (token,))
        for cursor in cursors:
            cursor.offset += 1
        if not committed:
            for cursor in cursors:
                cursor.tail += 1

    def appended(self, seq: int, rows: int, unexpected: tuple[int, ...], purpose: str) -> None:
        cursor = self.cursor(seq)
        plan = self._plan
        if plan is not None:
            if seq in plan.seqs:
                plan.rows[plan.seqs.index(seq)] += rows
            else:
                plan.seqs.append(seq)
                plan.starts.append(cursor.offset)
                plan.rows.append(rows)
        if purpose not in COMMITTED_AT_ONCE:
            cursor.tail += rows
        elif unexpected:
            _overwrite(cursor.stream, cursor.offset, unexpected)
        cursor.offset += rows

    def adopted(self, seq: int, tokens: tuple[int, ...]) -> None:
        cursor = self.cursor(seq)
        _overwrite(cursor.stream, 0, tokens)
        cursor.offset, cursor.tail = len(tokens), 0

    def committed(self, seq: int, tokens: tuple[int, ...]) -> None:
        cursor = self.cursor(seq)
        _overwrite(cursor.stream, cursor.offset - cursor.tail, tokens)
        cursor.tail = max(0, cursor.tail - len(tokens))

    def removed(self, seq: int, rows: int) -> None:
        """Trimmed or Rewound."""
        cursor = self.cursor(seq)
        cursor.offset = max(0, cursor.offset - rows)
        cursor.tail = max(0, cursor.tail - rows)

    def emptied(self, seq: int) -> None:
        """Reset or Preempted."""
        cursor = self.cursor(seq)
        cursor.offset = cursor.tail = 0

    def pool_reset(self) -> None:
        for cursor in self._cursors.values():
            cursor.offset = cursor.tail = 0

    def closed(self, seq: int) -> None:
        self._cursors.pop(seq, None)
        for tables in self._tables:
            tables.pop(seq, None)

    def forked(self, seq: int, child: int) -> None:
        parent = self.cursor(seq)
        self._cursors[child] = Cursor(list(parent.stream), parent.offset, parent.tail)

    def sampled(self, pieces: Pieces, numbers: Iterable[int], tokens: tuple[int, ...]) -> None:
        """Sampled tokens join the streams of their pieces' sequences."""
        cursors, seqs = self._cursors, pieces.seqs
        for number, token in zip(numbers, tokens, strict=False):
            cursor = cursors.get(seqs[number]) if 0 <= number < len(seqs) else None
            if cursor is not None:
                cursor.stream.append(token)

    def expected_visible(self, group: int, ends: list[int]) -> list[int]:
        """Visible rows of a piece that ends at each of `ends`, where no window start was moved."""
        spec = self.groups[group]
        if spec.kind != WINDOW:
            return ends
        window, sink = spec.window, spec.sink
        return [end if end <= window else window + min(sink, end - window) for end in ends]

    def expected_tables(self, group: int, pieces: Pieces) -> list[int]:
        """The hash of each piece's table as it was last read."""
        known = self._tables[group]
        return [known.get(seq, UNKNOWN) for seq in pieces.seqs]

    def observed(self, pieces: Pieces, observation: Observation) -> None:
        """Remember what was read, for the next step."""
        for known, column in zip(self._tables, observation.tables, strict=False):
            known.update(zip(pieces.seqs, column, strict=False))

    def expected_offsets(self, pieces: Pieces) -> list[int]:
        """Each piece's offset after the closing events; a closed sequence is forgotten for good."""
        cursors = self._cursors
        offsets = [cursors[seq].offset if seq in cursors else UNKNOWN for seq in pieces.seqs]
        if UNKNOWN in offsets:
            for seq, offset in zip(pieces.seqs, offsets, strict=True):
                if offset == UNKNOWN:
                    self.closed(seq)
        return offsets


def _overwrite(stream: list[int], at: int, tokens: tuple[int, ...]) -> None:
    """Put tokens into a stream; past its end there is nothing to go by."""
    if 0 <= at <= len(stream) and stream[at : at + len(tokens)] != list(tokens):
        stream[at : at + len(tokens)] = tokens
