"""Lifetime: sequences that open, are emptied and end; and the pool that is lost under them."""

from __future__ import annotations

from . import events as ev
from .draft import Draft
from .errors import InvariantBroken
from .publication import evicted
from .sequence import Sequence
from .tags import root_key


def opened(draft: Draft, event: ev.Opened) -> None:
    """A sequence exists, at offset 0."""
    if event.seq <= draft.last_seq:
        raise InvariantBroken(f"sequence id {event.seq} was used before, or is out of order")
    draft.last_seq = event.seq
    groups = len(draft.geometry.groups)
    root = root_key(draft.geometry, event.namespace)
    draft.put(
        None,
        Sequence(event.seq, event.namespace, root, tables=((),) * groups, starts=(0,) * groups),
    )


def _empty(draft: Draft, old: Sequence, preempted: bool) -> Sequence:
    """The sequence without rows or blocks: what Reset, Preempted and Closed share."""
    for group in range(len(old.tables)):
        draft.release_tail(old, group, 0)
    groups = len(old.tables)
    return Sequence(
        old.id,
        old.namespace,
        old.root,
        tables=((),) * groups,
        starts=(0,) * groups,
        preempted=preempted,
    )


def reset(draft: Draft, event: ev.Reset) -> None:
    """The sequence starts again at 0."""
    old = draft.sequence(event.seq)
    draft.put(old, _empty(draft, old, preempted=False))


def preempted(draft: Draft, event: ev.Preempted) -> None:
    """The sequence is emptied and waits."""
    old = draft.sequence(event.seq)
    draft.put(old, _empty(draft, old, preempted=True))


def closed(draft: Draft, event: ev.Closed) -> None:
    """The sequence is emptied and gone."""
    old = draft.sequence(event.seq)
    _empty(draft, old, preempted=False)
    draft.remove(old)


def pool_reset(draft: Draft, _event: ev.PoolReset) -> None:
    """The pages were lost: every sequence waits at 0, the index is empty, issued steps are void."""
    for step in sorted(draft.pins):
        draft.unpin(step)
    state = draft.rebase()
    for seq in sorted(state.sequences):
        old = draft.sequence(seq)
        draft.put(old, _empty(draft, old, preempted=True))
    state = draft.rebase()
    for group in state.paged_groups():
        for _, number in sorted(state.groups[group].cached.items.items()):
            evicted(draft, group, number)
    draft.written_step = draft.issued_step
