"""Export Perfetto: a tape as a trace in the JSON format of Chrome's trace viewer.

For ui.perfetto.dev and chrome://tracing: a lane a request (queued, prompt, answer, with its
preemptions and rewinds), two lanes of steps with their parts (two, for a step begins before the one
before it ended), and counters for rows of the batch, blocks of each pool and requests. Times are
microseconds by the steps (clock.py). Format: "Trace Event Format", Google, 2016: events B, E, X, i,
C and M.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from statemachine import events as ev
from statemachine.records import (
    Header,
    Record,
    RequestArrived,
    RequestCancelled,
    StepDone,
    StepFailed,
    StepPlanned,
    StepTimed,
)

from .clock import Clock
from .export import Options
from .following import Following

REQUESTS, STEPS = 1, 2
"""Processes of the trace."""
QUEUED, PROMPT, ANSWER = "queued", "prompt", "answer"

Item = dict[str, Any]

_BASE: Item = {"cat": "mlxtape"}
"""Some readers want a category of every event."""


def as_perfetto(records: Iterable[Record], options: Options, notes: list[str]) -> Iterator[bytes]:
    """The file in pieces: one JSON object with a list of events."""
    trace, encoder = _Trace(), msgspec.json.Encoder()
    yield b'{"displayTimeUnit":"ms","traceEvents":[\n'
    between = b""
    for record in records:
        for item in trace.feed(record):
            yield between + encoder.encode(item)
            between = b",\n"
        if trace.following.broken:
            notes.append(f"the trace ends there: {trace.following.broken}")
            break
    for item in trace.finish():
        yield between + encoder.encode(item)
        between = b",\n"
    yield b"\n]}\n"
    if not trace.timed:
        notes.append("the tape has no step times: each step is drawn as 1 ms")


class _Trace:
    """Follows a tape. An answer is drawn once it is known how long its step took."""

    def __init__(self) -> None:
        self.following = Following()
        self.timed = False
        self._clock = Clock()
        self._phases: dict[int, str] = {}
        self._held: StepDone | StepFailed | None = None
        self._parts: dict[str, int] = {}

    def feed(self, record: Record) -> Iterator[Item]:
        """Events of the trace, in order of time in each lane."""
        if isinstance(record, StepTimed):
            self.timed, self._parts = True, record.parts_us
        else:
            yield from self._answered()
        held = isinstance(record, StepDone | StepFailed)
        start = self._clock.start(record.step) if isinstance(record, StepTimed) else 0
        self._clock.feed(record)
        if isinstance(record, StepTimed):
            yield from self._step(record, start)
            yield from self._answered()
            return
        if held:
            assert isinstance(record, StepDone | StepFailed)
            self._held = record
        before = self.following.state if self.following.header is not None else None
        self.following.feed(record)
        if self.following.broken:
            return
        if isinstance(record, Header) and before is None:
            yield from self._names(record)
        elif isinstance(record, RequestArrived):
            yield from self._arrived(record)
        elif isinstance(record, RequestCancelled):
            yield from self._mark(record.request, f"cancelled: {record.reason}")
            if record.request not in self.following.state.sequences:
                yield from self._phase(record.request, "")
        elif isinstance(record, StepPlanned):
            yield from self._planned(record)

    def finish(self) -> Iterator[Item]:
        """What is still open ends with the tape."""
        yield from self._answered()
        for request in tuple(self._phases):
            yield from self._phase(request, "")

    def _names(self, record: Header) -> Iterator[Item]:
        yield _meta("process_name", REQUESTS, 0, f"requests of {record.model}")
        yield _meta("process_name", STEPS, 0, "steps")
        for lane in (0, 1):
            yield _meta("thread_name", STEPS, lane + 1, ("even steps", "odd steps")[lane])

    def _arrived(self, record: RequestArrived) -> Iterator[Item]:
        name = f"request {record.request}"
        if record.external_id:
            name += f" ({record.external_id})"
        yield _meta("thread_name", REQUESTS, record.request + 1, name)
        yield from self._phase(record.request, QUEUED, {"prompt tokens": len(record.tokens)})

    def _phase(self, request: int, name: str, about: Item | None = None) -> Iterator[Item]:
        """A lane goes on with another slice; "" ends it."""
        if self._phases.get(request, "") == name:
            return
        if request in self._phases:
            yield self._item("E", REQUESTS, request + 1, {"name": self._phases.pop(request)})
        if name:
            self._phases[request] = name
            yield self._item("B", REQUESTS, request + 1, {"name": name, "args": about or {}})

    def _mark(self, request: int, text: str) -> Iterator[Item]:
        yield self._item("i", REQUESTS, request + 1, {"name": text, "s": "t"})

    def _item(self, kind: str, process: int, lane: int, more: Item) -> Item:
        return {**_BASE, "ph": kind, "pid": process, "tid": lane, "ts": self._clock.now, **more}

    def _planned(self, record: StepPlanned) -> Iterator[Item]:
        rows = dict.fromkeys(ev.PURPOSES, 0)
        for event in record.events:
            if isinstance(event, ev.Appended):
                rows[event.purpose] = rows.get(event.purpose, 0) + event.rows
                if event.purpose == ev.PROMPT:
                    yield from self._phase(event.seq, PROMPT, {"step": record.step})
                elif event.purpose != ev.PAD:
                    yield from self._phase(event.seq, ANSWER, {"step": record.step})
            elif isinstance(event, ev.AppendedEach):
                rows[event.purpose] = rows.get(event.purpose, 0) + len(event.seqs)
                for seq in event.seqs:
                    yield from self._phase(seq, ANSWER, {"step": record.step})
            elif isinstance(event, ev.PrefixAdopted):
                yield from self._mark(event.seq, f"{len(event.tokens)} rows found computed")
            else:
                yield from self._moved(event)
        yield self._item("C", STEPS, 0, {"name": "rows", "args": rows})
        yield from self._pools()

    def _pools(self) -> Iterator[Item]:
        state = self.following.state
        for group in state.paged_groups():
            blocks = {"held": state.held_blocks(group), "cached": state.cached_blocks(group)}
            yield self._item("C", STEPS, 0, {"name": f"blocks, group {group}", "args": blocks})
        waiting = sum(phase == QUEUED for phase in self._phases.values())
        told = {"running": len(self._phases) - waiting, "waiting": waiting}
        yield self._item("C", STEPS, 0, {"name": "requests", "args": told})

    def _moved(self, event: ev.Event) -> Iterator[Item]:
        """What ends a slice, or stands in one."""
        if isinstance(event, ev.Closed):
            yield from self._mark(event.seq, f"ended by {event.reason}")
            yield from self._phase(event.seq, "")
        elif isinstance(event, ev.Preempted):
            yield from self._mark(event.seq, "preempted")
            yield from self._phase(event.seq, QUEUED)
        elif isinstance(event, ev.PoolReset):
            for request in tuple(self._phases):
                yield from self._mark(request, "the pages were lost")
                yield from self._phase(request, QUEUED)
        elif isinstance(event, ev.Rewound):
            yield from self._mark(event.seq, f"{event.rows} rows taken back")

    def _step(self, record: StepTimed, start: int) -> Iterator[Item]:
        """A step's slice with its parts in it."""
        lane = record.step % 2 + 1
        whole = max(0, sum(record.parts_us.values()))
        named = {**_BASE, "ph": "X", "pid": STEPS, "tid": lane}
        yield {**named, "ts": start, "dur": whole, "name": f"step {record.step}"}
        for part, spent in record.parts_us.items():
            yield {**named, "ts": start, "dur": max(0, spent), "name": part}
            start += max(0, spent)

    def _answered(self) -> Iterator[Item]:
        """The answer that was held back, now that its time is known."""
        record, self._held = self._held, None
        if record is None:
            return
        self._clock.settle()
        if isinstance(record, StepFailed):
            text = f"step {record.step} failed at {record.stage}: {record.error}"
            yield self._item("i", STEPS, record.step % 2 + 1, {"name": text, "s": "p"})
        for event in record.events:
            yield from self._moved(event)


def _meta(what: str, process: int, lane: int, name: str) -> Item:
    return {
        **_BASE,
        "ph": "M",
        "ts": 0,
        "pid": process,
        "tid": lane,
        "name": what,
        "args": {"name": name},
    }
