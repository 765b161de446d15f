"""Ahead: what the tests of lookahead ask of a simulation."""

from __future__ import annotations

from msgspec import structs

from .follow import AHEAD
from .sim import Sim

BARE = structs.replace(AHEAD, prefix_cache=False, watermark_blocks=0)
"""Lookahead and nothing else that takes blocks."""


def sevens(seq: int, position: int) -> int:
    """A model that says 7, whatever it is asked."""
    return 7


def turns(sim: Sim, count: int) -> None:
    """So many turns of the loop."""
    for _ in range(count):
        sim.step()
