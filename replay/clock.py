"""Clock: microseconds since a tape's start, as far as its StepTimed records tell them.

A tape has no clock: its steps say how long they took, so time stands still while a server idles. A
step begins when the newest one that was answered before it ended. Where no step says how long it
took, each takes STEP_US.
"""

from __future__ import annotations

from statemachine.records import Record, StepDone, StepFailed, StepPlanned, StepTimed

STEP_US = 1000


class Clock:
    """Feed it records in order. now: the end of the newest step that was answered; a step's own end
    is known when its StepTimed came, or the record behind its answer.
    """

    def __init__(self) -> None:
        self.now = 0
        self._starts: dict[int, int] = {}
        self._answered: int | None = None
        self._last_us = STEP_US

    def feed(self, record: Record) -> None:
        """One record on."""
        if isinstance(record, StepTimed):
            self._last_us = max(0, sum(record.parts_us.values()))
            if record.step == self._answered:
                self._end(self._last_us)
            return
        self.settle()
        if isinstance(record, StepPlanned):
            self._starts[record.step] = self.now
        elif isinstance(record, StepDone | StepFailed):
            self._answered = record.step

    def start(self, step: int) -> int:
        """When a step that is in flight, or was answered last, began."""
        return self._starts.get(step, self.now)

    def settle(self) -> None:
        """No StepTimed came for the step that was answered last: it took as long as others."""
        if self._answered is not None:
            self._end(self._last_us)

    def _end(self, took_us: int) -> None:
        assert self._answered is not None
        start = self._starts.pop(self._answered, self.now)
        self._answered = None
        self.now = max(self.now, start + took_us)
