"""Draft: a working copy of a state, for the handlers in transitions.py.

Its primitives move blocks between held, cached and free, and note what they changed; `finish` takes
the lines of what was there before out of the digest, and adds those of what is there now. So an
entry that many events changed is hashed twice. The state that it was made from never changes; a
draft that a handler gave up is thrown away whole.
"""

from __future__ import annotations

from immutables import Map, MapMutation
from msgspec import structs

from .digest import (
    CACHED,
    FREE,
    MASK,
    block_lines,
    entry_lines,
    pin_line,
    queue_lines,
    scalars_line,
    sequence_line,
    table_lines,
)
from .errors import InvariantBroken
from .events import NO_BLOCK
from .geometry import PAGED
from .sequence import Sequence
from .state import Block, Entry, GroupState, Queue, State

SKIPPED_MAX = 1024
"""Blocks never used that one event may pass over: commands pass over none, hands may a few."""


class QueueDraft:
    """A queue while it changes. What came into it by now stands apart: it may go at once."""

    def __init__(self, queue: Queue) -> None:
        self._before = queue
        self.items: MapMutation[int, int] = queue.items.mutate()
        self.places: MapMutation[int, int] = queue.places.mutate()
        self.head = queue.head
        self.tail = queue.tail
        self._new_items: dict[int, int] = {}
        self._new_places: dict[int, int] = {}
        self._left: list[tuple[int, int]] = []

    def push(self, block: int) -> None:
        """Append a block."""
        position = self.tail
        self._new_items[position] = block
        self._new_places[block] = position
        self.tail = position + 1

    def remove(self, block: int) -> None:
        """Take a block out, wherever it stands. The head skips gaps."""
        items, new = self.items, self._new_items
        position = self._new_places.pop(block, None)
        if position is None:
            position = self.places.pop(block)
            del items[position]
            self._left.append((position, block))
        else:
            del new[position]
        while self.head < self.tail and self.head not in items and self.head not in new:
            self.head += 1

    def digest_delta(self, kind: int, group: int) -> int:
        """What a state's digest gains by the changes so far."""
        if not self._new_items and not self._left:
            return 0
        gained = queue_lines(kind, group, self._new_items.items())
        return gained - queue_lines(kind, group, self._left)

    def finish(self) -> Queue:
        """The queue as a value."""
        if self.tail == self._before.tail and not self._left:
            return self._before
        self.items.update(self._new_items)
        self.places.update(self._new_places)
        return Queue(self.items.finish(), self.places.finish(), self.head, self.tail)


