"""Counters: what an engine did since it began, in plain numbers, for status and metrics.

Owns the counts and the histograms of latencies. The engine's thread alone writes them, a few
additions for each row; any thread may read them, for a number is replaced whole and never goes
back. Times are of the engine's side: from a request's submission to the news of its tokens. Knows
nothing of Prometheus (metrics.py), never waits and takes no lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from time import perf_counter

from statemachine.events import Event, Preempted, Rewound
from statemachine.records import ShadowReport

from .closing import Outcome
from .prefix_store import Counts
from .submission import CANCELLED, ERROR, LENGTH, STOP
from .view import StepPlan, View

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of buckets, which are vLLM's, so that its dashboards and alerts carry over."""

ABORT = "abort"
ENDS = {STOP: STOP, LENGTH: LENGTH, CANCELLED: ABORT, ERROR: ERROR}
"""How a request ends, and what vLLM calls that."""
DIVERGENCES = ("observation", "content")


class Histogram:
    """How many values fell into each bucket: at most its bound; the last has none."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """One more value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class _Times:
    """When things happened to a live request, in seconds; below 0: not yet."""

    __slots__ = ("admitted", "arrived", "first", "last")

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self.admitted = self.first = self.last = -1.0


class Counters:
    """See the module. `clock` gives seconds, as the arrivals' times do."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._live: dict[int, _Times] = {}
        self.steps = 0
        self.failed_steps = 0
        self.failures_in_a_row = 0
        self.plans_raised = 0
        self.preemptions = 0
        self.rewound_rows = 0
        self.guessed_tokens = 0
        self.accepted_tokens = 0
        self.shadow_checked = 0
        self.shadow_found = 0
        self.divergences = dict.fromkeys(DIVERGENCES, 0)
        self.capture_failures = 0
        self.capture_bytes = 0
        self.capture_gaps = 0
        self.kept = Counts()
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.ends = dict.fromkeys(ENDS.values(), 0)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.between_tokens_s = Histogram(BETWEEN_TOKENS_S)
        self.request_s = Histogram(REQUEST_S)
        self.queue_s = Histogram(REQUEST_S)
        self.prefill_s = Histogram(REQUEST_S)
        self.decode_s = Histogram(REQUEST_S)

    def arrived(self, request: int, at_s: float) -> None:
        """A request was submitted."""
        self._live[request] = _Times(at_s)

    def events(self, events: Iterable[Event]) -> None:
        """What a step's events gave up."""
        for event in events:
            if isinstance(event, Preempted):
                self.preemptions += 1
            elif isinstance(event, Rewound):
                self.rewound_rows += event.rows

    def planned(self, view: View, plan: StepPlan) -> None:
        """A step was planned; `view` is the one that `begin` gave."""
        self.events(plan.events)
        if plan.pieces:
            self.step_tokens.add(sum([piece.rows for piece in plan.pieces]))
            self.guessed_tokens += sum([it.samples - 1 for it in plan.pieces if it.samples > 1])
        if not plan.admitted:
            return
        now = self._clock()
        for request, rows in plan.admitted:
            times = self._live.get(request)
            if times is None or times.admitted >= 0:
                continue
            times.admitted = now
            self.queue_s.add(now - times.arrived)
            if plan.policy.prefix_cache:
                self.prefix_queries += len(view.requests[request].arrived.tokens)
                self.prefix_hits += rows

    def done(self, view: View, outcomes: Iterable[Outcome], shadow: ShadowReport) -> None:
        """A step succeeded; `view` is the one before its tokens joined their answers."""
        self.steps += 1
        self.shadow_checked += shadow.checked
        self.shadow_found += shadow.found
        now, live, between = self._clock(), self._live, self.between_tokens_s
        for outcome in outcomes:
            self.generation_tokens += len(outcome.tokens)
            if outcome.rows:
                self.accepted_tokens += outcome.rows - 1
            times = live.get(outcome.seq)
            if times is None:
                continue
            if times.first < 0:
                times.first = now
                self.prompt_tokens += len(view.requests[outcome.seq].arrived.tokens)
                self.first_token_s.add(now - times.arrived)
                self.prefill_s.add(now - times.admitted)
            elif outcome.tokens:
                between.add(now - times.last)
            times.last = now

    def ended(self, request: int, reason: str) -> None:
        """A request is over; the first time that this is said counts."""
        times = self._live.pop(request, None)
        if times is None:
            return
        self.ends[ENDS[reason]] += 1
        if reason in (STOP, LENGTH):
            self.request_s.add(self._clock() - times.arrived)
            self.decode_s.add(times.last - times.first)
