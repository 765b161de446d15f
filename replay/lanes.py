"""Lanes: each request's way through a tape as spans and marks on the axis of its steps.

Goes by what the events say, without a state, so that it works behind a divergence too. A place on
the axis is the number of a planned step, counted from 0 in the order of the tape; a span is half
open. Compares nothing.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from statemachine import events as ev
from statemachine.events import DECODE, DRAFT, LOOKAHEAD, PAD, PROMPT, Event
from statemachine.records import Checkpoint, Finished, RequestArrived, RequestCancelled

PHASES = ("queued", "prefill", "decode", "preempted")
QUEUED, PREFILL, DECODING, PREEMPTED = range(len(PHASES))
WAITING = (QUEUED, PREEMPTED)
_PHASE_OF = {PROMPT: PREFILL, DECODE: DECODING, DRAFT: DECODING, LOOKAHEAD: DECODING}

MARKS = ("adopted", "rewound", "trimmed", "forked", "preempted", "reset", "cancelled", "failed")
ADOPTED, REWOUND, TRIMMED, FORKED, PREEMPTION, RESET, CANCELLED, FAILED = range(len(MARKS))

UNKNOWN = -1
LIVE = ""
LOST = "not known: records are missing here"
NAME_CHARS_MAX = 100


class Lane(Struct):
    """A request. start, end: places; end is UNKNOWN while it is live. parent: whose copy it is.

    arrived: whether its arrival is on tape, or it was there before it. adopted: rows of its first
    admission that were found in the prefix index.
    """

    number: int
    request: int
    name: str
    prompt_tokens: int
    max_tokens: int
    parent: int
    start: int
    arrived: bool = True
    phase: int = QUEUED
    since: int = 0
    end: int = UNKNOWN
    ended: str = LIVE
    adopted: int = 0
    answer_tokens: int = UNKNOWN
    preemptions: int = 0
    pads: int = 0


class Lanes:
    """Feed it inputs and events in tape order.

    spans: lane, phase, first and last place, flat. marks: lane, place, kind, rows (the other
    sequence of a fork), flat. phases: how many requests are in each now.
    """

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self.spans = array("i")
        self.marks = array("q")
        self.phases: Counter[int] = Counter()
        self._live: dict[int, Lane] = {}
        self._reasons: dict[int, str] = {}

    def checkpoint(self, record: Checkpoint, place: int) -> None:
        """The requests that live where nothing is known of before: a tape's start, or a gap."""
        for lane in list(self._live.values()):
            self._end(lane, place, LOST)
        for it in record.requests:
            self.arrived(it.arrived, place)
            lane = self._live[it.arrived.request]
            lane.arrived = False
            if it.running:
                self._turn(lane, DECODING if it.output else PREFILL, place)
            elif it.output:
                self._turn(lane, PREEMPTED, place)

    def arrived(self, record: RequestArrived, place: int) -> None:
        """A request entered the queue."""
        lane = Lane(
            number=len(self.lanes),
            request=record.request,
            name=_short(record.external_id),
            prompt_tokens=len(record.tokens),
            max_tokens=record.parameters.max_tokens,
            parent=record.parent,
            start=place,
            since=place,
        )
        self.lanes.append(lane)
        self._live[record.request] = lane
        self.phases[QUEUED] += 1

    def cancelled(self, record: RequestCancelled, place: int) -> None:
        """A client left. One that still waits is gone at once; others end with Closed."""
        lane = self._live.get(record.request)
        if lane is None:
            return
        if lane.phase == QUEUED:
            self._end(lane, place, _short(record.reason))
            return
        self._mark(record.request, place, CANCELLED)
        self._reasons[record.request] = _short(record.reason)

    def finished(self, record: Finished) -> None:
        """An end that only the engine saw; Closed follows."""
        self._reasons[record.request] = _short(record.reason)

    def failed(self, requests: tuple[int, ...], place: int) -> None:
        """Requests that a failed step is blamed on."""
        for request in requests:
            self._mark(request, place, FAILED)
            self._reasons.setdefault(request, "failed")

    def apply(self, event: Event, place: int, after: int) -> None:
        """One event of the step at `place`; what ends or turns, does at `after`."""
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event, place, after)

    def finish(self, place: int) -> None:
        """The tape is at its end; live lanes stay open."""
        for lane in self._live.values():
            self._close_span(lane, place)

    def lane_of(self, request: int) -> Lane | None:
        """The live lane of a request."""
        return self._live.get(request)

    def _turn(self, lane: Lane, phase: int, place: int) -> None:
        if lane.phase == phase:
            return
        self._close_span(lane, place)
        self.phases[lane.phase] -= 1
        self.phases[phase] += 1
        lane.phase, lane.since = phase, place

    def _close_span(self, lane: Lane, place: int) -> None:
        if place > lane.since:
            self.spans.extend((lane.number, lane.phase, lane.since, place))

    def _end(self, lane: Lane, place: int, reason: str) -> None:
        self._close_span(lane, place)
        self.phases[lane.phase] -= 1
        lane.end, lane.ended = max(place, lane.start), reason
        self._live.pop(lane.request, None)
        self._reasons.pop(lane.request, None)

    def _mark(self, seq: int, place: int, kind: int, rows: int = 0) -> None:
        lane = self._live.get(seq)
        if lane is not None:
            self.marks.extend((lane.number, place, kind, rows))

    def _appended(self, event: ev.Appended, place: int, _: int) -> None:
        lane = self._live.get(event.seq)
        if lane is None:
            return
        if event.purpose == PAD:
            lane.pads += event.rows
        else:
            self._turn(lane, _PHASE_OF.get(event.purpose, DECODING), place)

    def _each(self, event: ev.AppendedEach, place: int, _: int) -> None:
        phase, live = _PHASE_OF.get(event.purpose, DECODING), self._live
        for seq in event.seqs:
            lane = live.get(seq)
            if lane is not None and lane.phase != phase:
                self._turn(lane, phase, place)

    def _adopted(self, event: ev.PrefixAdopted, place: int, _: int) -> None:
        lane = self._live.get(event.seq)
        if lane is not None:
            lane.adopted = lane.adopted or len(event.tokens)
            self._mark(event.seq, place, ADOPTED, len(event.tokens))
            self._turn(lane, PREFILL, place)

    def _rewound(self, event: ev.Rewound, place: int, _: int) -> None:
        self._mark(event.seq, place, REWOUND, event.rows)

    def _trimmed(self, event: ev.Trimmed, place: int, _: int) -> None:
        """Pads are trimmed after each padded step: only rows beyond them are worth a mark."""
        lane = self._live.get(event.seq)
        if lane is None:
            return
        beyond = event.rows - lane.pads
        lane.pads = max(0, -beyond)
        if beyond > 0:
            self._mark(event.seq, place, TRIMMED, beyond)

    def _forked(self, event: ev.Forked, place: int, _: int) -> None:
        self._mark(event.seq, place, FORKED, event.child)
        self._mark(event.child, place, FORKED, event.seq)

    def _preempted(self, event: ev.Preempted, place: int, after: int) -> None:
        lane = self._live.get(event.seq)
        if lane is not None:
            self._preempt(lane, place, after)

    def _preempt(self, lane: Lane, place: int, after: int) -> None:
        lane.preemptions += 1
        lane.pads = 0
        self._mark(lane.request, place, PREEMPTION)
        self._turn(lane, PREEMPTED, after)

    def _reset(self, event: ev.Reset, place: int, after: int) -> None:
        lane = self._live.get(event.seq)
        if lane is not None:
            lane.pads = 0
            self._mark(event.seq, place, RESET)
            self._turn(lane, PREEMPTED, after)

    def _pool_reset(self, _: ev.PoolReset, place: int, after: int) -> None:
        for lane in self._live.values():
            if lane.phase not in WAITING:
                self._preempt(lane, place, after)

    def _closed(self, event: ev.Closed, _: int, after: int) -> None:
        lane = self._live.get(event.seq)
        if lane is not None:
            reason = self._reasons.get(event.seq) or _short(event.reason) or "closed"
            self._end(lane, after, reason)


_HANDLERS: dict[type, Callable[[Lanes, Any, int, int], None]] = {
    ev.Appended: Lanes._appended,
    ev.AppendedEach: Lanes._each,
    ev.PrefixAdopted: Lanes._adopted,
    ev.Rewound: Lanes._rewound,
    ev.Trimmed: Lanes._trimmed,
    ev.Forked: Lanes._forked,
    ev.Preempted: Lanes._preempted,
    ev.Reset: Lanes._reset,
    ev.PoolReset: Lanes._pool_reset,
    ev.Closed: Lanes._closed,
}


def _short(text: str) -> str:
    """Names and reasons come from clients: they may be of any length."""
    return text if len(text) <= NAME_CHARS_MAX else text[: NAME_CHARS_MAX - 1] + "\u2026"
