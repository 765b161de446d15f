"""`replay show`: a moment, a sequence's life and a block's, on tapes of every kind of step."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from replay.cli import main
from replay.pool_map import BlockNow, PoolNow, map_lines
from statemachine.events import Appended, Opened
from statemachine.geometry import Geometry, Group
from statemachine.records import Record, StepPlanned

from .faults import loads
from .faults.loads import Load
from .faults.runner import record as play
from .sim import POLICY, header
from .tampering import first_step, write
from .tapes import golden

TAPE = str(golden.PATH)
RECORDS: list[Record] = golden.records()


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines that `replay show` prints."""
    assert main(["show", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What `replay show --json` prints."""
    assert main(["show", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def tape_of(folder: Path, load: Load) -> str:
    path = folder / "tape.log"
    play(load, path)
    return str(path)


def whats(report: Any) -> list[str]:
    return [it["what"] for it in report["spans"]]


def test_a_moment_has_the_pool_the_batch_the_queue_and_what_happened(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = shown(capsys, TAPE, "--at", "11")
    assert lines[0] == (
        f"step 11 of {TAPE}, while its forward runs: 4 rows of 4 sequences in the batch, "
        "0 others with rows, 1 waiting"
    )
    assert lines[2:4] == [
        "pool    group 0, full, 24 blocks of 4 rows: 24 held (1 of them by several), 0 cached, "
        "0 free; 20 published",
        "       0  AAAAA#DD dcCADBBB CCCCabCC",
    ]
    at = lines.index("batch")
    assert lines[at + 1 : at + 3] == [
        "  a  sequence 0: 1 decode at position 25; offset 26 (26 committed)",
        "       visible rows 26, blocks 0-4 11 20 (6 published)",
    ]
    at = lines.index("waiting, in the order of the queue")
    assert lines[at + 1] == "     request 5: 13 prompt tokens, came after step 10"
    at = lines.index("step 11 planned")
    assert lines[at + 2] == "  [1] block 8 of group 0 evicted from the index"
    assert "the caches saw 1 row from position 25, 26 visible; sampled 49" in lines[at + 5]


def test_the_json_of_a_moment_counts_what_the_map_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = told(capsys, TAPE, "--at", "11")
    (pool,) = report["pools"]
    assert (pool["held"], pool["shared"], pool["cached"], pool["free"]) == (24, 1, 0, 0)
    assert [it["block"] for it in pool["used"] if len(it["holders"]) > 1] == [5]
    assert [it["sequence"] for it in report["standing"]] == [0, 3, 4, 1]
    assert report["standing"][1]["adopted"] == 4
    assert report["standing"][3]["rows"] == {"decode": 1}
    assert [it["request"] for it in report["waiting"]] == [5]
    assert [it["token"] for it in report["drawn"]] == [49, 30, 59, 60]
    assert report["outcome"] == "done"


def test_a_number_from_the_end_counts_steps_not_records(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told(capsys, TAPE, "--at", "-1")["step"] == 36
    assert told(capsys, TAPE, "--at", "-36")["step"] == 1
    assert main(["show", TAPE, "--at", "-37"]) == 2
    said = capsys.readouterr().err
    assert said == f"replay: {TAPE} has no step -37 from the end: its last one is 36\n"
    data = io.TextIOWrapper(io.BytesIO(golden.PATH.read_bytes()))
    monkeypatch.setattr(sys, "stdin", data)
    assert told(capsys, "-", "--at", "-2")["step"] == 35


def test_a_pipe_can_be_asked_for_its_last_step_and_for_a_later_start() -> None:
    for arguments, first in (
        (["show", "-", "--at", "-1"], b"step 36 of -, while its forward runs"),
        (["-", "--from", "1"], b"CLEAN at depth fold: 36 steps"),
    ):
        made = subprocess.run(
            [sys.executable, "-m", "replay.cli", *arguments],
            input=golden.PATH.read_bytes(),
            capture_output=True,
            check=True,
        )
        assert made.stdout.startswith(first)


def test_a_failed_step_is_shown_with_its_error_and_what_undid_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = shown(capsys, TAPE, "--at", "12")
    at = lines.index("step 12 failed at build: a failure on order")
    assert lines[at + 1] == "  [0] sequence 0: trimmed 1 row at the end"
    assert told(capsys, TAPE, "--at", "12")["outcome"] == "failed"


def test_a_step_in_flight_is_named_and_a_step_is_shown_with_its_late_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tape = tape_of(tmp_path, loads.AHEAD_TIGHT)
    report = told(capsys, tape, "--at", "9")
    assert [it["step"] for it in report["flights"]] == [8]
    assert report["outcome"] == "done"
    assert {it["record"] for it in report["events"]} == {"StepPlanned", "StepDone"}
    assert {it["step"] for it in report["events"]} == {9}
    rows = [it["rows"] for it in report["standing"] if it["piece"] >= 0]
    assert {"lookahead": 1} in rows
    line = shown(capsys, tape, "--at", "9")[1]
    assert line.startswith("step 8 (")
    assert line.endswith(") was issued before and is not answered yet")


def test_a_step_that_was_never_answered_is_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end = first_step(RECORDS, lambda it: isinstance(it, StepPlanned) and it.step == 5)
    tape = write(tmp_path, RECORDS[: end + 1])
    lines = shown(capsys, tape, "--at", "-1")
    assert lines[-1] == ("step 5 was never answered: the tape ends, or its process died in it")


def test_each_group_has_a_map_and_a_window_shows_the_blocks_it_let_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tape = tape_of(tmp_path, loads.AHEAD_WINDOWS)
    lines = shown(capsys, tape, "--at", "9")
    assert [it.split(":")[0] for it in lines if it.startswith("pool")] == [
        "pool    group 0, full, 64 blocks of 4 rows",
        "pool    group 1, window of 8 and 2 sinks, 64 blocks of 4 rows",
    ]
    assert "       visible rows 10, blocks of group 1 4 _ _ 7-8 20 27 (3 published)" in lines


def test_the_raw_events_of_a_step_are_as_on_tape(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, TAPE, "--at", "9", "--events")
    assert lines[0].startswith("step 9 planned, state ")
    assert any('{"type":"StepWritten","step":9}' in line for line in lines)
    assert not any("step 10" in line for line in lines)
    events = told(capsys, TAPE, "--at", "9", "--events")["events"]
    assert json.loads(events[-1]["event"])["type"]
    assert {it["step"] for it in events} == {9}


def test_a_life_is_told_from_arrival_to_end_with_its_decode_steps_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert shown(capsys, TAPE, "--seq", "5") == [
        f"sequence 5 of {TAPE}: ended: length",
        "",
        " step",
        "   10  arrived: 13 prompt tokens (30 16 47 60 8 1 60 33 29 24 60 60 ...), "
        "at most 12 answer tokens, temperature 1, seed 5",
        "11-13  queued: waited for 3 steps",
        "   14  opened",
        "   14  prefill: 13 rows, from position 0, new blocks 20 15 14 13",
        "   14  3 pad rows behind the prompt",
        "   14  trimmed 3 rows at the end: offset 16 -> 13; published 20 15 14",
        "15-20  decode: 6 rows, from position 13, new block 6; published 13",
        "   20  failed at eval: a failure on order",
        "   20  the pages were lost: every sequence starts again, the index is empty "
        "(it had 19 rows)",
        "21-22  prefill: 19 rows, from position 0, in 2 steps, new blocks 8 0 21 9 14; "
        "published 8 0 21 9",
        "   22  5 pad rows behind the prompt",
        "   22  trimmed 5 rows at the end: offset 24 -> 19",
        "23-27  decode: 5 rows, from position 19, new block 2; published 14 2",
        "   27  closed: length (it had 24 rows)",
    ]


def test_a_life_counts_rows_issued_ahead_and_guesses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = told(capsys, tape_of(tmp_path, loads.AHEAD_TIGHT), "--seq", "0")
    decode = next(it for it in report["spans"] if it["what"] == "decode")
    assert (decode["rows"], decode["ahead"], decode["committed"]) == (19, 16, 16)
    report = told(capsys, tape_of(tmp_path, loads.DRAFTS), "--seq", "0")
    decode = next(it for it in report["spans"] if it["what"] == "decode")
    assert decode["drafts"] == decode["committed"] + decode["rewound"] == 25
    assert decode["rows"] - decode["rewound"] == 19


def test_a_fork_starts_at_the_rows_of_its_parent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tape = tape_of(tmp_path, loads.FORKS)
    lines = shown(capsys, tape, "--seq", "1")
    assert "   3  forked from sequence 0: it shares its 19 rows" in lines
    assert "   3  trimmed 2 rows at the end: offset 19 -> 17" in lines
    assert whats(told(capsys, tape, "--seq", "0")).count("forked") == 2


def test_a_preempted_life_waits_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tape = tape_of(tmp_path, loads.TIGHT)
    lives = [whats(told(capsys, tape, "--seq", str(seq))) for seq in range(6)]
    life = next(it for it in lives if "preempted" in it)
    after = life[life.index("preempted") + 1 :]
    assert after[:1] == ["queued"]
    assert after[-1] == "closed"


def test_a_life_that_began_before_the_tape_starts_at_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "captures"
    play(loads.SEGMENTS, folder)
    for segment in sorted(folder.iterdir())[:2]:
        segment.unlink()
    report = told(capsys, str(folder), "--seq", "0")
    (first, *_, last) = report["spans"]
    assert first["text"].startswith("running already, with ")
    assert last["what"] == "closed"
    assert last["text"] == "closed: length (it had 28 rows)"


def test_the_raw_events_of_a_sequence_name_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, TAPE, "--seq", "3", "--events")
    assert lines[0].startswith("request 3 arrived, 14 tokens: ")
    assert any('"Closed","seq":3' in line for line in lines)
    assert not any('"seq":4' in line for line in lines)


def test_a_block_is_followed_through_all_who_held_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tape = tape_of(tmp_path, loads.TIGHT)
    report = told(capsys, tape, "--block", "2")
    story = [(it["what"], it["sequence"]) for it in report["stretches"]]
    assert story[:5] == [
        ("taken", 0),
        ("written", 0),
        ("written", 0),
        ("published", 0),
        ("released", 0),
    ]
    written = [it["positions"] for it in report["stretches"] if it["what"] == "written"]
    assert written[:2] == [[8, 8], [9, 11]]
    takers = [seq for what, seq in story if what in ("taken", "adopted")]
    leavers = [seq for what, seq in story if what == "released"]
    assert takers == leavers
    assert len(takers) > 1
    assert report["status"] == "cached"
    lines = shown(capsys, tape, "--block", "2")
    assert lines[0] == f"block 2 of group 0 (4 rows) of {tape}: cached where the tape ends"
    assert lines[3] == "   1  taken by sequence 0, place 2 of its table"


def test_a_block_that_is_shared_copied_and_rewound_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tape = tape_of(tmp_path, loads.REPEATS)
    lines = shown(capsys, tape, "--block", "1")
    assert any(line.endswith("15 rows copied into block 2 for sequence 1, which holds it no more")
               for line in lines)  # fmt: skip
    assert any(it.endswith(": 15 rows copied from block 1")
               for it in shown(capsys, tape, "--block", "2"))  # fmt: skip
    lines = shown(capsys, tape_of(tmp_path, loads.DRAFTS), "--block", "15")
    assert "   3  released by sequence 1 (Rewound)" in lines


def test_a_lost_pool_lets_go_of_every_block(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, TAPE, "--block", "6")
    assert "   20  the pages were lost: it is free, what it held is gone" in lines


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--at", "999"], f"{TAPE} has no step 999: the last one is 36"),
        (["--at", "0"], f"{TAPE} has no step 0: it begins later"),
        (["--seq", "99"], f"{TAPE} knows of no sequence 99"),
        (["--seq", "99", "--events"], f"{TAPE} knows of no sequence 99"),
        (["--block", "24"], "group 0 has no block 24: its last is 23"),
        (["--block", "1", "--group", "7"], "there is no group 7 with blocks: there is 0"),
        (["--block", "1", "--events"], "--events goes with --at or --seq, not with --block"),
    ],
)
def test_what_is_not_on_the_tape_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["show", TAPE, *arguments]) == 2
    assert capsys.readouterr().err == f"replay: {said}\n"


def pool(num_blocks: int, *used: BlockNow) -> PoolNow:
    return PoolNow(0, "full", num_blocks, 4, 0, 0, 0, 0, 0, used)


def test_a_map_leaves_rows_of_free_blocks_out_and_marks_what_a_copy_reads() -> None:
    used = (
        BlockNow(0, (7,), 0, False),
        BlockNow(1, (7,), 0, True),
        BlockNow(2, (7, 8), 0, True),
        BlockNow(3, (), 0, True),
        BlockNow(4, (), 1, False),
        BlockNow(200, (9,), 0, False),
    )
    assert map_lines(pool(300, *used), {7: "a"}) == [
        "       0  aA#+!... ........ ........ ........ ........ ........ ........ ........",
        "      64  ... all free up to block 191",
        "     192  ........ o....... ........ ........ ........ ........ ........ ........",
        "     256  ... all free up to block 299",
    ]


def test_a_map_of_a_big_pool_has_cells_of_many_blocks() -> None:
    used = [BlockNow(number, (1,), 0, False) for number in range(700)]
    used += [BlockNow(100_000, (), 0, True)]
    lines = map_lines(pool(262_144, *used), {1: "a"})
    assert lines[0].startswith("       0  OOOOOOOO o.......")  # 86 blocks a cell
    assert len(lines) <= 50
    assert any("+" in line for line in lines)


def test_a_group_of_a_models_own_caches_has_no_map(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opaque = Geometry(block_size=4, groups=(Group(kind="opaque"),))
    rows = Appended(0, 1, 4, (1, 2, 3, 4), ((),), "prompt")
    tape = write(tmp_path, [header(opaque, POLICY), StepPlanned(1, (Opened(0), rows), 0)])
    lines = shown(capsys, tape, "--at", "1")
    assert not any(line.startswith("pool") for line in lines)
    assert any("offset 4 (4 committed)" in line for line in lines)
    assert main(["show", tape, "--block", "0"]) == 2
    said = "replay: there is no group 0 with blocks: this model keeps its own caches\n"
    assert capsys.readouterr().err == said


def test_a_slot_is_told_as_one_and_each_map_has_its_own_legend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    big = Geometry(4, (Group(num_blocks=4096), Group("recurrent", num_blocks=8)))
    rows = Appended(0, 1, 4, (1, 2, 3, 4), ((0,), (0,)), "prompt")
    tape = write(tmp_path, [header(big, POLICY), StepPlanned(1, (Opened(0), rows), 0)])
    told = " ".join(shown(capsys, tape, "--at", "1"))
    assert "group 1, recurrent, 8 slots of one state: 1 held" in told
    assert "(2 blocks a letter: O all held" in told
    assert "(one letter a block: " in told
    first = shown(capsys, tape, "--block", "0", "--group", "1")[0]
    assert (
        first == f"block 0 of group 1 (a slot of one state) of {tape}: held by sequence 0 where "
        "the tape ends"
    )
    assert main(["stat", tape]) == 0
    assert "group 1: 1 of 8 slots (12%) held at most, in step 1" in capsys.readouterr().out
