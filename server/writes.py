"""Writes: records on their way to the tape, one write at a time, and a tape that fails.

Owns the records that wait for the next write. A tape that cannot be written is left alone from then
on: serving goes on without it, and the counters say so.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from statemachine.records import Record

from .counters import Counters
from .parts import Capture

log = structlog.get_logger()


class Writes:
    """See the module. Where there is no tape, records wait and are forgotten all the same."""

    def __init__(self, capture: Capture | None, counters: Counters) -> None:
        self._capture = capture
        self._counters = counters
        self._waiting: list[Record] = []

    def __len__(self) -> int:
        """How many records wait."""
        return len(self._waiting)

    @property
    def checkpoint_due(self) -> bool:
        """Whether a Checkpoint should stand before the next StepPlanned."""
        return self._capture is not None and self._capture.checkpoint_due

    @property
    def position(self) -> int | None:
        """Bytes of the tape's current file; None without a tape."""
        return None if self._capture is None else self._capture.position

    def wait(self, records: Iterable[Record]) -> None:
        """Let records wait for the next write."""
        self._waiting += records

    def flush(self, records: Iterable[Record] = ()) -> None:
        """One write: what waited, then `records`."""
        due, self._waiting = [*self._waiting, *records], []
        if not due or self._capture is None:
            return
        try:
            self._capture.write(due)
            self._counters.capture_bytes = self._capture.bytes_written
            self._counters.capture_gaps = self._capture.gaps
        except Exception:
            log.exception("the tape could not be written; serving goes on without it")
            self._counters.capture_failures += 1
            self._capture = None

    def close(self) -> None:
        """End the tape."""
        if self._capture is not None:
            self._capture.close()
