"""What the plan depth takes from the fold that ran before it: states, and only where they fit."""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from replay.fold import Fold
from replay.plan import PlanChecker
from replay.reader import Tape
from statemachine.records import Record, StepDone

from . import long_tape


def tape(folder: Path) -> list[Record]:
    path = folder / "capture.log"
    long_tape.make(path, 400, running=4)
    return list(Tape(str(path)))


def test_the_plan_depth_goes_on_with_the_state_that_the_fold_made(tmp_path: Path) -> None:
    fold = Fold()
    plan = PlanChecker(fold)
    same = 0
    for record in tape(tmp_path):
        fold.feed(record)
        plan.feed(record)
        if isinstance(record, StepDone):
            assert plan.view is not None
            assert plan.view.state is fold.state
            same += 1
    assert same > 20


def test_a_state_that_the_fold_made_of_another_one_is_not_taken(tmp_path: Path) -> None:
    fold = Fold()
    plan = PlanChecker(fold)
    for record in tape(tmp_path):
        fold.feed(record)
        if isinstance(record, StepDone):
            assert fold.applied is not None
            events, before, after = fold.applied
            fold.applied = events, before ^ 1, structs.replace(after)
        plan.feed(record)
        if isinstance(record, StepDone):
            assert plan.view is not None
            assert fold.applied is not None
            assert plan.view.state is not fold.applied[2]
            assert plan.view.state == fold.state


def test_what_was_applied_names_the_state_before_and_after(tmp_path: Path) -> None:
    fold = Fold()
    for record in tape(tmp_path):
        before = fold.state.digest if fold.counts.records else 0
        fold.feed(record)
        if isinstance(record, StepDone):
            assert fold.applied is not None
            assert fold.applied[0] is record.events
            assert fold.applied[1:] == (before, fold.state)
            assert fold.state.digest == record.digest
