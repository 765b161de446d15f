"""Transitions: what each event does to a state. The rules that hold, whatever is emitted:

1. A state changes by events only, and only here; the state that was given stays as it was.
2. An event is applied whole or not at all: a handler that raises leaves nothing behind.
3. A handler checks that what the event claims may be (InvariantBroken where not); which of the
   blocks that may be taken is taken is the commands' choice.
4. A block in two tables, or published, is never written: an append first copies it.
5. Committed rows come first, then speculative rows, then pads; after a pad only pads may follow.
6. Only full, written, committed blocks are published; only cached ones are evicted.
7. One handler empties a sequence, whatever ends it; each table entry is released once, tail first.
8. A prompt's last row is never adopted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import structs

from . import events as ev
from .column import append_column, recent_marks
from .content import extend, retract
from .draft import Draft
from .errors import InvariantBroken
from .events import NO_BLOCK
from .geometry import OPAQUE, WINDOW
from .prefix import adoption_limit, needed_indices
from .publication import evicted, find_entry, published
from .sequence import NO_TOKEN, Sequence, Speculative, pack, window_start, written_rows
from .state import NO_ENTRY, State
from .tags import root_key

SPECULATIVE_ROWS_MAX = 65_536
"""The most rows of one append that may be taken back."""


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


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantBroken(message)


def opened(draft: Draft, event: ev.Opened) -> None:
    """A sequence exists, at offset 0."""
    _require(
        event.seq > draft.last_seq, f"sequence id {event.seq} was used before, or is out of order"
    )
    draft.last_seq = event.seq
    groups = len(draft.geometry.groups)
    root = root_key(draft.geometry, event.namespace)
    draft.put(
        None,
        Sequence(event.seq, event.namespace, root, tables=((),) * groups, starts=(0,) * groups),
    )


def prefix_adopted(draft: Draft, event: ev.PrefixAdopted) -> None:
    """An empty sequence shares published blocks whose identity is its prompt's."""
    old, geometry, rows = draft.sequence(event.seq), draft.geometry, len(event.tokens)
    _require(old.offset == 0, f"sequence {old.id} has {old.offset} rows: only an empty one adopts")
    _require(
        1 <= rows <= adoption_limit(event.prompt_rows),
        f"sequence {old.id} adopted {rows} rows of a prompt of {event.prompt_rows}: "
        f"at most {adoption_limit(event.prompt_rows)} may be adopted",
    )
    _require(len(event.blocks) == len(geometry.groups), "an adoption names one table a group")
    new = extend(geometry, old, event.tokens)
    _require_needed(draft, event)
    _require_identity(draft, new, event)
    for group, table in enumerate(event.blocks):
        draft.table_gains(old.id, group, 0, table)
        for block in table:
            if block != NO_BLOCK:
                draft.group(group).hold(block, refs=1)
    starts = tuple(window_start(geometry, group, rows) for group in range(len(geometry.groups)))
    draft.put(
        old,
        structs.replace(
            new, tables=event.blocks, starts=starts, marks=(0, rows), adopted=rows, preempted=False
        ),
    )


def _require_needed(draft: Draft, event: ev.PrefixAdopted) -> None:
    """The tables hold what the next query reads, and no more."""
    rows = len(event.tokens)
    count = draft.geometry.blocks_for(rows)
    for group, table in enumerate(event.blocks):
        _require(len(table) == count, f"{rows} rows take {count} blocks a table, not {len(table)}")
        held = {index for index, block in enumerate(table) if block != NO_BLOCK}
        _require(
            held == needed_indices(draft.geometry, group, rows),
            f"group {group}: the next query reads other places than {sorted(held)} of the table",
        )


def _require_identity(draft: Draft, new: Sequence, event: ev.PrefixAdopted) -> None:
    """Each block is published under exactly this namespace, these tokens and all before them."""
    size, parent = draft.geometry.block_size, NO_ENTRY
    for index in range(len(event.blocks[0])):
        named = {
            _entry_of(draft, group, table[index])
            for group, table in enumerate(event.blocks)
            if table[index] != NO_BLOCK
        }
        if index < len(new.keys):
            whole = find_entry(draft, new, parent, new.keys[index], new.packed[index])
            found = set() if whole is None else {whole.id}
        else:
            tokens = pack(event.tokens[index * size :])
            entries = [draft.index()[0][number] for number in named]
            found = {
                entry.id
                for entry in entries
                if entry.parent == parent
                and entry.namespace == new.namespace
                and entry.tokens.startswith(tokens)
            }
        _require(
            len(found) == 1 and named <= found,
            f"place {index}: no published block holds these rows of the prompt of {new.id}",
        )
        (parent,) = found


