"""Export Mooncake: the load of a tape as a trace that load generators read.

A line a request, in order of arrival: `timestamp` (milliseconds since the first record),
`input_length`, `output_length`, and `hash_ids`: one number for each block of the prompt (512 tokens
in the published traces), the same one where all tokens up to its end are the same, which tells a
load generator what prefixes are shared. Memory grows with distinct blocks of prompts, 16 bytes of
hash each, and with requests that wait for an earlier one's end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Struct
from xxhash import xxh3_128_digest

from statemachine.records import Record, RequestArrived
from statemachine.sequence import pack

from .clock import Clock
from .endings import LIVE, Endings
from .export import Options


class Line(Struct):
    """One request of the trace."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


def as_mooncake(records: Iterable[Record], options: Options, notes: list[str]) -> Iterator[bytes]:
    """Lines, each written once its request and all before it ended."""
    trace = _Trace(options.block_tokens)
    endings = Endings(trace.watch(records), set())
    cut = 0
    for ending in endings:
        line = trace.lines.get(ending.arrived.request)
        if line is not None:
            line.output_length = ending.answer_tokens
            trace.ended.add(ending.arrived.request)
            cut += ending.reason == LIVE
        yield from trace.ready()
    if endings.stopped:
        notes.append(f"the export ends there: {endings.stopped}")
    if cut:
        notes.append(f"{cut} answers go on behind the tape's end: they count as far as it goes")


class _Trace:
    """Requests by arrival, until they can be written."""

    def __init__(self, block_tokens: int) -> None:
        self.lines: dict[int, Line] = {}
        self.ended: set[int] = set()
        self._size = block_tokens
        self._order: deque[int] = deque()
        self._ids: dict[bytes, int] = {}
        self._clock = Clock()

    def watch(self, records: Iterable[Record]) -> Iterator[Record]:
        """The records; arrivals are noted on the way."""
        for record in records:
            self._clock.feed(record)
            if isinstance(record, RequestArrived):
                self._arrived(record)
            yield record

    def _arrived(self, record: RequestArrived) -> None:
        self.lines[record.request] = Line(
            self._clock.now // 1000, len(record.tokens), 0, self._hash_ids(record)
        )
        self._order.append(record.request)

    def _hash_ids(self, record: RequestArrived) -> list[int]:
        space = record.namespace
        above = msgspec.msgpack.encode(space)
        found: list[int] = []
        for start in range(0, len(record.tokens), self._size):
            above = xxh3_128_digest(above + pack(record.tokens[start : start + self._size]))
            found.append(self._ids.setdefault(above, len(self._ids)))
        return found

    def ready(self) -> Iterator[bytes]:
        """Lines of requests before which none is live."""
        while self._order and self._order[0] in self.ended:
            request = self._order.popleft()
            self.ended.discard(request)
            yield msgspec.json.encode(self.lines.pop(request)) + b"\n"
