"""Closing: what a step's results do to the sequences and requests that were in it.

Owns the end of a request: end token, length, a Finished input. Pure, like the scheduler that it is
a part of. Closing events: StepWritten (where rows were issued); what became of rows issued on the
chance: Committed and Rewound for drafts (Trimmed to a block's edge where a state
went through some that do not stay), Rewound and CommittedEach for lookahead rows; then for each
piece in batch order Trimmed, BlockPublished, FrontTrimmed, Closed.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, structs

from statemachine import commands
from statemachine.events import (
    DRAFT,
    PROMPT,
    BlockPublished,
    CommittedEach,
    Event,
    FrontTrimmed,
    StepWritten,
)
from statemachine.geometry import has_state
from statemachine.records import Finished
from statemachine.sequence import Sequence
from statemachine.state import State
from statemachine.transitions import apply_all

from .admission import capacity_tokens, limit_tokens
from .speculation import accepted, extend
from .submission import LENGTH, STOP
from .view import PlannedPiece, RequestState, StepPlan, View


class Outcome(Struct, frozen=True, gc=False):
    """What became of a request that sampled: `tokens` that join its answer, and its end.

    rows: of a piece that verified drafts, how many stay; 0 of others.
    """

    seq: int
    tokens: tuple[int, ...]
    reason: str | None = None
    rows: int = 0


Drawn = tuple[PlannedPiece, RequestState, tuple[int, ...]]
"""A piece, its request, and the tokens that it drew for the answer."""


def drawn(view: View, plan: StepPlan, tokens: tuple[int, ...]) -> Iterator[Drawn]:
    """The tokens of each piece that sampled for a live request, in batch order. Drafts that were
    not accepted are no tokens of it, and nor is what was sampled behind them.

    Raises ValueError where there are not as many tokens as samples.
    """
    wanted = sum([piece.samples for piece in plan.pieces])
    if wanted != len(tokens):
        raise ValueError(f"step {plan.step} has {wanted} samples, not {len(tokens)}")
    at = 0
    for piece in plan.pieces:
        if not piece.samples:
            continue
        mine, at = tokens[at : at + piece.samples], at + piece.samples
        request = view.requests.get(piece.seq)
        if request is None:
            continue  # it was cancelled while the step was in flight
        if piece.purpose == DRAFT:
            guesses = view.state.sequences[piece.seq].speculative[1:]
            mine = mine[: accepted(mine, (row.token for row in guesses)) + 1]
        yield piece, request, mine


def outcomes(
    view: View, plan: StepPlan, tokens: tuple[int, ...], finished: tuple[Finished, ...]
) -> tuple[Outcome, ...]:
    """What the sampled tokens do, in batch order.

    An end token ends the answer and is no part of it. A Finished input keeps tokens_kept answer
    tokens. Raises ValueError where there are not as many tokens as samples.
    """
    ends = {end.request: end for end in finished}
    capacity = capacity_tokens(view.state.geometry, plan.policy)
    return tuple(
        [
            _outcome(piece, request, mine, ends.get(piece.seq), capacity)
            for piece, request, mine in drawn(view, plan, tokens)
        ]
    )


def _outcome(
    piece: PlannedPiece,
    request: RequestState,
    tokens: tuple[int, ...],
    end: Finished | None,
    capacity: int,
) -> Outcome:
    parameters, length = request.arrived.parameters, request.stream.length
    if parameters.embed:
        # The answer is what was sampled from, and the token is nobody's.
        return Outcome(piece.seq, (), STOP, int(piece.purpose == DRAFT))
    left, ends = limit_tokens(request, capacity) - length, parameters.end_tokens
    if end is None and len(tokens) < left and (not ends or set(tokens).isdisjoint(ends)):
        return Outcome(piece.seq, tokens, None, len(tokens) if piece.purpose == DRAFT else 0)
    kept, reason = len(tokens), None
    for at, token in enumerate(tokens):
        if token in ends:
            kept, reason = at, STOP
            break
        if end is not None and end.tokens_kept <= request.output_tokens + at + 1:
            kept, reason = max(0, end.tokens_kept - request.output_tokens), end.reason
            break
        if at + 1 >= left:
            kept, reason = at + 1, LENGTH
            break
    else:
        reason = None if end is None else end.reason
    rows = 1 + min(kept, len(tokens) - 1) if piece.purpose == DRAFT else 0
    return Outcome(piece.seq, tokens[:kept], reason, rows)


def close_step(view: View, plan: StepPlan, found: tuple[Outcome, ...]) -> tuple[Event, ...]:
    """The closing events of a step with these outcomes; `plan` is the view's oldest flight."""
    if not plan.pieces:
        return ()
    reasons = {outcome.seq: outcome.reason for outcome in found if outcome.reason is not None}
    size = view.state.geometry.block_size
    events: list[Event] = [StepWritten(plan.step)]
    written = apply_all(view.state, events)
    resolving: list[Event] = []
    if plan.policy.draft_tokens or len(view.flights) > 1:  # or no row was issued on the chance
        resolving = _resolve(written, plan, found)
        events += resolving
    sequences = written.sequences
    closing = [
        piece
        for piece in plan.pieces
        # One that was cancelled while the step was in flight is closed by now.
        if (sequence := sequences.get(piece.seq)) is not None
        and (
            sequence.committed % size == 0
            or piece.purpose in (PROMPT, DRAFT)
            or piece.seq in reasons
        )
    ]
    if closing:
        # Rows that CommittedEach names are those of the step in flight: they are not written yet,
        # so nothing that is asked of the closing pieces depends on them.
        resolved = [event for event in resolving if not isinstance(event, CommittedEach)]
        if resolved:
            written = apply_all(written, resolved)
        events += _closings(written, plan, closing, reasons)
    return tuple(events)


