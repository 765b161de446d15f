"""Invariants: what holds in every state, as named predicates that share no code with transitions.

`check_step` is cheap enough for each step; `check_all` counts everything anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from . import digest
from .errors import InvariantBroken
from .events import NO_BLOCK
from .sequence import NO_TOKEN, window_start, written_rows
from .state import NO_ENTRY, Entry, State
from .tags import root_key, row_tag

Check = Callable[[State], Iterator[str]]


def shapes_fit_the_geometry(state: State) -> Iterator[str]:
    """One table, start and list of blocks a group; ids below the next ones; parents come first."""
    groups = len(state.geometry.groups)
    if len(state.groups) != groups:
        yield f"{len(state.groups)} groups of blocks for {groups} of the geometry"
    for seq, sequence in state.sequences.items():
        if not len(sequence.tables) == len(sequence.starts) == groups or len(sequence.marks) % 2:
            yield f"sequence {seq}: tables, starts or marks are not as many as they should be"
        if seq > state.last_seq:
            yield f"sequence {seq} is open, and the last one opened is {state.last_seq}"
    for number, entry in state.entries.items():
        if len(entry.blocks) != groups or not entry.parent < number < state.next_entry:
            yield f"entry {number} does not fit the index"
    for key, numbers in state.by_key.items():
        if any(at not in state.entries or state.entries[at].key != key for at in numbers):
            yield f"key {key} names entries that are not its"


def blocks_add_up(state: State) -> Iterator[str]:
    """free + cached + held = all, in each group."""
    for group in state.paged_groups():
        blocks = state.geometry.groups[group].num_blocks
        free, cached, held = (
            state.free_blocks(group),
            state.cached_blocks(group),
            state.held_blocks(group),
        )
        if free + cached + held != blocks or min(free, cached, held) < 0:
            yield f"group {group}: free {free} + cached {cached} + held {held} is not {blocks}"


def queues_are_sound(state: State) -> Iterator[str]:
    """No block stands in a queue twice, or in a queue and in use; both maps say the same."""
    for group in state.paged_groups():
        record = state.groups[group]
        for name, queue in (("free", record.free), ("cached", record.cached)):
            if {block: at for at, block in queue.items.items()} != dict(queue.places.items()):
                yield f"group {group}: the {name} queue names a block twice"
            if any(not queue.head <= at < queue.tail for at in queue.items):
                yield f"group {group}: the {name} queue holds a place outside of its ends"
        for block in record.free.places:
            if block in record.blocks or block >= record.unused:
                yield f"group {group}: block {block} is free and in use"
        for block, held in record.blocks.items():
            idle = held.refs == held.pins == 0
            if idle != (block in record.cached.places) or (idle and not held.entry):
                yield f"group {group}: block {block} is in the wrong queue"


def references_are_counted(state: State) -> Iterator[str]:
    """refs = table entries, pins = pins; no block is used that does not exist."""
    for group in state.paged_groups():
        refs: Counter[int] = Counter()
        for sequence in state.sequences.values():
            refs.update(block for block in sequence.tables[group] if block != NO_BLOCK)
        pins = Counter(block for held in state.pins.values() for at, block in held if at == group)
        for block, record in state.groups[group].blocks.items():
            if record.refs != refs.pop(block, 0) or record.pins != pins.pop(block, 0):
                yield f"group {group}: block {block} counts {record.refs}, {record.pins}"
        if refs or pins:
            yield f"group {group}: blocks {sorted({*refs, *pins})} are in a table and not in use"


def pins_wait_for_a_step(state: State) -> Iterator[str]:
    """A pin lasts until its step is written, so none is left of a step that was."""
    for step in state.pins:
        if not state.written_step < step <= state.issued_step:
            yield f"step {step} has pins; steps {state.written_step + 1} on are in flight"


def tables_cover_the_offset(state: State) -> Iterator[str]:
    """Each table has exactly the blocks of the offset; holes lie before the window only, and of a
    recurrent group also between the last block and those where pieces ended.
    """
    for sequence in state.sequences.values():
        for group in state.paged_groups():
            table, spec = sequence.tables[group], state.geometry.groups[group]
            if len(table) != state.geometry.blocks_for(sequence.offset):
                yield f"sequence {sequence.id}: {len(table)} blocks for {sequence.offset} rows"
            first = sequence.starts[group] // state.geometry.block_size
            sinks = state.geometry.blocks_for(spec.sink)
            for index, block in enumerate(table):
                passed = spec.recurrent and index < len(table) - 1 and index >= first
                if not passed and (block == NO_BLOCK) != (sinks <= index < first):
                    yield f"sequence {sequence.id}: place {index} of group {group} is {block}"


def starts_leave_the_window(state: State) -> Iterator[str]:
    """No group lost a row that the next query needs; only windows move on."""
    for sequence in state.sequences.values():
        for group, start in enumerate(sequence.starts):
            if not 0 <= start <= window_start(state.geometry, group, sequence.offset):
                yield f"sequence {sequence.id}: group {group} starts at {start}"


def rows_are_ordered(state: State) -> Iterator[str]:
    """Drafts and lookahead rows never mix; preempted sequences are empty."""
    for sequence in state.sequences.values():
        kinds = {row.token == NO_TOKEN for row in sequence.speculative}
        if len(kinds) > 1 or min(sequence.committed, sequence.pads) < 0:
            yield f"sequence {sequence.id}: rows of mixed kinds"
        if sequence.preempted and sequence.offset:
            yield f"sequence {sequence.id} is preempted and has {sequence.offset} rows"
        if not 0 <= written_rows(sequence, state.written_step) <= sequence.offset:
            yield f"sequence {sequence.id}: more rows written than it has"


def content_matches_keys(state: State) -> Iterator[str]:
    """Keys and tokens of a sequence are as long as its committed rows, and chain from its root."""
    size = state.geometry.block_size
    for sequence in state.sequences.values():
        key = root_key(state.geometry, sequence.namespace)
        rows = len(sequence.packed) * size + len(sequence.tail) // 8
        if rows != sequence.committed or len(sequence.keys) != len(sequence.packed):
            yield f"sequence {sequence.id}: {rows} tokens for {sequence.committed} rows"
        for found, tokens in zip(sequence.keys, sequence.packed, strict=False):
            key = row_tag(state.geometry, key, tokens)
            if found != key:
                yield f"sequence {sequence.id}: a key does not follow from its tokens"
                break


def index_is_findable(state: State) -> Iterator[str]:
    """Each published block is named by one entry, whose parent exists and whose key follows."""
    named: Counter[tuple[int, int]] = Counter()
    children: Counter[int] = Counter(entry.parent for entry in state.entries.values())
    for number, entry in state.entries.items():
        named.update((group, block) for group, ids in enumerate(entry.blocks) for block in ids)
        if number not in state.by_key.get(entry.key, ()):
            yield f"entry {number} is not findable by its key"
        if children[number] != entry.children:
            yield f"entry {number} has {children[number]} children, not {entry.children}"
        yield from _entry_follows(state, entry)
        for group, ids in enumerate(entry.blocks):
            for block in ids:
                record = state.groups[group].blocks.get(block)
                if record is None or record.entry != number:
                    yield f"entry {number} names block {block} of group {group}, which is not its"
    for group, blocks in enumerate(state.groups):
        for block, held in blocks.blocks.items():
            if held.entry and named[group, block] != 1:
                yield f"block {block} of group {group} is published {named[group, block]} times"


def _entry_follows(state: State, entry: Entry) -> Iterator[str]:
    parent = state.entries.get(entry.parent)
    if entry.parent != NO_ENTRY and parent is None:
        yield f"entry {entry.id} has no parent"
        return
    if not entry.children and not any(entry.blocks):
        yield f"entry {entry.id} names nothing"
    above = root_key(state.geometry, entry.namespace) if parent is None else parent.key
    if entry.key != row_tag(state.geometry, above, entry.tokens):
        yield f"entry {entry.id} has a key that does not follow from its tokens"


def published_rows_are_committed(state: State) -> Iterator[str]:
    """A published block in a table holds that sequence's committed, written rows."""
    size = state.geometry.block_size
    for sequence in state.sequences.values():
        written = written_rows(sequence, state.written_step)
        for group in state.paged_groups():
            for index, block in enumerate(sequence.tables[group]):
                record = None if block == NO_BLOCK else state.groups[group].blocks.get(block)
                if record is None or not record.entry:
                    continue
                rows = sequence.block_tokens(index)
                end = min((index + 1) * size, sequence.offset)
                if end > min(written, sequence.committed) or not _same(state, record.entry, rows):
                    yield f"sequence {sequence.id}: published block {block} holds other rows"


