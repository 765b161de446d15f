"""Soundness: whether the state of a checkpoint, which a replay starts from, is one at all.

Nothing before it on the tape leads to it, so all that a state must be is asked of it here; then no
event can make the handlers trip over it.
"""

from __future__ import annotations

import struct

from statemachine.errors import InvariantBroken
from statemachine.invariants import check_all
from statemachine.state import State

from .errors import Unusable

PLACES_MAX = 1 << 26
"""Places from a queue's head to its tail that are believed: walking them takes seconds."""

# What the checks trip over where a state's own parts do not fit each other.
_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error)


def require_sound(state: State, step: int) -> None:
    """Raise Unusable where a checkpoint's state is none that events lead to."""
    what = ""
    try:
        check_all(state)
    except InvariantBroken as error:
        what = str(error)
    except _MALFORMED as error:
        what = f"its parts do not fit each other ({error})"
    for group in state.groups:
        if max(it.tail - it.head for it in (group.free, group.cached)) > PLACES_MAX:
            what = what or "a queue of blocks is too long"
    if what:
        raise Unusable(
            f"the checkpoint after step {step} makes no sense, so nothing can start from it: {what}"
        )
