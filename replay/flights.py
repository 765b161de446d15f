"""Flights: steps of a tape that are not answered yet, and the order in which they must be.

A step is answered after those that were planned before it. Where the pages are lost, the steps in
flight behind are void, and said to be, before anything else is planned. Compares no event.
"""

from __future__ import annotations

from .observed import Pieces

BUILD = "build"
"""The stage of a StepFailed after which the pages are sound."""
VOID = "void"
"""The stage of a step that was in flight behind one that lost the pages."""


class Flights(dict[int, Pieces]):
    """Batches by step, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self._void: set[int] = set()

    def clear(self) -> None:
        """Nothing is in flight: a checkpoint stands between two steps."""
        super().clear()
        self._void.clear()

    def wrong_plan(self) -> str:
        """Why no step may be planned now; "" where one may."""
        if not self._void:
            return ""
        return f"the pages were lost with step {min(self._void)} in flight, which is not void"

    def wrong_answer(self, step: int, stage: str = "") -> str:
        """Why this cannot be the next answer; "" where it can. stage: of a StepFailed."""
        if step not in self:
            return "it was never planned"
        oldest = next(iter(self))
        if step != oldest:
            return f"step {oldest}, which was issued before it, is to be answered before it"
        if step in self._void and stage != VOID:
            return "it was in flight when the pages were lost: it is void, and has no result"
        if step not in self._void and stage == VOID:
            return "it is said to be void, and no step before it lost the pages"
        return ""

    def answered(self, step: int, stage: str = "") -> Pieces:
        """Take a step out."""
        self._void.discard(step)
        pieces = self.pop(step)
        if stage not in ("", BUILD, VOID):
            self._void.update(self)
        return pieces
