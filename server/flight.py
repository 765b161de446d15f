"""Flight: a step between its issue and its close, and what is said of it afterwards."""

from __future__ import annotations

from itertools import pairwise

from kernel.batch import BuildFailed, StepResult
from statemachine.records import Observation, ShadowReport, StepTimed

from .view import StepPlan

NOTHING = StepResult(
    Observation((0, 0), (0, 0), (0, 0), (0, 0), 0, (), (), (), ()), ShadowReport(), (), (), (), ()
)
"""The result of a step without rows, which never reaches the kernel."""


class Flight:
    """A step between its issue and its close; `error` where it could not be issued."""

    def __init__(self, plan: StepPlan, times: list[float]) -> None:
        self.plan = plan
        self.times = times
        self.ticket: object = None
        self.error: Exception | None = None


def blame(plan: StepPlan, error: BuildFailed) -> tuple[int, ...]:
    """The request at fault: the one that the kernel names, or the only one in the step."""
    seqs = [piece.seq for piece in plan.pieces]
    if error.seq in seqs:
        return (error.seq,) if error.seq is not None else ()
    return (seqs[0],) if len(seqs) == 1 else ()


def timed(step: int, times: list[float]) -> StepTimed:
    names = ("plan", "write", "forward", "close")
    spans = zip(names, pairwise(times), strict=True)
    parts = {name: round((end - start) * 1e6) for name, (start, end) in spans}
    return StepTimed(step, parts)
