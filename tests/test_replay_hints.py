"""What a report adds to a divergence: whose table or row was read, and what to run next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from replay.cli import COMMANDS, main
from replay.divergence import CONTENT, OBSERVATION
from replay.report import as_text, verdict
from replay.run import Outcome
from statemachine.events import Appended, AppendedEach
from statemachine.observing import table_hash
from statemachine.records import Record, ShadowFinding, ShadowReport, StepDone, StepPlanned
from statemachine.tags import sequence_tags

from .faults.catalogue import BY_NAME
from .faults.runner import record as play
from .tampering import changed, first_step, observed, outcome_of
from .tapes import golden

RECORDS: list[Record] = golden.records()
PLACE = first_step(
    RECORDS,
    lambda it: (
        isinstance(it, StepPlanned)
        and it.step > 8
        and isinstance(it.events[0], AppendedEach)
        and len(it.events[0].seqs) > 2
    ),
)


def answer() -> int:
    """The place of that step's StepDone."""
    step: Any = RECORDS[PLACE]
    return first_step(RECORDS, lambda it: isinstance(it, StepDone) and it.step == step.step)


def sequences_at() -> dict[int, Any]:
    """The state's sequences while that step's forward runs."""
    from replay.following import Following

    following = Following()
    for record in RECORDS[: PLACE + 1]:
        following.feed(record)
    return dict(following.state.sequences)


def other_table(tmp_path: Path, table: tuple[int, ...]) -> Outcome:
    done: Any = RECORDS[answer()]
    tables = ((table_hash(table),), *done.observation.tables[1:])
    return outcome_of(tmp_path, observed(RECORDS, answer(), tables=tables))


def test_a_table_that_is_another_sequences_is_named(tmp_path: Path) -> None:
    plan: Any = RECORDS[PLACE]
    mine, other = plan.events[0].seqs[:2]
    tables = {seq: it.tables[0] for seq, it in sequences_at().items()}
    outcome = other_table(tmp_path, tables[other])
    assert outcome.divergence is not None
    assert (outcome.divergence.kind, outcome.divergence.sequence) == (OBSERVATION, mine)
    assert f"the table that was read is that of sequence {other}" in outcome.notes
    (row,) = [it for it in outcome.divergence.values if it.name == "table (group 0)"]
    assert (row.derived, row.observed) == (tables[mine], tables[other])


def test_a_table_without_its_last_block_is_named(tmp_path: Path) -> None:
    plan: Any = RECORDS[PLACE]
    table = sequences_at()[plan.events[0].seqs[0]].tables[0]
    outcome = other_table(tmp_path, table[:-1])
    assert "the table that was read is its own without the last block" in outcome.notes


def test_a_table_that_nobody_has_adds_nothing(tmp_path: Path) -> None:
    outcome = other_table(tmp_path, (99, 98))
    assert not [note for note in outcome.notes if "table" in note]


@pytest.mark.parametrize("case", ["another's", "its own", "never written", "gone"])
def test_a_row_that_stands_where_another_should_is_traced(tmp_path: Path, case: str) -> None:
    plan: Any = RECORDS[PLACE]
    mine, other = plan.events[0].seqs[0], plan.events[0].seqs[2]
    sequences = sequences_at()
    first: Any = next(it for it in RECORDS if isinstance(it, StepPlanned))
    tag, said = {
        "another's": (
            sequence_tags(golden.TIGHT, sequences[other], 3, 4)[0],
            f"the row that stands there is that of sequence {other} at position 3",
        ),
        "its own": (
            sequence_tags(golden.TIGHT, sequences[mine], 2, 3)[0],
            "the row that stands there is its own at position 2",
        ),
        "never written": (0, ""),
        "gone": (
            0xABC,
            "the row that stands there was left by a sequence that is gone: no live one has it",
        ),
    }[case]
    assert isinstance(first.events[-1], Appended)
    report = ShadowReport(99, 1, (ShadowFinding(mine, 0, 5, 12, 0xDEF, tag),))
    outcome = outcome_of(tmp_path, changed(RECORDS, answer(), shadow=report))
    assert outcome.divergence is not None
    assert outcome.divergence.kind == CONTENT
    assert outcome.divergence.block == 12
    hints = [note for note in outcome.notes if note.startswith("the row that stands")]
    assert hints == ([said] if said else [])
    assert "--block 12" in as_text(outcome)


@pytest.mark.parametrize("fault", ["S1", "S3", "S13", "wrong-victim", "slot-off-by-one"])
def test_every_command_that_is_advised_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    import shlex

    from replay.advice import next_steps
    from replay.run import Options, replay

    tape = tmp_path / "a tape.log"
    play(BY_NAME[fault].load, tape, BY_NAME[fault])
    outcome = replay(str(tape), Options(BY_NAME[fault].depth))
    assert outcome.divergence is not None
    steps = next_steps(outcome.divergence, outcome)
    assert len(steps) >= 2
    for step in steps:
        words = shlex.split(step.command)
        assert words[0] == "replay"
        if words[1] in COMMANDS and words[1] != "show":
            continue  # they write files
        if "forward" in words:
            continue  # the fake model cannot be loaded
        assert main(words[1:]) in (0, 1)
        assert capsys.readouterr().out


def test_a_plan_verdict_says_both_events_in_words(tmp_path: Path) -> None:
    from replay.run import Options, replay

    tape = tmp_path / "tape.log"
    play(BY_NAME["wrong-victim"].load, tape, BY_NAME["wrong-victim"])
    line = verdict(replay(str(tape), Options("plan")))
    assert line.endswith(
        "(on tape: sequence 0: preempted: it gave its blocks back and waits; "
        "now: sequence 4: preempted: it gave its blocks back and waits)"
    )


def test_a_state_that_does_not_fit_comes_with_the_events_of_its_record(tmp_path: Path) -> None:
    plan: Any = RECORDS[PLACE]
    outcome = outcome_of(tmp_path, changed(RECORDS, PLACE, digest=plan.digest ^ 1))
    found = outcome.divergence
    assert found is not None
    assert [it.index for it in found.last_events] == list(range(len(plan.events)))
    assert "the events of that record (step, record[event])" in as_text(outcome)
    assert structs.asdict(found)["sequence"] == -1
