"""Scheduler: what the next step does, as a pure function of the view; and how the view goes on.

    plan_step -> begin -> (the forward) -> close_step -> settle           one step that succeeds
                          (it raised)   -> fail_step -> settle_failed     one that does not

A step's order: closes of cancelled requests; decode rows (all running sequences with one row left
and an answer), some with drafts behind them; lookahead rows; admissions; prompt pieces in admission
order (sharing.py says how many rows each).

Who makes room, after cached blocks: a row that finds no block takes those of the running request
with the fewest answer tokens (of several, the one that arrived last), which goes back into the
queue with all its tokens. The oldest running request is never chosen while another runs, so it
always gets to its end, and the next becomes the oldest. By priority, "oldest" is the first in the
queue's order, and the last in it is chosen. A prompt piece takes blocks only while nothing else is
issued in the step; otherwise it waits, since others move. A step that preempted admits nobody.

Lookahead: while a step is in flight its samplers get a row each whose token nobody has read yet.
Such a plan preempts nobody: a row that knows its token and finds no block makes it idle, so that
the flight is read first; a lookahead row that finds none is left out. A sequence never has
lookahead and draft rows at once, and none of either while pads are in flight.
"""

from __future__ import annotations

from itertools import chain

from msgspec import structs

from kernel.batch import Batch, Piece
from statemachine import commands
from statemachine.errors import PoolExhausted
from statemachine.events import (
    DRAFT,
    LOOKAHEAD,
    PAD,
    PROMPT,
    BlockCopied,
)
from statemachine.geometry import has_state
from statemachine.records import NO_SCORES
from statemachine.sequence import Sequence
from statemachine.transitions import apply_all

from .admission import admit
from .closing import Outcome, close_step, drawn, outcomes, settle
from .decoding import decoding, ngrams_of, plan_ahead, plan_decode, sampling
from .draft import Apply, Draft, InFlight
from .failing import fail_step, settle_failed
from .policy import Policy
from .scoring import NOTHING, scored_by
from .sharing import rows_to_edge, share
from .submission import CANCELLED
from .view import (
    UNKNOWN,
    PlannedPiece,
    RequestState,
    StepPlan,
    View,
    initial,
    receive,
)

__all__ = [
    "Outcome",
    "StepPlan",
    "View",
    "batch",
    "begin",
    "close_step",
    "drawn",
    "fail_step",
    "initial",
    "outcomes",
    "plan_step",
    "receive",
    "settle",
    "settle_failed",
]


def plan_step(view: View, policy: Policy, apply: Apply = apply_all) -> StepPlan:
    """The next step. Pure; a plan that is `idle` means that there is nothing to do, or nothing
    before the step in flight was settled.
    """
    draft = Draft(view, policy, apply)
    if view.alone and view.flights:
        return draft.plan()
    try:
        _fill(draft)
    except InFlight:
        return Draft(view, policy).plan()
    return draft.plan()


def _fill(draft: Draft) -> None:
    """All of a step. Raises InFlight."""
    view = draft.view
    closing = [commands.close(draft.state, seq, CANCELLED) for seq in sorted(view.closing)]
    draft.do(tuple(chain.from_iterable(closing)))
    if view.flush:
        draft.do(commands.flush(draft.state), store=False)
    if view.alone:
        _plan_alone(draft, view.alone[0])
        return
    ahead = sampling(draft) if view.flights else []
    draft.rows_left -= len(ahead)  # drafts are made of what rows of one token each leave
    plan_decode(draft, decoding(draft))
    draft.rows_left += len(ahead)
    plan_ahead(draft, ahead)
    if draft.waiting.chunks and not draft.preempted:
        admit(draft)
    _plan_prompts(draft, draft.prompts())


def _plan_alone(draft: Draft, seq: int) -> None:
    """A step of one sequence, to learn whether it is the one that cannot be built."""
    if seq in decoding(draft):
        plan_decode(draft, [seq])
    else:
        _plan_prompts(draft, [seq])


def _plan_prompts(draft: Draft, seqs: list[int]) -> None:
    """Pieces of prompts, as sharing.py divides the rows that are left."""
    shares = share(draft.policy, draft.rows_left, [draft.left(seq) for seq in seqs])
    for seq, (rows, pads) in zip(seqs, shares, strict=False):
        while seq in draft.running and not _plan_piece(draft, seq, rows, pads):
            if draft.pieces:
                break
            draft.make_room()


