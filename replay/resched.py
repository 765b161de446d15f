"""Resched: the scheduler of this version over a recorded load, under any policy, without a model.

Inputs come before the steps that saw them, or sooner where nothing else is to be done by then; a
step takes as long as a recorded one did. Sampled tokens are the recorded ones, by request and place
in the answer; where the record has none (its request was cancelled, failed or cut off there), one
is made up that ends nothing. No step fails. Yields the records of the tape that such a server would
write, but for what only a kernel can see.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from attrs import define, field
from msgspec import structs

from server import scheduler
from server.admission import refuse
from server.policy import Policy
from server.submission import RequestRefused, Submission
from server.view import StepPlan, View, initial, receive, restore
from statemachine.errors import CodecError
from statemachine.geometry import Geometry
from statemachine.records import (
    Finished,
    Observation,
    Record,
    RequestArrived,
    RequestCancelled,
    ShadowReport,
    StepDone,
    StepPlanned,
    TapeEnded,
)

from .errors import Unusable
from .recorded import Input, Recorded

_UNSEEN = Observation((0, 0), (0, 0), (0, 0), (0, 0), 0, (), (), (), ())


@define
class _Flight:
    """A step in flight: when it was planned, and the (request, place) of each of its samples."""

    plan: StepPlan
    time: int
    samples: list[tuple[int, int]]


@define
class Resched:
    """Iterate `records` once. made_up: answer tokens that the record does not have, of as many
    `beyond` requests; refused: requests that a server with this policy would not take.
    """

    recorded: Recorded
    policy: Policy
    geometry: Geometry
    made_up: int = 0
    refused: int = 0
    beyond: set[int] = field(factory=set)
    _view: View = field(init=False)
    _flights: deque[_Flight] = field(init=False, factory=deque)
    _landed: int = field(init=False, default=0)

    def records(self) -> Iterator[Record]:
        """See the module. Raises Unusable where the tape cannot be started from."""
        start = self.recorded.start
        self._view = initial(self.geometry, self.policy)
        yield structs.replace(
            self.recorded.header, geometry=self.geometry, policy=structs.asdict(self.policy)
        )
        if start is not None:
            try:
                self._view = restore(start, self.policy)
            except CodecError as error:
                raise Unusable(f"the checkpoint after step {start.step}: {error}") from error
            self._landed = start.step
            yield start
        yield from self._steps()
        yield TapeEnded(self._view.step - 1)

    def _steps(self) -> Iterator[Record]:
        time = self._view.step
        while True:
            for given in self.recorded.due(time, self._newest(time)):
                yield from self._received(given)
            if self._flights and (time in self.recorded.drained or self.recorded.waits(time)):
                yield from self._land()
                continue
            plan = scheduler.plan_step(self._view, self.policy)
            if not plan.idle:
                yield self._begin(plan, time)
                time += 1
                if len(self._flights) > int(self.policy.lookahead):
                    yield from self._land()
            elif self._flights:
                yield from self._land()
            else:
                due = self.recorded.next_step()
                if due is None:
                    return
                time, self._landed = max(time, due), max(time, due)

    def _newest(self, time: int) -> int:
        """The newest step that was answered, as far as inputs wait for it; without lookahead each
        one is answered before the next is planned, and nothing waits.
        """
        return self._landed if self.recorded.header.policy.get("lookahead") else time

    def _received(self, given: Input) -> Iterator[Record]:
        if isinstance(given, RequestArrived) and self._refused(given):
            self.refused += 1
            self.recorded.forget(given.request)
            return
        if isinstance(given, RequestCancelled):
            if given.request not in self._view.requests:
                return
            self.recorded.forget(given.request)
        self._view = receive(self._view, given)
        yield given

    def _refused(self, given: RequestArrived) -> bool:
        asked = Submission(given.tokens, given.parameters, namespace=given.namespace)
        try:
            refuse(self.geometry, self.policy, asked)
        except RequestRefused:
            return True
        return False

    def _begin(self, plan: StepPlan, time: int) -> StepPlanned:
        requests = self._view.requests
        samples: list[tuple[int, int]] = []
        for piece in plan.pieces:
            end = plan.state.sequences[piece.seq].offset - piece.pads
            prompt = len(requests[piece.seq].arrived.tokens)
            first = end - piece.samples + 1 - prompt
            samples += [(piece.seq, first + at) for at in range(piece.samples)]
        self._view = scheduler.begin(self._view, plan)
        self._flights.append(_Flight(plan, time, samples))
        return StepPlanned(plan.step, plan.events, plan.state.digest)

    def _land(self) -> Iterator[Record]:
        """Answer the oldest step in flight."""
        flight = self._flights.popleft()
        plan, view = flight.plan, self._view
        tokens = tuple([self._token(request, place) for request, place in flight.samples])
        finished = self._finished(view, plan, tokens)
        outcomes = scheduler.outcomes(view, plan, tokens, finished)
        events = scheduler.close_step(view, plan, outcomes)
        for outcome in outcomes:
            first = view.requests[outcome.seq].output_tokens
            self._count_made_up(outcome.seq, first, len(outcome.tokens))
            if outcome.reason is not None:
                self.recorded.forget(outcome.seq)
        self._view = scheduler.settle(view, plan, outcomes, events)
        self._landed = flight.time
        yield from finished
        sampled = tuple(at for at, piece in enumerate(plan.pieces) for _ in range(piece.samples))
        nothing = (0.0,) * len(tokens)
        digest = self._view.state.digest
        yield StepDone(
            plan.step,
            _UNSEEN,
            ShadowReport(),
            sampled,
            tokens,
            nothing,
            nothing,
            events,
            (),
            digest,
        )

    def _token(self, request: int, place: int) -> int:
        known = self._view.requests.get(request)
        told = None if known is None else self.recorded.token(request, place)
        if told is not None:
            return told
        ends = () if known is None else known.arrived.parameters.end_tokens
        return next(token for token in range(place % 61, 1 << 32) if token not in ends)

    def _count_made_up(self, request: int, first: int, tokens: int) -> None:
        for place in range(first, first + tokens):
            if self.recorded.token(request, place) is None:
                self.made_up += 1
                self.beyond.add(request)

    def _finished(
        self, view: View, plan: StepPlan, tokens: tuple[int, ...]
    ) -> tuple[Finished, ...]:
        """Ends by a stop string, where the record has them."""
        found: list[Finished] = []
        for piece, request, mine in scheduler.drawn(view, plan, tokens):
            kept = self.recorded.ends.get(piece.seq)
            if kept is None or not request.arrived.parameters.stop:
                continue
            if request.output_tokens < kept <= request.output_tokens + len(mine):
                found.append(Finished(piece.seq, kept, "stop"))
        return tuple(found)
