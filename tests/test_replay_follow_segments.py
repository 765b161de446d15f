"""`replay follow` of a folder: segments that are rotated, compressed, deleted and damaged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from replay import live as live_module
from replay.live import Live
from replay.reader import Tape
from replay.run import CLEAN, DIVERGED, replay
from replay.run import Options as ReplayOptions
from server.capture import compress
from statemachine.codec import TapeEncoder
from statemachine.records import Header, StepDone, TapeEnded

from .following_tapes import follow, segments_in, server, texts
from .tampering import changed, first_step


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
