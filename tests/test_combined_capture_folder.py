"""A capture folder that is not the server's alone: what others keep or begin there stays theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay.run import CLEAN, Options, replay
from server.capture import CaptureWriter

from .test_capture import run

FOREIGN = ("2024-old.tape", "1.tape", "000007-old.tape", "12.tape.zst", "9-notes.tape.txt")


def test_tapes_of_other_names_in_a_folder_neither_stop_a_server_nor_count_as_runs(
    tmp_path: Path,
) -> None:
    for name in FOREIGN:
        (tmp_path / name).write_bytes(b"mine")
    run(CaptureWriter(tmp_path, segment_bytes=4_000, keep_bytes=0))
    assert [(tmp_path / name).read_bytes() for name in FOREIGN] == [b"mine"] * len(FOREIGN)
    (last,) = set(tmp_path.iterdir()) - {tmp_path / name for name in FOREIGN}
    assert last.name.startswith("000001-0000")


@pytest.mark.parametrize("last", [999_998, 999_999, 1_000_041])
def test_the_run_behind_the_last_one_has_a_file_of_its_own(tmp_path: Path, last: int) -> None:
    old = tmp_path / f"{last:06}-00000.tape.zst"
    old.touch()
    names = []
    for _ in range(2):
        before = set(tmp_path.iterdir())
        run(CaptureWriter(tmp_path))
        (made,) = set(tmp_path.iterdir()) - before
        assert replay(str(made), Options()).exit_code == CLEAN
        names.append(made.name)
    assert names == [f"{last + 1:06}-00000.tape", f"{last + 2:06}-00000.tape"]


def test_servers_that_begin_in_a_folder_at_once_write_a_run_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = CaptureWriter._prepare

    def overtaken(writer: CaptureWriter) -> None:
        prepare(writer)
        monkeypatch.setattr(CaptureWriter, "_prepare", prepare)
        run(CaptureWriter(tmp_path))

    monkeypatch.setattr(CaptureWriter, "_prepare", overtaken)
    run(CaptureWriter(f"{tmp_path}/"))
    made = sorted(tmp_path.iterdir())
    assert [it.name for it in made] == ["000001-00000.tape", "000002-00000.tape"]
    assert [replay(str(it), Options()).exit_code for it in made] == [CLEAN, CLEAN]


def test_replay_reads_the_newest_run_of_a_folder_that_holds_tapes_of_other_names(
    tmp_path: Path,
) -> None:
    run(CaptureWriter(f"{tmp_path}/"))
    (made,) = tmp_path.iterdir()
    for name in ("kept-before.tape", "old.tape", "2024-old.tape"):
        (tmp_path / name).write_bytes(b"no tape")
    outcome = replay(str(tmp_path), Options())
    assert (outcome.exit_code, outcome.counts) == (CLEAN, replay(str(made), Options()).counts)


def test_the_newest_run_is_the_one_of_the_highest_number(tmp_path: Path) -> None:
    run(CaptureWriter(f"{tmp_path}/"))
    (made,) = tmp_path.iterdir()
    newest = made.rename(tmp_path / "1000000-00000.tape")
    (tmp_path / "999999-00000.tape").write_bytes(b"no tape")
    outcome = replay(str(tmp_path), Options())
    assert (outcome.exit_code, outcome.counts) == (CLEAN, replay(str(newest), Options()).counts)
