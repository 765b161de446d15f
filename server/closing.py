"""Closing: what a step's results do to the sequences and requests that were in it.

Owns the end of a request: end token, length, a Finished input; and the undoing of a step that
raised. Pure, like the scheduler that it is a part of. Closing events: StepWritten (where rows were
issued), then for each piece in batch order Trimmed, BlockPublished, FrontTrimmed, Closed.
"""

from __future__ import annotations

from msgspec import Struct, structs

from statemachine import commands
from statemachine.errors import IllegalCommand
from statemachine.events import PROMPT, BlockCopied, BlockPublished, Closed, Event, Preempted
from statemachine.records import Finished
from statemachine.state import State
from statemachine.transitions import apply_all

from .admission import capacity_tokens
from .submission import ERROR, LENGTH, STOP
from .view import RequestState, StepPlan, View

BUILD = "build"
EVAL = "eval"
PLAN = "plan"
CLOSE = "close"
"""Stages at which a step fails; after PLAN and CLOSE, which are bugs, every live request ends."""


class Outcome(Struct, frozen=True):
    """What became of a request that sampled: `token` where one joins its answer, and its end."""

    seq: int
    token: int | None
    reason: str | None = None


def outcomes(
    view: View, plan: StepPlan, tokens: tuple[int, ...], finished: tuple[Finished, ...]
) -> tuple[Outcome, ...]:
    """What each sampled token does, in batch order.

    An end token ends the answer and is no part of it. A Finished input keeps the token, unless
    tokens_kept leaves it out. Raises ValueError where there are not as many tokens as samplers.
    """
    samplers = [piece.seq for piece in plan.pieces if piece.samples]
    if len(samplers) != len(tokens):
        raise ValueError(f"step {plan.step} has {len(samplers)} samplers, not {len(tokens)}")
    capacity = capacity_tokens(view.state.geometry, plan.policy)
    ends = {end.request: end for end in finished}
    found = []
    for seq, token in zip(samplers, tokens, strict=True):
        request: RequestState = view.requests[seq]
        stream, parameters = request.stream, request.arrived.parameters
        length = stream.length + 1
        if token in parameters.end_tokens:
            found.append(Outcome(seq, None, STOP))
        elif seq in ends:
            kept = ends[seq].tokens_kept > request.output_tokens
            found.append(Outcome(seq, token if kept else None, ends[seq].reason))
        elif length >= min(len(stream.prompt) + parameters.max_tokens, capacity):
            found.append(Outcome(seq, token, LENGTH))
        else:
            found.append(Outcome(seq, token))
    return tuple(found)


def close_step(
    view: View, plan: StepPlan, tokens: tuple[int, ...], finished: tuple[Finished, ...] = ()
) -> tuple[Event, ...]:
    """The closing events of a step whose samplers drew `tokens`; `view` is what `begin` gave."""
    if not plan.pieces:
        return ()
    reasons = {
        outcome.seq: outcome.reason
        for outcome in outcomes(view, plan, tokens, finished)
        if outcome.reason is not None
    }
    size = view.state.geometry.block_size
    events: list[Event] = list(commands.step_written(view.state, plan.step))
    state = apply_all(view.state, events)
    published: set[tuple[int, int]] = set()
    for piece in plan.pieces:
        seq = piece.seq
        edge = state.sequences[seq].committed % size == 0
        if edge or piece.purpose == PROMPT or seq in reasons:
            closed = _close_piece(state, plan, seq, piece.pads, reasons.get(seq))
            for event in closed:
                if isinstance(event, BlockPublished):
                    if (event.group, event.block) in published:
                        continue
                    published.add((event.group, event.block))
                events.append(event)
    return tuple(events)


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
    view: View,
    plan: StepPlan,
    tokens: tuple[int, ...],
    finished: tuple[Finished, ...],
    events: tuple[Event, ...],
) -> View:
    """The view after a step: tokens joined their answers, ended requests are gone."""
    ended: set[int] = set()
    with view.requests.mutate() as requests:
        for outcome in outcomes(view, plan, tokens, finished):
            if outcome.reason is not None:
                ended.add(outcome.seq)
                del requests[outcome.seq]
            elif outcome.token is not None:
                request = requests[outcome.seq]
                requests[outcome.seq] = RequestState(
                    request.arrived,
                    request.stream.append(outcome.token),
                    request.cached_tokens,
                    request.passed,
                )
        live = requests.finish()
    prompts = any(piece.purpose == PROMPT for piece in plan.pieces)
    tried = {piece.seq for piece in plan.pieces}
    return View(
        state=apply_all(view.state, events),
        requests=live,
        waiting=view.waiting,
        running=tuple(r for r in view.running if r not in ended) if ended else view.running,
        closing=view.closing,
        alone=tuple(seq for seq in view.alone if seq not in tried) if view.alone else (),
        stuck=view.stuck and not ended and not prompts,
        step=plan.step + 1,
    )


def fail_step(
    view: View, plan: StepPlan, stage: str, blamed: tuple[int, ...] = ()
) -> tuple[Event, ...]:
    """The events that undo a step; `view` is what `begin` gave.

    At build the pages are as before: every sequence of the step is trimmed to where it was, the
    blamed ones are closed. At eval the pages are lost. After a bug everything is given up.
    """
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
    requests go back to the front of the queue, with their tokens.
    """
    gone = {event.seq for event in events if isinstance(event, Closed)}
    if stage in (PLAN, CLOSE):
        gone |= set(view.requests.keys())
    with view.requests.mutate() as requests:
        for seq in sorted(gone):
            requests.pop(seq, None)
        live = requests.finish()
    back = {event.seq for event in events if isinstance(event, Preempted)}
    running = tuple(seq for seq in view.running if seq not in gone and seq not in back)
    waiting = tuple(seq for seq in view.waiting if seq not in gone)
    waiting = tuple(seq for seq in view.running if seq in back) + waiting
    alone = tuple(seq for seq in view.alone if seq in running)
    if stage == BUILD and not blamed:
        alone = tuple(piece.seq for piece in plan.pieces if piece.seq in running)
    if stage != BUILD:
        running, waiting, alone = (), running + waiting, ()
    return structs.replace(
        view,
        state=apply_all(view.state, events),
        requests=live,
        waiting=waiting,
        running=running,
        closing=tuple(seq for seq in view.closing if seq not in gone),
        alone=alone,
        stuck=False,
        step=plan.step + 1,
    )
