"""Faults of blocks: tables, references, copies, the prefix index, and what stands in the pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import structs

from kernel.batch import Batch
from statemachine.events import NO_BLOCK, BlockEvicted, BlockPublished, Event
from statemachine.records import ShadowReport
from statemachine.state import Block
from statemachine.tags import row_tag

from . import loads
from .fault import DONE, FAILED, Catalogue, Witness

FAULTS = Catalogue()


@FAULTS.add(
    "neighbours-table",
    "a sequence reads another one's block table",
    "kernel.metadata:_table",
    loads.MIXED,
    "fold",
    "observation",
    "another block table",
)
def neighbours_table(original: Any, witness: Witness) -> Any:
    def table(pieces: Any, group: int, geometry: Any) -> Any:
        found = original(pieces, group, geometry)
        covers = [geometry.blocks_for(piece.sequence.offset) for piece in pieces]
        for number in range(1, len(pieces)):
            if covers[number] == covers[0] and pieces[number].start:
                witness.note(pieces[number].sequence.id)
                found[number] = found[0]
                break
        return found

    return table


@FAULTS.add(
    "freed-block-read",
    "after a preemption a sequence still reads the blocks that it had before",
    "kernel.metadata:_table",
    loads.TIGHT,
    "fold",
    "observation",
    "another block table",
)
def freed_read(original: Any, witness: Witness) -> Any:
    first: dict[int, int] = {}

    def table(pieces: Any, group: int, geometry: Any) -> Any:
        found = original(pieces, group, geometry)
        for number, piece in enumerate(pieces):
            seq = piece.sequence.id
            old = first.setdefault(seq, int(found[number, 0]))
            if old != found[number, 0]:
                witness.note(seq)
                found[number, 0] = old
        return found

    return table


@FAULTS.add(
    "slot-off-by-one",
    "decode rows are written one row after their place",
    "kernel.metadata:_slots",
    loads.MIXED,
    "fold",
    "content",
    "not the row",
)
def slot_off(original: Any, witness: Witness) -> Any:
    def slots(pieces: Any, tables: Any, piece_of: Any, positions: Any, geometry: Any) -> Any:
        found = original(pieces, tables, piece_of, positions, geometry)
        at = 0
        for piece in pieces:
            inside = (piece.start + 1) % geometry.block_size
            if piece.rows == 1 and piece.start and inside:
                witness.note(piece.sequence.id)
                found[:, at] += 1
            at += piece.rows
        return found

    return slots


@FAULTS.add(
    "shared-block-written",
    "copy on write moves the table and copies no row",
    "server.scheduler:batch",
    loads.REPEATS,
    "fold",
    "content",
    "not the row",
)
def not_copied(original: Any, witness: Witness) -> Any:
    def batch(view: Any, plan: Any) -> Batch:
        made: Batch = original(view, plan)
        if made.copies:
            witness.note(made.copies[0].seq)
        return structs.replace(made, copies=())

    return batch


@FAULTS.add(
    "copy-skipped",
    "an append writes into a block that is published: no copy is planned",
    "statemachine.commands:_copies",
    loads.REPEATS,
    "plan",
    "plan",
    "of StepPlanned",
)
def copy_skipped(original: Any, witness: Witness) -> Any:
    def copies(state: Any, sequence: Any, *moved: Any) -> list[int]:
        if original(state, sequence, *moved):
            witness.note(sequence.id)
        return []

    return copies


@FAULTS.add(
    "refs-stay",
    "a sequence that closes keeps its blocks' references: they never come back",
    "statemachine.draft:Draft.release_tail",
    loads.MIXED,
    "fold",
    "fold",
    "digest",
)
def refs_stay(original: Any, witness: Witness) -> Any:
    def release_tail(draft: Any, sequence: Any, group: int, keep: int) -> tuple[int, ...]:
        if keep == 0 and sequence.tables[group]:
            witness.note(-1, DONE)
            return ()
        return tuple(original(draft, sequence, group, keep))

    return release_tail


@FAULTS.add(
    "freed-while-held",
    "a shared block is freed when the first of its holders lets go",
    "statemachine.draft:GroupDraft.release",
    loads.MIXED,
    "fold",
    "fold",
    "digest",
)
def freed_while_held(original: Any, witness: Witness) -> Any:
    def release(group: Any, number: int, refs: int = 0, pins: int = 0) -> None:
        old: Block = group.block(number)
        if refs and old.refs > 1:
            witness.note(-1, DONE)
            refs = old.refs
        original(group, number, refs, pins)

    return release


@FAULTS.add(
    "trim-keeps-blocks",
    "a trim moves the offset back and leaves the blocks of the trimmed rows in the table",
    "statemachine.draft:Draft.release_tail",
    loads.PADDED,
    "fold",
    "fold",
    "digest",
)
def trim_keeps_blocks(original: Any, witness: Witness) -> Any:
    def release_tail(draft: Any, sequence: Any, group: int, keep: int) -> tuple[int, ...]:
        if 0 < keep < len(sequence.tables[group]):
            witness.note(-1, DONE)
            return tuple(sequence.tables[group])
        return tuple(original(draft, sequence, group, keep))

    return release_tail


@FAULTS.add(
    "S11-key",
    "the key of a stored block is made of one token more than the block has rows",
    "statemachine.content:grown",
    loads.MIXED,
    "fold",
    "fold",
    "digest",
)
def key_too_long(original: Any, witness: Witness) -> Any:
    def grown(geometry: Any, sequence: Any, more: bytes) -> Any:
        keys, packed, tail = original(geometry, sequence, more)
        if len(keys) == len(sequence.keys):
            return keys, packed, tail
        witness.note()
        after = (tail or packed[0])[:8]
        parent = keys[-2] if len(keys) > 1 else sequence.root
        key = row_tag(geometry, parent, packed[-1] + after)
        return (*keys[:-1], key), packed, tail

    return grown


@FAULTS.add(
    "S11-unwritten",
    "a block is published before its rows are written",
    "server.closing:close_step",
    loads.MIXED,
    "plan",
    "plan",
    "raised at close",
    "not written",
)
def published_early(original: Any, witness: Witness) -> Any:
    def close_step(view: Any, plan: Any, found: Any) -> tuple[Event, ...]:
        events: tuple[Event, ...] = original(view, plan, found)
        early = tuple(event for event in events if isinstance(event, BlockPublished))
        if not early:
            return events
        witness.note(-1, FAILED)
        return early + tuple(event for event in events if event not in early)

    return close_step


@FAULTS.add(
    "free-order",
    "the block that was freed last is taken first",
    "statemachine.supply:_walk",
    loads.UNSHARED,
    "plan",
    "plan",
    "of StepPlanned",
)
def free_order(original: Any, witness: Witness) -> Any:
    def walk(state: Any, number: int, *rest: Any) -> Iterator[int]:
        free = state.groups[number].free
        queued = [free.items[at] for at in range(free.head, free.tail) if at in free.items]
        mine = original(state, number, *rest)
        for block in reversed(queued):
            if next(mine) != block:
                witness.note()
            yield block
        yield from mine

    return walk


@FAULTS.add(
    "evicted-newest",
    "the most recently used cached block is evicted first",
    "statemachine.supply:_walk",
    loads.EVICTS,
    "plan",
    "plan",
    "BlockEvicted",
)
def evicted_newest(original: Any, witness: Witness) -> Any:
    def walk(state: Any, number: int, spared: Any, evictions: list[Any]) -> Iterator[int]:
        idle = state.free_blocks(number)
        mine = original(state, number, spared, evictions)
        for _ in range(idle):
            yield next(mine)
        group = state.groups[number]
        queue = [group.cached.items.get(at) for at in range(group.cached.head, group.cached.tail)]
        cached = [block for block in queue if block is not None]
        oldest_first = list(cached)
        for block in reversed(cached):
            if oldest_first[0] != block:
                witness.note()
            key = state.entries[group.blocks[block].entry].key
            evictions.append(BlockEvicted(number, block, key))
            yield block

    return walk


@FAULTS.add(
    "not-evicted",
    "a cached block is handed out and stays in the index",
    "statemachine.supply:Supply.drain",
    loads.EVICTS,
    "plan",
    "plan",
    "BlockEvicted",
)
def not_evicted(original: Any, witness: Witness) -> Any:
    def drain(supply: Any) -> list[Any]:
        if original(supply):
            witness.note()
        return []

    return drain


@FAULTS.add(
    "held-block-taken",
    "a block that a running sequence holds is handed to another one",
    "statemachine.supply:_walk",
    loads.MIXED,
    "plan",
    "plan",
    "of StepPlanned",
)
def held_taken(original: Any, witness: Witness) -> Any:
    def walk(state: Any, number: int, *rest: Any) -> Iterator[int]:
        blocks = state.groups[number].blocks
        held = sorted(block for block, record in blocks.items() if record.refs)
        for block in held:
            witness.note()
            yield block
        yield from original(state, number, *rest)

    return walk


@FAULTS.add(
    "salt-ignored",
    "rows are shared across salts: a request is opened in everyone's namespace",
    "server.view:_arrived",
    loads.SALTED,
    "plan",
    "plan",
    "Opened",
)
def salt_ignored(original: Any, witness: Witness) -> Any:
    def arrived(view: Any, record: Any) -> Any:
        if record.namespace.salt:
            witness.note(record.request)
        return original(view, structs.replace(record, namespace=type(record.namespace)()))

    return arrived


@FAULTS.add(
    "collision-shared",
    "a hit goes by the hash alone: two prompts whose keys collide share rows",
    "statemachine.prefix:find",
    loads.COLLIDING,
    "plan",
    "plan",
)
def collision_shared(original: Any, witness: Witness) -> Any:
    def find(state: Any, namespace: Any, parent: int, key: int, tokens: bytes) -> Any:
        found = original(state, namespace, parent, key, tokens)
        for number in state.by_key.get(key, ()):
            if found is None or number != found.id:
                witness.note()
            return state.entries[number]
        return found

    return find


@FAULTS.add(
    "hole-read",
    "the table of a window is shifted when blocks are released at its front",
    "kernel.metadata:_table",
    loads.WINDOWS,
    "fold",
    "observation",
)
def hole_read(original: Any, witness: Witness) -> Any:
    def table(pieces: Any, group: int, geometry: Any) -> Any:
        found = original(pieces, group, geometry)
        for number, piece in enumerate(pieces):
            line = found[number]
            held = np.flatnonzero(line != NO_BLOCK)
            cover = geometry.blocks_for(piece.sequence.offset)
            if NO_BLOCK in line[:cover].tolist():
                witness.note(piece.sequence.id)
                line[held[0] + 1 : cover] = line[held[-1]]
        return found

    return table


@FAULTS.add(
    "sanitizer-silent",
    "a step's rows are not compared with their tags, and nobody is told",
    "kernel.shadow:Shadow.apply",
    loads.MIXED,
    "fold",
    "content",
    "0 rows in the pages were compared",
)
def not_compared(original: Any, witness: Witness) -> Any:
    def apply(self: Any, batch: Any, metadata: Any) -> ShadowReport:
        report: ShadowReport = original(self, batch, metadata)
        if len(batch.pieces) < 2:
            return report
        witness.note(record=DONE)
        return ShadowReport()

    return apply
