"""Expectation: the values of a state that a script may compare, and a report may show, by name."""

from __future__ import annotations

from typing import Any

from .sequence import Sequence, held_blocks, visible
from .state import State


def _per_group(values: list[Any]) -> Any:
    """One group's value bare, several as a list."""
    return values[0] if len(values) == 1 else values


def sequence_values(state: State, sequence: Sequence) -> dict[str, Any]:
    """A sequence's lengths and tables; values of several groups are lists."""
    groups = range(len(state.geometry.groups))
    return {
        "offset": sequence.offset,
        "committed": sequence.committed,
        "speculative": len(sequence.speculative),
        "pads": sequence.pads,
        "start": _per_group(list(sequence.starts)),
        "visible": _per_group([visible(state.geometry, sequence, group) for group in groups]),
        "blocks": _per_group([len(held_blocks(table)) for table in sequence.tables]),
        "table": _per_group([list(table) for table in sequence.tables]),
        "adopted": sequence.adopted,
        "tokens": list(sequence.tokens),
    }


def pool_values(state: State) -> dict[str, Any]:
    """Counts of blocks, per group where there are several."""
    groups = range(len(state.geometry.groups))
    return {
        "free": _per_group([state.free_blocks(group) for group in groups]),
        "cached": _per_group([state.cached_blocks(group) for group in groups]),
        "held": _per_group([state.held_blocks(group) for group in groups]),
        "published": _per_group([state.published_blocks(group) for group in groups]),
    }