def _plan_piece(draft: Draft, seq: int, rows: int, pads: int) -> bool:
    """Issue a piece, without its pads where these do not fit; False where the rows do not."""
    stream, step = draft.request(seq).stream, draft.view.step
    first = draft.state.sequences[seq].committed
    if has_state(draft.state.geometry):
        rows = rows_to_edge(draft.state.geometry.block_size, first, rows, stream.length)
    tokens = stream.slice(first, first + rows)
    try:
        draft.do(
            commands.append(draft.state, seq, step, tokens=tokens, purpose=PROMPT, applied=True)
        )
    except PoolExhausted:
        return False
    if pads:
        try:
            draft.do(commands.append(draft.state, seq, step, rows=pads, purpose=PAD, applied=True))
        except PoolExhausted:
            pads = 0
    samples = int(first + rows == stream.length)
    draft.pieces.append(PlannedPiece(seq, rows, pads, PROMPT, samples))
    draft.rows_left -= rows + pads
    return True


def begin(view: View, plan: StepPlan) -> View:
    """The view once a plan's opening events are applied."""
    requests, policy = view.requests, plan.policy
    for seq, rows in plan.admitted:
        request = requests[seq]
        if request.cached_tokens == UNKNOWN:
            request = structs.replace(request, cached_tokens=rows)
        if request.offered is not None:
            request = structs.replace(request, offered=None)
        if policy.draft_tokens and view.draft is None:
            request = structs.replace(request, ngrams=ngrams_of(request, policy))
        requests = requests.set(seq, request)
    for seq in plan.passed:
        request = requests[seq]
        requests = requests.set(seq, structs.replace(request, passed=request.passed + 1))
    return View(
        state=plan.state,
        requests=requests,
        waiting=plan.waiting,
        running=plan.running,
        closing=(),
        alone=plan.alone,
        stuck=plan.stuck,
        flights=(*view.flights, plan),
        step=plan.step + 1,
        draft=view.draft,
    )


def batch(view: View, plan: StepPlan) -> Batch:
    """What the kernel is handed for a plan; `view` is the one that `begin` gave."""
    pieces, requests, sequences = [], view.requests, view.state.sequences
    for planned in plan.pieces:
        request: RequestState = requests[planned.seq]
        sequence, parameters = sequences[planned.seq], request.arrived.parameters
        fed, ahead = _fed(request, sequence, planned), int(planned.purpose == LOOKAHEAD)
        asked = parameters if planned.samples else None
        piece = Piece(sequence, fed, planned.pads, ahead, planned.samples, asked)
        if parameters.score_from != NO_SCORES or parameters.reads_answer:
            piece = _told_more(piece, request, planned)
        pieces.append(piece)
    copies = tuple(event for event in plan.events if isinstance(event, BlockCopied))
    return Batch(plan.step, tuple(pieces), copies)


def _told_more(piece: Piece, request: RequestState, planned: PlannedPiece) -> Piece:
    """A piece with what few requests ask for: scores of a prompt, samples that read the answer."""
    arrived = request.arrived
    parameters, scored = arrived.parameters, NOTHING
    if parameters.score_from != NO_SCORES:
        scored = scored_by(request, piece.sequence, planned)
    reads = planned.samples and parameters.reads_answer
    return structs.replace(
        piece,
        parameters=parameters if planned.samples or scored else None,
        answer=request.stream.output() if reads else (),
        prompt=arrived.tokens if reads and parameters.reads_prompt else (),
        targets=arrived.tokens[scored.start : scored.stop] if scored else (),
    )


def _fed(request: RequestState, sequence: Sequence, planned: PlannedPiece) -> tuple[int, ...]:
    """The tokens of a piece's rows, as far as they are known."""
    if planned.purpose == LOOKAHEAD:
        return ()
    if planned.purpose == DRAFT:
        return tuple(row.token for row in sequence.speculative)
    if planned.rows == 1 and planned.samples:
        return (request.stream.last(),)
    end = sequence.committed
    return request.stream.slice(end - planned.rows, end)
