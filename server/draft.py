"""Draft: a plan that is being made; nothing outside of plan_step sees it.

Owns the scratch state that each event is applied to, the rows that are left in the step, and who
makes room for whom.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from statemachine import commands
from statemachine.events import BlockEvicted, BlockStored, Event
from statemachine.sequence import Sequence
from statemachine.state import State
from statemachine.transitions import apply_all

from .policy import PRIORITY, Policy
from .view import PlannedPiece, RequestState, StepPlan, View
from .waiting import Waiting

Apply = Callable[[State, tuple[Event, ...]], State]
"""What transitions.apply_all does; a replay knows some of these states already."""


class InFlight(Exception):
    """Somebody would have to be preempted, but a step is in flight: read that first."""


class Draft:
    """Events so far, the state after them, and the pieces of the batch."""

    def __init__(self, view: View, policy: Policy, apply: Apply = apply_all) -> None:
        self._apply = apply
        self.view = view
        self.policy = policy
        self.state: State = view.state
        self.events: list[Event] = []
        self.pieces: list[PlannedPiece] = []
        self.running = list(view.running)
        self.waiting: Waiting = view.waiting
        self.rows_left = policy.max_batch_tokens
        self.stuck = view.stuck
        self.preempted = False
        self.admitted: list[tuple[int, int]] = []
        self.passed: list[int] = []

    def do(self, events: tuple[Event, ...], store: bool = True) -> None:
        """Apply events and keep them. store: blocks that are evicted may go to the prefix store."""
        if events:
            if store and self.policy.store_evicted:
                events = tuple(chain.from_iterable(map(self._stored, events)))
            self.state = self._apply(self.state, events)
            self.events.extend(events)

    def _stored(self, event: Event) -> tuple[Event, ...]:
        """An eviction behind the read of its block; not of one that this plan loaded."""
        if not isinstance(event, BlockEvicted):
            return (event,)
        state = self.view.state
        known = state.groups[event.group].blocks.get(event.block)
        if known is None or not known.entry or state.entries[known.entry].key != event.key:
            return (event,)
        return BlockStored(event.group, event.block, event.key), event

    def request(self, seq: int) -> RequestState:
        """A live request."""
        request: RequestState = self.view.requests[seq]
        return request

    def left(self, seq: int) -> int:
        """Rows of a sequence's stream that were not issued yet."""
        sequence: Sequence = self.state.sequences[seq]
        rows = sequence.committed + len(sequence.speculative)
        return self.request(seq).stream.length - rows

    def prompts(self) -> list[int]:
        """Running sequences that have prompt rows to issue, in admission order."""
        if len(self.pieces) == len(self.running):
            return []
        issued = {piece.seq for piece in self.pieces}
        return [
            seq
            for seq in self.running
            if seq not in issued and self.left(seq) > 0 and not self.state.sequences[seq].pads
        ]

    def make_room(self) -> None:
        """Preempt the running request that the module's rule names; a lone one starts over."""
        if self.view.flights:
            raise InFlight
        first = min(self.running, key=self._place)
        others = [seq for seq in self.running if seq != first] or [first]
        if self.policy.scheduling == PRIORITY:
            victim = max(others, key=self._place)
        else:
            victim = min(others, key=lambda seq: (self.request(seq).output_tokens, -seq))
        self.do(commands.preempt(self.state, victim))
        self.running.remove(victim)
        self.waiting = self.waiting.add(victim, self.request(victim).priority)
        self.preempted = True

    def _place(self, seq: int) -> tuple[int, int]:
        """Where a request stands in the queue's order."""
        by_priority = self.policy.scheduling == PRIORITY
        return (self.request(seq).priority if by_priority else 0, seq)

    def plan(self) -> StepPlan:
        """What was drafted, frozen."""
        running = tuple(self.running)
        return StepPlan(
            step=self.view.step,
            events=tuple(self.events),
            pieces=tuple(self.pieces),
            state=self.state,
            policy=self.policy,
            waiting=self.waiting,
            running=self.view.running if running == self.view.running else running,
            alone=tuple(seq for seq in self.view.alone if seq in self.running),
            admitted=tuple(self.admitted),
            passed=tuple(self.passed),
            stuck=self.stuck and not self.preempted,
        )
