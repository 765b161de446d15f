"""Order: which of the issued steps may still be collected.

Owns the numbers of tickets and the knowledge that the pages were lost. No MLX: both kernels use it.
"""

from __future__ import annotations

from .batch import EvalFailed


class Order:
    """Steps are collected as they were issued; once one has failed, none before `reset`."""

    def __init__(self) -> None:
        self._issued = 0
        self._collected = 0
        self._void = 0
        self._lost = False

    def issue(self) -> int:
        """The next ticket's number. Raises EvalFailed while the pages are lost."""
        if self._lost:
            raise EvalFailed("the pages were lost and not reset")
        self._issued += 1
        return self._issued

    def collect(self, number: int) -> None:
        """Raises EvalFailed where the ticket's pages were lost, or thrown away since."""
        assert number > self._collected, "steps are collected in the order of their issue"
        self._collected = number
        if self._lost or number <= self._void:
            raise EvalFailed("the pages were lost before this step was collected")

    def fail(self) -> None:
        """The pages are lost."""
        self._lost = True

    def reset(self) -> None:
        """There are new pages; what was issued before is void."""
        self._void, self._lost = self._issued, False