def _closings(
    state: State, plan: StepPlan, pieces: list[PlannedPiece], reasons: dict[int, str]
) -> list[Event]:
    """Closing events of pieces; a block that two of them share is published once."""
    events: list[Event] = []
    published: set[tuple[int, int]] = set()
    for piece in pieces:
        for event in _close_piece(state, plan, piece.seq, piece.pads, reasons.get(piece.seq)):
            if isinstance(event, BlockPublished):
                if (event.group, event.block) in published:
                    continue
                published.add((event.group, event.block))
            events.append(event)
    return events


def _resolve(state: State, plan: StepPlan, found: tuple[Outcome, ...]) -> list[Event]:
    """What the outcomes do to rows that were issued on the chance: the drafts of this step, and
    the lookahead rows of the next one.
    """
    events: list[Event] = []
    ahead: list[Outcome] = []
    for outcome in found:
        sequence: Sequence = state.sequences[outcome.seq]
        rows = len(sequence.speculative)
        if not rows:
            continue
        if outcome.rows:
            kept = tuple(row.token for row in sequence.speculative[: outcome.rows])
            rows -= outcome.rows
            if rows and has_state(state.geometry):
                # The accepted ones are computed again, from the last state that was kept.
                if outcome.reason is None:
                    back = sequence.offset - _edge(state, sequence)
                    events += commands.trim(state, outcome.seq, back)
                continue
            events += commands.commit(state, outcome.seq, kept)
            if rows:
                state = apply_all(state, events[-1:])
                events += commands.rewind(state, outcome.seq, rows)
        elif outcome.reason is None:
            ahead.append(outcome)
        else:
            events += commands.rewind(state, outcome.seq, rows)
    if ahead:
        seqs = tuple([outcome.seq for outcome in ahead])
        tokens = tuple([outcome.tokens[0] for outcome in ahead])
        events += commands.commit_each(state, seqs, tokens)
    return events


def _edge(state: State, sequence: Sequence) -> int:
    """The last block's edge in the committed rows."""
    size: int = state.geometry.block_size
    return sequence.committed // size * size


def _close_piece(
    state: State, plan: StepPlan, seq: int, pads: int, reason: str | None
) -> tuple[Event, ...]:
    """Closing events of one piece. They name what is already held and choose nothing, so each may
    be asked of the state as the step's write left it."""
    events: tuple[Event, ...] = commands.trim(state, seq, pads) if pads else ()
    if plan.policy.prefix_cache:
        events += commands.publish(state, seq)
    if reason is not None:
        return events + commands.close(state, seq, reason)
    if plan.policy.draft_tokens and has_state(state.geometry):
        return events + commands.front_trims(state, seq, to_edge=True)
    return events + commands.front_trims(state, seq)


def settle(
    view: View,
    plan: StepPlan,
    found: tuple[Outcome, ...],
    events: tuple[Event, ...],
    state: State | None = None,
) -> View:
    """The view after a step: tokens joined their answers, ended requests are gone.

    state: after the events, where the caller has it.
    """
    ended: set[int] = set()
    ngram = plan.policy.lookup_ngram if plan.policy.draft_tokens else 0
    with view.requests.mutate() as requests:
        for outcome in found:
            if outcome.reason is not None:
                ended.add(outcome.seq)
                del requests[outcome.seq]
            elif outcome.tokens:
                requests[outcome.seq] = _continued(requests[outcome.seq], outcome.tokens, ngram)
        live = requests.finish()
    alone = view.alone
    if alone:
        tried = {piece.seq for piece in plan.pieces}
        alone = tuple(seq for seq in alone if seq not in tried)
    return structs.replace(
        view,
        state=apply_all(view.state, events) if state is None else state,
        requests=live,
        running=tuple(r for r in view.running if r not in ended) if ended else view.running,
        alone=alone,
        stuck=view.stuck and not ended and not _freeing(view, plan, events),
        flights=view.flights[1:],
    )


def _freeing(view: View, plan: StepPlan, events: tuple[Event, ...]) -> bool:
    """Whether a step may have made room for who waits, by its kind or by what closed it."""
    if plan.step in view.state.pins:
        return True
    return any(piece.purpose in (PROMPT, DRAFT) for piece in plan.pieces) or any(
        isinstance(event, FrontTrimmed) for event in events
    )


def _continued(request: RequestState, tokens: tuple[int, ...], ngram: int) -> RequestState:
    """A request with more of its answer; `ngram` 0: nobody looks anything up in it."""
    stream = request.stream
    for token in tokens:
        stream = stream.append(token)
    ngrams = request.ngrams
    if ngram and ngrams is not None:
        ngrams = extend(ngrams, stream, len(tokens), ngram)
    return RequestState(
        request.arrived, stream, request.cached_tokens, request.passed, ngrams if ngram else None
    )
