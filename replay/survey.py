"""Survey: one pass over a tape: where it diverges, how large it is, and which requests its
divergence could not do without.

Owns who depends on whom (a fork on its parent, an adoption on those who published its blocks) and
who may have written the rows that were found in a wrong place. Memory grows with requests and
blocks, not with steps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from attrs import define, evolve, field
from msgspec import Struct

from statemachine.events import (
    Appended,
    AppendedEach,
    BlockCopied,
    BlockEvicted,
    BlockLoaded,
    BlockPublished,
    CommittedEach,
    Event,
    Forked,
    PoolReset,
    PrefixAdopted,
)
from statemachine.records import (
    Checkpoint,
    Gap,
    Header,
    Record,
    RequestArrived,
    StepDone,
    StepFailed,
    StepPlanned,
)

from .divergence import CONTENT, FOLD, Diverged, Divergence
from .flights import BUILD, VOID
from .fold import Fold
from .judge import Judge
from .observed import Pieces
from .run import Checker, Options
from .subset import Wrong, batch_of, blocks_of

_SEQUENCE = re.compile(r"\bsequences? (\d+)")
_BLOCK = re.compile(r"\bblock (\d+) of group (\d+)")
_NAMES = ("seq", "child")


class Size(Struct, frozen=True):
    """How large a tape is: requests, planned steps, rows issued, bytes."""

    requests: int = 0
    steps: int = 0
    rows: int = 0
    bytes: int = 0


@define
class Survey:
    """What one pass found; `found` None: no divergence, and the rest is of no use.

    base: records from this one on, after the header, are all that is needed: the state begins anew
    there. named: sequences that the divergence names; near: those of its step. writers: sequences
    that held the blocks in which wrong rows were found, newest first. donors: sequences whose rows
    the event at fault shares. live: those that were open.
    """

    size: Size
    header: Header | None = None
    found: Divergence | None = None
    wrong: Wrong = field(factory=lambda: Wrong(0, 0))
    base: int = 1
    requests: frozenset[int] = frozenset()
    depends: dict[int, set[int]] = field(factory=dict)
    named: frozenset[int] = frozenset()
    near: frozenset[int] = frozenset()
    live: frozenset[int] = frozenset()
    writers: tuple[int, ...] = ()
    donors: frozenset[int] = frozenset()

    def with_dependencies(self, requests: Iterable[int]) -> frozenset[int]:
        """Requests, and all whose rows they took over."""
        found: set[int] = set()
        left = [it for it in requests if it in self.requests]
        while left:
            request = left.pop()
            if request not in found:
                found.add(request)
                left += [it for it in self.depends.get(request, ()) if it in self.requests]
        return frozenset(found)


def needed(records: Iterable[Record], base: int) -> Iterator[Record]:
    """The header, and the records from number `base` on."""
    for number, record in enumerate(records):
        if number == 0 or (number >= base and not isinstance(record, Gap)):
            yield record


def survey(
    records: Iterable[Record],
    options: Options,
    make: Callable[[Options, Fold], Checker | None],
    size_of: Callable[[], int],
) -> Survey:
    """Replay records up to their first divergence, then count the rest. size_of: bytes so far."""
    surveyor = _Surveyor(Judge(options, make))
    for record in records:
        surveyor.feed(record)
    surveyor.finish()
    done = surveyor.done
    done.size = Size(len(surveyor.requests), surveyor.steps, surveyor.rows, size_of())
    done.requests = frozenset(surveyor.requests)
    return done


class _Surveyor:
    """See `survey`."""

    def __init__(self, judge: Judge) -> None:
        self.done = Survey(Size())
        self.requests: set[int] = set()
        self.steps = self.rows = 0
        self._judge = judge
        self._number = -1
        self._lost = False
        self._lost_steps: set[int] = set()
        self._publishers: dict[tuple[int, int], int] = {}
        self._takers: dict[tuple[int, int], list[int]] = {}
        self._pieces: dict[int, Pieces] = {}
        self._last: Record | None = None

    def feed(self, record: Record) -> None:
        """One record on; behind the divergence it is only counted."""
        self._number += 1
        self._count(record)
        if self.done.found is not None:
            return
        self._last = record
        self._rebase(record)
        if isinstance(record, StepFailed) and record.stage not in (BUILD, VOID):
            self._lost_steps.add(record.step)
        try:
            self._judge.feed(record)
        except Diverged as diverged:
            self._diverged(diverged.divergence, record)
            return
        if isinstance(record, StepPlanned):
            self._pieces[record.step] = self._judge.fold.pieces[record.step]
        elif isinstance(record, StepDone | StepFailed):
            self._pieces.pop(record.step, None)
        for event in getattr(record, "events", ()):
            self._depend(event)

    def finish(self) -> None:
        """The records are at their end."""
        if self.done.found is not None or self._last is None:
            return
        try:
            self._judge.finish()
        except Diverged as diverged:
            self._diverged(diverged.divergence, self._last)

    def _count(self, record: Record) -> None:
        if isinstance(record, Header) and self.done.header is None:
            self.done.header = record
        elif isinstance(record, RequestArrived):
            self.requests.add(record.request)
        elif isinstance(record, Checkpoint) and self._number < 3:
            self.requests.update(it.arrived.request for it in record.requests)
        elif isinstance(record, StepPlanned):
            self.steps += 1
            self.rows += sum(batch_of(record.events)[1])

    def _rebase(self, record: Record) -> None:
        if isinstance(record, Gap):
            self._lost = True
        elif isinstance(record, Checkpoint) and self._lost:
            self._lost, self.done.base = False, self._number
            self.requests.update(it.arrived.request for it in record.requests)
            self.done.depends, self._publishers, self._takers = {}, {}, {}

    def _depend(self, event: Event) -> None:
        if isinstance(event, PrefixAdopted):
            donors = {self._publishers.get(place, event.seq) for place in blocks_of(event)}
            self.done.depends.setdefault(event.seq, set()).update(donors - {event.seq})
        elif isinstance(event, Forked):
            self.done.depends.setdefault(event.child, set()).add(event.seq)
        elif isinstance(event, BlockPublished | BlockLoaded):
            self._publishers[event.group, event.block] = event.seq
        elif isinstance(event, BlockEvicted):
            self._publishers.pop((event.group, event.block), None)
        elif isinstance(event, PoolReset):
            self._publishers = {}
        elif isinstance(event, Appended | BlockCopied):
            taken = blocks_of(event) if isinstance(event, Appended) else ()
            for place in taken or [(event.group, event.target)]:  # type: ignore[union-attr]
                held = self._takers.setdefault(place, [])
                held[:] = [*held[-3:], event.seq]

    def _diverged(self, found: Divergence, record: Record) -> None:
        fold, done = self._judge.fold, self.done
        at = self._number - done.base + 1
        wrong = Wrong(at, found.step, lost=frozenset(self._lost_steps))
        if isinstance(record, StepDone):
            wrong = evolve(wrong, pieces=self._pieces.get(record.step))
        digest = getattr(record, "digest", None)
        if digest is not None and "has digest" in found.summary:
            wrong = evolve(wrong, digest=digest - fold.state.digest)
        for value in found.values:
            if value.name == "rows compared":
                wrong = evolve(wrong, checked=int(str(value.recorded)) - int(str(value.derived)))
        done.found, done.wrong = found, wrong
        events = [json.loads(it) for it in _texts(found)]
        named = {found.sequence, *(int(it) for it in _SEQUENCE.findall(found.summary))}
        for event in events:
            named.update(event[name] for name in _NAMES if name in event)
        for place in _blocks(found, record):
            named.update(
                seq
                for seq, sequence in fold.state.sequences.items()
                if place[0] < len(sequence.tables) and place[1] in sequence.tables[place[0]]
            )
            named.add(self._publishers.get(place, -1))
        done.donors = self._donors(found, record)
        done.named = frozenset(named)
        done.near = frozenset(
            {it.sequence for it in found.neighbours} | set(named_in(getattr(record, "events", ())))
        )
        done.live = frozenset(fold.state.sequences.keys())
        findings = record.shadow.findings if isinstance(record, StepDone) else ()
        if findings and found.kind == CONTENT:
            first = next((it for it in findings if it.seq == found.sequence), findings[0])
            held = self._takers.get((first.group, first.block), [])
            writers = dict.fromkeys(seq for seq in reversed(held) if seq != first.seq)
            done.writers = tuple(writers)

    def _donors(self, found: Divergence, record: Record) -> frozenset[int]:
        events = getattr(record, "events", ())
        if found.kind != FOLD or not 0 <= found.event_index < len(events):
            return frozenset()
        event = events[found.event_index]
        if isinstance(event, Forked):
            return frozenset({event.seq})
        if not isinstance(event, PrefixAdopted | BlockCopied):
            return frozenset()
        # Who is found behind a block may be the sequence itself.
        donors = {self._publishers.get(place, -1) for place in blocks_of(event)}
        return frozenset(donors - {-1, event.seq})


def _texts(found: Divergence) -> list[str]:
    """All events that a divergence shows, as JSON."""
    shown: list[Any] = [found.event]
    for value in found.values:
        if value.name == "event":
            shown += [value.recorded, value.derived]
    return [it for it in shown if isinstance(it, str) and it.startswith("{")]


def _blocks(found: Divergence, record: Record) -> set[tuple[int, int]]:
    """Blocks that the event at fault, or the summary, names."""
    events = getattr(record, "events", ())
    places = {(int(group), int(block)) for block, group in _BLOCK.findall(found.summary)}
    if 0 <= found.event_index < len(events) and found.kind == FOLD:
        places.update(blocks_of(events[found.event_index]))
    return places


def named_in(events: Iterable[Event]) -> Iterator[int]:
    """All sequences that events name; -1 for an event that names none."""
    for event in events:
        if isinstance(event, AppendedEach | CommittedEach):
            yield from event.seqs
        else:
            yield getattr(event, "seq", -1)