def _entry_of(draft: Draft, group: int, block: int) -> int:
    record = draft.block(group, block)
    _require(
        record is not None and record.entry != 0,
        f"block {block} of group {group} is not published: it cannot be adopted",
    )
    assert record is not None
    return record.entry


def _check_step(draft: Draft, step: int, purpose: str) -> None:
    _require(purpose in ev.PURPOSES, f"purpose {purpose!r} is none of {', '.join(ev.PURPOSES)}")
    _require(
        step > draft.written_step and step >= draft.issued_step,
        f"step {step} cannot append: step {draft.issued_step} was issued and "
        f"{draft.written_step} written",
    )


def _check_append(draft: Draft, sequence: Sequence, step: int, purpose: str) -> None:
    """What must hold before rows of a purpose are appended in a step."""
    _check_step(draft, step, purpose)
    _require(
        not sequence.preempted or purpose == ev.PROMPT,
        f"sequence {sequence.id} is preempted: it starts again with its prompt, not with "
        f"{purpose} rows",
    )
    _require(
        not sequence.pads or purpose == ev.PAD,
        f"sequence {sequence.id} ends in {sequence.pads} pads: only pads may follow",
    )
    speculative = sequence.speculative
    if not speculative:
        return
    _require(
        purpose in (ev.DRAFT, ev.LOOKAHEAD),
        f"sequence {sequence.id} ends in {len(speculative)} speculative rows: "
        f"{purpose} rows cannot follow",
    )
    _require(
        (purpose == ev.LOOKAHEAD) == (speculative[0].token == NO_TOKEN),
        f"sequence {sequence.id}: lookahead and draft rows never mix",
    )


def _require_writable(draft: Draft, sequence: Sequence) -> None:
    """The block that the next row falls in, where there is one, is this sequence's alone."""
    index, row = divmod(sequence.offset, draft.geometry.block_size)
    if row == 0:
        return
    for group in draft.paged_groups:
        number = sequence.tables[group][index]
        record = draft.block(group, number)
        _require(
            record is not None and record.refs == 1 and not record.entry,
            f"block {number} of group {group} is shared or published: "
            f"sequence {sequence.id} must copy it before it writes",
        )


def appended(draft: Draft, event: ev.Appended) -> None:
    """Rows were issued: blocks taken, the offset moved, tokens committed or speculative."""
    old, tokens = draft.sequence(event.seq), event.tokens
    _check_append(draft, old, event.step, event.purpose)
    _require(event.rows >= 1, f"an append of {event.rows} rows to sequence {old.id}")
    wants_tokens = event.purpose in (*ev.COMMITTED_AT_ONCE, ev.DRAFT)
    _require(
        (tokens is not None and len(tokens) == event.rows) if wants_tokens else tokens is None,
        f"an append of {event.rows} {event.purpose} rows to sequence {old.id} with "
        f"{'no' if tokens is None else len(tokens)} tokens",
    )
    _require_writable(draft, old)
    tables = _grown_tables(draft, old, event)
    new = structs.replace(
        _with_rows(draft, old, event.step, event.rows, tokens, event.purpose),
        tables=tables,
        preempted=False,
    )
    draft.issued_step = event.step
    draft.put(old, new)


def _grown_tables(draft: Draft, old: Sequence, event: ev.Appended) -> tuple[tuple[int, ...], ...]:
    """The tables with the event's new blocks, which are exactly as many as the rows need."""
    geometry = draft.geometry
    _require(len(event.blocks) == len(geometry.groups), "an append names new blocks for each group")
    wanted = geometry.blocks_for(old.offset + event.rows)
    tables = []
    for group, blocks in enumerate(event.blocks):
        table = old.tables[group]
        missing = wanted - len(table) if geometry.groups[group].paged else 0
        _require(
            len(blocks) == missing,
            f"sequence {old.id} needs {missing} new blocks in group {group}, not {len(blocks)}",
        )
        for block in blocks:
            draft.group(group).take(block)
        draft.table_gains(old.id, group, len(table), blocks)
        tables.append(table + blocks if blocks else table)
    return tuple(tables)


