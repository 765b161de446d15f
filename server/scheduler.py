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

from msgspec import structs

from kernel.batch import Batch, Piece
from statemachine import commands
from statemachine.errors import PoolExhausted
from statemachine.events import (
    DECODE,
    DRAFT,
    LOOKAHEAD,
    PAD,
    PROMPT,
    Appended,
    AppendedEach,
    BlockCopied,
    Event,
)
from statemachine.sequence import Sequence
from statemachine.state import State
from statemachine.transitions import apply_all

from .admission import admit, limit_tokens
from .closing import Outcome, close_step, drawn, fail_step, outcomes, settle, settle_failed
from .policy import PRIORITY, Policy
from .sharing import share
from .speculation import Ngrams, followed_at, index, propose
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
from .waiting import Waiting

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


class InFlight(Exception):
    """Somebody would have to be preempted, but a step is in flight: read that first."""


class Draft:
    """The plan that is being made; nothing outside of plan_step sees it."""

    def __init__(self, view: View, policy: Policy) -> None:
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


def plan_step(view: View, policy: Policy) -> StepPlan:
    """The next step. Pure; a plan that is `idle` means that there is nothing to do, or nothing
    before the step in flight was settled.
    """
    draft = Draft(view, policy)
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
    for seq in sorted(view.closing):
        draft.do(commands.close(draft.state, seq, CANCELLED))
    if view.flush:
        draft.do(commands.flush(draft.state))
    if view.alone:
        _plan_alone(draft, view.alone[0])
        return
    _plan_decode(draft, _decoding(draft))
    if view.flights:
        _plan_ahead(draft, _sampling(draft))
    if draft.waiting.chunks and not draft.preempted:
        admit(draft)
    _plan_prompts(draft, draft.prompts())


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
        stream, sequence = requests[seq].stream, sequences[seq]
        one_left = stream.length - sequence.committed == 1 and stream.length > len(stream.prompt)
        if one_left and not sequence.speculative and not sequence.pads:
            found.append(seq)
    return found


def _sampling(draft: Draft) -> list[int]:
    """Running sequences of the step in flight that may have a row before its tokens are read."""
    samplers = {
        piece.seq
        for piece in draft.view.flights[-1].pieces
        if piece.samples and piece.purpose != DRAFT and not piece.pads
    }
    return [seq for seq in draft.running if seq in samplers and not _waits_for_token(draft, seq)]


def _waits_for_token(draft: Draft, seq: int) -> bool:
    """Whether the token in flight is to be read first: it ends the answer, or drafts may follow."""
    request, policy = draft.request(seq), draft.policy
    stream = request.stream
    if stream.length + 1 >= limit_tokens(draft.view, policy, request):
        return True
    if not policy.draft_tokens:
        return False
    at = followed_at(stream, _ngrams(request, policy), policy.lookup_ngram)
    return at is not None and at + 1 < stream.length


def _ngrams(request: RequestState, policy: Policy) -> Ngrams:
    """The index of a request's stream; made here where nobody kept it."""
    if request.ngrams is not None:
        return request.ngrams
    return index(request.stream, policy.lookup_ngram)


def _plan_ahead(draft: Draft, seqs: list[int]) -> None:
    """A row without a token to each of `seqs`, the last ones left out while blocks are short."""
    while seqs:
        try:
            events = commands.append_each(draft.state, draft.view.step, seqs, None, LOOKAHEAD)
        except PoolExhausted:
            last = max(n for n, seq in enumerate(seqs) if _takes_block(draft, seq))
            seqs = seqs[:last] + seqs[last + 1 :]
            continue
        draft.do(events)
        draft.pieces.extend(PlannedPiece(seq, 1, 0, LOOKAHEAD, 1) for seq in _order(events))
        draft.rows_left -= len(seqs)
        return


def _takes_block(draft: Draft, seq: int) -> bool:
    return any(commands.blocks_needed(draft.state, seq, 1))


def _plan_decode(draft: Draft, seqs: list[int]) -> None:
    """One row to each of `seqs`, after whatever has to make room for them; drafts behind some of
    them, as long as all find their blocks without that.
    """
    drafts = _drafts(draft, seqs) if draft.policy.draft_tokens else {}
    if drafts and _plan_drafts(draft, seqs, drafts):
        return
    _plan_rows(draft, seqs)


def _drafts(draft: Draft, seqs: list[int]) -> dict[int, tuple[int, ...]]:
    """What may come next, where a text was read before; the step's other rows come first."""
    policy, spare = draft.policy, draft.rows_left - len(seqs)
    found = {}
    for seq in seqs:
        request = draft.request(seq)
        limit = limit_tokens(draft.view, policy, request)
        most = min(policy.draft_tokens, limit - request.stream.length - 1, spare)
        if most > 0:
            ngrams = _ngrams(request, policy)
            guess = propose(request.stream, ngrams, policy.lookup_ngram, most)
            if guess:
                found[seq] = guess
                spare -= len(guess)
    return found


def _plan_drafts(draft: Draft, seqs: list[int], drafts: dict[int, tuple[int, ...]]) -> bool:
    """Decode rows and drafts together; False, and nothing done, where blocks are short."""
    requests, step = draft.view.requests, draft.view.step
    state, events = draft.state, list[Event]()
    plain = [seq for seq in seqs if seq not in drafts]
    pieces: list[PlannedPiece] = []
    try:
        if plain:
            tokens = tuple(requests[seq].stream.last() for seq in plain)
            events += commands.append_each(state, step, plain, tokens, DECODE)
            pieces += [PlannedPiece(seq, 1, 0, DECODE, 1) for seq in _order(tuple(events))]
            state = apply_all(state, events)
        for seq, guess in drafts.items():
            fed = (requests[seq].stream.last(), *guess)
            fresh = commands.append(state, seq, step, tokens=fed, purpose=DRAFT)
            state = apply_all(state, fresh)
            events += fresh
            pieces.append(PlannedPiece(seq, len(fed), 0, DRAFT, len(fed)))
    except PoolExhausted:
        return False
    draft.state = state
    draft.events += events
    draft.pieces += pieces
    draft.rows_left -= sum(piece.rows for piece in pieces)
    return True


def _plan_rows(draft: Draft, seqs: list[int]) -> None:
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
        draft.pieces.extend(PlannedPiece(seq, 1, 0, DECODE, 1) for seq in _order(events))
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
        if policy.draft_tokens:
            request = structs.replace(request, ngrams=_ngrams(request, policy))
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
    )


def batch(view: View, plan: StepPlan) -> Batch:
    """What the kernel is handed for a plan; `view` is the one that `begin` gave."""
    pieces = []
    for planned in plan.pieces:
        request: RequestState = view.requests[planned.seq]
        sequence = view.state.sequences[planned.seq]
        pieces.append(
            Piece(
                sequence=sequence,
                tokens=_fed(request, sequence, planned),
                pads=planned.pads,
                pending=int(planned.purpose == LOOKAHEAD),
                samples=planned.samples,
                parameters=request.arrived.parameters if planned.samples else None,
            )
        )
    copies = tuple(event for event in plan.events if isinstance(event, BlockCopied))
    return Batch(plan.step, tuple(pieces), copies)


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
