"""Endings: the requests of a tape as they end, each with all that was sampled for it.

Names a request so that the same one of another run has the same name: by its external id where
both runs have it, else by its prompt, parameters (a seed where it decides) and namespace; of
several alike, by which one in order of arrival it is. Memory grows with the requests that are live
at once, and 8 bytes a request. Compares nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Set

import msgspec
from attrs import frozen
from msgspec import structs
from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from statemachine import events as ev
from statemachine.records import (
    Checkpoint,
    Gap,
    Parameters,
    Record,
    RequestArrived,
    RequestCancelled,
    StepDone,
    StepFailed,
    StepPlanned,
)

from .answers import Answer, Sampled
from .following import Following
from .tally import answer_tokens, require_columns

Name = tuple[str, int, int]
"""Whether by "id" or by "content", a hash of that, and which one of those alike it is."""

NOT_ADMITTED = -1
LIVE = "live"
"""The reason of a request that did not end on the tape."""


@frozen
class Ending:
    """A request and its answer. samples: of this tape, an end token included; before: the answer
    tokens that a checkpoint told. cached_tokens: prompt rows that it found computed; NOT_ADMITTED
    where it was not, or before the tape's start. step: the last one planned when it ended.
    """

    name: Name
    arrived: RequestArrived
    before: tuple[int, ...]
    samples: tuple[Sampled, ...]
    answer_tokens: int
    cached_tokens: int
    reason: str
    step: int


def external_ids(records: Iterable[Record]) -> set[int]:
    """Hashes of the external ids on a tape."""
    found: set[int] = set()
    for record in records:
        for arrived in _arrivals(record):
            if arrived.external_id:
                found.add(_hash(arrived.external_id))
    return found


def _arrivals(record: Record) -> tuple[RequestArrived, ...]:
    if isinstance(record, RequestArrived):
        return (record,)
    if isinstance(record, Checkpoint):
        return tuple(held.arrived for held in record.requests)
    return ()


def _hash(text: str) -> int:
    return xxh3_64_intdigest(text.encode(errors="surrogatepass"))


class Names:
    """Names of a tape's requests, by request id; `shared`: external ids that both runs have."""

    def __init__(self, shared: Set[int]) -> None:
        self._shared = shared
        self._alike = Counter[tuple[str, int]]()
        self.live: dict[int, Name] = {}

    def feed(self, record: Record) -> None:
        """Requests that arrive, or that a checkpoint tells."""
        for arrived in _arrivals(record):
            if arrived.request not in self.live:
                self.live[arrived.request] = self._name(arrived)

    def _name(self, arrived: RequestArrived) -> Name:
        digest = _hash(arrived.external_id)
        alike = ("id", digest)
        if not arrived.external_id or digest not in self._shared:
            content = arrived.tokens, asked_for(arrived), arrived.namespace
            alike = ("content", xxh3_128_intdigest(msgspec.msgpack.encode(content)))
        self._alike[alike] += 1
        return (*alike, self._alike[alike])


def asked_for(arrived: RequestArrived) -> Parameters:
    """What decides about an answer: where nothing is drawn, a seed does not."""
    parameters = arrived.parameters
    drawn = parameters.temperature > 0 and parameters.top_k != 1
    return parameters if drawn else structs.replace(parameters, seed=0)


class Endings:
    """Iterate once. `stopped`: why the tape could not be followed to its end; "" where it was."""

    def __init__(self, records: Iterable[Record] = (), shared: Set[int] = frozenset()) -> None:
        self._records = records
        self._names = Names(shared)
        self._following = Following()
        self._cached: dict[int, int] = {}

    @property
    def stopped(self) -> str:
        return self._following.broken

    def __iter__(self) -> Iterator[Ending]:
        """Requests in the order of their ends, those that are live at the tape's end last."""
        for record in self._records:
            yield from self.feed(record)
            if self.stopped:
                break
        yield from self.rest()

    def rest(self) -> Iterator[Ending]:
        """Requests that are live behind the last record."""
        for answer in tuple(self._following.answers.live.values()):
            yield self._ending(answer, LIVE)

    def feed(self, record: Record) -> Iterator[Ending]:
        """One record on, for who has to go record by record: the requests that it ends."""
        live = self._following.answers.live
        self._names.feed(record)
        closed: list[tuple[str, Answer]] = []
        if isinstance(record, StepDone):
            require_columns(record)
        elif isinstance(record, RequestCancelled) and record.request in live:
            # Nothing is sampled for it any more, whatever closes its sequence.
            closed.append((record.reason, live[record.request]))
        elif isinstance(record, Checkpoint):
            for held in record.requests:
                if held.cached_tokens >= 0:
                    self._cached.setdefault(held.arrived.request, held.cached_tokens)
        if isinstance(record, StepPlanned | StepDone | StepFailed):
            for event in record.events:
                self._admitted(event)
                if isinstance(event, ev.Closed) and event.seq in live:
                    closed.append((event.reason, live[event.seq]))
        self._following.feed(record)
        if self.stopped:
            return
        if isinstance(record, Gap):
            live.clear()
            self._cached.clear()
        for reason, answer in closed:
            yield self._ending(answer, reason)

    def _admitted(self, event: ev.Event) -> None:
        """Rows that a request found computed, at its first admission."""
        cached = self._cached
        if isinstance(event, ev.PrefixAdopted):
            cached.setdefault(event.seq, len(event.tokens))
        elif isinstance(event, ev.Forked):
            cached.setdefault(event.child, cached.get(event.seq, 0))
        elif isinstance(event, ev.Appended) and event.purpose == ev.PROMPT:
            cached.setdefault(event.seq, 0)

    def _ending(self, answer: Answer, reason: str) -> Ending:
        request = answer.arrived.request
        self._following.answers.live.pop(request, None)
        return Ending(
            name=self._names.live.pop(request),
            arrived=answer.arrived,
            before=answer.before,
            samples=tuple(answer.samples),
            answer_tokens=answer_tokens(answer),
            cached_tokens=self._cached.pop(request, NOT_ADMITTED),
            reason=reason,
            step=self._following.step,
        )
