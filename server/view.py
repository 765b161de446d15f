"""View: all that the scheduler may look at, as one frozen value, and what inputs do to it.

    RequestArrived -> waiting -> (plan_step, begin) -> running -> (close_step, settle) -> gone
                         ^                                |
                         +---------- preempted -----------+      a cancel: from either to closing

A request's id is also its sequence's. There is no prefill cursor: what is left to issue is the
stream after the sequence's rows. Steps that were begun and not settled are `flights`, which are
answered in order. Never reads a clock, never touches MLX, a thread or a file.
"""

from __future__ import annotations

from immutables import Map
from msgspec import Struct, structs

from statemachine.events import Event
from statemachine.geometry import Geometry
from statemachine.records import (
    BlocksOffered,
    Checkpoint,
    DraftModel,
    Finished,
    FlushRequested,
    RequestArrived,
    RequestCancelled,
    RequestSnapshot,
)
from statemachine.snapshot import decode_state, encode_state
from statemachine.state import State, new_state

from .draft_pool import DraftPool, Guesses, pool_of, restored, snapshot_of
from .policy import DEFAULT, PRIORITY, Policy
from .speculation import Ngrams
from .tokenlog import TokenLog, log_of
from .waiting import Waiting, waiting_of

LOOK_AHEAD = 16
"""Requests at the queue's front that one step looks at."""
UNKNOWN = -1
"""cached_tokens of a request that was not admitted yet."""


class RequestState(Struct, frozen=True, gc=False):
    """A live request.

    stream: prompt + answer so far. cached_tokens: rows adopted at the first admission, UNKNOWN
    before. passed: how many requests were admitted past it because it did not fit; never reset.
    ngrams: an index of the stream, where drafts are made from it and it was made already. offered:
    kept blocks of its prompt that its next admission may load. guesses: what a draft model guesses
    of its answer from here on; None before it was asked.
    """

    arrived: RequestArrived
    stream: TokenLog
    cached_tokens: int = UNKNOWN
    passed: int = 0
    ngrams: Ngrams | None = None
    offered: BlocksOffered | None = None
    guesses: tuple[int, ...] | None = None

    @property
    def priority(self) -> int:
        """What its client set; lower is sooner."""
        return self.arrived.parameters.priority

    @property
    def output_tokens(self) -> int:
        """Answer tokens so far."""
        return self.stream.length - len(self.stream.prompt)


class View(Struct, frozen=True):
    """What plan_step plans from.

    waiting: the queue. running: admission order. closing: cancelled requests whose sequences the
    next plan closes. alone: sequences of a step that failed at build, to be tried one by one.
    stuck: the queue was looked through and nothing fitted, and nothing that could change that has
    happened since. flush: the next plan empties the index. flights: steps that were begun and not
    settled, oldest first. step: the next one's. draft: the pool of a draft model, where there is
    one; guesses then come from it, and from nowhere else.
    """

    state: State
    requests: Map[int, RequestState] = Map()
    waiting: Waiting = Waiting()
    running: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()
    alone: tuple[int, ...] = ()
    stuck: bool = False
    flush: bool = False
    flights: tuple[StepPlan, ...] = ()
    step: int = 1
    draft: DraftPool | None = None


class PlannedPiece(Struct, frozen=True, gc=False):
    """One sequence's rows in a step: `rows`, then `pads`; the last `samples` rows are sampled."""

    seq: int
    rows: int
    pads: int
    purpose: str
    samples: int


