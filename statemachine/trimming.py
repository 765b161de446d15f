"""Trimming: rows that are accepted, taken back at the tail, or left behind by a window."""

from __future__ import annotations

from msgspec import structs

from . import events as ev
from .column import commit_column
from .content import extend, retract
from .draft import Draft
from .errors import InvariantBroken
from .events import NO_BLOCK
from .geometry import has_state
from .sequence import NO_TOKEN, Sequence, keeps_state, window_start, written_rows

NEVER = -1
"""No step."""


def committed(draft: Draft, event: ev.Committed) -> None:
    """The oldest speculative rows are accepted; lookahead rows learn their tokens."""
    old, count = draft.sequence(event.seq), len(event.tokens)
    if not (1 <= count <= len(old.speculative)):
        raise InvariantBroken(
            f"sequence {old.id} has {len(old.speculative)} speculative rows: {count} cannot be "
            "committed"
        )
    for row, token in zip(old.speculative, event.tokens, strict=False):
        if row.token not in (NO_TOKEN, token):
            raise InvariantBroken(
                f"sequence {old.id}: a draft row of token {row.token} was committed as {token}"
            )
    new = extend(draft.geometry, old, event.tokens)
    draft.put(old, structs.replace(new, speculative=old.speculative[count:]))


def committed_each(draft: Draft, event: ev.CommittedEach) -> None:
    """The oldest speculative row of each of many sequences is accepted."""
    if not (len(set(event.seqs)) == len(event.seqs) > 0):
        raise InvariantBroken("a commit names each sequence once")
    if len(event.tokens) != len(event.seqs):
        raise InvariantBroken("a commit names a token a sequence")
    commit_column(draft, event, committed)


def _cut(draft: Draft, old: Sequence, rows: int) -> Sequence:
    """The sequence without its last `rows` rows of any kind, and without their blocks."""
    offset, geometry = old.offset - rows, draft.geometry
    pads = max(0, old.pads - rows)
    speculative = max(0, len(old.speculative) - max(0, rows - old.pads))
    kept = min(old.committed, offset)
    tables = tuple(
        draft.release_tail(old, group, geometry.blocks_for(offset))
        for group in range(len(geometry.groups))
    )
    return structs.replace(
        retract(geometry, old, kept),
        speculative=old.speculative[:speculative],
        pads=pads,
        tables=tables,
        marks=tuple(
            min(value, offset) if place % 2 else value for place, value in enumerate(old.marks)
        ),
        adopted=min(old.adopted, offset),
        starts=tuple(min(start, offset) for start in old.starts),
    )


def _require_state(draft: Draft, old: Sequence, rows: int) -> None:
    """Each recurrent group holds the state that stands behind the sequence without `rows` rows."""
    if not has_state(draft.geometry):
        return
    left, sure_step = old.offset - rows, max(draft.written_step, draft.issued_step - 1)
    if _shares_state(draft, old):
        sure_step = NEVER  # another sequence, whose rows they are, goes through with that step
    if not keeps_state(draft.geometry, old, sure_step, left):
        raise InvariantBroken(
            f"no slot holds the state of sequence {old.id} behind {left} rows: {rows} cannot be "
            "taken back"
        )


def _shares_state(draft: Draft, old: Sequence) -> bool:
    """Whether the slot of its last row is also another's."""
    for table, (group, spec) in zip(old.tables, enumerate(draft.geometry.groups), strict=True):
        record = draft.block(group, table[-1]) if spec.recurrent and table else None
        if record is not None and record.refs > 1:
            return True
    return False


def trimmed(draft: Draft, event: ev.Trimmed) -> None:
    """Tail rows of any kind are gone, if every group still holds what the next query needs."""
    old = draft.sequence(event.seq)
    if not (1 <= event.rows <= old.offset):
        raise InvariantBroken(
            f"sequence {old.id} has {old.offset} rows: {event.rows} cannot be trimmed"
        )
    _require_state(draft, old, event.rows)
    for group, start in enumerate(old.starts):
        needed = window_start(draft.geometry, group, old.offset - event.rows)
        if start > needed:
            raise InvariantBroken(
                f"group {group} of sequence {old.id} holds rows from {start} on: a trim to "
                f"{old.offset - event.rows} needs rows from {needed} on"
            )
    draft.put(old, _cut(draft, old, event.rows))


def rewound(draft: Draft, event: ev.Rewound) -> None:
    """Speculative rows at the tail are gone."""
    old = draft.sequence(event.seq)
    if old.pads:
        raise InvariantBroken(f"sequence {old.id} ends in {old.pads} pads: trim them first")
    if not (1 <= event.rows <= len(old.speculative)):
        raise InvariantBroken(
            f"sequence {old.id} has {len(old.speculative)} speculative rows: {event.rows} cannot "
            "be rewound"
        )
    _require_state(draft, old, event.rows)
    draft.put(old, _cut(draft, old, event.rows))


def front_trimmed(draft: Draft, event: ev.FrontTrimmed) -> None:
    """A window moved on: blocks wholly before it, sinks apart, are holes now."""
    old, group = draft.sequence(event.seq), event.group
    if not (0 <= group < len(old.starts)):
        raise InvariantBroken(f"there is no group {group}")
    spec, size = draft.geometry.groups[group], draft.geometry.block_size
    if not spec.moves:
        raise InvariantBroken(f"group {group} is {spec.kind}: only a window moves on")
    safe = min(old.committed, written_rows(old, draft.written_step))
    start, limit = old.starts[group] + event.rows, max(0, safe - spec.span + 1)
    if event.rows < 1 or start > limit:
        raise InvariantBroken(
            f"group {group} of sequence {old.id} starts at {old.starts[group]} and may move on to "
            f"{limit}, not by {event.rows} rows"
        )
    table = list(old.tables[group])
    for index in range(draft.geometry.blocks_for(spec.sink), start // size):
        if table[index] != NO_BLOCK:
            draft.table_loses(old.id, group, index, (table[index],))
            draft.group(group).release(table[index], refs=1)
            table[index] = NO_BLOCK
    tables = (*old.tables[:group], tuple(table), *old.tables[group + 1 :])
    starts = (*old.starts[:group], start, *old.starts[group + 1 :])
    draft.put(old, structs.replace(old, tables=tables, starts=starts))
