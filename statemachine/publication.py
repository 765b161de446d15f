"""Publication: how blocks enter and leave the prefix index.

An entry stays while it has blocks or children, so that a child can be found again once its parent's
block is published anew.
"""

from __future__ import annotations

from msgspec import structs

from .draft import Draft
from .errors import InvariantBroken
from .events import NO_BLOCK, BlockPublished
from .sequence import Sequence, written_rows
from .state import NO_ENTRY, Entry


def published(draft: Draft, sequence: Sequence, event: BlockPublished) -> None:
    """Index one block of a sequence, which must be full, written and committed."""
    _check(draft, sequence, event)
    parent = parent_entry(draft, sequence, event.index)
    if parent is None:
        raise InvariantBroken(
            f"block {event.index} of sequence {sequence.id} cannot be found: "
            "the block before it is not in the index"
        )
    tokens = sequence.packed[event.index]
    old = find_entry(draft, sequence, parent, event.key, tokens)
    if old is None:
        groups = len(draft.geometry.groups)
        blocks: list[tuple[int, ...]] = [()] * groups
        blocks[event.group] = (event.block,)
        number, draft.next_entry = draft.next_entry, draft.next_entry + 1
        entry = Entry(number, parent, sequence.namespace, tokens, event.key, tuple(blocks))
        draft.set_entry(None, entry)
        _adopt_child(draft, parent, 1)
    else:
        blocks = list(old.blocks)
        blocks[event.group] = (*blocks[event.group], event.block)
        number = old.id
        draft.set_entry(old, structs.replace(old, blocks=tuple(blocks)))
    draft.group(event.group).publish(event.block, number)


def _check(draft: Draft, sequence: Sequence, event: BlockPublished) -> None:
    index, group, block = event.index, event.group, event.block
    if not 0 <= group < len(sequence.tables):
        raise InvariantBroken(f"there is no group {group}")
    if not 0 <= index < len(sequence.keys):
        raise _refusal(event, "is not full of committed rows: it cannot be published")
    table = sequence.tables[group]
    if index >= len(table) or table[index] != block or block == NO_BLOCK:
        raise _refusal(event, f"is not in its table of group {group}")
    written = written_rows(sequence, draft.written_step)
    if written < (index + 1) * draft.geometry.block_size:
        raise _refusal(event, f"is not written yet ({written} rows are)")
    if sequence.keys[index] != event.key:
        raise _refusal(event, f"has key {sequence.keys[index]}, not {event.key}")
    record = draft.block(group, block)
    if record is None or record.entry:
        raise _refusal(event, "is published already")


def _refusal(event: BlockPublished, why: str) -> InvariantBroken:
    return InvariantBroken(
        f"block {event.block} at place {event.index} of sequence {event.seq} {why}"
    )


def parent_entry(draft: Draft, sequence: Sequence, index: int) -> int | None:
    """Entry of the block before `index`: as its own block says, else by walking from the root."""
    if index == 0:
        return NO_ENTRY
    for group, table in enumerate(sequence.tables):
        block = table[index - 1] if index <= len(table) else NO_BLOCK
        record = draft.block(group, block) if block != NO_BLOCK else None
        if record is not None and record.entry:
            return record.entry
    parent: int = NO_ENTRY
    for place in range(index):
        entry = find_entry(draft, sequence, parent, sequence.keys[place], sequence.packed[place])
        if entry is None:
            return None
        parent = entry.id
    return parent


def find_entry(
    draft: Draft, sequence: Sequence, parent: int, key: int, tokens: bytes
) -> Entry | None:
    """The entry of exactly these tokens below `parent`, in the sequence's namespace."""
    entries, by_key = draft.index()
    for number in by_key.get(key, ()):
        entry: Entry = entries[number]
        same = entry.tokens == tokens and entry.namespace == sequence.namespace
        if same and entry.parent == parent:
            return entry
    return None


def _adopt_child(draft: Draft, number: int, count: int) -> None:
    """Count an entry's children; one without blocks and children goes, its parents likewise."""
    while number != NO_ENTRY:
        old: Entry = draft.index()[0][number]
        new = structs.replace(old, children=old.children + count)
        if new.children or any(new.blocks):
            draft.set_entry(old, new)
            return
        draft.set_entry(old, None)
        number, count = old.parent, -1


def evicted(draft: Draft, group: int, block: int) -> Entry:
    """Take a cached block out of the index; returns the entry that named it, as it was."""
    number = draft.group(group).unpublish(block)
    old: Entry = draft.index()[0][number]
    blocks = list(old.blocks)
    blocks[group] = tuple(other for other in blocks[group] if other != block)
    draft.set_entry(old, structs.replace(old, blocks=tuple(blocks)))
    _adopt_child(draft, number, 0)
    return old
