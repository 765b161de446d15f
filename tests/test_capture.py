"""The capture writer: one write a call, private files, segments, and a disk that is full."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from msgspec import structs

from kernel.fake import FakeClock, FakeKernel
from replay.reader import Tape
from replay.run import CLEAN, PLAN, TORN, Options, replay
from server.capture import CaptureError, CaptureWriter
from server.engine import Engine
from server.loop import Parts
from server.submission import Submission
from statemachine.codec import TapeEncoder
from statemachine.records import Checkpoint, Gap, Header, Parameters, Record, StepDone, TapeEnded

from .sim import POLICY, TIGHT, header, prompts


def run(writer: CaptureWriter, requests: int = 8, stop: bool = True) -> Engine:
    """An engine over the fake kernel, with its tape on disk."""
    parts = Parts(FakeKernel(TIGHT), POLICY, writer, header(TIGHT, POLICY))
    engine = Engine(lambda: parts, clock=FakeClock())
    engine.open()
    for number, prompt in enumerate(prompts(requests, seed=5)):
        engine.submit(Submission(prompt, Parameters(10, seed=number)), lambda update: None)
    while engine.step():
        pass
    if stop:
        engine.stop()
    return engine


class Disk:
    """os.write that counts, and fails in the ways that disks do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.fails: Callable[[int], bool] = lambda call: False
        self.partial = 0
        self._write = os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, file: int, data: bytes) -> int:
        call = len(self.sizes)
        self.sizes.append(len(data))
        if not self.fails(call):
            return self._write(file, data)
        if self.partial:
            return self._write(file, data[: self.partial])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_each_call_is_one_write_to_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    path = tmp_path / "capture.log"
    writer = CaptureWriter(path)
    first = header(TIGHT, POLICY)
    writer.write([first, TapeEnded(1), TapeEnded(2)])
    writer.write([TapeEnded(3)])
    writer.close()
    assert len(disk.sizes) == 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == sum(disk.sizes) == writer.position
    assert list(Tape(str(path))) == [first, TapeEnded(1), TapeEnded(2), TapeEnded(3)]


def test_a_tape_that_was_there_before_is_kept_beside_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "capture.log"
    for text in ("first", "second", "third"):
        writer = CaptureWriter(path)
        writer.write([structs.replace(header(TIGHT, POLICY), software=text)])
        writer.close()
    found = {}
    for file in sorted(tmp_path.iterdir()):
        (record,) = Tape(str(file))
        assert isinstance(record, Header)
        found[file.name] = record.software
    assert found == {"capture.log": "third", "capture.log.1": "first", "capture.log.2": "second"}


def test_a_path_that_cannot_be_written_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CaptureError, match=r"cannot be written to .* \(.*file: File exists"):
        CaptureWriter(tmp_path / "file" / "capture.log")


