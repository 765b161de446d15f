"""Sharing: how a step's rows are divided among prompts, in numbers only.

The rule: what decode rows leave of `max_batch_tokens` is divided evenly among the first SHARERS (or
one for each 16 rows) prompts in admission order; what one does not need goes to the next, and what
is left then goes to the earliest that can use it. So a short prompt behind a long one gets its rows
in the step after it arrived, and the earliest prompt always moves.
"""

from __future__ import annotations

from .policy import Policy

SHARERS = 4
"""Prompts that share even the smallest budget, as far as it has rows."""
ROWS_PER_SHARER = 16
"""Larger budgets are shared by one more prompt for each of these rows."""


def sharers(policy: Policy, rows_left: int) -> int:
    """How many prompts may have a piece in a step that has `rows_left` rows for prompts."""
    tiles = rows_left // policy.prefill_tile
    return min(tiles, max(SHARERS, rows_left // ROWS_PER_SHARER))


def share(policy: Policy, rows_left: int, needs: list[int]) -> list[tuple[int, int]]:
    """(rows, pads) for each of the first prompts in `needs`, which are rows left in order.

    Shorter than `needs` where not all get a piece. rows + pads sum to `rows_left` at most; with
    `prefill_tile` they are multiples of it, with `prefill_cohort` they are all the same.
    """
    tile = policy.prefill_tile
    count = min(len(needs), sharers(policy, rows_left))
    if not count:
        return []
    wanted = [min(need, policy.prefill_chunk) for need in needs[:count]]
    tiles = [-(-rows // tile) for rows in wanted]
    if policy.prefill_cohort:
        tiles = [min(max(tiles), rows_left // tile // count)] * count
    else:
        tiles = _tiles(rows_left // tile, tiles)
    given = [min(rows, number * tile) for rows, number in zip(wanted, tiles, strict=True)]
    return [(rows, number * tile - rows) for rows, number in zip(given, tiles, strict=True)]


def rows_to_edge(block_size: int, first: int, rows: int, length: int) -> int:
    """Rows of a piece from `first` on, at most `rows`, such that it ends at a block's edge: only
    there can the state of a recurrent group be found again. One that begins inside of a block ends
    with it. The last of `length` rows is always computed, so the edge before it is the last that is
    worth a piece.
    """
    if first % block_size:
        return min(rows, block_size - first % block_size)
    last = min(first + rows, length - 1)
    edge = last // block_size * block_size
    return edge - first if edge > first else rows


def _tiles(left: int, wanted: list[int]) -> list[int]:
    """Divide `left` tiles evenly in order, then give what is left to the earliest."""
    given = []
    for place, need in enumerate(wanted):
        tiles = min(need, max(1, left // (len(wanted) - place)))
        given.append(tiles)
        left -= tiles
    for place, need in enumerate(wanted):
        extra = min(need - given[place], left)
        given[place] += extra
        left -= extra
    return given
