"""Tally: what a tape's records add up to, in one pass: requests, steps, times, and the cache.

Memory grows with the requests that are live at once, not with the tape. Compares nothing; where a
tape cannot be applied (following.py), what follows is not counted, and `broken` says why. Steps are
counted between arrival and end, for a tape has no clock beside the times of its steps.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from statemachine import events as ev
from statemachine.events import PROMPT
from statemachine.records import (
    Checkpoint,
    FlushRequested,
    Gap,
    Record,
    RequestArrived,
    RequestCancelled,
    StepDone,
    StepFailed,
    StepPlanned,
    StepTimed,
)
from statemachine.state import State

from .answers import Answer
from .cache_counts import CacheCounts
from .errors import Unusable
from .following import Following
from .spread import Spread

SLOWEST = 5
WHOLE = "whole"
"""The sum of a step's parts."""


class Slow(Struct, frozen=True):
    """A request that ended. steps: from arrival to end, of them `waited` before its first row."""

    request: int
    external_id: str
    steps: int
    waited: int
    prompt_tokens: int
    answer_tokens: int
    preempted: int
    reason: str


class _Way(Struct):
    """A live request so far; -1 where not yet, or before the tape's start."""

    arrived: int
    admitted: int = -1
    waited: int = -1
    preempted: int = 0
    lost: int = 0
    cancelled: str = ""
    answer: Answer | None = None


class Counts(Struct):
    """Plain sums over a tape; see StatReport."""

    arrived: int = 0
    carried: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    admitted: int = 0
    prompt_rows: int = 0
    adopted_rows: int = 0
    hits: int = 0
    forked: int = 0
    forked_rows: int = 0
    flushes: int = 0
    preemptions: int = 0
    pool_resets: int = 0
    planned: int = 0
    answered: int = 0
    running_most: int = 0
    waiting_most: int = 0
    gaps: int = 0
    lost_records: int = 0