def test_segments_rotate_are_compressed_and_read_as_one_tape(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    writer = CaptureWriter(f"{folder}/", segment_bytes=500)
    run(writer)
    names = sorted(file.name for file in folder.iterdir())
    assert len(names) > 3
    assert names[:2] == ["000001-00000.tape.zst", "000001-00001.tape.zst"]
    assert names[-1] == f"000001-{len(names) - 1:05}.tape"
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    outcome = replay(str(folder), Options(depth=PLAN))
    assert outcome.exit_code == CLEAN
    one = CaptureWriter(tmp_path / "one.log")
    run(one)
    whole = replay(str(tmp_path / "one.log"), Options(depth=PLAN))
    assert outcome.counts.steps == whole.counts.steps > 10
    assert outcome.counts.rows == whole.counts.rows


def test_each_segment_can_be_replayed_alone(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    run(CaptureWriter(f"{folder}/", segment_bytes=500))
    segments = sorted(folder.iterdir())
    for number, segment in enumerate(segments):
        records = list(Tape(str(segment)))
        assert isinstance(records[0], Header)
        assert records[0].segment == number
        assert isinstance(records[1], Checkpoint)
        outcome = replay(str(segment), Options(depth=PLAN))
        assert outcome.divergence is None
        assert outcome.exit_code == (CLEAN if segment == segments[-1] else TORN)


def test_old_segments_are_deleted_by_size_and_the_rest_still_replays(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    run(CaptureWriter(f"{folder}/", segment_bytes=300, keep_bytes=3000))
    names = sorted(file.name for file in folder.iterdir())
    assert "000001-00000.tape.zst" not in names
    closed = [file.stat().st_size for file in folder.glob("*.zst")]
    assert 0 < sum(closed) <= 3000
    outcome = replay(str(folder), Options(depth=PLAN))
    assert outcome.exit_code == CLEAN
    assert any("older ones went" in note for note in outcome.notes)


def test_a_second_run_in_a_folder_is_a_tape_of_its_own(tmp_path: Path) -> None:
    for requests in (2, 8):
        run(CaptureWriter(f"{tmp_path}/"), requests)
    outcome = replay(str(tmp_path), Options())
    arrived = [r for r in Tape(str(tmp_path)) if type(r).__name__ == "RequestArrived"]
    assert len(arrived) == 8
    assert any("holds 2 runs" in note for note in outcome.notes)


@pytest.mark.parametrize("partial", [0, 1, 40])
def test_a_full_disk_leaves_a_gap_and_the_tape_goes_on_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partial: int
) -> None:
    disk = Disk(monkeypatch)
    disk.fails = lambda call: 5 <= call < 9
    disk.partial = partial
    path = tmp_path / "capture.log"
    writer = CaptureWriter(path)
    engine = run(writer)
    assert engine.status()["capture_failures"] == 0
    assert engine.status()["capture_gaps"] == 1
    records = list(Tape(str(path)))
    (gap,) = [record for record in records if isinstance(record, Gap)]
    assert isinstance(records[records.index(gap) + 1], Checkpoint)
    assert gap.records == writer.lost_records > 3
    assert writer.gaps == 1
    assert isinstance(records[-1], TapeEnded)
    outcome = replay(str(path), Options(depth=PLAN))
    assert outcome.exit_code == CLEAN
    assert any(f"{gap.records} records missing in 1 gap (" in note for note in outcome.notes)


def test_a_disk_that_is_full_from_the_start_gives_a_tape_once_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    disk.fails = lambda call: call < 3
    path = tmp_path / "capture.log"
    run(CaptureWriter(path))
    records = list(Tape(str(path)))
    assert [type(record).__name__ for record in records[:3]] == ["Header", "Gap", "Checkpoint"]
    assert replay(str(path), Options(depth=PLAN)).exit_code == CLEAN


def test_a_disk_that_stays_full_never_stops_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    disk.fails = lambda call: call >= 4
    path = tmp_path / "capture.log"
    writer = CaptureWriter(path)
    engine = run(writer)
    written: list[Record] = list(Tape(str(path)))
    assert engine.status()["steps"] > sum(isinstance(record, StepDone) for record in written)
    assert replay(str(path), Options()).exit_code == TORN


def test_a_record_that_does_not_fit_the_format_becomes_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "capture.log"
    writer = CaptureWriter(path)
    run(writer, stop=False)
    size = writer.position
    writer.write([TapeEnded(2**64)])
    assert (writer.gaps, writer.position, path.stat().st_size) == (1, size, size)
    assert writer.checkpoint_due
    writer.close()


def test_a_capture_is_synced_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Any] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    for sync in (False, True):
        writer = CaptureWriter(tmp_path / "capture.log", sync=sync)
        writer.write([header(TIGHT, POLICY)])
        writer.close()
        assert len(synced) == int(sync)


def test_a_checkpoint_larger_than_a_segment_does_not_end_one_at_each_step(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    run(CaptureWriter(f"{folder}/", segment_bytes=1000))
    heads, bodies = [], []
    for file in sorted(folder.iterdir())[1:-1]:
        data = zstandard.ZstdDecompressor().decompressobj().decompress(file.read_bytes())
        heads.append(len(TapeEncoder().encode(list(Tape(str(file)))[:2])))
        bodies.append(len(data) - heads[-1])
    assert max(heads) > 1000
    assert min(bodies) >= 1000