class GroupDraft:
    """One group's blocks while they change."""

    def __init__(self, number: int, num_blocks: int, state: GroupState) -> None:
        self.number = number
        self.num_blocks = num_blocks
        self.blocks: MapMutation[int, Block] = state.blocks.mutate()
        self.unused = state.unused
        self.free = QueueDraft(state.free)
        self.cached = QueueDraft(state.cached)
        self._before = state.blocks
        self._changed: set[int] = set()

    def digest_delta(self) -> int:
        """What a state's digest gains by the changes so far."""
        group, changed = self.number, self._changed
        delta = self.free.digest_delta(FREE, group) + self.cached.digest_delta(CACHED, group)
        delta -= block_lines(group, changed, self._before)
        return delta + block_lines(group, changed, self.blocks)

    def finish(self) -> GroupState:
        """The group as a value."""
        free, cached = self.free.finish(), self.cached.finish()
        return GroupState(self.blocks.finish(), self.unused, free, cached)

    def block(self, number: int) -> Block:
        """The record of a held or published block."""
        record: Block | None = self.blocks.get(number)
        if record is None:
            raise InvariantBroken(f"block {number} of group {self.number} is free, not in use")
        return record

    def _set(self, number: int, record: Block) -> None:
        """Replace the record of a block in use."""
        self._changed.add(number)
        self.blocks[number] = record

    def _free(self, number: int) -> None:
        """A block that is neither held nor published leaves the map."""
        self._changed.add(number)
        del self.blocks[number]
        self.free.push(number)

    def take(self, number: int) -> None:
        """A free block becomes held, by one table entry."""
        if not 0 <= number < self.num_blocks:
            raise InvariantBroken(
                f"group {self.number} has blocks 0 to {self.num_blocks - 1}, not {number}"
            )
        if number in self.blocks:
            raise InvariantBroken(f"block {number} of group {self.number} is in use, not free")
        if number > self.unused + SKIPPED_MAX:
            raise InvariantBroken(
                f"block {number} of group {self.number} is far beyond block {self.unused}, the "
                "next one that was never used"
            )
        if number >= self.unused:
            for skipped in range(self.unused, number):
                self.free.push(skipped)
            self.unused = number + 1
        else:
            self.free.remove(number)
        self._set(number, Block(1))

    def hold(self, number: int, refs: int = 0, pins: int = 0) -> None:
        """Add table entries or pins to a block in use; a cached one leaves its queue."""
        old = self.block(number)
        if old.refs + old.pins == 0:
            self.cached.remove(number)
        self._set(number, Block(old.refs + refs, old.pins + pins, old.entry))

    def release(self, number: int, refs: int = 0, pins: int = 0) -> None:
        """Drop table entries or pins; the last one makes the block cached or free."""
        old = self.block(number)
        if old.refs < refs or old.pins < pins:
            raise InvariantBroken(
                f"block {number} of group {self.number} has {old.refs} table entries and "
                f"{old.pins} pins: fewer than are released"
            )
        record = Block(old.refs - refs, old.pins - pins, old.entry)
        idle = record.refs + record.pins == 0
        if idle and not record.entry:
            self._free(number)
            return
        self._set(number, record)
        if idle:
            self.cached.push(number)

    def publish(self, number: int, entry: int) -> None:
        """A held block gets an index entry."""
        old = self.block(number)
        self._set(number, Block(old.refs, old.pins, entry))

    def unpublish(self, number: int) -> int:
        """A cached block becomes free; returns the entry that named it."""
        old = self.block(number)
        if old.refs + old.pins or not old.entry:
            raise InvariantBroken(
                f"block {number} of group {self.number} is not cached (table entries {old.refs}, "
                f"pins {old.pins}, {'published' if old.entry else 'not published'}): "
                "it cannot be evicted"
            )
        self.cached.remove(number)
        self._free(number)
        return old.entry


