"""A part of a tape: --from, --until with steps in flight, --seq; segments joined; the bar."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard
from msgspec import structs

from replay.cli import main
from replay.divergence import CRASH
from replay.reader import Tape
from replay.run import CLEAN, DIVERGED, UNUSABLE, Options, replay
from statemachine.codec import TapeEncoder
from statemachine.records import Checkpoint, Header, Record, StepDone, StepPlanned

from .faults import loads
from .faults.runner import record as play
from .tampering import changed, first_step, outcome_of, write
from .tapes import golden

FLIGHTS = str(golden.PATH.with_name("flights.tape"))
RECORDS: list[Record] = list(Tape(FLIGHTS))
ANSWERS = [it.step for it in RECORDS if isinstance(it, StepDone)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of segments, with lookahead."""
    path = tmp_path_factory.mktemp("segments") / "captures"
    play(loads.AHEAD_SEGMENTS, path)
    return path


def joined(folder: Path) -> bytes:
    """What `zstdcat` says of the segments, one behind the other."""
    return b"".join(
        zstandard.ZstdDecompressor().stream_reader(it.read_bytes()).read()
        if it.suffix == ".zst"
        else it.read_bytes()
        for it in sorted(folder.iterdir())
    )


def late_answer() -> int:
    """The place of a StepDone that stands behind the plan of the next step."""
    return first_step(
        RECORDS,
        lambda it: (
            isinstance(it, StepDone)
            and it.step > 3
            and any(isinstance(r, StepPlanned) and r.step == it.step + 1
                    for r in RECORDS[: RECORDS.index(it)])
        ),
    )  # fmt: skip


def test_until_a_step_looks_at_its_answer_behind_the_next_steps_plan(tmp_path: Path) -> None:
    place = late_answer()
    done: Any = RECORDS[place]
    bad = changed(RECORDS, place, digest=done.digest ^ 1)
    outcome = outcome_of(tmp_path, bad, until=done.step)
    assert outcome.exit_code == DIVERGED
    assert outcome.divergence is not None
    assert (outcome.divergence.step, outcome.divergence.record) == (done.step, "StepDone")
    assert outcome_of(tmp_path, bad, until=done.step - 1).exit_code == CLEAN


def test_until_every_step_is_clean_counts_its_steps_and_reads_no_further(tmp_path: Path) -> None:
    for until in range(1, max(ANSWERS) + 1):
        outcome = replay(FLIGHTS, Options("plan", until=until))
        assert outcome.exit_code == CLEAN
        assert outcome.counts.steps == until
        assert outcome.stopped_at == until
    end = late_answer()
    damaged = bytearray(TapeEncoder().encode(RECORDS))
    cut = len(TapeEncoder().encode(RECORDS[: end + 1]))
    damaged[cut + 5] ^= 1
    tape = tmp_path / "damaged.log"
    tape.write_bytes(damaged)
    step: Any = RECORDS[end]
    assert main([str(tape)]) == UNUSABLE
    assert main([str(tape), "--until", str(step.step)]) == CLEAN


def test_until_beyond_the_end_says_so() -> None:
    outcome = replay(FLIGHTS, Options(until=10**6))
    assert outcome.exit_code == CLEAN
    assert outcome.stopped_at is None
    assert "the tape ends before step 1000000 is answered" in outcome.notes


def test_a_step_in_flight_at_the_end_is_a_crash_only_where_it_is_asked_for(tmp_path: Path) -> None:
    place = late_answer()
    step: Any = RECORDS[place]
    cut = RECORDS[:place]
    assert outcome_of(tmp_path, cut, until=step.step - 1, strict=True).exit_code == CLEAN
    found = outcome_of(tmp_path, cut, strict=True).divergence
    assert found is not None
    assert (found.kind, found.step) == (CRASH, step.step)


@pytest.mark.parametrize("depth", ["fold", "plan"])
def test_from_a_step_skips_whole_segments_and_looks_at_that_step(folder: Path, depth: str) -> None:
    whole = replay(str(folder), Options(depth))
    assert whole.exit_code == CLEAN
    for start in range(1, whole.counts.steps + 1):
        outcome = replay(str(folder), Options(depth, start=start))
        assert outcome.exit_code == CLEAN, (start, outcome.divergence)
        assert outcome.started_after is not None
        assert outcome.started_after < start
        assert outcome.counts.steps == whole.counts.steps - outcome.started_after
        assert outcome.counts.records <= whole.counts.records
        until = replay(str(folder), Options(depth, start=start, until=start))
        assert until.counts.steps == start - outcome.started_after


