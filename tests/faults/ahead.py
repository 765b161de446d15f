"""Faults of steps in flight: rows ahead of their tokens, order, what a failure takes with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
from msgspec import structs

from kernel.batch import Batch
from kernel.metadata import StepMetadata
from statemachine.events import CommittedEach, Event, FrontTrimmed, Preempted, Rewound, Trimmed
from statemachine.geometry import WINDOW, Geometry
from statemachine.lifetime import preempted

from . import loads
from .fault import DONE, FAILED, PLANNED, Catalogue, Make, Witness
from .loads import Load

FAULTS = Catalogue()


class Counted:
    """Metadata as an engine makes it that counts a sequence's rows itself, as it issues them.

    Nobody tells it of rows that were taken back: the pool is, and the RoPE position is not.
    """

    def __init__(self, original: Any, witness: Witness) -> None:
        self._original = original
        self._witness = witness
        self._counts: dict[int, int] = {}

    def __call__(self, batch: Batch, geometry: Geometry) -> StepMetadata:
        metadata: StepMetadata = self._original(batch, geometry)
        positions, until = metadata.positions.copy(), metadata.until.copy()
        for number, piece in enumerate(batch.pieces):
            seq = piece.sequence.id
            start = self._counts.get(seq, piece.start) if piece.start else 0
            shift = max(0, start - piece.start)
            if shift:
                self._witness.note(seq)
                first = int(metadata.first[number])
                rows = slice(first, first + piece.rows)
                held = int(metadata.covers[number]) * geometry.block_size
                positions[rows] += shift
                until[rows] = np.minimum(until[rows] + shift, held)
            self._counts[seq] = piece.start + shift + piece.rows
        return attrs.evolve(metadata, positions=positions, until=until)


@FAULTS.add(
    "S3-lookahead",
    "a step that failed behind another is taken back in the pool, its offset stays: one ahead",
    "kernel.metadata:build",
    loads.AHEAD_BUILD_FAILS,
    "fold",
    "observation",
    "start",
)
def one_ahead(original: Any, witness: Witness) -> Any:
    return Counted(original, witness)


@FAULTS.add(
    "S3-pool-stays",
    "a failed step moves its offset back and keeps the blocks that it took",
    "statemachine.trimming:_cut",
    loads.AHEAD_BUILD_FAILS,
    "fold",
    "fold",
    "digest",
)
def pool_stays(original: Any, witness: Witness) -> Any:
    def cut(draft: Any, old: Any, rows: int) -> Any:
        size = draft.geometry.block_size
        if old.offset - rows <= (len(old.tables[0]) - 1) * size:
            witness.note(-1, FAILED)
        draft.release_tail = lambda sequence, group, keep: sequence.tables[group]
        try:
            return original(draft, old, rows)
        finally:
            del draft.release_tail

    return cut


@FAULTS.add(
    "S3-one-more",
    "a failed step unwinds one row more than it issued: a row that was read before it",
    "server.failing:_undo",
    loads.AHEAD_BUILD_FAILS,
    "plan",
    "plan",
    "event 0 of StepFailed",
)
def one_more_unwound(original: Any, witness: Witness) -> Any:
    def undo(view: Any, plan: Any, blamed: tuple[int, ...]) -> tuple[Event, ...]:
        events = []
        for event in original(view, plan, blamed):
            if isinstance(event, Trimmed) and event.rows == 1:
                witness.note(event.seq, FAILED, plan.step)
                event = Trimmed(event.seq, 2)
            events.append(event)
        return tuple(events)

    return undo


def _resolved(change: Callable[[Any, Any, list[Event]], list[Event]]) -> Make:
    """Other events for rows that were issued on the chance; the first that differs is noted."""

    def make(original: Any, witness: Witness) -> Any:
        def resolve(state: Any, plan: Any, found: Any) -> list[Event]:
            right = original(state, plan, found)
            events = change(state, found, list(right))
            if events != right:
                witness.note(-1, DONE, plan.step)
            return events

        return resolve

    return make


def resolve_fault(
    catalogue: Catalogue, name: str, sentence: str, load: Load, *says: str
) -> Callable[[Callable[[Any, Any, list[Event]], list[Event]]], None]:
    """Adds a fault of what becomes of lookahead and draft rows; decorates its change of events."""

    def keep(change: Callable[[Any, Any, list[Event]], list[Event]]) -> None:
        add = catalogue.add(name, sentence, "server.closing:_resolve", load, "plan", "plan", *says)
        add(_resolved(change))

    return keep


@resolve_fault(
    FAULTS,
    "neighbours-token-committed",
    "a lookahead row learns the token that its neighbour sampled",
    loads.AHEAD,
    "CommittedEach",
)
def neighbours_token(state: Any, found: Any, events: list[Event]) -> list[Event]:
    return [
        CommittedEach(it.seqs, (*it.tokens[1:], it.tokens[0]))
        if isinstance(it, CommittedEach)
        else it
        for it in events
    ]


@resolve_fault(
    FAULTS,
    "old-token-committed",
    "a lookahead row is committed with the token of the row before it",
    loads.AHEAD,
    "CommittedEach",
)
def old_token(state: Any, found: Any, events: list[Event]) -> list[Event]:
    return [
        CommittedEach(it.seqs, tuple(state.sequences[seq].tokens[-1] for seq in it.seqs))
        if isinstance(it, CommittedEach)
        else it
        for it in events
    ]


@resolve_fault(
    FAULTS,
    "lookahead-not-committed",
    "the last lookahead row of a step never learns its token",
    loads.AHEAD,
    "CommittedEach",
)
def not_committed(state: Any, found: Any, events: list[Event]) -> list[Event]:
    return [
        CommittedEach(it.seqs[:-1], it.tokens[:-1])
        if isinstance(it, CommittedEach) and len(it.seqs) > 1
        else it
        for it in events
    ]


def not_rewound(state: Any, found: Any, events: list[Event]) -> list[Event]:
    """Rows behind the end of an answer are not taken back."""
    ended = {outcome.seq for outcome in found if outcome.reason is not None}
    return [it for it in events if not (isinstance(it, Rewound) and it.seq in ended)]


for _why, _load in (("end token", loads.AHEAD_ENDING), ("stop string", loads.AHEAD_STOPS)):
    resolve_fault(
        FAULTS,
        f"not-rewound-at-{_why.replace(' ', '-')}",
        f"the row that was issued behind an {_why} is not rewound"
        if _why == "end token"
        else f"the row that was issued behind a {_why} is not rewound",
        _load,
        "Rewound",
    )(not_rewound)


@resolve_fault(
    FAULTS,
    "lookahead-kept-at-end",
    "the row behind an end token is committed, as if the answer went on",
    loads.AHEAD_ENDING,
    "Rewound",
)
def kept_at_end(state: Any, found: Any, events: list[Event]) -> list[Event]:
    return [CommittedEach((it.seq,), (0,)) if isinstance(it, Rewound) else it for it in events]


@FAULTS.add(
    "lookahead-past-length",
    "a row is issued behind the last token that an answer may have",
    "server.decoding:_waits_for_token",
    loads.AHEAD,
    "plan",
    "plan",
    "of StepPlanned",
)
def past_length(original: Any, witness: Witness) -> Any:
    def waits(request: Any, policy: Any, capacity: int) -> bool:
        if original(request, policy, capacity):
            witness.note(request.arrived.request)
        return False

    return waits


@FAULTS.add(
    "preempted-in-flight",
    "a request is preempted while its sample is in flight: the token is lost",
    "server.draft:Draft.make_room",
    loads.AHEAD_TIGHT,
    "plan",
    "plan",
    "Preempted",
)
def preempted_in_flight(original: Any, witness: Witness) -> Any:
    def make_room(draft: Any) -> None:
        view = draft.view
        if view.flights:
            witness.note()
        draft.view = structs.replace(view, flights=())
        try:
            original(draft)
        finally:
            draft.view = view

    return make_room


@FAULTS.add(
    "S14-lookahead",
    "a window moves on by the row that is in flight: a row is dropped that is still to be read",
    "statemachine.commands:front_trims",
    loads.AHEAD_WINDOWS,
    "plan",
    "plan",
    "raised at close",
    "may move on to",
)
def window_by_offset(original: Any, witness: Witness) -> Any:
    def front_trims(state: Any, seq: int) -> tuple[Event, ...]:
        right: tuple[Event, ...] = original(state, seq)
        sequence, found = state.sequences[seq], []
        for group, spec in enumerate(state.geometry.groups):
            rows = max(0, sequence.offset - spec.window + 1) - sequence.starts[group]
            if spec.kind == WINDOW and rows > 0:
                found.append(FrontTrimmed(seq, group, rows))
        if tuple(found) != right:
            witness.note(-1, FAILED, state.written_step)
        return tuple(found)

    return front_trims


@FAULTS.add(
    "second-flight-first",
    "of two steps in flight the newer one is read and closed first",
    "server.loop:Loop._land",
    loads.AHEAD,
    "fold",
    "fold",
    "to be answered before it",
)
def newest_first(original: Any, witness: Witness) -> Any:
    def land(loop: Any) -> None:
        if len(loop._flights) > 1:
            witness.note(-1, DONE, loop._flights[-1].plan.step)
            loop._flights.reverse()
        original(loop)

    return land


@FAULTS.add(
    "failed-first",
    "a step that cannot be built is undone before the step that is in flight was closed",
    "server.loop:Loop._land",
    loads.AHEAD_BUILD_FAILS,
    "fold",
    "fold",
    "to be answered before it",
)
def failed_first(original: Any, witness: Witness) -> Any:
    def land(loop: Any) -> None:
        if len(loop._flights) > 1 and loop._flights[-1].error is not None:
            witness.note(-1, FAILED, loop._flights[-1].plan.step)
            loop._flights.reverse()
        original(loop)

    return land


@FAULTS.add(
    "void-step-used",
    "the result of a step that was in flight behind lost pages is used",
    "server.loop:Loop._fail",
    loads.AHEAD_EVAL_FAILS,
    "fold",
    "fold",
    "it is void",
)
def void_used(original: Any, witness: Witness) -> Any:
    def fail(loop: Any, plan: Any, stage: str, *rest: Any) -> None:
        flights = loop._flights
        if stage != "eval" or not flights:
            original(loop, plan, stage, *rest)
            return
        loop._flights = deque()
        original(loop, plan, stage, *rest)
        loop._flights = flights
        loop._kernel._order._void = 0
        witness.note(-1, FAILED, plan.step + 1)
        loop._land()

    return fail


@FAULTS.add(
    "void-step-unsaid",
    "a step that was in flight behind lost pages is dropped, and the tape does not say so",
    "server.loop:Loop._void",
    loads.AHEAD_EVAL_FAILS,
    "fold",
    "fold",
    "which is not void",
)
def void_unsaid(original: Any, witness: Witness) -> Any:
    def void(loop: Any, plan: Any) -> None:
        said = len(loop._writes)
        original(loop, plan)
        del loop._writes._waiting[said:]
        witness.note(-1, PLANNED, plan.step + 1)

    return void


class _Unseen(deque[Any]):
    """Flights that nobody notices."""

    def __bool__(self) -> bool:
        return False


@FAULTS.add(
    "checkpoint-in-flight",
    "a segment of the tape begins while a step is in flight: whoever starts there has half of it",
    "server.loop:Loop._take_off",
    loads.AHEAD_SEGMENTS,
    "fold",
    "crash",
    "a new segment begins",
)
def checkpoint_in_flight(original: Any, witness: Witness) -> Any:
    def take_off(loop: Any, received: list[Any]) -> Any:
        flights = loop._flights
        if not flights or not loop._writes.checkpoint_due:
            return original(loop, received)
        witness.note(-1, PLANNED, flights[0].plan.step)
        loop._flights = _Unseen(flights)
        try:
            return original(loop, received)
        finally:
            loop._flights = deque(loop._flights)

    return take_off


@FAULTS.add(
    "lost-rows-found",
    "after lost pages rows of the prompts are found again that stood in them",
    "statemachine.lifetime:pool_reset",
    loads.AHEAD_EVAL_FAILS,
    "fold",
    "fold",
    "digest",
)
def lost_rows_found(original: Any, witness: Witness) -> Any:
    def reset(draft: Any, event: Any) -> None:
        for step in sorted(draft.pins):
            draft.unpin(step)
        state = draft.rebase()
        for seq in sorted(state.sequences):
            preempted(draft, Preempted(seq))
        draft.written_step = draft.issued_step
        witness.note(-1, FAILED, draft.issued_step - 1)

    return reset