class StepPlan(Struct, frozen=True):
    """A step: opening events, the batch they make, and the queue after them.

    state: after the events. pieces: batch order. admitted: (request, rows adopted). passed:
    requests that others were admitted past, once for each. policy: what the plan was made with.
    """

    step: int
    events: tuple[Event, ...]
    pieces: tuple[PlannedPiece, ...]
    state: State
    policy: Policy
    waiting: Waiting
    running: tuple[int, ...]
    alone: tuple[int, ...] = ()
    admitted: tuple[tuple[int, int], ...] = ()
    passed: tuple[int, ...] = ()
    stuck: bool = False

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do: no rows, and no events either."""
        return not self.events and not self.pieces


def initial(geometry: Geometry, policy: Policy = DEFAULT, draft: DraftModel | None = None) -> View:
    """An empty pool and no requests. Raises ValueError where a geometry makes no sense."""
    return View(
        new_state(geometry),
        waiting=Waiting(policy.scheduling == PRIORITY),
        draft=None if draft is None else pool_of(draft),
    )


Input = RequestArrived | RequestCancelled | FlushRequested | BlocksOffered | Finished


def receive(view: View, record: Input) -> View:
    """The view after an input.

    A cancel of a request that is not live, or an offer to it, changes nothing. Finished changes
    nothing here either: it belongs to the close of the step that it was seen in (close_step).
    Raises ValueError for a request id that is live.
    """
    if isinstance(record, RequestArrived):
        return _arrived(view, record)
    if isinstance(record, RequestCancelled):
        return _cancelled(view, record.request)
    if isinstance(record, FlushRequested):
        return structs.replace(view, flush=True, requests=_without_offers(view))
    if isinstance(record, BlocksOffered):
        return _offered(view, record)
    return view


def _arrived(view: View, record: RequestArrived) -> View:
    if record.request in view.requests:
        raise ValueError(f"request {record.request} is live already: each needs an id of its own")
    request = RequestState(record, log_of(record.tokens))
    waiting = view.waiting.add(record.request, request.priority)
    return structs.replace(
        view,
        requests=view.requests.set(record.request, request),
        waiting=waiting,
        stuck=view.stuck and record.request not in waiting.first(LOOK_AHEAD),
    )


def _without_offers(view: View) -> Map[int, RequestState]:
    """The requests: what is flushed cannot be loaded again."""
    requests = view.requests
    for number in view.waiting:
        if requests[number].offered is not None:
            requests = requests.set(number, structs.replace(requests[number], offered=None))
    return requests


def _offered(view: View, record: BlocksOffered) -> View:
    known = view.requests.get(record.request)
    if known is None:
        return view
    request = structs.replace(known, offered=record)
    return structs.replace(view, requests=view.requests.set(record.request, request))


def _cancelled(view: View, request: int) -> View:
    known = view.requests.get(request)
    if known is None:
        return view
    opened = request in view.state.sequences
    return structs.replace(
        view,
        requests=view.requests.delete(request),
        waiting=view.waiting.remove(request, known.priority),
        running=without(view.running, request),
        alone=without(view.alone, request),
        closing=(*view.closing, request) if opened else view.closing,
        stuck=False,
    )


def without(ids: tuple[int, ...], gone: int) -> tuple[int, ...]:
    """`ids` less one of them; the same tuple where it is not in there."""
    if gone not in ids:
        return ids
    place = ids.index(gone)
    return ids[:place] + ids[place + 1 :]


def checkpoint(view: View) -> Checkpoint:
    """All that planning goes by, as a record; `view` is one without flights of either kind."""
    running = len(view.running)
    live = [view.requests[request] for request in (*view.running, *view.waiting)]
    return Checkpoint(
        step=view.step - 1,
        state=encode_state(view.state),
        requests=tuple(
            RequestSnapshot(
                arrived=request.arrived,
                output=request.stream.output(),
                running=place < running,
                cached_tokens=request.cached_tokens,
                passed=request.passed,
            )
            for place, request in enumerate(live)
        ),
        digest=view.state.digest,
        alone=view.alone,
        stuck=view.stuck,
        flush=view.flush,
        offered=tuple(it.offered for it in live if it.offered is not None),
        draft=None if view.draft is None else snapshot_of(view.draft, _guesses(live)),
    )


def _guesses(live: list[RequestState]) -> Guesses:
    found = {it.arrived.request: it.guesses for it in live if it.guesses is not None}
    return tuple(sorted(found.items()))


def restore(record: Checkpoint, policy: Policy = DEFAULT) -> View:
    """The view that a checkpoint was made of. Sequences of no request are still to be closed.

    Raises CodecError where its state cannot be read.
    """
    state = decode_state(record.state)
    offered = {it.request: it for it in record.offered}
    guesses = {} if record.draft is None else dict(record.draft.guesses)
    requests = {
        held.arrived.request: RequestState(
            arrived=held.arrived,
            stream=log_of(held.arrived.tokens, held.output),
            cached_tokens=held.cached_tokens,
            passed=held.passed,
            offered=offered.get(held.arrived.request),
            guesses=guesses.get(held.arrived.request),
        )
        for held in record.requests
    }
    return View(
        state=state,
        requests=Map(requests),
        waiting=waiting_of(
            (
                (held.arrived.request, held.arrived.parameters.priority)
                for held in record.requests
                if not held.running
            ),
            policy.scheduling == PRIORITY,
        ),
        running=tuple(held.arrived.request for held in record.requests if held.running),
        closing=tuple(seq for seq in sorted(state.sequences) if seq not in requests),
        alone=record.alone,
        stuck=record.stuck,
        flush=record.flush,
        step=record.step + 1,
        draft=None if record.draft is None else restored(record.draft),
    )
