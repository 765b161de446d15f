"""Transitions: what each event does to a state. The rules that hold, whatever is emitted:

1. A state changes by events only, and only here; the state that was given stays as it was.
2. An event is applied whole or not at all: a handler that raises leaves nothing behind.
3. A handler checks that what the event claims may be (InvariantBroken where not); which of the
   blocks that may be taken is taken is the commands' choice.
4. A block in two tables, or published, is never written: an append first copies it.
5. Committed rows come first, then speculative rows, then pads; after a pad only pads may follow.
6. Only full, written, committed blocks are published, or loaded as such; only cached ones are
   evicted.
7. One handler empties a sequence, whatever ends it; each table entry is released once, tail first.
8. A prompt's last row is never adopted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any

from . import events as ev
from .appending import appended, appended_each, block_copied
from .draft import Draft
from .errors import InvariantBroken
from .lifetime import closed, opened, pool_reset, preempted, reset
from .publication import evicted, loaded, published, stored
from .sharing import forked, prefix_adopted
from .state import State
from .trimming import committed, committed_each, front_trimmed, rewound, trimmed


def apply(state: State, event: ev.Event) -> State:
    """The state after one event. Raises InvariantBroken; `state` stays as it was."""
    return apply_all(state, (event,))


def apply_all(state: State, events: Iterable[ev.Event]) -> State:
    """The state after events, all of them or (InvariantBroken) none."""
    draft = Draft(state)
    try:
        for event in events:
            HANDLERS[type(event)](draft, event)
        return draft.finish()
    except (struct.error, OverflowError, UnicodeEncodeError) as error:
        raise InvariantBroken(
            f"an event holds a number or a text out of range (ids, steps and rows are unsigned "
            f"64-bit integers, names are UTF-8): {error}"
        ) from error


def step_written(draft: Draft, event: ev.StepWritten) -> None:
    """The writes of a step, and of those before, are real; what they pinned is let go."""
    if not (draft.written_step < event.step <= draft.issued_step):
        raise InvariantBroken(
            f"step {event.step} cannot be written now: step {draft.issued_step} was issued and "
            f"{draft.written_step} written"
        )
    draft.written_step = event.step
    for step in sorted(step for step in draft.pins if step <= event.step):
        draft.unpin(step)


def block_published(draft: Draft, event: ev.BlockPublished) -> None:
    """A full, written, committed block can be found."""
    published(draft, draft.sequence(event.seq), event)


def block_stored(draft: Draft, event: ev.BlockStored) -> None:
    """A published block was read for the prefix store: nothing changes."""
    stored(draft, event)


def block_loaded(draft: Draft, event: ev.BlockLoaded) -> None:
    """A kept block can be found, as if an earlier request had computed it."""
    loaded(draft, draft.sequence(event.seq).namespace, event)


def block_evicted(draft: Draft, event: ev.BlockEvicted) -> None:
    """A cached block can no longer be found; it is free."""
    if not (0 <= event.group < len(draft.geometry.groups)):
        raise InvariantBroken(f"there is no group {event.group}")
    entry = evicted(draft, event.group, event.block)
    if entry.key != event.key:
        raise InvariantBroken(
            f"block {event.block} of group {event.group} has key {entry.key}, not {event.key}"
        )


HANDLERS: dict[type[Any], Callable[[Draft, Any], None]] = {
    ev.Opened: opened,
    ev.PrefixAdopted: prefix_adopted,
    ev.Appended: appended,
    ev.AppendedEach: appended_each,
    ev.StepWritten: step_written,
    ev.Committed: committed,
    ev.CommittedEach: committed_each,
    ev.Trimmed: trimmed,
    ev.Rewound: rewound,
    ev.FrontTrimmed: front_trimmed,
    ev.BlockCopied: block_copied,
    ev.Forked: forked,
    ev.BlockPublished: block_published,
    ev.BlockEvicted: block_evicted,
    ev.Reset: reset,
    ev.Preempted: preempted,
    ev.Closed: closed,
    ev.PoolReset: pool_reset,
    ev.BlockStored: block_stored,
    ev.BlockLoaded: block_loaded,
}
