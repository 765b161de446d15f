"""Scheduler: what the next step does, as a pure function of the view; and how the view goes on.

    plan_step -> begin -> (the forward) -> close_step -> settle           one step that succeeds
                          (it raised)   -> fail_step -> settle_failed     one that does not

A step's order: closes of cancelled requests; decode rows (all running sequences with one row left
and an answer); admissions; prompt pieces in admission order (sharing.py says how many rows each).

Who makes room, after cached blocks: a row that finds no block takes those of the running request
with the fewest answer tokens (of several, the one that arrived last), which goes to the front of
the queue with all its tokens. The oldest running request is never chosen while another runs, so it
always gets to its end, and the next becomes the oldest. A prompt piece takes blocks only while
nothing else is issued in the step; otherwise it waits, since others move. A step that preempted
admits nobody.
"""

from __future__ import annotations

from msgspec import structs

from kernel.batch import Batch, Piece
from statemachine import commands
from statemachine.errors import PoolExhausted
from statemachine.events import DECODE, PAD, PROMPT, Appended, AppendedEach, BlockCopied, Event
from statemachine.state import State
from statemachine.transitions import apply_all

from .admission import admit
from .closing import Outcome, close_step, fail_step, outcomes, settle, settle_failed
from .policy import Policy
from .sharing import share
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
    "fail_step",
    "initial",
    "outcomes",
    "plan_step",
    "receive",
    "settle",
    "settle_failed",
]


class Draft:
    """The plan that is being made; nothing outside of plan_step sees it."""

    def __init__(self, view: View, policy: Policy) -> None:
        self.view = view
        self.policy = policy
        self.state: State = view.state
        self.events: list[Event] = []
        self.pieces: list[PlannedPiece] = []
        self.running = list(view.running)
        self.waiting = view.waiting
        self.rows_left = policy.max_batch_tokens
        self.stuck = view.stuck
        self.preempted = False
        self.admitted: list[tuple[int, int]] = []
        self.passed: list[int] = []

    def do(self, events: tuple[Event, ...]) -> None:
        """Apply events and keep them."""
        if events:
            self.state = apply_all(self.state, events)
            self.events.extend(events)

    def request(self, seq: int) -> RequestState:
        """A live request."""
        request: RequestState = self.view.requests[seq]
        return request

    def left(self, seq: int) -> int:
        """Rows of a sequence's stream that were not issued yet."""
        return self.request(seq).stream.length - int(self.state.sequences[seq].committed)

    def prompts(self) -> list[int]:
        """Running sequences that have prompt rows to issue, in admission order."""
        if len(self.pieces) == len(self.running):
            return []
        issued = {piece.seq for piece in self.pieces}
        return [seq for seq in self.running if seq not in issued and self.left(seq) > 0]

    def make_room(self) -> None:
        """Preempt the running request that the module's rule names; a lone one starts over."""
        oldest = min(self.running)
        others = [seq for seq in self.running if seq != oldest]
        victim = min(others or [oldest], key=lambda seq: (self.request(seq).output_tokens, -seq))
        self.do(commands.preempt(self.state, victim))
        self.running.remove(victim)
        self.waiting = (victim, *self.waiting)
        self.preempted = True

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


def plan_step(view: View, policy: Policy) -> StepPlan:
    """The next step. Pure; a plan that is `idle` means that there is nothing to do."""
    draft = Draft(view, policy)
    for seq in sorted(view.closing):
        draft.do(commands.close(draft.state, seq, CANCELLED))
    if view.alone:
        _plan_alone(draft, view.alone[0])
    else:
        _plan_decode(draft, _decoding(draft))
        if draft.waiting and not draft.preempted:
            admit(draft)
        _plan_prompts(draft, draft.prompts())
    return draft.plan()


def _plan_alone(draft: Draft, seq: int) -> None:
    """A step of one sequence, to learn whether it is the one that cannot be built."""
    if seq in _decoding(draft):
        _plan_decode(draft, [seq])
    else:
        _plan_prompts(draft, [seq])


def _decoding(draft: Draft) -> list[int]:
    """Running sequences with one row left and an answer, in admission order."""
    requests, sequences = draft.view.requests, draft.state.sequences
    found = []
    for seq in draft.running:
        stream = requests[seq].stream
        if stream.length - sequences[seq].committed == 1 and stream.length > len(stream.prompt):
            found.append(seq)
    return found


def _plan_decode(draft: Draft, seqs: list[int]) -> None:
    """One row to each of `seqs`, after whatever has to make room for them."""
    requests, step = draft.view.requests, draft.view.step
    while seqs:
        tokens = tuple(requests[seq].stream.last() for seq in seqs)
        try:
            events = commands.append_each(draft.state, step, seqs, tokens, DECODE)
        except PoolExhausted:
            draft.make_room()
            seqs = [seq for seq in seqs if seq in draft.running]
            continue
        draft.do(events)
        draft.pieces.extend(PlannedPiece(seq, 1, 0, DECODE, True) for seq in _order(events))
        draft.rows_left -= len(seqs)
        return


def _order(events: tuple[Event, ...]) -> list[int]:
    """Sequences in the order in which decode events name them: the order of the batch."""
    order: list[int] = []
    for event in events:
        if isinstance(event, AppendedEach):
            order.extend(event.seqs)
        elif isinstance(event, Appended):
            order.append(event.seq)
    return order


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
    tokens = stream.slice(first, first + rows)
    try:
        draft.do(commands.append(draft.state, seq, step, tokens=tokens, purpose=PROMPT))
    except PoolExhausted:
        return False
    if pads:
        try:
            draft.do(commands.append(draft.state, seq, step, rows=pads, purpose=PAD))
        except PoolExhausted:
            pads = 0
    samples = first + rows == stream.length
    draft.pieces.append(PlannedPiece(seq, rows, pads, PROMPT, samples))
    draft.rows_left -= rows + pads
    return True


def begin(view: View, plan: StepPlan) -> View:
    """The view once a plan's opening events are applied."""
    requests = view.requests
    for seq, rows in plan.admitted:
        request = requests[seq]
        if request.cached_tokens == UNKNOWN:
            requests = requests.set(seq, structs.replace(request, cached_tokens=rows))
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
        step=plan.step,
    )


def batch(view: View, plan: StepPlan) -> Batch:
    """What the kernel is handed for a plan; `view` is the one that `begin` gave."""
    pieces = []
    for planned in plan.pieces:
        request: RequestState = view.requests[planned.seq]
        sequence = view.state.sequences[planned.seq]
        if planned.rows == 1 and planned.samples:
            tokens: tuple[int, ...] = (request.stream.last(),)
        else:
            end = sequence.committed
            tokens = request.stream.slice(end - planned.rows, end)
        pieces.append(
            Piece(
                sequence=sequence,
                tokens=tokens,
                pads=planned.pads,
                sample_position=request.stream.length if planned.samples else None,
                parameters=request.arrived.parameters if planned.samples else None,
            )
        )
    copies = tuple(event for event in plan.events if isinstance(event, BlockCopied))
    return Batch(plan.step, tuple(pieces), copies)
