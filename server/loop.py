"""Loop: the engine's step, without threads: inputs, plan, tape, forward, close, news.

Owns the view, and what becomes of a step that raises. The thread (engine.py) and the step-pinned
driver call the same `step`. Never waits for input.

Tape order: the last step's StepDone and StepTimed, then inputs, then StepPlanned, in one write
before the forward is issued. Finished records stand before the StepDone that they end a request in.

Steps that were issued and not read are *flights*, one with the policy's lookahead while the next is
planned, else none. They are read in the order of their issue, each whole: a step that cannot be
built is undone after the one before it was read, and what flies behind lost pages is void.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import structlog

from kernel.batch import BuildFailed, EvalFailed, StepResult
from statemachine.events import Event
from statemachine.observing import OFF
from statemachine.records import (
    Finished,
    FlushRequested,
    Record,
    RequestArrived,
    RequestCancelled,
    StepDone,
    StepFailed,
    StepPlanned,
    TapeEnded,
)
from statemachine.state import State

from . import scheduler
from .clients import Clients
from .counters import Counters
from .drafting import Drafting
from .failing import BUILD, CLOSE, EVAL, PLAN, VOID
from .flight import NOTHING, Flight, blame, timed
from .kept import KeptBlocks
from .live_guard import DIVERGED, LiveGuard, Wrong, sentence
from .news import news
from .parts import Arrival, Input, Parts
from .submission import CANCELLED, ERROR, STOP, Update
from .view import StepPlan, View, checkpoint, initial, receive
from .writes import Writes

FAILURES_MAX = 8
"""Failed steps in a row after which the engine stops."""

log = structlog.get_logger()


_SAID = {
    ERROR: (ERROR, "the answer could not be delivered"),
    DIVERGED: (ERROR, "the cache that it read was found wrong: send it again"),
}
"""By a cancel's reason: how the request ends, and what its client hears."""


