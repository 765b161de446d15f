"""Spread: how values are spread, in memory that does not grow with how many there are."""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

EXACT_BELOW = 1000
"""Values below it are kept as they are, greater ones to three digits."""


class Percentiles(Struct, frozen=True):
    """Of `count` values: the mean, and the values that half, 90 % and 99 % of them do not exceed.

    Values of 1000 and more are kept to three digits.
    """

    count: int
    mean: float
    median: int
    p90: int
    p99: int
    most: int


class Spread:
    """Counts values of 0 or more."""

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0
        self.most = 0
        self._counts = Counter[int]()

    def add(self, value: int) -> None:
        """One value more."""
        self.count += 1
        self.sum += value
        if value > self.most:
            self.most = value
        if value >= EXACT_BELOW:
            unit: int = 10 ** (len(str(value)) - 3)
            value -= value % unit
        self._counts[value] += 1

    def percentiles(self) -> Percentiles | None:
        """None where there were no values."""
        if not self.count:
            return None
        mean = round(self.sum / self.count, 2)
        return Percentiles(
            self.count, mean, self._at(0.5), self._at(0.9), self._at(0.99), self.most
        )

    def _at(self, share: float) -> int:
        """The least value that this share of all does not exceed."""
        due = share * self.count
        passed = 0
        for value in sorted(self._counts):
            passed += self._counts[value]
            if passed >= due:
                return value
        return self.most
