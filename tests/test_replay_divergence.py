"""Each class of divergence, made by changing one thing of a sound tape; and the reports of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from msgspec import structs

from replay.cli import main
from replay.divergence import CONTENT, CRASH, FOLD, OBSERVATION, PLAN, Divergence
from replay.report import verdict
from replay.run import CLEAN, DIVERGED, TORN, Options, replay
from statemachine import commands
from statemachine.events import Appended, Trimmed
from statemachine.records import (
    Record,
    RequestCancelled,
    ShadowFinding,
    ShadowReport,
    StepDone,
    StepPlanned,
    StepTimed,
)

from .sim import Sim
from .tampering import changed, divergence_of, first_step, observed, outcome_of, with_item, write
from .tapes import golden

RECORDS: list[Record] = golden.records()


def is_padded(record: Record) -> bool:
    return isinstance(record, StepDone) and any(isinstance(e, Trimmed) for e in record.events)


def decodes(record: Record) -> bool:
    return isinstance(record, StepDone) and record.observation.rows[:3] == (1, 1, 1)


def at(place: int) -> Any:
    return RECORDS[place]


def value(found: Divergence, name: str) -> tuple[object, object, object]:
    (it,) = [values for values in found.values if values.name == name]
    return it.recorded, it.derived, it.observed


def test_an_event_that_cannot_be_applied_is_named_with_its_sequence(tmp_path: Path) -> None:
    place = first_step(
        RECORDS, lambda r: isinstance(r, StepPlanned) and isinstance(r.events[-1], Appended)
    )
    events = at(place).events
    index = len(events) - 1
    stolen = structs.replace(events[index], blocks=((9999,),))
    found = divergence_of(
        tmp_path, changed(RECORDS, place, events=with_item(events, index, stolen))
    )
    assert (found.kind, found.step, found.record) == (FOLD, at(place).step, "StepPlanned")
    assert (found.event_index, found.sequence) == (index, events[index].seq)
    assert '"blocks":[[9999]]' in found.event
    assert found.last_events[-1].event == found.event


def test_an_event_that_is_missing_shows_in_the_digest_of_its_step(tmp_path: Path) -> None:
    place = first_step(RECORDS, is_padded)
    kept = tuple(event for event in at(place).events if not isinstance(event, Trimmed))
    found = divergence_of(tmp_path, changed(RECORDS, place, events=kept))
    assert (found.kind, found.step) == (FOLD, at(place).step)


def test_a_digest_that_is_not_the_states_is_a_fold_divergence(tmp_path: Path) -> None:
    place = first_step(RECORDS, lambda r: isinstance(r, StepPlanned) and r.step == 9)
    found = divergence_of(tmp_path, changed(RECORDS, place, digest=1))
    assert (found.kind, found.step, found.record) == (FOLD, 9, "StepPlanned")
    assert "digest 0000000000000001" in found.summary


def test_an_offset_that_is_not_the_sequences_is_named_with_both_values(tmp_path: Path) -> None:
    place = first_step(RECORDS, decodes)
    right = at(place).offsets
    assert right[1] > 0
    found = divergence_of(
        tmp_path, changed(RECORDS, place, offsets=with_item(right, 1, right[1] + 3))
    )
    assert (found.kind, found.step) == (FOLD, at(place).step)
    assert value(found, "offset") == (right[1] + 3, right[1], None)


@pytest.mark.parametrize(
    ("column", "name"), [("starts", "offset before the step"), ("rows", "rows of the piece")]
)
def test_a_piece_seen_elsewhere_or_longer_is_an_observation_of_its_sequence(
    tmp_path: Path, column: str, name: str
) -> None:
    place = first_step(RECORDS, decodes)
    right = getattr(at(place).observation, column)
    wrong = with_item(right, 2, right[2] + 27)
    found = divergence_of(tmp_path, observed(RECORDS, place, **{column: wrong}))
    planned = at(first_step(RECORDS, lambda r: r == planned_of(place)))
    assert (found.kind, found.step) == (OBSERVATION, at(place).step)
    assert found.sequence == sequences(planned)[2]
    assert value(found, name) == (right[2], right[2], right[2] + 27)
    assert found.layer == "every layer"
    assert found.neighbours[2].sequence == found.sequence
    assert found.record == "StepPlanned"
    assert str(found.sequence) in found.event


def planned_of(place: int) -> StepPlanned:
    step = at(place).step
    (planned,) = [r for r in RECORDS if isinstance(r, StepPlanned) and r.step == step]
    return planned


def sequences(planned: StepPlanned) -> list[int]:
    """The batch, in order."""
    found: list[int] = []
    for event in planned.events:
        seqs = getattr(event, "seqs", ())
        if isinstance(event, Appended) and event.seq not in found:
            seqs = (event.seq,)
        found += seqs
    return found


def test_pad_rows_that_stay_visible_show_as_the_incident_does(tmp_path: Path) -> None:
    padded = at(first_step(RECORDS, is_padded))
    trimmed = next(event for event in padded.events if isinstance(event, Trimmed))
    place = first_step(
        RECORDS,
        lambda r: (
            isinstance(r, StepDone)
            and r.step > padded.step
            and trimmed.seq in sequences(planned_of(RECORDS.index(r)))
        ),
    )
    piece = sequences(planned_of(place)).index(trimmed.seq)
    seen = at(place).observation
    start, (visible,) = seen.starts[piece], seen.visible[piece]
    found = divergence_of(
        tmp_path,
        observed(
            RECORDS,
            place,
            starts=with_item(seen.starts, piece, start + trimmed.rows),
            visible=with_item(seen.visible, piece, (visible + trimmed.rows,)),
        ),
    )
    assert (found.kind, found.sequence) == (OBSERVATION, trimmed.seq)
    assert value(found, "offset before the step") == (start, start, start + trimmed.rows)
    assert value(found, "visible rows (group 0)") == (None, visible, visible + trimmed.rows)
    assert any('"Trimmed"' in happened.event for happened in found.last_events)


def test_visible_rows_and_tables_are_compared_by_group(tmp_path: Path) -> None:
    place = first_step(RECORDS, decodes)
    seen = at(place).observation
    more = with_item(seen.visible, 1, (seen.visible[1][0] + 5,))
    found = divergence_of(tmp_path, observed(RECORDS, place, visible=more))
    assert (found.kind, found.group) == (OBSERVATION, 0)
    assert f"saw visible rows {more[1][0]}" in found.summary
    other = with_item(seen.tables, 1, (77,))
    found = divergence_of(tmp_path, observed(RECORDS, place, tables=other))
    assert (found.kind, found.group) == (OBSERVATION, 0)
    assert value(found, "hash of the table (group 0)")[2] == f"{77:016x}"


@pytest.mark.parametrize(
    ("fields", "said", "layer"),
    [
        ({"rows_updated": (3, 64)}, "some layers saw 3 rows written and others 64", "some layers"),
        ({"updates": (0, 1)}, "some layers saw 0 updates", "some layers"),
        ({"updates": (2, 2)}, "saw updates 2, where the state has 1", "every layer"),
        ({"attends": (0, 0)}, "attention calls 0", "every layer"),
        ({"offset_reads": (0, 1)}, "reads of the offset", "some layers"),
        ({"strangers": 2}, "uses of another step's metadata 2", "every layer"),
    ],
)
def test_layers_that_do_not_agree_are_an_observation(
    tmp_path: Path, fields: dict[str, Any], said: str, layer: str
) -> None:
    place = first_step(RECORDS, decodes)
    found = divergence_of(tmp_path, observed(RECORDS, place, **fields))
    assert (found.kind, found.layer, found.step) == (OBSERVATION, layer, at(place).step)
    assert said in found.summary


def test_a_row_that_is_not_its_sequences_is_content(tmp_path: Path) -> None:
    place = first_step(RECORDS, decodes)
    seq = sequences(planned_of(place))[1]
    report = ShadowReport(9, 3, (ShadowFinding(seq, 0, 5, 12, 0xABC, 1),))
    found = divergence_of(tmp_path, changed(RECORDS, place, shadow=report))
    assert (found.kind, found.sequence, found.position, found.group) == (CONTENT, seq, 5, 0)
    assert "position 5 in block 12 of group 0 holds a pad row, not the row 0000000000000abc" in (
        found.summary
    )


def test_a_token_that_was_not_sampled_is_found_by_planning_again(tmp_path: Path) -> None:
    place = first_step(RECORDS, decodes)
    tokens = at(place).tokens
    records = changed(RECORDS, place, tokens=with_item(tokens, 0, tokens[0] + 1))
    assert outcome_of(tmp_path, records).exit_code == CLEAN
    found = divergence_of(tmp_path, records, depth="plan")
    assert (found.kind, found.record) == (PLAN, "StepPlanned")
    assert found.step == at(place).step + 1
    recorded, derived, _ = value(found, "event")
    assert recorded != derived


@pytest.mark.parametrize("first", [True, False])
def test_a_wrong_token_that_the_code_of_tape_and_replay_share_is_found_by_planning_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Events and state agree then; what arrived and what was sampled do not."""
    name = "append_each" if first else "append"
    original = getattr(commands, name)

    def wrong(state: Any, seq: int, step: Any, tokens: Any = None, *rest: Any, **more: Any) -> Any:
        if first:
            step, seqs = seq, step
            return original(state, step, seqs, (tokens[0],) * len(tokens), *rest, **more)
        shifted = tokens and (*tokens[1:], tokens[0])
        return original(state, seq, step, shifted, *rest, **more)

    monkeypatch.setattr(commands, name, wrong)
    sim = Sim()
    for prompt in ((1, 2, 3, 4, 5), (6, 7, 8)):
        sim.submit(prompt, 6)
    sim.run()
    path = write(tmp_path, [*sim.capture.records])
    assert replay(path, Options("fold")).divergence is None
    found = replay(path, Options("plan")).divergence
    assert found is not None
    assert (found.kind, found.step) == (PLAN, 2 if first else 1)
    assert "does not hold its request's token" in found.summary