class Tally:
    """Feed it a tape's records in order; all figures stand in its fields."""

    def __init__(self) -> None:
        self.following = Following()
        self.counts = Counts()
        self.cache = CacheCounts()
        self.ended = Counter[str]()
        self.failed = Counter[str]()
        self.waited = Spread()
        self.lasted = Spread()
        self.times: dict[str, Spread] = {}
        self._slow: list[tuple[int, int, Slow]] = []
        self._ways: dict[int, _Way] = {}
        self._running: set[int] = set()
        self._start = True

    @property
    def broken(self) -> str:
        """Why nothing is counted from some record on; "" where all was."""
        return self.following.broken

    @property
    def live(self) -> int:
        """Requests that did not end yet."""
        return len(self._ways)

    @property
    def slowest(self) -> tuple[Slow, ...]:
        """The requests that took the most steps, slowest first."""
        return tuple(slow for _, _, slow in sorted(self._slow, reverse=True))

    def feed(self, record: Record) -> None:
        """One record on. Raises Unusable where the tape's start makes no sense."""
        if self.broken:
            return
        live = self.following.answers.live
        if isinstance(record, StepDone):
            require_columns(record)
        if isinstance(record, RequestCancelled):
            self._cancelled(record, live.get(record.request))
        if isinstance(record, StepPlanned | StepDone | StepFailed):
            self._step(record, live)
            return
        self.following.feed(record)
        handler = _RECORDS.get(type(record))
        if handler is not None:
            handler(self, record)

    def _step(self, record: StepPlanned | StepDone | StepFailed, live: dict[int, Answer]) -> None:
        """A record with events."""
        closing = [event for event in record.events if isinstance(event, ev.Closed)]
        answers = [live.get(event.seq) for event in closing]
        before = self.following.state
        self.following.feed(record)
        if self.broken:
            return
        for event in record.events:
            handler = _EVENTS.get(type(event))
            if handler is not None:
                handler(self, before, record.step, event)
        self.cache.count(before, record.step, record.events)
        if isinstance(record, StepPlanned):
            self._planned(record)
        elif isinstance(record, StepDone):
            self.counts.answered += 1
        else:
            self.failed[record.stage] += 1
        for event, answer in zip(closing, answers, strict=True):
            self._end(event.seq, event.reason, answer)

    def _checkpoint(self, record: Checkpoint) -> None:
        """The requests that were live when the tape began, or went on after a gap."""
        if not self._start:
            return
        self._start = False
        for held in record.requests:
            self.counts.carried += 1
            self._ways[held.arrived.request] = _Way(-1, 0 if held.cached_tokens >= 0 else -1)
        self._running = {held.arrived.request for held in record.requests if held.running}

    def _arrived(self, record: RequestArrived) -> None:
        self.counts.arrived += 1
        self.counts.prompt_tokens += len(record.tokens)
        self._ways[record.request] = _Way(self.following.step)
        waiting = len(self._ways) - len(self._running)
        self.counts.waiting_most = max(self.counts.waiting_most, waiting)

    def _cancelled(self, record: RequestCancelled, answer: Answer | None) -> None:
        """It ends now, or with the plan that closes its sequence."""
        way = self._ways.get(record.request)
        if way is None:
            return
        way.cancelled, way.answer = record.reason, answer
        if record.request not in self.following.state.sequences:
            self._end(record.request, record.reason, answer)

    def _flushed(self, record: FlushRequested) -> None:
        self.counts.flushes += 1

    def _gap(self, record: Gap) -> None:
        """What was live is of no known end."""
        self.counts.gaps += 1
        self.counts.lost_records += record.records
        self._ways.clear()
        self._running.clear()
        self.following.answers.live.clear()
        self._start = True

    def _timed(self, record: StepTimed) -> None:
        for part, spent in record.parts_us.items():
            self.times.setdefault(part, Spread()).add(max(0, spent))
        whole = sum(record.parts_us.values())
        self.times.setdefault(WHOLE, Spread()).add(max(0, whole))

    def _planned(self, record: StepPlanned) -> None:
        counts, self._start = self.counts, False
        counts.planned += 1
        pieces = self.following.flights.get(record.step)
        if pieces is not None:
            self.cache.issued(pieces)
            for seq, start, count in zip(pieces.seqs, pieces.starts, pieces.rows, strict=True):
                way = self._ways.get(seq)
                if way is not None and start < way.lost:
                    self.cache.rows.again += min(way.lost, start + count) - start
        self.cache.look_at_pool(self.following.state, record.step)
        counts.running_most = max(counts.running_most, len(self._running))
        counts.waiting_most = max(counts.waiting_most, len(self._ways) - len(self._running))

    def _admit(self, seq: int, step: int, rows: int) -> None:
        """A request's first rows, or the first after it was preempted."""
        self._running.add(seq)
        way = self._ways.get(seq)
        if way is None or way.admitted >= 0:
            if way is not None:
                way.admitted = step
            return
        way.admitted = step
        if way.arrived < 0:
            return
        way.waited = step - way.arrived - 1
        self.waited.add(way.waited)
        answer = self.following.answers.live.get(seq)
        if rows < 0 or answer is None:
            return
        self.counts.admitted += 1
        self.counts.prompt_rows += len(answer.arrived.tokens)
        self.counts.adopted_rows += rows
        self.counts.hits += rows > 0

    def _adopted(self, _: State, step: int, event: ev.PrefixAdopted) -> None:
        self._admit(event.seq, step, len(event.tokens))

    def _forked(self, before: State, step: int, event: ev.Forked) -> None:
        self.counts.forked += 1
        parent = before.sequences.get(event.seq)
        self.counts.forked_rows += 0 if parent is None else parent.committed
        self._admit(event.child, step, -1)

    def _appended(self, before: State, step: int, event: ev.Appended) -> None:
        """A request that finds nothing computed before starts with its first prompt rows."""
        if event.purpose != PROMPT:
            return
        sequence, way = before.sequences.get(event.seq), self._ways.get(event.seq)
        fresh = sequence is None or not sequence.offset
        if fresh and way is not None and way.admitted < step:
            self._admit(event.seq, step, 0)

    def _preempted(self, before: State, step: int, event: ev.Preempted) -> None:
        self.counts.preemptions += 1
        self._lose(before, event.seq)

    def _lose(self, before: State, seq: int) -> None:
        """A sequence is emptied, and its request waits again."""
        way, sequence = self._ways.get(seq), before.sequences.get(seq)
        if way is None or sequence is None or not sequence.offset:
            return
        way.preempted += 1
        way.lost = max(way.lost, sequence.committed)
        self._running.discard(seq)

    def _pool_reset(self, before: State, step: int, event: ev.PoolReset) -> None:
        self.counts.pool_resets += 1
        for seq in before.sequences:
            self._lose(before, seq)

    def _closed(self, before: State, step: int, event: ev.Closed) -> None:
        self._running.discard(event.seq)

    def _end(self, seq: int, reason: str, answer: Answer | None) -> None:
        way = self._ways.pop(seq, None)
        if way is None:
            return
        reason, answer = way.cancelled or reason, answer or way.answer
        self.ended[reason] += 1
        tokens = 0 if answer is None else answer_tokens(answer)
        self.counts.answer_tokens += tokens
        if way.arrived < 0 or answer is None:
            return
        steps = self.following.step - way.arrived
        self.lasted.add(steps)
        slow = Slow(
            seq,
            answer.arrived.external_id,
            steps,
            max(way.waited, 0),
            len(answer.arrived.tokens),
            tokens,
            way.preempted,
            reason,
        )
        # Of several with as many steps the first one stays.
        heapq.heappush(self._slow, (steps, -seq, slow))
        if len(self._slow) > SLOWEST:
            heapq.heappop(self._slow)


def answer_tokens(answer: Answer) -> int:
    """Tokens of an answer so far; an end token is none of it, nor what an embedding ends with."""
    if answer.arrived.parameters.embed:
        return 0
    samples = answer.samples
    tokens = len(answer.before) + len(samples)
    if samples and samples[-1].token in answer.arrived.parameters.end_tokens:
        tokens -= 1
    return tokens if answer.kept is None else min(tokens, answer.kept)


def require_columns(record: StepDone) -> None:
    """Samples, tokens, logits and margins go together."""
    lengths = len(record.sampled), len(record.tokens), len(record.logits), len(record.margins)
    if len(set(lengths)) > 1:
        raise Unusable(
            f"step {record.step} says {lengths[0]} samples and {lengths[1]} tokens: `replay` on "
            "this tape tells what is wrong with it"
        )


_RECORDS: dict[type, Callable[[Tally, Any], None]] = {
    Checkpoint: Tally._checkpoint,
    RequestArrived: Tally._arrived,
    FlushRequested: Tally._flushed,
    Gap: Tally._gap,
    StepTimed: Tally._timed,
}
_EVENTS: dict[type, Callable[[Tally, State, int, Any], None]] = {
    ev.PrefixAdopted: Tally._adopted,
    ev.Forked: Tally._forked,
    ev.Appended: Tally._appended,
    ev.Preempted: Tally._preempted,
    ev.PoolReset: Tally._pool_reset,
    ev.Closed: Tally._closed,
}