class Loop:
    """Runs steps over a kernel. All calls come from one thread."""

    def __init__(self, parts: Parts, clock: Callable[[], float]) -> None:
        """`clock` gives seconds; only StepTimed sees it. Writes header and first checkpoint."""
        self._kernel = parts.kernel
        self._policy = parts.policy
        self._clock = clock
        self._clients = Clients(parts.decoder)
        self._kept = parts.kept
        drafted = None if parts.draft is None else parts.draft.model
        self.view: View = initial(parts.kernel.geometry, parts.policy, drafted)
        self._flights: deque[Flight] = deque()
        sanitize = OFF if parts.header is None else parts.header.sanitize
        self._guard = LiveGuard(parts.kernel.geometry, sanitize, parts.on_divergence)
        self._drafting: Drafting | None = None
        if parts.draft is not None:
            self._drafting = Drafting(parts.draft, parts.policy, sanitize)
        self.counters = Counters()
        if parts.kept is not None:
            self.counters.kept = parts.kept.counts
        self.failure = ""
        self._writes = Writes(parts.capture, self.counters)
        if parts.header is not None:
            self._writes.flush([parts.header, checkpoint(self.view)])

    @property
    def broken(self) -> bool:
        """Whether too many steps failed in a row, or one diverged that ends the engine: `failure`
        says what it was.
        """
        return self.counters.failures_in_a_row >= FAILURES_MAX or bool(self._guard.stopped)

    @property
    def busy(self) -> bool:
        """Whether a step would find something to do without any input."""
        view = self.view
        waits = self._clients.lost or self._guard.pending or self._writes or self._flights
        if waits or view.requests or view.closing:
            return True
        if self._drafting is not None and self._drafting.due(view):
            return True
        # A flush of an empty index makes no step; the next plan is rid of it.
        state = view.state
        return view.flush and any(state.cached_blocks(group) for group in state.paged_groups())

    def step(self, inputs: Iterable[Input] = ()) -> bool:
        """One turn: take inputs, plan and issue a step, read the oldest in flight where it is due.
        False where there was nothing to do.
        """
        received = self._receive([*self._guard.take(), *self._clients.take_lost(), *inputs])
        issued = self._take_off(received)
        flights = self._flights
        if flights and (not issued or self._due()):
            self._land()
            while flights and (flights[-1].error is not None or self._guard.pending):
                self._land()
            return True
        return issued or bool(received)

    def _due(self) -> bool:
        """Whether the oldest flight is to be read before the next step is planned."""
        last = self._flights[-1]
        return len(self._flights) > int(self._policy.lookahead) or last.error is not None

    def _take_off(self, received: list[Record]) -> bool:
        """Plan the next step and issue it; False where nothing is to be done before the step in
        flight was read. `received` is on tape then.
        """
        due = self._writes.checkpoint_due
        if due and self._flights:
            self._writes.flush(received)  # a checkpoint stands between two steps
            return False
        drafted = self._drafted(received)
        started = self._clock()
        try:
            plan = scheduler.plan_step(self.view, self._policy)
        except Exception as error:
            self.counters.plans_raised += 1
            if self._flights:
                # It most likely raises again, with nothing in flight; then everything is given up.
                log.exception("no plan could be made while a step was in flight")
                self._writes.flush(received)
                return False
            self._give_up(received, error)
            return True
        if plan.idle:
            if self.view.requests and not (self._flights or received or drafted):
                # Nobody would ever move again, and nobody would hear of it.
                self._give_up(received, RuntimeError("nothing can be planned for what is live"))
                return True
            self._writes.flush(received)
            return False
        if due:
            received.append(checkpoint(self.view))
        before = self.view.state
        self.view = scheduler.begin(self.view, plan)
        self.counters.planned(self.view, plan)
        planned = self._clock()
        self._write_planned(received, plan.step, plan.events)
        self._flights.append(self._issue(plan, before, [started, planned, self._clock()]))
        return True

    def _drafted(self, received: list[Record]) -> bool:
        """Whether the draft model had a round; `received` is on tape then."""
        if self._drafting is None:
            return False

        def write(planned: list[Record]) -> None:
            self._writes.flush([*received, *planned])
            received.clear()

        before = self.view
        self.view, answers = self._drafting.round(before, write)
        self._writes.wait(answers)
        for kind in self._drafting.take_divergences():
            self.counters.divergences[kind] += 1
        return self.view is not before

    def _issue(self, plan: StepPlan, before: State, times: list[float]) -> Flight:
        """Hand a step to the kernel; what it raises is dealt with in its turn."""
        flight = Flight(plan, times)
        try:
            if self._kept is not None:
                self._kept.carry_out(before, plan)
            if plan.pieces:
                flight.ticket = self._kernel.issue(scheduler.batch(self.view, plan))
        except Exception as error:
            flight.error = error
        return flight

    def _write_planned(self, received: list[Record], step: int, events: tuple[Event, ...]) -> None:
        digest = self.view.state.digest
        self._writes.flush([*received, StepPlanned(step, events, digest)])

    def _receive(self, inputs: list[Input]) -> list[Record]:
        """Take inputs into the view; returns those that changed it, as records."""
        received: list[Record] = []
        for given in inputs:
            if isinstance(given, Arrival):
                record: RequestArrived | RequestCancelled | FlushRequested = given.record
                self._clients.add(given.record, given.sink)
                self.counters.arrived(given.record.request, given.at_s)
            elif isinstance(given, RequestCancelled) and given.request not in self.view.requests:
                continue
            else:
                record = given
            self.view = receive(self.view, record)
            received.append(record)
            if self._kept is not None:
                received += self._offered(self._kept, given)
            if isinstance(record, RequestCancelled):
                why, said = _SAID.get(record.reason, (CANCELLED, ""))
                self._tell(Update(record.request, (), why, error=said))
        return received

    def _offered(self, kept: KeptBlocks, given: Input) -> list[Record]:
        """What the prefix store has for a request that came in; a flush empties it."""
        if isinstance(given, FlushRequested):
            kept.flush()
        if not isinstance(given, Arrival) or given.reading is None:
            return []
        offer = kept.offer(given.record, given.reading.result())
        if offer is None:
            return []
        self.view = receive(self.view, offer)
        return [offer]

    def _land(self) -> None:
        """Read the oldest flight, and close it."""
        flight = self._flights.popleft()
        plan = flight.plan
        try:
            result = self._collect(flight)
        except BuildFailed as error:
            self._fail(plan, BUILD, error, blame(plan, error))
            return
        except Exception as error:
            # Whatever is no BuildFailed leaves pages of which nothing is known.
            self._fail(plan, EVAL, error, ())
            return
        flight.times.append(self._clock())
        try:
            self._close(plan, result, flight.times)
        except Exception as error:
            self._fail(plan, CLOSE, error, tuple(sorted(self.view.requests.keys())))

    def _collect(self, flight: Flight) -> StepResult:
        if flight.error is not None:
            raise flight.error
        return self._kernel.collect(flight.ticket) if flight.plan.pieces else NOTHING

    def _close(self, plan: StepPlan, result: StepResult, times: list[float]) -> None:
        """Closing events, the new view, news; the records wait for the next write."""
        wrong = self._guard.look(plan, result)
        finished = self._stops(plan, result.tokens)
        before, tokens = self.view, result.tokens
        outcomes = scheduler.outcomes(before, plan, tokens, finished)
        events = scheduler.close_step(before, plan, outcomes)
        after = scheduler.settle(before, plan, outcomes, events)
        left = map(after.state.sequences.get, [piece.seq for piece in plan.pieces])
        done = StepDone(
            step=plan.step,
            observation=result.observation,
            shadow=result.shadow,
            sampled=result.sampled,
            tokens=tokens,
            logits=result.logits,
            margins=result.margins,
            events=events,
            offsets=tuple([-1 if it is None else it.offset for it in left]),
            digest=after.state.digest,
            scored=result.scored,
            scores=result.score_column,
        )
        # From here on nothing raises: the step is what the tape will say.
        self.view = after
        self.counters.done(before, outcomes, result.shadow)
        self.counters.events(events)
        if wrong:
            self._diverged(before, plan, wrong)
        if plan.pieces:
            self.counters.failures_in_a_row = 0
        if self._kept is not None:
            self._kept.settled(plan.step)
        for update in news(before, plan, result, outcomes):
            self._tell(update)
        times.append(self._clock())
        self._writes.wait([*finished, done, timed(plan.step, times)])

    def _stops(self, plan: StepPlan, tokens: tuple[int, ...]) -> tuple[Finished, ...]:
        """Feed new tokens to the requests that have stop strings; the ends that they came to."""
        found: list[Finished] = []
        if not self._clients.reading:
            return ()
        for piece, request, drawn in scheduler.drawn(self.view, plan, tokens):
            for kept, token in enumerate(drawn, start=1):
                if token in request.arrived.parameters.end_tokens:
                    break
                if self._clients.stopped(piece.seq, token):
                    found.append(Finished(piece.seq, request.output_tokens + kept, STOP))
                    break
        return tuple(found)

    def _fail(self, plan: StepPlan, stage: str, error: Exception, blamed: tuple[int, ...]) -> None:
        """Undo a step that raised, on the view and on tape, and say so to those it ends."""
        expected = isinstance(error, BuildFailed | EvalFailed)
        log.error(
            "step failed",
            step=plan.step,
            stage=stage,
            error=str(error),
            blamed=blamed,
            exc_info=None if expected else error,
        )
        before, said = self.view, str(error) or type(error).__name__
        try:
            events = scheduler.fail_step(before, plan, stage, blamed)
            after = scheduler.settle_failed(before, plan, stage, blamed, events)
        except Exception:
            # The state itself is broken: nothing can be undone, and the engine ends. Its tape must
            # not end as if the process had been killed in this step.
            digest = before.state.digest
            self._writes.flush([StepFailed(plan.step, stage, said, blamed, (), digest)])
            raise
        self.view = after
        self.counters.events(events)
        self.counters.failed_steps += 1
        if not getattr(error, "wished", False):
            self.counters.failures_in_a_row += 1
        self.failure = said
        digest = after.state.digest
        self._writes.wait([StepFailed(plan.step, stage, said, blamed, events, digest)])
        for request in blamed:
            self._tell(Update(request, (), ERROR, error=f"the model could not run this: {said}"))
        if self._kept is not None and stage == BUILD:
            self._kept.settled(plan.step)
        if stage != BUILD:
            if self._kept is not None:
                self._kept.lost()
            self._kernel.reset_pages()
            while self._flights:
                self._void(self._flights.popleft().plan)

    def _void(self, plan: StepPlan) -> None:
        """Give a step up that was issued behind one that lost the pages."""
        self.view = scheduler.settle_failed(self.view, plan, VOID, (), ())
        said = "a step before it lost the pages"
        digest = self.view.state.digest
        self._writes.wait([StepFailed(plan.step, VOID, said, (), (), digest)])

    def _give_up(self, received: list[Record], error: Exception) -> None:
        """No plan could be made, which is a bug: end everything live, and go on empty."""
        view = self.view
        plan = StepPlan(view.step, (), (), view.state, self._policy, view.waiting, view.running)
        self._write_planned(received, plan.step, ())
        self._fail(plan, PLAN, error, tuple(sorted(view.requests.keys())))

    def end(self, reason: str, error: str = "") -> None:
        """End all that is live with a reason, and the tape. The loop is of no use after it."""
        while self._flights:
            self._land()
        live = sorted(self.view.requests.keys())
        records: list[Record] = []
        for request in live:
            record = RequestCancelled(request, reason)
            self.view = receive(self.view, record)
            records.append(record)
            self._tell(Update(request, (), reason, error=error))
        self._drafted(records)
        plan = scheduler.plan_step(self.view, self._policy)
        if plan.idle:
            self._writes.flush(records)
        else:
            self.view = scheduler.begin(self.view, plan)
            self._write_planned(records, plan.step, plan.events)
            now = self._clock()
            self._close(plan, NOTHING, [now, now, now, now])
        self._keep_all()
        self._writes.flush([TapeEnded(self.view.step - 1)])
        self._writes.close()

    def _keep_all(self) -> None:
        """What the pool has goes into the prefix store. No event says so: nothing comes after.

        Where a cache was found wrong the flush that is due never comes: the store is emptied here.
        """
        if self._kept is None:
            return
        try:
            if self._guard.pending:
                self._kept.flush()
            elif not self.broken:
                self._kept.finish(self.view.state)
        except Exception:
            log.exception("the pool's blocks could not be kept")

    def release(self) -> None:
        """Let go of the kernel, and so of the model and its pages, on the thread that made them;
        of the prefix store behind the writes that wait.
        """
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()
        del self._kernel, kept
        self._drafting = None

    def tell_all(self, reason: str, error: str) -> None:
        """Tell every client that its request is over; for when not even `end` can run."""
        self._clients.tell_all(reason, error)

    def _tell(self, update: Update) -> None:
        if update.finish_reason is not None:
            if self._kept is not None:
                self._kept.forget(update.request)
            self.counters.ended(update.request, update.finish_reason)
        self._clients.tell(update)

    def _diverged(self, before: View, plan: StepPlan, wrong: tuple[Wrong, ...]) -> None:
        """A step's caches saw something else than the state has: count it and act. Who is given up
        hears of it before the step's tokens are told: these may be wrong already.
        """
        for kind in sorted({it.kind for it in wrong}):
            self.counters.divergences[kind] += 1
        for request in self._guard.act(before, plan, wrong, self._writes.position):
            self._tell(Update(request, (), ERROR, error=sentence(plan.step)))
        if self._guard.stopped:
            self.failure = self._guard.stopped
