"""Sharing: rows that a sequence takes over from the prefix index, or from a sequence it forks."""

from __future__ import annotations

from msgspec import structs

from . import events as ev
from .content import extend
from .draft import Draft
from .errors import InvariantBroken
from .events import NO_BLOCK
from .geometry import OPAQUE, has_state
from .prefix import adoption_limit, needed_indices
from .publication import find_entry
from .sequence import Sequence, pack, window_start
from .state import NO_ENTRY


def prefix_adopted(draft: Draft, event: ev.PrefixAdopted) -> None:
    """An empty sequence shares published blocks whose identity is its prompt's."""
    old, geometry, rows = draft.sequence(event.seq), draft.geometry, len(event.tokens)
    if old.offset != 0:
        raise InvariantBroken(f"sequence {old.id} has {old.offset} rows: only an empty one adopts")
    if not (1 <= rows <= adoption_limit(event.prompt_rows)):
        raise InvariantBroken(
            f"sequence {old.id} adopted {rows} rows of a prompt of {event.prompt_rows}: "
            f"at most {adoption_limit(event.prompt_rows)} may be adopted"
        )
    if len(event.blocks) != len(geometry.groups):
        raise InvariantBroken("an adoption names one table a group")
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
    if rows % draft.geometry.block_size and has_state(draft.geometry):
        raise InvariantBroken(
            f"{rows} rows end inside of a block: a recurrent group is adopted at block edges only"
        )
    count = draft.geometry.blocks_for(rows)
    for group, table in enumerate(event.blocks):
        if len(table) != count:
            raise InvariantBroken(f"{rows} rows take {count} blocks a table, not {len(table)}")
        held = {index for index, block in enumerate(table) if block != NO_BLOCK}
        if held != needed_indices(draft.geometry, group, rows):
            raise InvariantBroken(
                f"group {group}: the next query reads other places than {sorted(held)} of the table"
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
            whole = find_entry(draft, new.namespace, parent, new.keys[index], new.packed[index])
            found = set() if whole is None else {whole.id}
        else:
            tokens = pack(event.tokens[index * size :])
            entries = [draft.entries[number] for number in named]
            found = {
                entry.id
                for entry in entries
                if entry.parent == parent
                and entry.namespace == new.namespace
                and entry.tokens.startswith(tokens)
            }
        if len(found) != 1 or not named <= found:
            raise InvariantBroken(
                f"place {index}: no published block holds these rows of the prompt of {new.id}"
            )
        (parent,) = found


def _entry_of(draft: Draft, group: int, block: int) -> int:
    record = draft.block(group, block)
    if record is None or not record.entry:
        raise InvariantBroken(
            f"block {block} of group {group} is not published: it cannot be adopted"
        )
    return record.entry


def forked(draft: Draft, event: ev.Forked) -> None:
    """A child shares every committed row of a sequence; rows that may be taken back are not shared.

    The child is new, or was opened in the same namespace and has no rows.
    """
    parent, child = draft.sequence(event.seq), draft.sequences.get(event.child)
    if child is None and event.child <= draft.last_seq:
        raise InvariantBroken(f"sequence id {event.child} was used before")
    if child is not None and (child.offset or child.namespace != parent.namespace):
        raise InvariantBroken(
            f"sequence {child.id} has rows, or another namespace than sequence {parent.id}: it "
            "cannot be its fork"
        )
    if parent.preempted:
        raise InvariantBroken(f"sequence {parent.id} is preempted: it cannot fork")
    if any(group.kind == OPAQUE for group in draft.geometry.groups):
        raise InvariantBroken("rows of an opaque group cannot be shared")
    if parent.speculative and has_state(draft.geometry):
        raise InvariantBroken(
            f"sequence {parent.id} cannot fork: its state went through rows that may be taken back"
        )
    draft.last_seq = max(draft.last_seq, event.child)
    rows = parent.committed
    tables = tuple(table[: draft.geometry.blocks_for(rows)] for table in parent.tables)
    for group, table in enumerate(tables):
        draft.table_gains(event.child, group, 0, table)
        for block in table:
            if block != NO_BLOCK:
                draft.group(group).hold(block, refs=1)
    shared = structs.replace(
        parent,
        id=event.child,
        speculative=(),
        pads=0,
        tables=tables,
        starts=tuple(min(start, rows) for start in parent.starts),
        marks=tuple(min(mark, rows) if at % 2 else mark for at, mark in enumerate(parent.marks)),
    )
    draft.put(child, shared)
