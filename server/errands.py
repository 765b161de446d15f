"""Errands: work that others want done on the engine's thread, between two of its steps.

Owns the work that is due and who waits for it. Whoever uses it holds the engine's lock for `put`
and `take`; what was taken is run without it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Made = TypeVar("Made")
Errand = tuple[Callable[[], Any], Future[Any]]


class Errands:
    """See the module. True while something is due."""

    def __init__(self) -> None:
        self._due: list[Errand] = []

    def __bool__(self) -> bool:
        return bool(self._due)

    def put(self, work: Callable[[], Made]) -> Future[Made]:
        """To be run; its result, or what it raises, is told to the future."""
        future: Future[Made] = Future()
        self._due.append((work, future))
        return future

    def take(self) -> list[Errand]:
        """All that is due; it is the caller's now."""
        due, self._due = self._due, []
        return due


def run(errands: list[Errand]) -> None:
    """Run errands in their order."""
    for work, future in errands:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)


def give_up(errands: list[Errand], error: Exception) -> None:
    """Tell those who wait that nobody will run them."""
    for _, future in errands:
        future.set_exception(error)