def _with_rows(
    draft: Draft,
    old: Sequence,
    step: int,
    rows: int,
    tokens: tuple[int, ...] | None,
    purpose: str,
) -> Sequence:
    """The sequence with rows of a purpose at its end."""
    marks = (*recent_marks(old.marks, draft.written_step, step), step, old.offset + rows)
    if purpose in ev.COMMITTED_AT_ONCE:
        assert tokens is not None
        return structs.replace(extend(draft.geometry, old, tokens), marks=marks)
    if purpose == ev.PAD:
        return structs.replace(old, pads=old.pads + rows, marks=marks)
    _require(rows <= SPECULATIVE_ROWS_MAX, f"at most {SPECULATIVE_ROWS_MAX} rows are speculative")
    given = tokens if tokens is not None else (NO_TOKEN,) * rows
    if tokens is not None:
        pack(tokens)
    added = tuple(Speculative(token, step) for token in given)
    return structs.replace(old, speculative=old.speculative + added, marks=marks)


def appended_each(draft: Draft, event: ev.AppendedEach) -> None:
    """One row to each of many sequences, inside of their blocks: the common decode step."""
    tokens = event.tokens
    _require(len(set(event.seqs)) == len(event.seqs) > 0, "an append names each sequence once")
    _require(tokens is None or len(tokens) == len(event.seqs), "an append names a token a sequence")
    _require(
        (tokens is None) == (event.purpose in (ev.LOOKAHEAD, ev.PAD)),
        f"{event.purpose} rows {'need' if tokens is None else 'have no'} tokens",
    )
    size, step = draft.geometry.block_size, event.step
    _check_step(draft, step, event.purpose)
    draft.issued_step = step
    if event.purpose in ev.COMMITTED_AT_ONCE:
        append_column(draft, event)
        return
    for place, seq in enumerate(event.seqs):
        old = draft.sequence(seq)
        _require(old.offset % size != 0, f"sequence {seq} is at a block's edge: append it alone")
        _check_append(draft, old, step, event.purpose)
        _require_writable(draft, old)
        row = None if tokens is None else (tokens[place],)
        draft.put(old, _with_rows(draft, old, step, 1, row, event.purpose))


def step_written(draft: Draft, event: ev.StepWritten) -> None:
    """The writes of a step, and of those before, are real; what they pinned is let go."""
    _require(
        draft.written_step < event.step <= draft.issued_step,
        f"step {event.step} cannot be written now: step {draft.issued_step} was issued and "
        f"{draft.written_step} written",
    )
    draft.written_step = event.step
    for step in sorted(step for step in draft.pins if step <= event.step):
        draft.unpin(step)


def committed(draft: Draft, event: ev.Committed) -> None:
    """The oldest speculative rows are accepted; lookahead rows learn their tokens."""
    old, count = draft.sequence(event.seq), len(event.tokens)
    _require(
        1 <= count <= len(old.speculative),
        f"sequence {old.id} has {len(old.speculative)} speculative rows: {count} cannot be "
        "committed",
    )
    for row, token in zip(old.speculative, event.tokens, strict=False):
        _require(
            row.token in (NO_TOKEN, token),
            f"sequence {old.id}: a draft row of token {row.token} was committed as {token}",
        )
    new = extend(draft.geometry, old, event.tokens)
    draft.put(old, structs.replace(new, speculative=old.speculative[count:]))


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


def trimmed(draft: Draft, event: ev.Trimmed) -> None:
    """Tail rows of any kind are gone, if every group still holds what the next query needs."""
    old = draft.sequence(event.seq)
    _require(
        1 <= event.rows <= old.offset,
        f"sequence {old.id} has {old.offset} rows: {event.rows} cannot be trimmed",
    )
    for group, start in enumerate(old.starts):
        needed = window_start(draft.geometry, group, old.offset - event.rows)
        _require(
            start <= needed,
            f"group {group} of sequence {old.id} holds rows from {start} on: a trim to "
            f"{old.offset - event.rows} needs rows from {needed} on",
        )
    draft.put(old, _cut(draft, old, event.rows))


def rewound(draft: Draft, event: ev.Rewound) -> None:
    """Speculative rows at the tail are gone."""
    old = draft.sequence(event.seq)
    _require(not old.pads, f"sequence {old.id} ends in {old.pads} pads: trim them first")
    _require(
        1 <= event.rows <= len(old.speculative),
        f"sequence {old.id} has {len(old.speculative)} speculative rows: {event.rows} cannot be "
        "rewound",
    )
    draft.put(old, _cut(draft, old, event.rows))