def _same(state: State, entry: int, rows: bytes) -> bool:
    return bool(state.entries[entry].tokens.startswith(rows))


def shared_rows_are_committed(state: State) -> Iterator[str]:
    """No speculative or pad row is in two tables' reach: where a sequence has such rows in a block,
    the others that hold it end before them. (A fork shares a block that its parent was writing.)
    """
    size = state.geometry.block_size
    writers: dict[tuple[int, int], tuple[int, int]] = {}
    for sequence in state.sequences.values():
        if sequence.offset == sequence.committed:
            continue
        for group in state.paged_groups():
            for block in sequence.tables[group][sequence.committed // size :]:
                if block != NO_BLOCK and state.groups[group].blocks[block].refs > 1:
                    if (group, block) in writers:
                        yield f"block {block} of group {group} is written by two sequences"
                    writers[group, block] = (sequence.id, sequence.committed)
    if not writers:
        return
    for sequence in state.sequences.values():
        for group in state.paged_groups():
            for block in sequence.tables[group]:
                writer, committed = writers.get((group, block), (sequence.id, 0))
                if writer != sequence.id and sequence.offset > committed:
                    yield f"sequence {sequence.id}: block {block} is shared and being written"


def digest_is_kept(state: State) -> Iterator[str]:
    """The digest that was kept is the digest counted anew, and so is each sequence's line."""
    if state.digest != digest.recompute(state):
        yield "the digest is not that of the state"
    for sequence in state.sequences.values():
        if sequence.line != digest.sequence_line(sequence):
            yield f"sequence {sequence.id}: its line is not that of its record"


CHEAP: tuple[Check, ...] = (blocks_add_up,)
ALL: tuple[Check, ...] = (
    shapes_fit_the_geometry,
    blocks_add_up,
    queues_are_sound,
    references_are_counted,
    pins_wait_for_a_step,
    tables_cover_the_offset,
    starts_leave_the_window,
    rows_are_ordered,
    content_matches_keys,
    index_is_findable,
    published_rows_are_committed,
    shared_rows_are_committed,
    digest_is_kept,
)


def _run(checks: tuple[Check, ...], state: State) -> None:
    for check in checks:
        for message in check(state):
            raise InvariantBroken(f"{check.__name__}: {message}")


def check_step(state: State) -> None:
    """The cheap invariants. Raises InvariantBroken with the name of the one that fails."""
    _run(CHEAP, state)


def check_all(state: State) -> None:
    """All invariants; walks the whole state. Raises InvariantBroken."""
    _run(ALL, state)
