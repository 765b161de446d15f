"""Pool snapshot: what an engine does and which sequence holds which block, as one JSON value.

Owns the packing of a pool into cells: 16 bits each, at most CELLS_MAX of them, so that a snapshot
has at most some tens of KB however big the pool is. Looks at a view and at counters, both of which
any thread may read. Holds no text, no token and no name that a client chose.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from statemachine.sequence import Sequence
from statemachine.state import NO_ENTRY, GroupState, State

from ..counters import Counters
from ..view import View

CELLS_MAX = 4096
RUNS_MAX = 1024
SEQUENCES_MAX = 256
"""Sequences that are listed; blocks of others are NOBODY's."""

FREE, CACHED, OWN, PUBLISHED, SHARED, COPIED = range(6)
"""The three upper bits of a cell: a free block; one that can be found and is held by nobody; held
by one sequence; the same, and can be found; held by several; read by a copy that is under way.
"""
STATE_SHIFT = 13
NOBODY = (1 << STATE_SHIFT) - 1


class Pool(Struct, frozen=True):
    """A group's blocks. cells: base64 of 16-bit little-endian numbers, `each` blocks a cell.

    A cell's lower 13 bits are the place of its first holder among the snapshot's sequences, or
    NOBODY; where each > 1, the percentage of its blocks that are held.

    also: by place among the sequences, the blocks that it holds and is not the first holder of, as
    first, count, first, count ..; at most RUNS_MAX runs in all, and none where each > 1.
    """

    group: int
    kind: str
    num_blocks: int
    each: int
    held: int
    cached: int
    free: int
    cells: str
    also: tuple[tuple[int, ...], ...]


class Live(Struct, frozen=True):
    """A sequence with rows in the pool. prompt, answer: tokens; adopted: prompt rows that were
    shared at its admission.
    """

    seq: int
    prompt: int
    answer: int
    rows: int
    adopted: int


class Snapshot(Struct, frozen=True):
    """An engine at a moment. at_ms: of a clock that only differences make sense of."""

    at_ms: int
    healthy: bool
    step: int
    running: int
    waiting: int
    block_size: int
    prompt_tokens: int
    generation_tokens: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    failed_steps: int
    divergences: int
    pools: tuple[Pool, ...]
    sequences: tuple[Live, ...]
    sequences_left_out: int


def snapshot(view: View, counters: Counters, healthy: bool, at_ms: int) -> bytes:
    """A snapshot as JSON."""
    state = view.state
    ids = [seq for seq in sorted(state.sequences) if state.sequences[seq].offset]
    listed = [state.sequences[seq] for seq in ids[:SEQUENCES_MAX]]
    others = [state.sequences[seq] for seq in ids[SEQUENCES_MAX:]]
    geometry = state.geometry
    pools = [_pool(state, group, listed, others) for group in state.paged_groups()]
    return msgspec.json.encode(
        Snapshot(
            at_ms=at_ms,
            healthy=healthy,
            step=view.step - 1,
            running=len(view.running),
            waiting=len(view.waiting),
            block_size=geometry.block_size,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            preemptions=counters.preemptions,
            failed_steps=counters.failed_steps,
            divergences=sum(counters.divergences.values()),
            pools=tuple(pools),
            sequences=tuple(_live(view, sequence) for sequence in listed),
            sequences_left_out=len(others),
        )
    )


def _live(view: View, sequence: Sequence) -> Live:
    request = view.requests.get(sequence.id)
    prompt = 0 if request is None else len(request.arrived.tokens)
    answer = 0 if request is None else request.output_tokens
    return Live(sequence.id, prompt, answer, sequence.offset, sequence.adopted)


def _pool(state: State, group: int, listed: list[Sequence], others: list[Sequence]) -> Pool:
    spec = state.geometry.groups[group]
    tables = [_blocks(sequence, group) for sequence in listed]
    holders = np.zeros(spec.num_blocks, np.int32)
    for sequence in others:
        holders[_blocks(sequence, group)] += 1
    owner = np.full(spec.num_blocks, NOBODY, np.uint16)
    for place in reversed(range(len(tables))):
        holders[tables[place]] += 1
        owner[tables[place]] = place
    each = -(-spec.num_blocks // CELLS_MAX)
    states, held = _states(state.groups[group], holders)
    also = shared_runs(tables, owner) if each == 1 else ()
    if each > 1:
        states, owner = _aggregated(states, held, each)
    cells = (states.astype(np.uint16) << STATE_SHIFT) | owner
    return Pool(
        group=group,
        kind=spec.kind,
        num_blocks=spec.num_blocks,
        each=each,
        held=state.held_blocks(group),
        cached=state.cached_blocks(group),
        free=state.free_blocks(group),
        cells=base64.b64encode(cells.astype("<u2").tobytes()).decode(),
        also=also,
    )


def _blocks(sequence: Sequence, group: int) -> NDArray[np.int64]:
    """The blocks of a sequence's table, [n]."""
    table = np.array(sequence.tables[group], np.int64)
    return table[table >= 0]


def shared_runs(
    tables: list[NDArray[np.int64]], owner: NDArray[np.uint16]
) -> tuple[tuple[int, ...], ...]:
    """Runs of the blocks that each sequence has beside those that it is the first holder of."""
    found, left = [], RUNS_MAX
    for place, table in enumerate(tables):
        blocks = np.sort(table[owner[table] != place])
        starts = np.flatnonzero(np.diff(blocks, prepend=-2) != 1)[:left]
        left -= len(starts)
        ends = np.append(np.flatnonzero(np.diff(blocks) != 1), len(blocks) - 1)[: len(starts)]
        runs = np.stack([blocks[starts], ends - starts + 1], axis=1) if len(starts) else starts
        found.append(tuple(runs.ravel().tolist()))
    return tuple(found)


def _states(blocks: GroupState, holders: NDArray[np.int32]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The state of each block, and whether it is held."""
    used = blocks.blocks.items()
    findable = np.zeros(len(holders), bool)
    findable[[number for number, block in used if block.entry != NO_ENTRY]] = True
    pinned = np.zeros(len(holders), bool)
    pinned[[number for number, block in used if block.pins]] = True
    state = np.where(findable, CACHED, FREE)
    state[pinned] = COPIED
    state[holders == 1] = OWN
    state[(holders == 1) & findable] = PUBLISHED
    state[holders > 1] = SHARED
    return state, (holders > 0) | pinned


_RANK = np.array([0, 1, 3, 4, 5, 2])
"""What a cell of several blocks is shown as: the state of its blocks with the highest rank."""


def _aggregated(
    state: NDArray[Any], held: NDArray[Any], each: int
) -> tuple[NDArray[Any], NDArray[np.uint16]]:
    """States and percentages of cells of `each` blocks; the last one may have fewer."""
    starts = np.arange(0, len(state), each)
    ranks = np.maximum.reduceat(_RANK[state], starts)
    sizes = np.diff([*starts.tolist(), len(state)])
    share = np.add.reduceat(held.astype(np.int64), starts) * 100 // sizes
    return np.argsort(_RANK)[ranks], share.astype(np.uint16)