def test_an_input_that_is_missing_is_a_plan_divergence_and_folds(tmp_path: Path) -> None:
    records = [record for record in RECORDS if not isinstance(record, RequestCancelled)]
    assert outcome_of(tmp_path, records).exit_code == CLEAN
    assert divergence_of(tmp_path, records, depth="plan").kind == PLAN


def test_the_earliest_event_wins_where_fold_and_plan_both_find_something(tmp_path: Path) -> None:
    place = first_step(
        RECORDS, lambda r: isinstance(r, StepPlanned) and len(r.events) > 3 and r.step > 1
    )
    events = at(place).events
    last = next(i for i in reversed(range(len(events))) if isinstance(events[i], Appended))
    broken = with_item(events, last, structs.replace(events[last], blocks=((9999,),)))
    found = divergence_of(tmp_path, changed(RECORDS, place, events=broken), depth="plan")
    assert (found.kind, found.event_index) == (FOLD, last)


def test_a_step_without_an_answer_is_a_crash_where_the_tape_goes_on(tmp_path: Path) -> None:
    place = first_step(RECORDS, lambda r: isinstance(r, StepPlanned) and r.step == 8)
    found = divergence_of(tmp_path, [*RECORDS[: place + 1], RECORDS[-1]])
    assert (found.kind, found.step) == (CRASH, 8)
    assert found.summary == "step 8 was issued and never answered, yet the tape ends in order"


