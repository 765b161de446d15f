"""The tape of a draft model: from the middle, wrong in a place, in each command of replay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from replay.cli import main as replay_command
from replay.errors import Unusable
from replay.fold import Fold
from replay.plan import PlanChecker
from statemachine.codec import TapeDecoder, TapeEncoder
from statemachine.records import (
    Checkpoint,
    Drafted,
    Record,
    StepDone,
    StepPlanned,
)

from .drafting import PROMPT_TOKENS, a_run, diverged, drafting, wrong_at
from .sim import Sim, tape_bytes


def cut_at_checkpoint(sim: Sim) -> list[Record]:
    """The tape from its second checkpoint on, behind its header, through bytes."""
    records = sim.capture.records
    at = [n for n, record in enumerate(records) if isinstance(record, Checkpoint)][1]
    encoder = TapeEncoder()
    return list(TapeDecoder().feed(encoder.encode([records[0], *records[at:]])))


def drafted_at(records: Sequence[Record], kind: type[Record], step: int) -> int:
    """Where the draft model's record of a step stands."""
    return next(
        n for n, it in enumerate(records)
        if isinstance(it, Drafted) and isinstance(it.record, kind) and it.record.step == step
    )  # fmt: skip


def wrongly_seen() -> list[Record]:
    """A run in which the caches of the draft model saw another start in its step 4."""
    records = list(a_run().capture.records)
    place = drafted_at(records, StepDone, 4)
    drafted: Any = records[place]
    seen = structs.replace(drafted.record.observation, starts=(9,))
    records[place] = Drafted(structs.replace(drafted.record, observation=seen))
    return records


@pytest.mark.parametrize("at", range(2, 7))
def test_a_tape_that_begins_in_the_middle_has_the_drafters_pool_and_guesses(at: int) -> None:
    sim = drafting(wrong_at(8, 12, 13, 19))
    for n in range(2):
        sim.submit((40 + n, *PROMPT_TOKENS), 20)

    def due() -> None:
        sim.capture.checkpoint_due = True

    sim.run({at: [due]})
    fold, plan = Fold("event"), PlanChecker()
    for record in cut_at_checkpoint(sim):
        fold.feed(record)
        plan.feed(record)
    fold.finish()
    assert fold.drafted is not None
    assert fold.drafted.counts.steps > 0


def test_a_round_that_is_missing_on_tape_is_found_by_plan() -> None:
    records = a_run().capture.records
    found = diverged([it for it in records if not isinstance(it, Drafted)])
    assert found is not None
    assert (found.kind, found.step, found.draft_step) == ("plan", 2, -1)
    assert "the draft model has a step due before it" in found.summary


def test_another_guess_than_the_one_on_tape_is_found_at_the_plan_that_uses_it() -> None:
    records = list(a_run().capture.records)
    place = drafted_at(records, StepDone, 3)
    drafted: Any = records[place]
    records[place] = Drafted(structs.replace(drafted.record, tokens=(55,)))
    found = diverged(records)
    assert found is not None
    assert (found.kind, found.step, found.record, found.draft_step) == (
        "plan",
        2,
        "StepPlanned",
        -1,
    )


def test_what_is_wrong_in_the_drafters_pool_is_told_with_both_steps() -> None:
    records = wrongly_seen()
    found = diverged(records)
    assert found is not None
    assert (found.kind, found.step, found.draft_step, found.sequence) == ("observation", 3, 4, 0)
    assert found.summary.startswith(
        "in step 4 of the draft model: sequence 0: the caches saw start"
    )


def test_steps_of_a_draft_model_that_no_header_names_are_unusable() -> None:
    first, *records = a_run().capture.records
    fold = Fold()
    fold.feed(structs.replace(first, draft=None))
    drafted = next(it for it in records if isinstance(it, Drafted))
    with pytest.raises(Unusable, match="its header names no draft model"):
        fold.feed(drafted)


@pytest.fixture
def tape(tmp_path: Path) -> str:
    sim = a_run()
    sim.engine.stop()
    path = tmp_path / "drafted.tape"
    path.write_bytes(tape_bytes(sim.capture.records))
    return str(path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["TAPE"],
        ["TAPE", "--depth", "plan", "--invariants", "event"],
        ["show", "TAPE", "--at", "2"],
        ["stat", "TAPE"],
        ["html", "TAPE", "-o", "OUT.html"],
        ["diff", "TAPE", "TAPE"],
        ["repair", "TAPE", "-o", "OUT.tape"],
        ["upgrade", "TAPE", "-o", "OUT.tape"],
        ["bisect", "TAPE"],
        *(["export", "TAPE", "--to", to, "-o", "OUT"] for to in ("jsonl", "perfetto", "kv-events")),
    ],
    ids=" ".join,
)
def test_commands_of_replay_take_a_tape_with_a_draft_model(
    tape: str, tmp_path: Path, arguments: list[str]
) -> None:
    named = [it.replace("TAPE", tape).replace("OUT", str(tmp_path / "out")) for it in arguments]
    assert replay_command(named) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["redact", "TAPE", "-o", "OUT"], "whose guesses this version cannot redact"),
        (["what-if", "TAPE"], "what it would have guessed in other steps is not on it"),
    ],
    ids=["redact", "what-if"],
)
def test_what_would_need_other_guesses_is_refused_in_a_sentence(
    tape: str, tmp_path: Path, capsys: Any, arguments: list[str], said: str
) -> None:
    named = [it.replace("TAPE", tape).replace("OUT", str(tmp_path / "out")) for it in arguments]
    assert replay_command(named) == 2
    assert said in capsys.readouterr().err
    assert [it.name for it in tmp_path.iterdir()] == ["drafted.tape"]


def test_a_report_says_which_step_of_the_draft_model_it_is(tape: str, capsys: Any) -> None:
    records = wrongly_seen()
    Path(tape).write_bytes(tape_bytes(records))
    assert replay_command([tape]) == 1
    assert "step      3, before it step 4 of the draft model" in capsys.readouterr().out


@pytest.mark.parametrize("strict", [False, True])
def test_a_tape_that_ends_inside_a_round_says_so(strict: bool, tape: str, capsys: Any) -> None:
    records = a_run().capture.records
    place = drafted_at(records, StepPlanned, 5)
    Path(tape).write_bytes(tape_bytes(records[: place + 1]))
    assert replay_command([tape, *(["--strict"] if strict else [])]) == (1 if strict else 3)
    said = capsys.readouterr().out
    if strict:
        assert "in step 4 of the draft model: step 4 was issued and never answered" in said
    else:
        assert "the tape ends inside step 4 of the draft model" in said
