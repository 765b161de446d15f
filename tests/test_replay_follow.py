"""replay follow: a capture is checked while its server writes, cuts, rotates and deletes it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import pytest

from kernel.fake import FakeClock
from replay import schema
from replay.cli import main
from replay.errors import Unusable
from replay.follow import Follower, FollowReport, Options
from replay.reader import Tape
from replay.run import CLEAN, DIVERGED, TORN, UNUSABLE, replay
from replay.run import Options as ReplayOptions
from statemachine.codec import TapeEncoder
from statemachine.records import Gap, Record, TapeEnded

from .following_tapes import ACT, follow, server, texts
from .tapes import golden


def test_each_byte_of_a_growing_file_is_a_torn_tail_that_is_completed_later(tmp_path: Path) -> None:
    data, path = golden.PATH.read_bytes(), tmp_path / "capture.log"
    end = 1600

    def grow(size: int) -> ACT:
        return lambda: path.write_bytes(data[:size])

    code, said = follow(path, [*(grow(size) for size in range(end)), grow(len(data))])
    assert code == CLEAN
    assert said[0].state == "waiting"
    assert said[-1].text == "CLEAN: 36 steps, 370 rows agree; the server closed the tape"
    assert said[-1].counts == replay(str(golden.PATH), ReplayOptions()).counts


def test_a_running_server_is_followed_to_its_end_step_by_step(tmp_path: Path) -> None:
    path = tmp_path / "capture.log"
    engine = server(path)
    steps: list[int] = []
    said: list[FollowReport] = []

    def wait() -> None:
        if not engine.step():
            engine.stop()
        steps.append(engine.next_step)

    code = Follower(str(path), Options(between_s=0.0), said.append, FakeClock()).run(wait)
    assert code == CLEAN
    told = [it.step for it in said if it.state == "following"]
    assert told[-1] == steps[-1] - 1
    assert len(set(told)) > 10, "it followed while the server ran"
    assert all(it.unread_bytes == 0 for it in said)
    assert said[-1].counts.steps == replay(str(path), ReplayOptions()).counts.steps


def test_a_run_that_takes_the_place_of_one_that_died_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "capture.log"
    data = golden.PATH.read_bytes()
    path.write_bytes(data[:2000])

    def restart() -> None:
        path.rename(tmp_path / "capture.log.1")
        path.write_bytes(data)

    code, said = follow(path, [restart])
    assert code == TORN
    assert texts(said)[1] == (
        "the run stopped without its end; a new capture begins (step 7 of the old one was never "
        "answered)"
    )
    assert texts(said)[-1].endswith("agree; the server closed the tape")


def test_a_file_that_is_only_renamed_is_read_on(tmp_path: Path) -> None:
    path, moved = tmp_path / "capture.log", tmp_path / "capture.log.1"
    data = golden.PATH.read_bytes()
    path.write_bytes(data[:2000])

    def go_on() -> None:
        with moved.open("ab") as file:
            file.write(data[2000:])

    assert follow(path, [lambda: path.rename(moved), go_on])[0] == CLEAN


@pytest.mark.parametrize("whole_frames", [False, True])
@pytest.mark.parametrize("look", ["after the cut", "after the gap"])
def test_a_disk_that_was_full_is_a_gap_and_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_frames: bool, look: str
) -> None:
    path = tmp_path / "capture.log"
    engine = server(path)
    write, cut = os.write, os.ftruncate

    def full(file: int, data: bytes) -> int:
        """Takes a part of what is written, in the first call; nothing in the next ones."""
        if state["calls"] > 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        state["calls"] += 1
        return write(file, data if whole_frames else data[: len(data) // 2]) - whole_frames

    state = {"calls": 0}

    def held_cut(file: int, size: int) -> None:
        """Cuts only when it is told to: a follower looks before that."""
        state["cut"] = (file, size)  # type: ignore[assignment]

    def fill() -> None:
        monkeypatch.setattr(os, "write", full)
        monkeypatch.setattr(os, "ftruncate", held_cut)
        engine.step()

    def make_room() -> None:
        monkeypatch.setattr(os, "ftruncate", cut)
        cut(*state["cut"])  # type: ignore[misc]
        if look == "after the gap":
            go_on()

    def go_on() -> None:
        monkeypatch.setattr(os, "write", write)
        while engine.step():
            pass
        engine.stop()

    acts: list[ACT] = [lambda: [engine.step() for _ in range(5)], fill, make_room]
    code, said = follow(path, acts + ([go_on] if look == "after the cut" else []))
    assert code == CLEAN
    assert said[-1].counts.gaps == 1
    assert texts(said)[1].startswith("5 records missing: the server could not write them (only ")
    assert replay(str(path), ReplayOptions()).counts.gaps == 1


def encoded(records: Sequence[Record], size: int) -> tuple[bytes, TapeEncoder, int]:
    """The first records, the encoder behind them, and its mark."""
    encoder = TapeEncoder()
    return encoder.encode(records[:size]), encoder, encoder.crc


def test_a_gap_that_is_shorter_than_what_was_cut_back_is_seen_at_once(tmp_path: Path) -> None:
    path = tmp_path / "capture.log"
    tape = [*Tape(str(golden.PATH))]
    begun, encoder, crc = encoded(tape, 20)
    lost = encoder.encode(tape[20:60])
    encoder.resume(crc)
    path.write_bytes(begun + lost)
    once = encoder.encode([Gap(7, "full")])
    encoder.resume(crc)
    rest = encoder.encode([Gap(40, "full"), tape[1], TapeEnded(0)])
    assert len(once) < len(rest) < len(lost)
    code, said = follow(
        path,
        [
            lambda: path.write_bytes(begun),
            lambda: path.write_bytes(begun + once),
            lambda: path.write_bytes(begun + rest),
        ],
    )
    assert code == CLEAN
    assert [it.text.split(":")[0] for it in said if it.state == "note"] == [
        "7 records missing",
        "40 records missing",
    ]


def test_damage_behind_a_gap_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "capture.log"
    tape = [*Tape(str(golden.PATH))]
    begun, encoder, crc = encoded(tape, 20)
    encoder.resume(crc)
    path.write_bytes(begun + encoder.encode([Gap(40, "full"), tape[1]]) + b"nonsense")
    with pytest.raises(Unusable, match="corrupt at byte"):
        follow(path)


def test_it_ends_at_the_first_divergence_with_the_whole_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = golden.PATH.with_name("diverged.tape")
    assert main(["follow", str(path)]) == DIVERGED
    printed = capsys.readouterr().out
    verdict = main([str(path)])
    assert verdict == DIVERGED
    alone = capsys.readouterr().out
    assert alone.splitlines()[0] in printed
    assert printed.rstrip().endswith(alone.rstrip().splitlines()[-1])


def test_json_lines_are_what_the_schema_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["follow", str(golden.PATH.with_name("diverged.tape")), "--json"]) == DIVERGED
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    told = json.loads(schema.PATH.read_text(encoding="utf-8"))
    wanted = {"$schema": told["$schema"], "$ref": "#/$defs/FollowReport", "$defs": told["$defs"]}
    for line in lines:
        jsonschema.validate(line, wanted)
    assert [line["state"] for line in lines] == ["following", "diverged"]
    assert lines[-1]["report"]["divergence"]["class"] == "fold"


def test_an_alert_that_cannot_be_run_is_refused_at_once_and_one_that_dies_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["follow", str(tmp_path), "--alert", "no-such-command"]) == UNUSABLE
    assert "there is no such command" in capsys.readouterr().err
    diverged = golden.PATH.with_name("diverged.tape")
    dies = (sys.executable, "-c", "raise SystemExit(7)")
    code, said = follow(diverged, alert=dies)
    assert code == DIVERGED
    assert said[2].text.endswith("was told (its exit code is 7)")
    assert said[-1].skipped > 0


def test_damage_is_no_torn_tail(tmp_path: Path) -> None:
    data = bytearray(golden.PATH.read_bytes())
    data[3000] ^= 1
    path = tmp_path / "capture.log"
    path.write_bytes(data)
    with pytest.raises(Unusable, match="corrupt at byte"):
        follow(path)
    path.write_bytes(b"\xff\xd8\xff\xe0 a picture")
    with pytest.raises(Unusable, match="not a tape"):
        follow(path)


def test_it_says_where_it_stood_when_it_is_stopped_or_nothing_comes(tmp_path: Path) -> None:
    path, said = tmp_path / "capture.log", list[FollowReport]()
    assert texts(follow(path)[1])[-1] == "CLEAN SO FAR: 0 steps, 0 rows agree; stopped by hand"
    clock = iter(range(100))
    silent = Follower(str(path), Options(idle_s=5.0), said.append, lambda: float(next(clock)))
    with pytest.raises(Unusable, match="did not come to be"):
        silent.run(lambda: None)
    path.write_bytes(golden.PATH.read_bytes()[:2000])
    code, said = follow(path)
    assert (code, said[-1].exit_code) == (TORN, TORN)
    assert said[-1].text == "CLEAN SO FAR: 6 steps, 76 rows agree; stopped by hand"
    clock = iter(range(100))
    silent = Follower(str(path), Options(idle_s=5.0), said.append, lambda: float(next(clock)))
    assert silent.run(lambda: None) == TORN
    assert said[-1].text.endswith("agree; nothing came for 5 s")


def test_the_command_can_be_stopped_with_a_signal(tmp_path: Path) -> None:
    path = tmp_path / "capture.log"
    path.write_bytes(golden.PATH.read_bytes()[:2000])
    command = [sys.executable, "-m", "replay.cli", "follow", str(path), "--every", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "clean so far" not in process.stdout.readline():
            pass
        process.terminate()
        rest = process.stdout.read()
    assert process.returncode == TORN
    assert rest.splitlines()[-1].endswith("CLEAN SO FAR: 6 steps, 76 rows agree; stopped by hand")
