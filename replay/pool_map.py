"""Pool map: the blocks of a pool, one letter each, and counts of them, at one moment.

Big pools take rows of cells that stand for several blocks each; rows without a used block are left
out. Looks at a state only.
"""

from __future__ import annotations

from collections import defaultdict

from msgspec import Struct

from statemachine.events import NO_BLOCK
from statemachine.state import NO_ENTRY, State

FREE, CACHED, SHARED, COPIED, OTHER = ".", "+", "#", "!", "o"
LETTERS = "abcdefghijklmnopqrstuvwxyz".replace(OTHER, "")
ROW_CELLS = 64
ROWS_MAX = 48
LEGEND = (
    "one letter a block: that of its sequence below, o of one without a letter; a capital one is "
    "published (others may find it); # held by several; + cached: published, held by nobody; "
    "! read by a copy; . free"
)
BIG_LEGEND = (
    "{blocks} blocks a letter: O all held, o some of them; + some cached, none held; . all free"
)


class BlockNow(Struct, frozen=True):
    """A block that is not free: the sequences that hold it, pins of copies, whether it is
    published.
    """

    block: int
    holders: tuple[int, ...]
    pins: int
    published: bool


class PoolNow(Struct, frozen=True):
    """A group's blocks. shared: held by several sequences. used: all that are not free."""

    group: int
    kind: str
    num_blocks: int
    block_size: int
    held: int
    shared: int
    cached: int
    free: int
    published: int
    used: tuple[BlockNow, ...]


def pools(state: State) -> tuple[PoolNow, ...]:
    """The pool of each group that has blocks."""
    return tuple(_pool(state, group) for group in state.paged_groups())


def _pool(state: State, group: int) -> PoolNow:
    holders: defaultdict[int, list[int]] = defaultdict(list)
    for seq in sorted(state.sequences):
        for block in state.sequences[seq].tables[group]:
            if block != NO_BLOCK:
                holders[block].append(seq)
    used = tuple(
        BlockNow(number, tuple(holders.get(number, ())), block.pins, block.entry != NO_ENTRY)
        for number, block in sorted(state.groups[group].blocks.items())
    )
    spec = state.geometry.groups[group]
    return PoolNow(
        group=group,
        kind=spec.kind,
        num_blocks=spec.num_blocks,
        block_size=state.geometry.block_size,
        held=state.held_blocks(group),
        shared=sum(len(it.holders) > 1 for it in used),
        cached=state.cached_blocks(group),
        free=state.free_blocks(group),
        published=sum(it.published for it in used),
        used=used,
    )


def map_lines(pool: PoolNow, letters: dict[int, str]) -> list[str]:
    """The map: rows of ROW_CELLS letters behind the number of their first block. `letters`: by
    sequence.
    """
    each = max(1, -(-pool.num_blocks // (ROW_CELLS * ROWS_MAX)))
    per_row = ROW_CELLS * each
    rows: defaultdict[int, dict[int, list[BlockNow]]] = defaultdict(dict)
    for it in pool.used:
        rows[it.block // per_row].setdefault(it.block % per_row // each, []).append(it)
    lines, due = [], 0
    last = -(-pool.num_blocks // per_row)
    for number in [*sorted(rows), last]:
        if due < number:
            end = min(number * per_row, pool.num_blocks) - 1
            lines.append(f"{due * per_row:>8}  {FREE * 3} all free up to block {end}")
        if number < last:
            cells = min(ROW_CELLS, -(-(pool.num_blocks - number * per_row) // each))
            row = [_cell(rows[number].get(at, []), each, letters) for at in range(cells)]
            lines.append(f"{number * per_row:>8}  {_spaced(row)}")
        due = number + 1
    return lines


def legend(pool: PoolNow) -> str:
    """What the letters mean."""
    each = max(1, -(-pool.num_blocks // (ROW_CELLS * ROWS_MAX)))
    return LEGEND if each == 1 else BIG_LEGEND.format(blocks=each)


def _cell(blocks: list[BlockNow], each: int, letters: dict[int, str]) -> str:
    if not blocks:
        return FREE
    if each > 1:
        held = sum(bool(it.holders or it.pins) for it in blocks)
        return "O" if held == each else OTHER if held else CACHED
    (it,) = blocks
    if not it.holders:
        return COPIED if it.pins else CACHED
    if len(it.holders) > 1:
        return SHARED
    letter = letters.get(it.holders[0], OTHER)
    return letter.upper() if it.published else letter


def _spaced(row: list[str]) -> str:
    """Eight letters, a space, eight letters."""
    return " ".join("".join(row[at : at + 8]) for at in range(0, len(row), 8))
