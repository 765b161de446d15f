"""Publication: how blocks enter and leave the prefix index.

An entry stays while it has blocks or children, so that a child can be found again once its parent's
block is published anew.
"""

from __future__ import annotations

from msgspec import structs

from .draft import Draft
from .errors import InvariantBroken
from .events import NO_BLOCK, BlockLoaded, BlockPublished, BlockStored, Namespace
from .geometry import FULL, has_gaps
from .sequence import Sequence, pack, written_rows
from .state import NO_ENTRY, Entry
from .tags import root_key, row_tag

Named = tuple[tuple[int, int], ...]


def published(draft: Draft, sequence: Sequence, event: BlockPublished) -> None:
    """Index one block of a sequence, which must be full, written and committed."""
    _check(draft, sequence, event)
    parent = parent_entry(draft, sequence, event.index)
    if parent is None and has_gaps(draft.geometry):
        parent = _named_path(draft, sequence, event.index)
    if parent is None:
        raise InvariantBroken(
            f"block {event.index} of sequence {sequence.id} cannot be found: "
            "the block before it is not in the index"
        )
    tokens = sequence.packed[event.index]
    number = _named(draft, sequence.namespace, parent, event, tokens)
    draft.group(event.group).publish(event.block, number)


def _named_path(draft: Draft, sequence: Sequence, index: int) -> int:
    """The entry of the block before `index`; those on the way that are missing are made, and name
    no block.
    """
    parent: int = NO_ENTRY
    for place in range(index):
        key, tokens = sequence.keys[place], sequence.packed[place]
        known = find_entry(draft, sequence.namespace, parent, key, tokens)
        parent = known.id if known else _add(draft, sequence.namespace, parent, key, tokens, ())
    return parent


def _add(
    draft: Draft, namespace: Namespace, parent: int, key: int, tokens: bytes, named: Named
) -> int:
    """A new entry below `parent`, which names (group, block) of each of `named`."""
    blocks: list[tuple[int, ...]] = [()] * len(draft.geometry.groups)
    for group, block in named:
        blocks[group] = (block,)
    number, draft.next_entry = draft.next_entry, draft.next_entry + 1
    draft.add_entry(Entry(number, parent, namespace, tokens, key, tuple(blocks)))
    _adopt_child(draft, parent)
    return number


def _named(
    draft: Draft,
    namespace: Namespace,
    parent: int,
    event: BlockPublished | BlockLoaded,
    tokens: bytes,
) -> int:
    """The entry of these tokens, which names one block more now."""
    old = find_entry(draft, namespace, parent, event.key, tokens)
    if old is not None:
        blocks = list(old.blocks)
        blocks[event.group] = (*blocks[event.group], event.block)
        draft.put_entry(structs.replace(old, blocks=tuple(blocks)))
        return old.id
    named = ((event.group, event.block),)
    return _add(draft, namespace, parent, event.key, tokens, named)


def loaded(draft: Draft, namespace: Namespace, event: BlockLoaded) -> None:
    """Index a free block, whose rows the prefix store kept: it is published, and nobody holds it.

    Its key must be that of its tokens behind its parent's, and the parent of the same namespace.
    """
    geometry, where = draft.geometry, f"block {event.block} of group {event.group}"
    if not 0 <= event.group < len(geometry.groups):
        raise InvariantBroken(f"there is no group {event.group}")
    if geometry.groups[event.group].kind != FULL:
        raise InvariantBroken(f"{where} cannot be loaded: only groups that keep all rows are kept")
    if len(event.tokens) != geometry.block_size:
        raise InvariantBroken(
            f"{where} was loaded with {len(event.tokens)} tokens: a kept block is full"
        )
    if event.step <= draft.written_step or event.step < draft.issued_step:
        raise InvariantBroken(
            f"{where} cannot be loaded in step {event.step}: step {draft.issued_step} was issued "
            f"and {draft.written_step} written"
        )
    parent = draft.entries.get(event.parent)
    if event.parent != NO_ENTRY and (parent is None or parent.namespace != namespace):
        raise InvariantBroken(
            f"{where} was loaded below entry {event.parent}, which is not in the namespace of "
            f"sequence {event.seq}"
        )
    tokens = pack(event.tokens)
    before = root_key(geometry, namespace) if parent is None else parent.key
    key = row_tag(geometry, before, tokens)
    if key != event.key:
        raise InvariantBroken(f"{where} was loaded under key {event.key}: its tokens have {key}")
    draft.issued_step = event.step
    group = draft.group(event.group)
    group.take(event.block)
    group.publish(event.block, _named(draft, namespace, event.parent, event, tokens))
    group.release(event.block, refs=1)


def stored(draft: Draft, event: BlockStored) -> None:
    """What was stored must be published under the key that it was stored by."""
    if not 0 <= event.group < len(draft.geometry.groups):
        raise InvariantBroken(f"there is no group {event.group}")
    record = draft.block(event.group, event.block)
    if record is None or not record.entry:
        raise InvariantBroken(
            f"block {event.block} of group {event.group} is not published: it cannot be stored"
        )
    key = draft.entries[record.entry].key
    if key != event.key:
        raise InvariantBroken(
            f"block {event.block} of group {event.group} has key {key}, not {event.key}"
        )


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
        tokens = sequence.packed[place]
        entry = find_entry(draft, sequence.namespace, parent, sequence.keys[place], tokens)
        if entry is None:
            return None
        parent = entry.id
    return parent


def find_entry(
    draft: Draft, namespace: Namespace, parent: int, key: int, tokens: bytes
) -> Entry | None:
    """The entry of exactly these tokens below `parent`, in this namespace."""
    entries = draft.entries
    for number in draft.by_key.get(key, ()):
        entry: Entry = entries[number]
        same = entry.tokens == tokens and entry.namespace == namespace
        if same and entry.parent == parent:
            return entry
    return None


def _adopt_child(draft: Draft, parent: int) -> None:
    """Count one child more of an entry, where there is one."""
    if parent != NO_ENTRY:
        old: Entry = draft.entries[parent]
        draft.put_entry(structs.replace(old, children=old.children + 1))


def evicted(draft: Draft, group: int, block: int) -> Entry:
    """Take a cached block out of the index; returns the entry that named it, as it was. One without
    blocks and children goes, its parents likewise.
    """
    number = draft.group(group).unpublish(block)
    found: Entry = draft.entries[number]
    named = list(found.blocks)
    named[group] = tuple([other for other in named[group] if other != block])
    old, blocks, children = found, tuple(named), found.children
    while not (children or any(blocks)):
        draft.drop_entry(old)
        if old.parent == NO_ENTRY:
            return found
        old = draft.entries[old.parent]
        blocks, children = old.blocks, old.children - 1
    draft.put_entry(structs.replace(old, blocks=blocks, children=children))
    return found