def test_a_tape_that_stops_inside_a_step_is_torn_and_strictly_a_crash(tmp_path: Path) -> None:
    place = first_step(RECORDS, lambda r: isinstance(r, StepPlanned) and r.step == 8)
    outcome = outcome_of(tmp_path, RECORDS[: place + 1])
    assert outcome.exit_code == TORN
    assert any("ends inside step 8" in note for note in outcome.notes)
    found = divergence_of(tmp_path, RECORDS[: place + 1], strict=True)
    assert (found.kind, found.step) == (CRASH, 8)


def test_wall_times_are_compared_by_nobody(tmp_path: Path) -> None:
    slow = [
        structs.replace(r, parts_us={"plan": 10**9}) if isinstance(r, StepTimed) else r
        for r in RECORDS
    ]
    assert outcome_of(tmp_path, slow, depth="plan").exit_code == CLEAN


def test_until_stops_before_a_later_divergence_and_seq_leaves_others_out(tmp_path: Path) -> None:
    place = first_step(RECORDS, decodes)
    step, seen = at(place).step, at(place).observation
    records = observed(RECORDS, place, starts=with_item(seen.starts, 0, 99))
    path = write(tmp_path, records)
    assert replay(path, Options(until=step - 1)).exit_code == CLEAN
    assert replay(path, Options(until=step)).exit_code == DIVERGED
    mine, others = sequences(planned_of(place))[:2]
    assert replay(path, Options(only=mine)).exit_code == DIVERGED
    assert replay(path, Options(only=others)).exit_code == CLEAN