def test_segments_before_the_start_are_not_read_beyond_their_checkpoint(
    folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "captures"
    copy.mkdir()
    files = sorted(folder.iterdir())
    for file in files:
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / files[1].name).write_bytes(b"rubbish")
    last = replay(str(folder), Options()).counts.steps
    outcome = replay(str(copy), Options(start=last))
    assert outcome.exit_code == CLEAN
    assert outcome.counts.steps < last // 4
    assert [note for note in outcome.notes if note.startswith("it starts at the checkpoint after")]


def test_from_finds_what_is_wrong_behind_it_and_not_what_is_before(
    folder: Path, tmp_path: Path
) -> None:
    records = list(Tape(str(folder)))
    points = [it.step for it in records if isinstance(it, Checkpoint)]
    inside = [it for it in records if not isinstance(it, Header)]
    one_file = [records[0], *inside]
    place = first_step(one_file, lambda it: isinstance(it, StepDone) and it.step == points[3])
    done: Any = one_file[place]
    tape = write(tmp_path, changed(one_file, place, digest=done.digest ^ 1))
    assert replay(tape, Options()).exit_code == DIVERGED
    assert replay(tape, Options(start=points[3])).exit_code == DIVERGED
    after = replay(tape, Options(start=points[3] + 1))
    assert (after.exit_code, after.started_after) == (CLEAN, points[3])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "999"], "the tape has no step 999 to start from: its last one is "),
        (["--from", "0"], "the tape holds no checkpoint before step 0"),
        (["--from", "9", "--until", "8"], "--until 8 is before --from 9: nothing is between"),
    ],
)
def test_a_part_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main([FLIGHTS, *arguments]) == UNUSABLE
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_segments_one_behind_the_other_are_one_tape(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder)]) == CLEAN
    verdict = capsys.readouterr().out.splitlines()[0]
    data = joined(folder)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert main(["-"]) == CLEAN
    assert capsys.readouterr().out.splitlines()[0] == verdict
    assert main(["-", "--from", "12", "--until", "24"]) == CLEAN
    assert capsys.readouterr().out.startswith("CLEAN at depth fold from step 10 up to step 24: ")


def test_segments_are_joined_wherever_the_reads_fall(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "joined.log"
    path.write_bytes(joined(folder))
    records = list(Tape(str(folder)))
    for chunk in (1, 7, 8, 9, 4096):
        monkeypatch.setattr("replay.reader.CHUNK_BYTES", chunk)
        assert list(Tape(str(path))) == records


def test_two_runs_one_behind_the_other_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = golden.PATH.read_bytes()
    path = tmp_path / "twice.log"
    path.write_bytes(data + data)
    assert main([str(path)]) == UNUSABLE
    assert (
        "another tape begins where segment 1 of this one should follow" in capsys.readouterr().err
    )


def test_comparing_one_sequence_leaves_the_others_out(tmp_path: Path) -> None:
    place = late_answer()
    done: Any = RECORDS[place]
    seen = done.observation
    starts = (seen.starts[0] + 1, *seen.starts[1:])
    bad = changed(RECORDS, place, observation=structs.replace(seen, starts=starts))
    found = outcome_of(tmp_path, bad).divergence
    assert found is not None
    assert outcome_of(tmp_path, bad, only=found.sequence).exit_code == DIVERGED
    other = next(it.sequence for it in found.neighbours if it.sequence != found.sequence)
    assert outcome_of(tmp_path, bad, only=other).exit_code == CLEAN


def test_a_bar_is_drawn_on_a_terminal_and_nowhere_else() -> None:
    command = [sys.executable, "-m", "replay.cli", FLIGHTS]
    plain = subprocess.run(command, capture_output=True, check=True)
    assert plain.stderr == b""
    reader, terminal = pty.openpty()
    drawn = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=terminal, check=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )  # fmt: skip
    os.close(terminal)
    told = b""
    while True:
        try:
            told += (chunk := os.read(reader, 4096))
        except OSError:
            break
        if not chunk:
            break
    os.close(reader)
    assert b"replay, fold" in told
    assert b"100%" in told
    assert drawn.stdout == plain.stdout