def front_trimmed(draft: Draft, event: ev.FrontTrimmed) -> None:
    """A window moved on: blocks wholly before it, sinks apart, are holes now."""
    old, group = draft.sequence(event.seq), event.group
    _require(0 <= group < len(old.starts), f"there is no group {group}")
    spec, size = draft.geometry.groups[group], draft.geometry.block_size
    _require(spec.kind == WINDOW, f"group {group} is {spec.kind}: only a window moves on")
    safe = min(old.committed, written_rows(old, draft.written_step))
    start, limit = old.starts[group] + event.rows, max(0, safe - spec.window + 1)
    _require(
        event.rows >= 1 and start <= limit,
        f"group {group} of sequence {old.id} starts at {old.starts[group]} and may move on to "
        f"{limit}, not by {event.rows} rows",
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


def block_copied(draft: Draft, event: ev.BlockCopied) -> None:
    """Copy on write: the table names the target; the source is pinned until the step is written."""
    old, group, index = draft.sequence(event.seq), event.group, event.index
    size = draft.geometry.block_size
    _require(0 <= group < len(old.tables), f"there is no group {group}")
    table = old.tables[group]
    _require(
        0 <= index == len(table) - 1 and table[index] == event.source != NO_BLOCK,
        f"block {event.source} is not the last of sequence {old.id}'s table in group {group}",
    )
    _require(
        event.rows == old.offset - index * size < size,
        f"sequence {old.id} has {old.offset - index * size} rows in its last block, not "
        f"{event.rows}",
    )
    _require(
        event.step > draft.written_step and event.step >= draft.issued_step,
        f"step {event.step} cannot copy: step {draft.issued_step} was issued and "
        f"{draft.written_step} written",
    )
    _require(
        written_rows(old, event.step - 1) == old.offset,
        f"rows of sequence {old.id} are issued in step {event.step} itself, whose copies run "
        "before its writes: they cannot be copied in it",
    )
    draft.issued_step = event.step
    blocks = draft.group(group)
    blocks.take(event.target)
    draft.pin(event.step, group, event.source)
    blocks.release(event.source, refs=1)
    draft.table_loses(old.id, group, index, (event.source,))
    draft.table_gains(old.id, group, index, (event.target,))
    tables = (*old.tables[:group], (*table[:index], event.target), *old.tables[group + 1 :])
    draft.put(old, structs.replace(old, tables=tables))


def forked(draft: Draft, event: ev.Forked) -> None:
    """A child shares every row of a sequence that has committed rows only."""
    parent = draft.sequence(event.seq)
    _require(event.child > draft.last_seq, f"sequence id {event.child} was used before")
    _require(
        not parent.speculative and not parent.pads and not parent.preempted,
        f"sequence {parent.id} is preempted, or has rows that may be taken back: it cannot fork",
    )
    _require(
        all(group.kind != OPAQUE for group in draft.geometry.groups),
        "rows of an opaque group cannot be shared",
    )
    draft.last_seq = event.child
    for group, table in enumerate(parent.tables):
        draft.table_gains(event.child, group, 0, table)
        for block in table:
            if block != NO_BLOCK:
                draft.group(group).hold(block, refs=1)
    draft.put(None, structs.replace(parent, id=event.child))


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


def block_published(draft: Draft, event: ev.BlockPublished) -> None:
    """A full, written, committed block can be found."""
    published(draft, draft.sequence(event.seq), event)


def block_evicted(draft: Draft, event: ev.BlockEvicted) -> None:
    """A cached block can no longer be found; it is free."""
    _require(0 <= event.group < len(draft.geometry.groups), f"there is no group {event.group}")
    entry = evicted(draft, event.group, event.block)
    _require(
        entry.key == event.key,
        f"block {event.block} of group {event.group} has key {entry.key}, not {event.key}",
    )


HANDLERS: dict[type[Any], Callable[[Draft, Any], None]] = {
    ev.Opened: opened,
    ev.PrefixAdopted: prefix_adopted,
    ev.Appended: appended,
    ev.AppendedEach: appended_each,
    ev.StepWritten: step_written,
    ev.Committed: committed,
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
}
