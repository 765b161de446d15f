"""Garbage: Python's collector, kept out of the way of steps.

A full collection walks all that the process holds while no thread can run: some 70 ms once a model
and its libraries are loaded, in the middle of whatever step it falls into. `settle` puts all that
is there aside, for good, so that later collections walk what came since; `tidy` collects this
while there is nothing else to do. Both are a server's: a program that is not ours to settle, and
that loads engines one after the other, is left alone.
"""

from __future__ import annotations

import gc

IDLE_S = 1.0
"""How long there must be nothing to do before garbage is collected."""

_settled = False


def settle() -> None:
    """Collect once, then never walk again what is there now. For a process that only serves."""
    global _settled
    gc.collect()
    gc.freeze()
    _settled = True


def tidy() -> None:
    """Collect what became garbage since `settle`; without it nothing happens."""
    if _settled:
        gc.collect()