class Draft:
    """A state while events are applied to it."""

    def __init__(self, state: State) -> None:
        self._start(state)

    def _start(self, state: State) -> None:
        self.base = state
        self.geometry = state.geometry
        self.paged_groups = [at for at, it in enumerate(self.geometry.groups) if it.kind in PAGED]
        self.sequences: MapMutation[int, Sequence] = state.sequences.mutate()
        self.entries: MapMutation[int, Entry] = state.entries.mutate()
        self.by_key: MapMutation[int, tuple[int, ...]] = state.by_key.mutate()
        self._changed_entries: set[int] = set()
        self.pins = state.pins
        self.issued_step = state.issued_step
        self.written_step = state.written_step
        self.last_seq = state.last_seq
        self.next_entry = state.next_entry
        self.delta = 0
        self._groups: list[GroupDraft | None] = [None] * len(state.groups)

    def group(self, number: int) -> GroupDraft:
        """A group's working copy, made when first asked for."""
        draft = self._groups[number]
        if draft is None:
            spec = self.geometry.groups[number]
            draft = GroupDraft(number, spec.num_blocks, self.base.groups[number])
            self._groups[number] = draft
        return draft

    def blocks(self, group: int) -> Map[int, Block] | MapMutation[int, Block]:
        """A group's block records, to be read: no working copy is made for it."""
        draft = self._groups[group]
        return self.base.groups[group].blocks if draft is None else draft.blocks

    def block(self, group: int, number: int) -> Block | None:
        """A block's record, to be read."""
        record: Block | None = self.blocks(group).get(number)
        return record

    def sequence(self, seq: int) -> Sequence:
        """A live sequence."""
        sequence: Sequence | None = self.sequences.get(seq)
        if sequence is None:
            raise InvariantBroken(f"sequence {seq} is not open")
        return sequence

    def put(self, old: Sequence | None, new: Sequence) -> None:
        """Replace a sequence's record, tables' lines apart."""
        new = structs.replace(new, line=sequence_line(new))
        self.delta += new.line - (old.line if old is not None else 0)
        self.sequences[new.id] = new

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that holds nothing."""
        self.delta -= sequence.line
        del self.sequences[sequence.id]

    def table_gains(self, seq: int, group: int, first: int, blocks: tuple[int, ...]) -> None:
        """The digest learns of blocks at table places from `first` on."""
        self.delta += table_lines(seq, group, first, blocks)

    def table_loses(self, seq: int, group: int, first: int, blocks: tuple[int, ...]) -> None:
        """The digest forgets them."""
        self.delta -= table_lines(seq, group, first, blocks)

    def release_tail(self, sequence: Sequence, group: int, keep: int) -> tuple[int, ...]:
        """Drop a table's blocks from place `keep` on, tail first; returns what is left."""
        table = sequence.tables[group]
        if keep >= len(table):
            return table
        cut = table[keep:]
        self.table_loses(sequence.id, group, keep, cut)
        blocks = self.group(group)
        for block in reversed(cut):
            if block != NO_BLOCK:
                blocks.release(block, refs=1)
        return table[:keep]

    def add_entry(self, new: Entry) -> None:
        """Add an entry to the prefix index."""
        self._changed_entries.add(new.id)
        self.entries[new.id] = new
        self.by_key[new.key] = (*self.by_key.get(new.key, ()), new.id)

    def put_entry(self, new: Entry) -> None:
        """Replace an entry by one of the same key."""
        self._changed_entries.add(new.id)
        self.entries[new.id] = new

    def drop_entry(self, old: Entry) -> None:
        """Forget an entry."""
        self._changed_entries.add(old.id)
        del self.entries[old.id]
        same_key = self.by_key[old.key]
        if same_key == (old.id,):
            del self.by_key[old.key]
        else:
            self.by_key[old.key] = tuple([number for number in same_key if number != old.id])

    def pin(self, step: int, group: int, block: int) -> None:
        """Hold a block until `step` is written."""
        self.group(group).hold(block, pins=1)
        self.delta += pin_line(step, group, block)
        self.pins = self.pins.set(step, (*self.pins.get(step, ()), (group, block)))

    def unpin(self, step: int) -> None:
        """Let go of what `step` pinned."""
        for group, block in self.pins.get(step, ()):
            self.delta -= pin_line(step, group, block)
            self.group(group).release(block, pins=1)
        if step in self.pins:
            self.pins = self.pins.delete(step)

    def rebase(self) -> State:
        """Go on from what was done so far, as a value: for handlers that must walk a map."""
        state = self.finish()
        self._start(state)
        return state

    def finish(self) -> State:
        """The new state."""
        base = self.base
        groups, delta, changed = list(base.groups), self.delta, self._changed_entries
        for number, draft in enumerate(self._groups):
            if draft is not None:
                delta += draft.digest_delta()
                groups[number] = draft.finish()
        if changed:
            delta += entry_lines(changed, self.entries) - entry_lines(changed, base.entries)
        state = State(
            base.geometry,
            tuple(groups),
            self.sequences.finish(),
            self.entries.finish() if changed else base.entries,
            self.by_key.finish() if changed else base.by_key,
            self.pins,
            self.issued_step,
            self.written_step,
            self.last_seq,
            self.next_entry,
        )
        delta += scalars_line(state) - scalars_line(base)
        return structs.replace(state, digest=(base.digest + delta) & MASK)