def test_the_report_says_the_verdict_first_and_json_says_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = first_step(RECORDS, decodes)
    seen = at(place).observation
    path = write(tmp_path, observed(RECORDS, place, starts=with_item(seen.starts, 0, 99)))
    seq = sequences(planned_of(place))[0]
    assert main([path]) == DIVERGED
    text = capsys.readouterr().out
    line = (
        f"DIVERGED at step {at(place).step}, sequence {seq} (observation): "
        f"the caches saw start 99, where the state has {seen.starts[0]}"
    )
    assert text.splitlines()[0] == line
    for part in (
        "last events of sequence",
        "the batch of step",
        "This usually means:",
        "Try next:",
    ):
        assert part in text
    assert main([path, "--json"]) == DIVERGED
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == line
    assert report["exit_code"] == DIVERGED
    assert report["divergence"]["class"] == OBSERVATION
    assert report["divergence"]["sequence"] == seq
    offset = report["divergence"]["values"][0]
    assert (offset["derived"], offset["observed"]) == (seen.starts[0], 99)
    assert len(report["divergence"]["last_events"]) == 8


def test_a_clean_report_says_what_was_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(golden.PATH), "--depth", "plan", "--json"]) == CLEAN
    report = json.loads(capsys.readouterr().out)
    assert report["divergence"] is None
    assert report["counts"]["steps"] == report["figures"]["steps planned again"] == 36
    assert report["verdict"].startswith("CLEAN at depth plan: 36 steps")


def test_a_verdict_says_that_records_were_lost() -> None:
    outcome = replay(str(golden.PATH), Options())
    assert "missing" not in verdict(outcome)
    lossy = attrs.evolve(outcome, counts=structs.replace(outcome.counts, gaps=1, lost_records=70))
    assert verdict(lossy).endswith(" rows agree, 70 records missing in 1 gap")


@pytest.mark.parametrize(
    "arguments",
    [["--until", "-1"], ["--seq", "one"], ["--margin", "x"], ["--margin", "-1"], ["--margin=nan"]],
)
def test_a_number_that_is_none_is_refused_with_what_it_must_be(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(golden.PATH), *arguments])
    assert ended.value.code == 2
    assert "number of 0 or more, not " in capsys.readouterr().err


def test_a_model_that_is_missing_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([str(golden.PATH), "--depth", "forward"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "the tape's model cannot be loaded (--model gives a path)" in said
