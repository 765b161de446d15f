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
from .geometry import Geometry, Group
from .sequence import Sequence

UNKNOWN = -1
"""Expected table hash of a sequence that was not seen yet; also the offset of a closed one."""


class Cursor(Struct):
    """One sequence: its stream, its offset (UNKNOWN once it is closed), how many rows at its end
    are not committed, and the hash of each group's table as it was last read.
    """

    stream: list[int]
    tables: list[int]
    offset: int = 0
    tail: int = 0


class Pieces(Struct):
    """The batch of a planned step: sequence, first position and rows of each piece."""

    seqs: list[int]
    cursors: list[Cursor]
    starts: list[int]
    rows: list[int]


class Tracker:
    """See the module. Methods are named after the records and events that they follow.

    draft: the same of the draft model's pool, where there is one.
    """

    def __init__(self) -> None:
        self.groups: tuple[Group, ...] = ()
        self.steps: dict[int, Pieces] = {}
        self.counters: tuple[int, ...] = ()
        self.parts: tuple[str, ...] = ()
        self._cursors: dict[int, Cursor] = {}
        self._waiting: dict[int, tuple[int, ...]] = {}
        """Streams of requests that were not opened yet: nothing is added to these, so none is
        copied, however many wait."""
        self._plan: Pieces | None = None
        self.draft: Tracker | None = None

    def header(self, geometry: Geometry, draft: Geometry | None = None) -> None:
        """A tape or segment starts: nothing is known but the geometries."""
        self.__init__()  # type: ignore[misc]
        self.groups = geometry.groups
        if draft is not None:
            self.draft = Tracker()
            self.draft.header(draft)

    def checkpoint(
        self, streams: Iterable[tuple[int, tuple[int, ...]]], sequences: Iterable[Sequence]
    ) -> None:
        """Start from a state: prompt and answer of its live requests, and its sequences."""
        self._waiting = dict(streams)
        self._cursors = {}
        self.steps, self.counters, self.parts = {}, (), ()
        for sequence in sequences:
            stream = self._waiting.pop(sequence.id, None)
            tail = sequence.offset - sequence.committed
            known = sequence.tokens if stream is None else stream
            self._cursors[sequence.id] = self._new(list(known), sequence.offset, tail)

    def arrived(self, request: int, tokens: tuple[int, ...]) -> None:
        self._waiting[request] = tokens
        if self.draft is not None:
            self.draft.arrived(request, tokens)

    def cancelled(self, request: int) -> None:
        self._waiting.pop(request, None)
        if self.draft is not None:
            self.draft.cancelled(request)

    def opened(self, seq: int) -> Cursor:
        """A new cursor; its stream is that of the request of the same id."""
        cursor = self._cursors[seq] = self._new(list(self._waiting.pop(seq, ())))
        return cursor

    def _new(self, stream: list[int], offset: int = 0, tail: int = 0) -> Cursor:
        return Cursor(stream, [UNKNOWN] * len(self.groups), offset, tail)

    def begin_plan(self, step: int) -> None:
        """The appends that follow, up to `end_plan`, make this step's batch."""
        self._plan = self.steps[step] = Pieces([], [], [], [])

    def end_plan(self) -> None:
        self._plan = None

    def cursor(self, seq: int) -> Cursor:
        return self._cursors.get(seq) or self.opened(seq)

    def cursors(self, seqs: tuple[int, ...]) -> list[Cursor]:
        known = self._cursors
        try:
            return [known[seq] for seq in seqs]
        except KeyError:
            return [self.cursor(seq) for seq in seqs]

    def next_tokens(self, cursors: list[Cursor]) -> tuple[int, ...]:
        """The stream's token at each offset; () where one of them is not known."""
        try:
            return tuple([cursor.stream[cursor.offset] for cursor in cursors])
        except IndexError:
            return ()

    def uncommitted_tokens(self, cursors: list[Cursor]) -> tuple[int, ...]:
        """The stream's token after each one's committed rows; () where one is not known."""
        places = [cursor.offset - cursor.tail for cursor in cursors]
        if min(places, default=0) < 0:
            return ()
        try:
            pairs = zip(cursors, places, strict=True)
            return tuple([cursor.stream[place] for cursor, place in pairs])
        except IndexError:
            return ()

    def appended_each(
        self,
        seqs: tuple[int, ...],
        cursors: list[Cursor],
        unexpected: tuple[int, ...],
        purpose: str,
    ) -> None:
        """One row each; `unexpected`: their tokens, where they are not the stream's."""
        if self._plan is not None:
            self._plan.seqs += seqs
            self._plan.cursors += cursors
            self._plan.starts += [cursor.offset for cursor in cursors]
            self._plan.rows += [1] * len(seqs)
        if purpose in COMMITTED_AT_ONCE:
            for cursor, token in zip(cursors, unexpected, strict=False):
                _overwrite(cursor.stream, cursor.offset, (token,))
        else:
            for cursor in cursors:
                cursor.tail += 1
        for cursor in cursors:
            cursor.offset += 1

    def appended(self, seq: int, rows: int, unexpected: tuple[int, ...], purpose: str) -> None:
        cursor = self.cursor(seq)
        plan = self._plan
        if plan is not None:
            if seq in plan.seqs:
                plan.rows[plan.seqs.index(seq)] += rows
            else:
                plan.seqs.append(seq)
                plan.cursors.append(cursor)
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

    def committed_each(self, cursors: list[Cursor], unexpected: tuple[int, ...]) -> None:
        """One row each; `unexpected`: their tokens, where they are not the stream's."""
        for cursor, token in zip(cursors, unexpected, strict=False):
            _overwrite(cursor.stream, cursor.offset - cursor.tail, (token,))
        for cursor in cursors:
            cursor.tail = cursor.tail - 1 if cursor.tail > 0 else 0

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
        cursor = self._cursors.pop(seq, None)
        if cursor is not None:
            cursor.offset = UNKNOWN
        if self.draft is not None:
            self.draft.cancelled(seq)

    def forked(self, seq: int, child: int) -> None:
        parent = self.cursor(seq)
        arrived, known = self._waiting.pop(child, None), self._cursors.get(child)
        stream = known.stream if known is not None else []
        if arrived is not None:
            stream = list(arrived)
        if not stream:
            stream = list(parent.stream)
        self._cursors[child] = self._new(stream, parent.offset - parent.tail)

    def sampled(
        self, pieces: Pieces, numbers: tuple[int, ...] | None, tokens: tuple[int, ...]
    ) -> None:
        """Sampled tokens join the streams of their pieces' sequences; None: of each piece."""
        cursors = pieces.cursors
        if numbers is None:
            for cursor, token in zip(cursors, tokens, strict=False):
                cursor.stream.append(token)
            return
        for number, token in zip(numbers, tokens, strict=False):
            if 0 <= number < len(cursors):
                cursors[number].stream.append(token)

    def expected_visible(self, group: int, ends: list[int]) -> list[int]:
        """Visible rows of a piece that ends at each of `ends`, where no window start was moved."""
        spec = self.groups[group]
        if not spec.moves:
            return ends
        window, sink = spec.span, spec.sink
        return [end if end <= window else window + min(sink, end - window) for end in ends]

    def expected_tables(self, group: int, pieces: Pieces) -> list[int]:
        """The hash of each piece's table as it was last read."""
        return [cursor.tables[group] for cursor in pieces.cursors]

    def observed(self, pieces: Pieces, group: int, hashes: tuple[int, ...]) -> None:
        """Remember what was read of a group's tables, for the next step."""
        for cursor, table in zip(pieces.cursors, hashes, strict=False):
            if cursor.tables[group] != table:
                cursor.tables[group] = table

    def expected_offsets(self, pieces: Pieces) -> list[int]:
        """Each piece's offset after the closing events."""
        return [cursor.offset for cursor in pieces.cursors]


def _overwrite(stream: list[int], at: int, tokens: tuple[int, ...]) -> None:
    """Put tokens into a stream; past its end there is nothing to go by."""
    if 0 <= at <= len(stream) and stream[at : at + len(tokens)] != list(tokens):
        stream[at : at + len(tokens)] = tokens
