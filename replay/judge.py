"""Judge: the first divergence of records in memory; and whether two divergences are the same one.

What run.py does to a tape, done to any records, so that a candidate need not be written to a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable

from attrs import field, frozen

from statemachine.records import Record

from .divergence import CRASH, PLAN, Diverged, Divergence
from .fold import EACH_STEP, Fold
from .run import Checker, Options, checker_for

_NUMBERS = re.compile(r"\b[0-9a-f]{16}\b|\d+")


@frozen
class Sameness:
    """What two tapes that diverge in the same way have in common.

    event: its type, "" for a decision (which of two differing events is at fault depends on what
    stands behind it). wrong: the summary, its numbers left out, which names the wrong value.
    """

    kind: str
    record: str
    event: str
    sequence: int
    wrong: str
    step: int | None = field(default=None)


def sameness(found: Divergence, with_step: bool = True) -> Sameness:
    """Of a divergence. with_step: it must also stand in the same step."""
    event = "" if found.kind == PLAN else event_type(found.event)
    # How it shows that a step was never answered differs: a new segment begins, or the tape ends.
    wrong = "" if found.kind == CRASH else _NUMBERS.sub("#", found.summary)
    return Sameness(
        found.kind, found.record, event, found.sequence, wrong, found.step if with_step else None
    )


def event_type(text: str) -> str:
    """The type of an event that stands as text in a report; "" where there is none."""
    return str(json.loads(text).get("type", "")) if text.startswith("{") else ""


class Judge:
    """Feed it records in order, then `finish`; both raise Diverged at the first divergence."""

    def __init__(
        self,
        options: Options,
        make: Callable[[Options, Fold], Checker | None] = checker_for,
        invariants: str = EACH_STEP,
    ) -> None:
        self.fold = Fold(invariants)
        self.checker = make(options, self.fold)

    def feed(self, record: Record) -> None:
        """One record on. The fold comes first, unless the depth names an earlier event."""
        found: Diverged | None = None
        try:
            self.fold.feed(record)
        except Diverged as diverged:
            found = diverged
        checker = self.checker
        if checker is not None and (found is None or not checker.needs_fold):
            try:
                checker.feed(record)
            except Diverged as diverged:
                index = diverged.divergence.event_index
                if found is None or 0 <= index < found.divergence.event_index:
                    found = diverged
        if found is not None:
            raise found

    def finish(self) -> None:
        """The records are at their end."""
        self.fold.finish()
        if self.checker is not None:
            self.checker.finish()


def first_divergence(
    records: Iterable[Record],
    options: Options,
    make: Callable[[Options, Fold], Checker | None] = checker_for,
    invariants: str = EACH_STEP,
) -> Divergence | None:
    """The first divergence of records; None where there is none. Raises Unusable."""
    judge = Judge(options, make, invariants)
    try:
        for record in records:
            judge.feed(record)
        judge.finish()
    except Diverged as diverged:
        found = diverged.divergence
        if judge.checker is not None and judge.checker.needs_fold:
            # A depth that looks at whole requests may know of an earlier step.
            try:
                judge.checker.finish()
            except Diverged as other:
                if other.divergence.step < found.step:
                    return other.divergence
        return found
    return None
