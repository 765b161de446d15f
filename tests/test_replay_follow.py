"""replay follow: a capture is checked while its server writes, cuts, rotates and deletes it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kernel.fake import FakeClock, FakeKernel
from replay import live as live_module
from replay import schema
from replay.cli import main
from replay.errors import Unusable
from replay.follow import Follower, FollowReport, Options
from replay.live import Live
from replay.reader import Tape
from replay.run import CLEAN, DIVERGED, TORN, UNUSABLE, replay
from replay.run import Options as ReplayOptions
from server.capture import CaptureWriter, compress
from server.engine import Engine
from server.loop import Parts
from server.submission import Submission
from statemachine.codec import TapeEncoder
from statemachine.records import Gap, Header, Parameters, Record, StepDone, TapeEnded

from .sim import POLICY, TIGHT, header, prompts
from .tampering import changed, first_step
from .tapes import golden

ACT = Callable[[], object]


def server(path: str | Path, **options: Any) -> Engine:
    """An engine over the fake kernel that writes to a path, with requests in its queue."""
    writer = CaptureWriter(path, **options)
    parts = Parts(FakeKernel(TIGHT), POLICY, writer, header(TIGHT, POLICY))
    engine = Engine(lambda: parts, clock=FakeClock())
    engine.open()
    for number, prompt in enumerate(prompts(8, seed=5)):
        engine.submit(Submission(prompt, Parameters(10, seed=number)), lambda update: None)
    return engine


def follow(
    path: str | Path, acts: Sequence[ACT] = (), **options: Any
) -> tuple[int, list[FollowReport]]:
    """Follow a tape, with one act after each look at it; then it is stopped by hand."""
    said: list[FollowReport] = []
    turns = iter(acts)

    def wait() -> None:
        act = next(turns, None)
        if act is None:
            raise KeyboardInterrupt
        act()

    settings = Options(**{"between_s": 1e9, **options})
    code = Follower(str(path), settings, said.append, FakeClock()).run(wait)
    assert next(turns, None) is None, "it ended before all of the acts"
    return code, said


def texts(said: list[FollowReport]) -> list[str]:
    return [it.text for it in said]


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


def test_segments_that_are_rotated_and_compressed_under_it_are_one_tape(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    folder.mkdir()
    engine = server(folder, segment_bytes=600)
    seen: list[str] = []

    def turn() -> None:
        if not engine.step():
            engine.stop()

    live = Live(str(folder))
    kinds: list[type] = []
    while not live.ended:
        kinds += [type(it) for it in live.poll()]
        seen.append(Path(live.source).name if live.source else "")
        turn()
    assert len(list(folder.glob("*.zst"))) > 3
    assert kinds.count(Header) == len(list(folder.glob("*.tape*")))
    assert kinds[-1] is TapeEnded
    code, said = follow(folder)
    assert code == CLEAN
    assert said[-1].counts == replay(str(folder), ReplayOptions()).counts


def test_a_segment_that_is_compressed_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    folder = segments_in(tmp_path)
    first, second, *_ = sorted(folder.glob("*.tape"))
    whole, rest = first.read_bytes(), second.read_bytes()
    first.write_bytes(whole[: len(whole) // 2])
    for file in sorted(folder.glob("*.tape"))[1:]:
        file.rename(file.with_suffix(".kept"))

    def go_on() -> None:
        with first.open("ab") as rest_of_it:
            rest_of_it.write(whole[len(whole) // 2 :])
        second.write_bytes(rest)
        compress(first)
        for file in folder.glob("*.kept"):
            if not file.with_suffix(".tape").exists():
                file.rename(file.with_suffix(".tape"))

    code, said = follow(folder, [go_on])
    assert code == CLEAN
    assert not first.exists()
    assert texts(said)[-1].startswith("CLEAN: ")


def segments_in(tmp_path: Path) -> Path:
    """A closed capture in a folder of uncompressed segments."""
    import zstandard

    folder = tmp_path / "captures"
    folder.mkdir()
    engine = server(folder, segment_bytes=600)
    while engine.step():
        pass
    engine.stop()
    for packed in folder.glob("*.zst"):
        with packed.open("rb") as file:
            data = zstandard.ZstdDecompressor().stream_reader(file).read()
        packed.with_suffix("").write_bytes(data)
        packed.unlink()
    return folder


def test_segments_that_were_deleted_by_age_are_named_and_the_next_one_is_a_start(
    tmp_path: Path,
) -> None:
    folder = segments_in(tmp_path)
    total = replay(str(folder), ReplayOptions()).counts.steps
    files = sorted(folder.glob("*.tape"))
    late = [(file, file.read_bytes()) for file in files[3:]]
    for file in files[1:]:
        file.unlink()

    def rotate() -> None:
        files[0].unlink()
        for file, data in late:
            file.write_bytes(data)

    code, said = follow(folder, [rotate])
    assert code == CLEAN
    assert (
        texts(said)[1] == "2 segments were deleted before they could be read: going on behind that"
    )
    assert said[-1].source == str(files[-1])
    steps = replay(str(folder), ReplayOptions()).counts.steps
    assert 0 < steps < said[-1].counts.steps < total


def test_newest_begins_with_the_newest_segment(tmp_path: Path) -> None:
    folder = segments_in(tmp_path)
    newest = max(folder.glob("*.tape"))
    code, said = follow(folder, newest=True)
    assert code == CLEAN
    assert said[-1].counts.steps == replay(str(newest), ReplayOptions()).counts.steps
    assert said[-1].counts.steps < follow(folder)[1][-1].counts.steps


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


def test_what_is_written_between_a_look_and_the_next_segment_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = segments_in(tmp_path)
    first, *others = sorted(folder.glob("*.tape"))
    whole = first.read_bytes()
    first.write_bytes(whole[:-40])
    found = live_module.segments(str(folder))

    def listing(path: str) -> dict[tuple[int, int], Path]:
        if not first.read_bytes().endswith(whole[-40:]) and listed:
            first.write_bytes(whole)
        listed.append(path)
        return found

    listed: list[str] = []
    monkeypatch.setattr(live_module, "segments", listing)
    assert follow(folder)[0] == CLEAN
    assert len(listed) > len(others)


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


def test_with_an_alert_it_goes_on_at_the_next_segment(tmp_path: Path) -> None:
    folder = segments_in(tmp_path)
    files = sorted(folder.glob("*.tape"))
    for file in (files[1], files[3]):
        damaged = [*Tape(str(file))]
        place = first_step(damaged, lambda it: isinstance(it, StepDone))
        damaged = changed(damaged, place, digest=damaged[place].digest ^ 1)
        file.write_bytes(TapeEncoder().encode(damaged))
    told = tmp_path / "told"
    script = (
        "import json,sys; report = json.load(sys.stdin); "
        f"open({str(told)!r}, 'a').write(f'{{report[\"exit_code\"]}} {{sys.argv[1]}}\\n')"
    )
    code, said = follow(folder, alert=(sys.executable, "-c", script))
    assert code == DIVERGED
    assert [it.state for it in said] == [
        "following", "diverged", "note", "note", "diverged", "note", "note", "end",
    ]  # fmt: skip
    lines = told.read_text(encoding="utf-8").splitlines()
    assert [line.split(" ")[:4] for line in lines] == [
        ["1", "DIVERGED", "at", "step"],
        ["1", "DIVERGED", "at", "step"],
    ]
    assert lines[0] != lines[1]
    assert said[-1].divergences == 2
    assert said[-1].text.startswith("DIVERGED in 2 places: ")
    assert said[-1].skipped > 0
    assert "checkpoint after step" in said[3].text


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
