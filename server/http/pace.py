"""Pace: when a client that was refused for a full queue should come again.

The estimate is the mean time between the ends of the last 16 requests, up to now, in whole seconds
from 1 to 60: a place in the queue becomes free as often as a request ends. It counts on nobody
else's coming first.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

ENDS = 16
AT_MOST_S = 60


class Pace:
    """See the module."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=ENDS)

    def ended(self) -> None:
        """A request has ended."""
        self._ends.append(self._clock())

    def retry_after_s(self) -> int:
        """Seconds, for the header Retry-After (RFC 9110, 10.2.3)."""
        if not self._ends:
            return 1
        mean_s = (self._clock() - self._ends[0]) / len(self._ends)
        return min(AT_MOST_S, max(1, math.ceil(mean_s)))
