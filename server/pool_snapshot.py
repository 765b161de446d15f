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

from statemachine.geometry import Group
from statemachine.sequence import Sequence
from statemachine.state import NO_ENTRY, GroupState

from .counters import Counters
from .view import View

CELLS_MAX = 4096
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
    """

    group: int
    kind: str
    num_blocks: int
    each: int
    held: int
    cached: int
    free: int
    cells: str


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
    pools = [
        Pool(
            group=group,
            kind=geometry.groups[group].kind,
            num_blocks=geometry.groups[group].num_blocks,
            each=_each(geometry.groups[group]),
            held=state.held_blocks(group),
            cached=state.cached_blocks(group),
            free=state.free_blocks(group),
            cells=_cells(geometry.groups[group], group, state.groups[group], listed, others),
        )
        for group in state.paged_groups()
    ]
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


def _each(spec: Group) -> int:
    return -(-spec.num_blocks // CELLS_MAX)


def _cells(
    spec: Group, group: int, blocks: GroupState, listed: list[Sequence], others: list[Sequence]
) -> str:
    holders = np.zeros(spec.num_blocks, np.int32)
    owner = np.full(spec.num_blocks, NOBODY, np.uint16)
    for place, sequence in reversed(list(enumerate([*listed, *others]))):
        table = np.array(sequence.tables[group], np.int64)
        table = table[table >= 0]
        holders[table] += 1
        owner[table] = place if place < len(listed) else NOBODY
    used = blocks.blocks.items()
    findable = np.zeros(spec.num_blocks, bool)
    findable[[number for number, block in used if block.entry != NO_ENTRY]] = True
    pinned = np.zeros(spec.num_blocks, bool)
    pinned[[number for number, block in used if block.pins]] = True
    state = np.where(findable, CACHED, FREE)
    state[pinned] = COPIED
    state[holders == 1] = OWN
    state[(holders == 1) & findable] = PUBLISHED
    state[holders > 1] = SHARED
    each = _each(spec)
    if each > 1:
        state, owner = _aggregated(state, (holders > 0) | pinned, each)
    cells = (state.astype(np.uint16) << STATE_SHIFT) | owner
    return base64.b64encode(cells.astype("<u2").tobytes()).decode()


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
