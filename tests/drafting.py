"""Drafting: simulations with a draft model, and its part of a tape.

The fake model says 1 2 3 4 over and over; the fake draft model says so too, but where it is told to
be wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import structs

from kernel.fake import Failure, FakeKernel
from replay.divergence import Diverged, Divergence
from replay.fold import Fold
from replay.plan import PlanChecker
from statemachine.geometry import Geometry
from statemachine.records import (
    Drafted,
    Record,
)

from .follow import GUESSING, clean
from .sim import SMALL, Sim

ROUND = (1, 2, 3, 4)
PROMPT_TOKENS = (9, 8, 7, 6, 5, 9)
"""Six tokens, so that the first answer's token is at position 6 and says 3."""
PLAIN = structs.replace(GUESSING, draft_tokens=0)
GUESSES = structs.replace(GUESSING, draft_tokens=3)
Script = Callable[[int, int], int | None]


def going_round(seq: int, position: int) -> int:
    """What both models say."""
    return ROUND[position % 4]


def wrong_at(*places: int) -> Script:
    """A draft model that guesses another token at these positions."""
    return lambda seq, position: 60 if position in places else ROUND[position % 4]


def drafting(
    draft: Script | None = going_round,
    script: Script | None = going_round,
    policy: Any = GUESSES,
    geometry: Geometry = SMALL,
    draft_geometry: Geometry | None = None,
    fail: dict[int, Failure] | None = None,
    **kernel: Any,
) -> Sim:
    """A simulation with a draft model; `fail` and `draft_geometry` are the draft model's."""
    small = FakeKernel(draft_geometry or SMALL, script=draft, fail=fail)
    return Sim(geometry, policy, draft=small, script=script, **kernel)


def draft_events(sim: Sim, kind: Any) -> list[Any]:
    """Events of a kind in the draft model's pool."""
    return [
        it for record in sim.records(Drafted) for it in record.record.events if type(it) is kind
    ]


def gone(sim: Sim) -> None:
    """Nothing is left, in either pool, and the tape replays."""
    clean(sim)
    view = sim.engine.view
    assert view.draft is not None
    state = view.draft.state
    assert not state.sequences
    assert [state.held_blocks(group) for group in state.paged_groups()] == [0] * len(state.groups)


def diverged(records: list[Record]) -> Divergence | None:
    """What fold and plan find first in records."""
    fold, plan = Fold(), PlanChecker()
    try:
        for record in records:
            fold.feed(record)
            plan.feed(record)
    except Diverged as found:
        return found.divergence
    return None


def a_run() -> Sim:
    """One request whose drafter is wrong twice."""
    sim = drafting(wrong_at(8, 12))
    sim.submit(PROMPT_TOKENS, 12)
    sim.run()
    return sim
