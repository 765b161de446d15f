"""Closing: what a step's results do to the sequences and requests that were in it.

Owns the end of a request: end token, length, a Finished input; and the undoing of a step that
raised. Pure, like the scheduler that it is a part of. Closing events: StepWritten (where rows were
issued); what became of rows issued on the chance: Committed and Rewound for drafts, Rewound and
CommittedEach for lookahead rows; then for each piece in batch order Trimmed, BlockPublished,
FrontTrimmed, Closed.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, structs

from statemachine import commands
from statemachine.errors import IllegalCommand
from statemachine.events import (
    DRAFT,
    PROMPT,
    BlockCopied,
    BlockPublished,
    Closed,
    Event,
    Preempted,
)
from statemachine.records import Finished
from statemachine.sequence import Sequence
from statemachine.state import State
from statemachine.transitions import apply_all

from .admission import capacity_tokens
from .speculation import accepted, extend
from .submission import ERROR, LENGTH, STOP
from .view import PlannedPiece, RequestState, StepPlan, View

BUILD = "build"
EVAL = "eval"
PLAN = "plan"
CLOSE = "close"
VOID = "void"
"""Stages at which a step fails; after PLAN and CLOSE, which are bugs, every live request ends.
VOID: it was in flight behind one that lost the pages, and is given up unread."""


class Outcome(Struct, frozen=True):
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
    wanted = sum(piece.samples for piece in plan.pieces)
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
    left = min(len(request.stream.prompt) + parameters.max_tokens, capacity) - length
    kept, reason = len(tokens), None
    for at, token in enumerate(tokens):
        if token in parameters.end_tokens:
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
    events: list[Event] = list(commands.step_written(view.state, plan.step))
    written = apply_all(view.state, events)
    events += _resolve(written, plan, found)
    state = apply_all(view.state, events)
    published: set[tuple[int, int]] = set()
    for piece in plan.pieces:
        seq = piece.seq
        sequence = written.sequences.get(seq)
        if sequence is None:
            continue  # it was cancelled, and closed, while the step was in flight
        edge = sequence.committed % size == 0
        if edge or piece.purpose in (PROMPT, DRAFT) or seq in reasons:
            closed = _close_piece(state, plan, seq, piece.pads, reasons.get(seq))
            for event in closed:
                if isinstance(event, BlockPublished):
                    if (event.group, event.block) in published:
                        continue
                    published.add((event.group, event.block))
                events.append(event)
    return tuple(events)


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
            events += commands.commit(state, outcome.seq, kept)
            rows -= outcome.rows
            if rows:
                state = apply_all(state, events[-1:])
                events += commands.rewind(state, outcome.seq, rows)
        elif outcome.reason is None:
            ahead.append(outcome)
        else:
            events += commands.rewind(state, outcome.seq, rows)
    if ahead:
        seqs = tuple(outcome.seq for outcome in ahead)
        tokens = tuple(outcome.tokens[0] for outcome in ahead)
        events += commands.commit_each(state, seqs, tokens)
    return events


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
    return events + commands.front_trims(state, seq)


def settle(
    view: View, plan: StepPlan, found: tuple[Outcome, ...], events: tuple[Event, ...]
) -> View:
    """The view after a step: tokens joined their answers, ended requests are gone."""
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
    freeing = any(piece.purpose in (PROMPT, DRAFT) for piece in plan.pieces)
    tried = {piece.seq for piece in plan.pieces}
    return structs.replace(
        view,
        state=apply_all(view.state, events),
        requests=live,
        running=tuple(r for r in view.running if r not in ended) if ended else view.running,
        alone=tuple(seq for seq in view.alone if seq not in tried) if view.alone else (),
        stuck=view.stuck and not ended and not freeing,
        flights=view.flights[1:],
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


def fail_step(
    view: View, plan: StepPlan, stage: str, blamed: tuple[int, ...] = ()
) -> tuple[Event, ...]:
    """The events that undo a step; `view` is what `begin` gave.

    At build the pages are as before: every sequence of the step is trimmed to where it was, the
    blamed ones are closed. At eval the pages are lost. After a bug everything is given up.
    """
    if stage == VOID:
        return ()
    if stage == BUILD:
        return _undo(view, plan, blamed)
    events = list(commands.pool_reset(view.state))
    state = apply_all(view.state, events)
    ending = sorted(state.sequences) if stage in (PLAN, CLOSE) else sorted(blamed)
    for seq in ending:
        closed = commands.close(state, seq, ERROR)
        state = apply_all(state, closed)
        events.extend(closed)
    return tuple(events)


def _undo(view: View, plan: StepPlan, blamed: tuple[int, ...]) -> tuple[Event, ...]:
    """Back to before the step. Block copies were part of it, and may not have run: a sequence that
    had one gives up the copied rows too, or starts over where its windows no longer allow that.
    """
    copied = {event.seq: event.rows for event in plan.events if isinstance(event, BlockCopied)}
    state, events = view.state, list[Event]()
    for piece in plan.pieces:
        if piece.seq not in state.sequences:
            continue  # it ended by what the step before sampled
        if piece.seq in blamed:
            undone = commands.close(state, piece.seq, ERROR)
        else:
            rows = piece.rows + piece.pads + copied.get(piece.seq, 0)
            try:
                undone = commands.trim(state, piece.seq, rows)
            except IllegalCommand:
                undone = commands.preempt(state, piece.seq)
        state = apply_all(state, undone)
        events.extend(undone)
    if plan.step in state.pins:
        # No row of the step is left; this lets go of the blocks that its copies read.
        events.extend(commands.step_written(state, plan.step))
    return tuple(events)


def settle_failed(
    view: View,
    plan: StepPlan,
    stage: str,
    blamed: tuple[int, ...],
    events: tuple[Event, ...],
) -> View:
    """The view after a step that raised.

    At build, with nobody blamed, all of the step will run alone, one by one. At eval all running
    requests go back into the queue, with their tokens. VOID changes nothing: the step before did.
    """
    if stage == VOID:
        return structs.replace(view, flights=view.flights[1:])
    gone = {event.seq for event in events if isinstance(event, Closed)}
    if stage in (PLAN, CLOSE):
        gone |= set(view.requests.keys())
    back = {event.seq for event in events if isinstance(event, Preempted)}
    if stage != BUILD:
        back |= set(view.running)
    waiting = view.waiting
    for seq in sorted(back - gone):
        if seq in view.requests:
            waiting = waiting.add(seq, view.requests[seq].priority)
    with view.requests.mutate() as requests:
        for seq in sorted(gone):
            request = requests.pop(seq, None)
            if request is not None:
                waiting = waiting.remove(seq, request.priority)
        live = requests.finish()
    running = tuple(seq for seq in view.running if seq not in gone and seq not in back)
    alone = tuple(seq for seq in view.alone if seq in running)
    if stage == BUILD and not blamed:
        alone = tuple(piece.seq for piece in plan.pieces if piece.seq in running)
    return structs.replace(
        view,
        state=apply_all(view.state, events),
        requests=live,
        waiting=waiting,
        running=running,
        closing=tuple(seq for seq in view.closing if seq not in gone),
        alone=alone,
        stuck=False,
        flights=view.flights[1:],
        step=max(view.step, plan.step + 1),
    )
