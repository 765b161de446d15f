"""`replay what-if`: a recorded load under other settings."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from msgspec import structs

from kernel.fake import Failure
from replay.cli import main
from replay.reader import Tape
from replay.recorded import Recorded
from replay.resched import Resched
from replay.what_if import WhatIfReport, settings, what_if
from server.policy import Policy
from statemachine.events import Closed
from statemachine.geometry import Geometry, Group
from statemachine.records import Gap, Header, Record, RequestArrived, StepDone, StepPlanned

from .sim import POLICY, SMALL, TIGHT, Sim, prompts
from .simulation_play import play
from .simulation_random import random_load
from .tampering import changed, write

Planned = list[tuple[type, int, tuple[object, ...]]]


def decisions(records: list[Record]) -> Planned:
    """What a scheduler decided, step by step."""
    kept = (StepPlanned, StepDone)
    return [(type(it), it.step, it.events) for it in records if isinstance(it, kept)]


def tried(path: str, *given: str) -> list[Record]:
    """The records of a load that is run again."""
    tape = Tape(path)
    recorded = Recorded(tape, iter(tape))
    return list(Resched(recorded, *settings(recorded.header, given)).records())


def served(geometry: Geometry = TIGHT, policy: Policy = POLICY, **kernel: object) -> Sim:
    sim = Sim(geometry, policy, **kernel)
    sim.run(
        {
            1 + 2 * number: [lambda prompt=prompt: sim.submit(prompt, 12)]
            for number, prompt in enumerate(prompts(8, seed=3))
        }
    )
    sim.engine.stop()
    return sim


def report_of(folder: Path, records: list[Record], *given: str) -> WhatIfReport:
    return what_if(write(folder, records), given)


@pytest.mark.parametrize("first", [0, 14])
def test_under_the_recorded_settings_every_decision_is_the_recorded_one(
    first: int, tmp_path: Path
) -> None:
    """Lookahead, guesses, copies, priorities, cancels, stop strings, flushes and segments."""
    compared = 0
    for seed in range(first, first + 14):
        load = random_load(seed)
        if load.poison or load.draft:
            continue  # of steps that fail, and of what a draft model said, nothing is run again
        load = attrs.evolve(load, fail={}, full_disk={})
        path = tmp_path / f"{seed}{'' if load.segment_bytes else '.log'}"
        play(load, path)
        recorded = decisions(list(Tape(str(path))))
        assert decisions(tried(str(path))) == recorded, f"seed {seed}"
        compared += len(recorded)
    assert compared > 200


def test_a_tape_from_the_middle_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    compared = 0
    for seed in (54, 55):
        load = attrs.evolve(random_load(seed), fail={}, full_disk={}, segment_bytes=1000)
        play(load, tmp_path / f"{seed}")
        whole = str(tmp_path / f"{seed}")
        # Nothing is in flight where a segment ends.
        assert decisions(tried(whole)) == decisions(list(Tape(whole)))
        for segment in sorted((tmp_path / f"{seed}").glob("*.tape*"))[1:]:
            recorded = decisions(list(Tape(str(segment))))
            # The last step was answered before another was planned, for a segment to end there.
            last = len(recorded) - 1
            assert decisions(tried(str(segment)))[:last] == recorded[:last], segment.name
            compared += last
    assert compared > 20


def test_with_room_for_one_request_they_wait_for_each_other(tmp_path: Path) -> None:
    sim = Sim(SMALL, POLICY)
    for prompt in ((1, 2, 3), (4, 5, 6), (7, 8, 9)):
        sim.submit(prompt, 4)
    sim.run()
    report = report_of(tmp_path, sim.capture.records, "max_running=1")
    assert report.verdict == "WHAT IF max_running=1 (was 32): 12 steps instead of 4 (+200.0%)"
    assert report.recorded.waiting_steps is not None
    assert report.tried.waiting_steps is not None
    assert (report.recorded.waiting_steps.most, report.tried.waiting_steps.most) == (0, 8)
    assert (report.recorded.requests.running_most, report.tried.requests.running_most) == (3, 1)


def test_without_the_prefix_cache_nothing_is_found(tmp_path: Path) -> None:
    sim = served()
    report = report_of(tmp_path, sim.capture.records, "prefix_cache=off")
    assert report.recorded.prefix.adopted_rows > 0
    assert report.tried.prefix.hit_rate == 0
    assert report.tried.rows.prompt > report.recorded.rows.prompt


def test_a_larger_pool_preempts_nobody(tmp_path: Path) -> None:
    sim = served(Geometry(4, (Group(num_blocks=16),)))
    report = report_of(tmp_path, sim.capture.records, "num_blocks=64")
    assert report.recorded.requests.preemptions > 0
    assert report.tried.requests.preemptions == report.tried.rows.again == 0
    assert report.tried.pool[0].num_blocks == 64
    assert [(it.name, it.recorded, it.tried) for it in report.changes] == [
        ("num_blocks", "16", "64")
    ]


def test_slots_of_states_are_said_by_the_name_that_a_server_gives_them(tmp_path: Path) -> None:
    states = Geometry(4, (Group(num_blocks=48), Group("recurrent", num_blocks=3)))
    records = served(states, structs.replace(POLICY, lookahead=False)).capture.records
    blocks = report_of(tmp_path, records, "num_blocks=60")
    assert [it.num_blocks for it in blocks.tried.pool] == [60, 3]
    slots = report_of(tmp_path, records, "num_slots=30")
    assert [it.num_blocks for it in slots.tried.pool] == [48, 30]
    assert [(it.name, it.recorded, it.tried) for it in slots.changes] == [("num_slots", "3", "30")]


def test_answers_stay_as_recorded_whatever_is_tried(tmp_path: Path) -> None:
    sim = served()
    report = report_of(
        tmp_path, sim.capture.records, "max_running=2", "lookahead=on", "draft_tokens=3"
    )
    assert report.tried.answer_tokens == report.recorded.answer_tokens == 8 * 12
    assert (report.made_up, report.beyond) == (0, 0)
    assert report.tried.rows.lookahead > 0


def test_what_the_record_does_not_have_is_made_up_and_counted(tmp_path: Path) -> None:
    sim = Sim(SMALL, structs.replace(POLICY, max_running=1))
    for prompt in ((1, 2, 3), (4, 5, 6)):
        sim.submit(prompt, 6)
    sim.run({8: [lambda: sim.engine.cancel(1)]})
    report = report_of(tmp_path, sim.capture.records, "max_running=2")
    # It is given up before step 8, of which it saw one then, and sees six now.
    assert report.recorded.requests.ended == {"cancelled": 1, "length": 1}
    assert (report.recorded.answer_tokens, report.tried.answer_tokens) == (7, 12)
    assert (report.made_up, report.beyond) == (5, 1)


def test_steps_that_failed_do_not_fail_again(tmp_path: Path) -> None:
    sim = served(fail={4: Failure("eval")})
    report = report_of(tmp_path, sim.capture.records)
    assert report.verdict.startswith("SAME SETTINGS, run again: ")
    assert (report.recorded.steps.failed, report.tried.steps.failed) == ({"eval": 1}, {})
    said = "steps that failed when they were recorded: 1; none fails in the run that was tried"
    assert said in report.notes


def test_requests_that_would_be_refused_are_left_out(tmp_path: Path) -> None:
    sim = served()
    long = sum(len(prompt) >= 16 for prompt in prompts(8, seed=3))
    report = report_of(tmp_path, sim.capture.records, "context_tokens=16")
    assert report.refused == long > 0
    assert report.tried.requests.arrived == 8 - long


def test_nothing_behind_a_gap_is_run(tmp_path: Path) -> None:
    records = served().capture.records
    place = [at for at, it in enumerate(records) if isinstance(it, StepPlanned)][9]
    report = report_of(tmp_path, [*records[:place], Gap(4, "full"), records[1]])
    assert report.recorded.steps.planned == 9
    assert any(note.startswith("records are missing from a place on") for note in report.notes)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("speed=4", "there is no setting 'speed' to try; there are max_batch_tokens, "),
        ("max_running", "--set max_running has no value: write --set max_running=VALUE"),
        ("max_running=many", "max_running is a whole number of 0 or more, not 'many'"),
        ("max_running=0", "these settings cannot be tried: max_running must be at least 1"),
        ("lookahead=maybe", "lookahead is on or off, not 'maybe'"),
        ("num_blocks=1,2", "num_blocks is a whole number, or 1 of them with commas"),
        ("num_slots=9", "num_slots cannot be tried with this model: no group of it holds any"),
        ("num_blocks=0", "these settings cannot be tried: group 0: num_blocks must be at least 1"),
        ("scheduling=lifo", "these settings cannot be tried: scheduling must be fcfs or priority"),
    ],
)
def test_a_setting_that_makes_no_sense_is_one_sentence(
    given: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, served().capture.records)
    assert main(["what-if", path, "--set", given]) == 2
    assert capsys.readouterr().err.startswith(f"replay: {said}")


def test_inputs_that_no_server_had_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = served().capture.records
    place = next(at for at, it in enumerate(records) if isinstance(it, RequestArrived))
    path = write(tmp_path, [*records[:place], records[place], *records[place:]])
    assert main(["what-if", path]) == 2
    said = capsys.readouterr().err
    assert "the tape's inputs cannot be run again (request 0 is live already" in said


def test_what_the_model_cannot_do_is_not_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = served().capture.records
    assert isinstance(records[0], Header)
    flags = {"rewind": False, "rewind_reason": "its caches rotate"}
    path = write(tmp_path, changed(records, 0, capabilities=flags))
    assert main(["what-if", path, "--set", "lookahead=on"]) == 2
    said = capsys.readouterr().err
    assert said == "replay: lookahead=on cannot be tried with this model: its caches rotate\n"
    assert main(["what-if", path, "--set", "lookahead=off"]) == 0


def test_the_report_stands_beside_the_recorded_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = served().capture.records
    path = write(tmp_path, records)
    closed = sum(isinstance(it, Closed) for r in records for it in getattr(r, "events", ()))
    assert main(["what-if", path, "--set", "max-running=2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["format"] == 1
    assert report["tried"]["requests"]["ended"] == {"length": closed}
    assert main(["what-if", path, "--set", "max-running=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["recorded", "tried"]
    steps = [report[run]["steps"]["planned"] for run in ("recorded", "tried")]
    assert lines[2].split() == ["steps", *map(str, steps)]
