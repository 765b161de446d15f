"""Failing: the undoing of a step that raised. Pure, like the scheduler that it is a part of."""

from __future__ import annotations

from msgspec import structs

from statemachine import commands
from statemachine.errors import IllegalCommand
from statemachine.events import BlockCopied, Closed, Event, Preempted
from statemachine.transitions import apply_all

from .submission import ERROR
from .view import StepPlan, View

BUILD = "build"
EVAL = "eval"
PLAN = "plan"
CLOSE = "close"
VOID = "void"
"""Stages at which a step fails; after PLAN and CLOSE, which are bugs, every live request ends.
VOID: it was in flight behind one that lost the pages, and is given up unread."""


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
