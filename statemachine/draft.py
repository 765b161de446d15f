"""Draft: a working copy of a state, for the handlers in transitions.py.

Its primitives move blocks between held, cached and free, and keep the digest with each move. The
state that it was made from never changes; a draft that a handler gave up is thrown away whole.
"""

from __future__ import annotations

from immutables import Map, MapMutation
from msgspec import structs

from .digest import (
    CACHED,
    FREE,
    MASK,
    block_line,
    entry_line,
    line,
    pin_line,
    scalars_line,
    sequence_line,
    table_line,
)
from .errors import InvariantBroken
from .events import NO_BLOCK
from .geometry import PAGED
from .sequence import Sequence
from .state import Block, Entry, GroupState, Queue, State

SKIPPED_MAX = 1024
"""Blocks never used that one event may pass over: commands pass over none, hands may a few."""


class QueueDraft:
    """A queue while it changes."""

    def __init__(self, queue: Queue) -> None:
        self.items: MapMutation[int, int] = queue.items.mutate()
        self.places: MapMutation[int, int] = queue.places.mutate()
        self.head = queue.head
        self.tail = queue.tail

    def push(self, block: int) -> int:
        """Append a block; returns its position."""
        position = self.tail
        self.items[position] = block
        self.places[block] = position
        self.tail = position + 1
        return position

    def remove(self, block: int) -> int:
        """Take a block out, wherever it stands; returns its position. The head skips gaps."""
        position = self.places.pop(block)
        del self.items[position]
        while self.head < self.tail and self.head not in self.items:
            self.head += 1
        return position

    def finish(self) -> Queue:
        """The queue as a value."""
        return Queue(self.items.finish(), self.places.finish(), self.head, self.tail)


class GroupDraft:
    """One group's blocks while they change. `delta` collects what the digest gains."""

    def __init__(self, number: int, num_blocks: int, state: GroupState) -> None:
        self.number = number
        self.num_blocks = num_blocks
        self.blocks: MapMutation[int, Block] = state.blocks.mutate()
        self.unused = state.unused
        self.free = QueueDraft(state.free)
        self.cached = QueueDraft(state.cached)
        self.delta = 0

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

    def set_block(self, number: int, record: Block) -> None:
        """Replace a block's record; one that is neither held nor published leaves the map."""
        old = self.blocks.get(number)
        if old is not None:
            self.delta -= block_line(self.number, number, old)
        if record.refs or record.pins or record.entry:
            self.delta += block_line(self.number, number, record)
            self.blocks[number] = record
        elif old is not None:
            del self.blocks[number]

    def _push_free(self, number: int) -> None:
        self.delta += line(FREE, self.number, self.free.push(number), number)

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
                self._push_free(skipped)
            self.unused = number + 1
        else:
            self.delta -= line(FREE, self.number, self.free.remove(number), number)
        self.blocks[number] = taken = Block(refs=1)
        self.delta += block_line(self.number, number, taken)

    def hold(self, number: int, refs: int = 0, pins: int = 0) -> None:
        """Add table entries or pins to a block in use; a cached one leaves its queue."""
        old = self.block(number)
        if old.refs + old.pins == 0:
            self.delta -= line(CACHED, self.number, self.cached.remove(number), number)
        self.set_block(number, Block(old.refs + refs, old.pins + pins, old.entry))

    def release(self, number: int, refs: int = 0, pins: int = 0) -> None:
        """Drop table entries or pins; the last one makes the block cached or free."""
        old = self.block(number)
        if old.refs < refs or old.pins < pins:
            raise InvariantBroken(
                f"block {number} of group {self.number} has {old.refs} table entries and "
                f"{old.pins} pins: fewer than are released"
            )
        record = Block(old.refs - refs, old.pins - pins, old.entry)
        self.set_block(number, record)
        if record.refs + record.pins == 0:
            if record.entry:
                self.delta += line(CACHED, self.number, self.cached.push(number), number)
            else:
                self._push_free(number)

    def publish(self, number: int, entry: int) -> None:
        """A held block gets an index entry."""
        old = self.block(number)
        self.set_block(number, Block(old.refs, old.pins, entry))

    def unpublish(self, number: int) -> int:
        """A cached block becomes free; returns the entry that named it."""
        old = self.block(number)
        if old.refs + old.pins or not old.entry:
            raise InvariantBroken(
                f"block {number} of group {self.number} is not cached (table entries {old.refs}, "
                f"pins {old.pins}, {'published' if old.entry else 'not published'}): "
                "it cannot be evicted"
            )
        self.delta -= line(CACHED, self.number, self.cached.remove(number), number)
        self.set_block(number, Block())
        self._push_free(number)
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
        self.entries: MapMutation[int, Entry] | None = None
        self.by_key: MapMutation[int, tuple[int, ...]] | None = None
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
        for index, block in enumerate(blocks, first):
            if block != NO_BLOCK:
                self.delta += table_line(seq, group, index, block)

    def table_loses(self, seq: int, group: int, first: int, blocks: tuple[int, ...]) -> None:
        """The digest forgets them."""
        for index, block in enumerate(blocks, first):
            if block != NO_BLOCK:
                self.delta -= table_line(seq, group, index, block)

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

    def index(self) -> tuple[MapMutation[int, Entry], MapMutation[int, tuple[int, ...]]]:
        """The prefix index's working copies: entries, and entries by key."""
        if self.entries is None or self.by_key is None:
            self.entries = self.base.entries.mutate()
            self.by_key = self.base.by_key.mutate()
        return self.entries, self.by_key

    def set_entry(self, old: Entry | None, new: Entry | None) -> None:
        """Add, replace or drop an index entry."""
        entries, by_key = self.index()
        if old is not None:
            self.delta -= entry_line(old)
        if new is not None:
            self.delta += entry_line(new)
            entries[new.id] = new
            if old is None:
                by_key[new.key] = (*by_key.get(new.key, ()), new.id)
        elif old is not None:
            del entries[old.id]
            left = tuple(number for number in by_key[old.key] if number != old.id)
            if left:
                by_key[old.key] = left
            else:
                del by_key[old.key]

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
        groups, delta = list(base.groups), self.delta
        for number, draft in enumerate(self._groups):
            if draft is not None:
                groups[number] = draft.finish()
                delta += draft.delta
        state = State(
            base.geometry,
            tuple(groups),
            self.sequences.finish(),
            base.entries if self.entries is None else self.entries.finish(),
            base.by_key if self.by_key is None else self.by_key.finish(),
            self.pins,
            self.issued_step,
            self.written_step,
            self.last_seq,
            self.next_entry,
        )
        delta += scalars_line(state) - scalars_line(base)
        return structs.replace(state, digest=(base.digest + delta) & MASK)
