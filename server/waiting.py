"""Waiting: the queue's order, as a value whose changes cost next to nothing however long it is.

Requests stand sorted: by priority where the policy goes by it, then by arrival (their ids grow). A
preempted request goes back to where it stood, so nothing that arrived later is before it. Kept in
chunks that versions share. Knows nothing of what a request needs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from operator import itemgetter

from msgspec import Struct

Place = tuple[int, int]
"""(priority, request): what the queue is sorted by."""

CHUNK = 64
"""A chunk of twice as many places is cut in two."""


class Waiting(Struct, frozen=True):
    """`chunks` of places in order, none of them empty. by_priority False: all priorities are 0."""

    by_priority: bool = False
    chunks: tuple[tuple[Place, ...], ...] = ()

    def __len__(self) -> int:
        return sum(len(chunk) for chunk in self.chunks)

    def __iter__(self) -> Iterator[int]:
        return (request for _, request in chain.from_iterable(self.chunks))

    def first(self, count: int) -> tuple[int, ...]:
        """The first `count` requests."""
        return tuple(islice(self, count))

    def add(self, request: int, priority: int) -> Waiting:
        """The queue with a request in its place."""
        place = (priority if self.by_priority else 0, request)
        if not self.chunks:
            return Waiting(self.by_priority, ((place,),))
        number = max(0, self._chunk_of(place))
        chunk = self.chunks[number]
        at = bisect_left(chunk, place)
        grown = (*chunk[:at], place, *chunk[at:])
        if len(grown) < 2 * CHUNK:
            return self._with(number, (grown,))
        return self._with(number, (grown[:CHUNK], grown[CHUNK:]))

    def remove(self, request: int, priority: int) -> Waiting:
        """The queue without a request; the same queue where it is not in it."""
        place = (priority if self.by_priority else 0, request)
        number = self._chunk_of(place)
        if number < 0:
            return self
        chunk = self.chunks[number]
        at = bisect_left(chunk, place)
        if at == len(chunk) or chunk[at] != place:
            return self
        rest = chunk[:at] + chunk[at + 1 :]
        return self._with(number, (rest,) if rest else ())

    def _chunk_of(self, place: Place) -> int:
        """The last chunk that does not begin behind a place; -1 where all do."""
        return bisect_right(self.chunks, place, key=itemgetter(0)) - 1

    def _with(self, number: int, chunks: tuple[tuple[Place, ...], ...]) -> Waiting:
        kept = self.chunks
        return Waiting(self.by_priority, kept[:number] + chunks + kept[number + 1 :])


def waiting_of(places: Iterable[tuple[int, int]], by_priority: bool) -> Waiting:
    """A queue of (request, priority) pairs."""
    queue = Waiting(by_priority)
    for request, priority in places:
        queue = queue.add(request, priority)
    return queue
