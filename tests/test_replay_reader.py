"""Reading tapes: cut, damaged, compressed, in pieces, or no tapes at all; and the exit codes."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import zstandard

from replay.cli import main
from replay.errors import Unusable
from replay.reader import Tape
from replay.run import CLEAN, DIVERGED, TORN, UNUSABLE, Options, replay
from statemachine.codec import MAGIC, TapeDecoder, TapeEncoder
from statemachine.events import PURPOSES, BlockLoaded, BlockStored, Event, Reset
from statemachine.records import (
    NO_PARENT,
    FlushRequested,
    Header,
    Record,
    RequestArrived,
    StepDone,
    StepFailed,
    TapeEnded,
)

from .sim import POLICY, TIGHT, header
from .tapes import golden

TAPE = golden.PATH.read_bytes()
FLIGHTS = golden.FLIGHTS.read_bytes()


def write(folder: Path, data: bytes, name: str = "tape.log") -> str:
    path = folder / name
    path.write_bytes(data)
    return str(path)


def ends(data: bytes = TAPE) -> list[int]:
    """Where each frame of a tape ends, of the golden one if none is given."""
    decoder = TapeDecoder()
    return [decoder.position for _ in decoder.feed(data)]


def test_a_tape_of_0_1_0_keeps_its_bytes_and_its_meaning() -> None:
    digest = hashlib.sha256(TAPE).hexdigest()
    assert digest == "d85ffcb03ae95064a93607a52eb2ef12c5317fdd1966b304a52dd3b996aaa15b"
    first, *_ = Tape(str(golden.PATH))
    assert isinstance(first, Header)
    assert {"lookahead", "draft_tokens", "scheduling"} & set(first.policy) == set()
    for depth in ("fold", "plan"):
        outcome = replay(str(golden.PATH), Options(depth=depth, invariants="event"))
        assert outcome.exit_code == CLEAN, outcome.divergence


def test_this_version_still_writes_all_records_of_a_tape_of_0_1_0_but_its_header() -> None:
    assert golden.records()[1:] == list(Tape(str(golden.PATH)))[1:]


def test_the_tape_of_flights_is_what_this_version_writes_and_replays_clean() -> None:
    assert golden.tape() == FLIGHTS
    for depth in ("fold", "plan"):
        outcome = replay(str(golden.FLIGHTS), Options(depth=depth, invariants="event"))
        assert outcome.exit_code == CLEAN, outcome.divergence


def test_the_tape_of_flights_holds_all_that_the_scheduler_can_do() -> None:
    records = list(Tape(str(golden.FLIGHTS)))
    events = [event for record in records for event in getattr(record, "events", ())]
    purposes = {getattr(event, "purpose", "") for event in events} - {""}
    assert purposes == set(PURPOSES)
    kept = {BlockStored, BlockLoaded}  # test_prefix_store.py has tapes with a store
    assert {type(event) for event in events} == set(get_args(Event)) - {Reset} - kept
    stages = [record.stage for record in records if isinstance(record, StepFailed)]
    assert stages == ["build", "eval", "void"]
    arrived = [record for record in records if isinstance(record, RequestArrived)]
    assert {request.parameters.priority for request in arrived} == {-1, 0, 1, 2}
    assert any(request.parent != NO_PARENT for request in arrived)
    header = records[0]
    assert isinstance(header, Header)
    assert [group.kind for group in header.geometry.groups] == ["full", "window"]
    assert any(isinstance(record, FlushRequested) for record in records)
    assert len(FLIGHTS) < 12_000


def test_the_divergent_tape_is_the_other_with_one_event_changed() -> None:
    changed, _, _ = golden.diverged()
    assert TapeEncoder().encode(changed) == golden.DIVERGED.read_bytes()
    pairs = zip(golden.flights(), changed, strict=True)
    assert [type(left) for left, right in pairs if left != right] == [StepDone]


@pytest.mark.parametrize("depth", ["fold", "plan"])
def test_the_divergent_tape_diverges_at_its_step_and_sequence(
    depth: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, step, sequence = golden.diverged()
    found = replay(str(golden.DIVERGED), Options(depth=depth)).divergence
    assert found is not None
    assert (found.kind, found.step, found.record) == ("fold", step, "StepDone")
    assert found.sequence == sequence
    (values,) = found.values
    assert (values.name, values.derived - values.recorded) == ("offset", 1)
    assert main([str(golden.DIVERGED), "--depth", depth]) == DIVERGED
    assert f"step {step}" in capsys.readouterr().out


@pytest.mark.parametrize("seed", ["1", "2"])
def test_another_process_with_another_hash_seed_writes_the_same_bytes(seed: str) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "tests.tapes.golden", "-"],
        env={"PYTHONHASHSEED": seed, "PATH": ""},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        check=True,
    )
    assert made.stdout == FLIGHTS


def test_a_capture_cut_at_any_byte_of_its_last_4_kib_reads_to_its_last_whole_frame(
    tmp_path: Path,
) -> None:
    # The golden tape's first half: each cut is read from the start.
    records = list(Tape(str(golden.PATH)))[:58]
    data = TapeEncoder().encode(records)
    boundaries = ends(data)
    assert boundaries[1] < len(data) - 4096
    for cut in range(len(data) - 4096, len(data)):
        tape = Tape(write(tmp_path, data[:cut]))
        whole = sum(end <= cut for end in boundaries)
        assert list(tape) == records[:whole]
        assert tape.position == boundaries[whole - 1]
        assert tape.torn == (cut not in boundaries)
        if cut % 64 == 0 or cut in boundaries:
            assert replay(tape.path, Options()).exit_code == TORN


def test_any_one_flipped_byte_is_corruption(tmp_path: Path) -> None:
    lengths = {end + at for end in [len(MAGIC), *ends()] for at in range(8)}
    for at in sorted({*range(0, len(TAPE), 29), *lengths} & set(range(len(TAPE)))):
        damaged = bytearray(TAPE)
        damaged[at] ^= 0x10
        with pytest.raises(Unusable):
            list(Tape(write(tmp_path, bytes(damaged))))


def test_a_damaged_tape_exits_2_and_names_the_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = bytearray(TAPE)
    frame = max(end for end in ends() if end < 5000)
    damaged[5000] ^= 1
    assert main([write(tmp_path, bytes(damaged))]) == UNUSABLE
    said = capsys.readouterr()
    assert f"corrupt at byte {frame}" in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "too short to hold a header"),
        (MAGIC[:5], "too short to hold a header"),
        (MAGIC, "too short to hold a header"),
        (b"\xff\xd8\xff\xe0\x00\x10JFIF" * 100, "is not a tape"),
        (b"MLXTAPE9" + TAPE[8:], "tape of format 9, and this version reads format 1"),
        (zstandard.compress(b"hello " * 99), "is not a tape"),
        (b"\x28\xb5\x2f\xfd" + b"\x07" * 80, "cannot be read"),
        (TapeEncoder().encode([TapeEnded(1)]), "the first frame holds no header"),
    ],
)
def test_what_is_no_tape_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes, said: str
) -> None:
    assert main([write(tmp_path, data)]) == UNUSABLE
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1


def test_a_path_that_does_not_exist_and_a_folder_without_segments_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none.log")]) == UNUSABLE
    assert "does not exist" in capsys.readouterr().err
    assert main([str(tmp_path)]) == UNUSABLE
    assert capsys.readouterr().err.endswith("or .tape.zst): give the path of a tape\n")


def test_a_compressed_tape_reads_like_the_plain_one_and_can_be_torn(tmp_path: Path) -> None:
    packer = zstandard.ZstdCompressor().compressobj()
    packed = b"".join(
        packer.compress(TAPE[at : at + 1000]) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        for at in range(0, len(TAPE), 1000)
    )
    packed += packer.flush()
    plain: list[Record] = list(Tape(str(golden.PATH)))
    assert list(Tape(write(tmp_path, packed, "tape.zst"))) == plain
    outcome = replay(write(tmp_path, packed[: len(packed) // 2], "cut.zst"), Options())
    assert outcome.exit_code == TORN
    with pytest.raises(Unusable, match="bytes follow the end"):
        list(Tape(write(tmp_path, packed + b"more", "long.zst")))


@pytest.mark.parametrize("chunk", [1 << 20, 300, 7, 5])
def test_parts_that_were_compressed_apart_and_joined_are_one_tape(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay.reader.CHUNK_BYTES", chunk)
    pack = zstandard.ZstdCompressor().compress
    parts = [pack(TAPE[at : at + 700]) for at in range(0, len(TAPE), 700)]
    assert len(parts) > 3
    plain: list[Record] = list(Tape(str(golden.PATH)))
    assert list(Tape(write(tmp_path, b"".join(parts), "joined.zst"))) == plain
    cut = b"".join(parts[:3]) + parts[3][:9]
    assert replay(write(tmp_path, cut, "cut.zst"), Options()).exit_code == TORN
    for more in (b"x", b"more", parts[0][1:]):
        with pytest.raises(Unusable, match="bytes follow the end"):
            list(Tape(write(tmp_path, b"".join(parts) + more, "long.zst")))


def test_standard_input_reads_like_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TAPE)))
    assert main(["-"]) == CLEAN
    assert capsys.readouterr().out.startswith("CLEAN at depth fold: 36 steps")


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    for number in (0, 2):
        first = header(TIGHT, POLICY)
        data = TapeEncoder().encode([type(first)(**{**_fields(first), "segment": number})])
        write(tmp_path, data, f"000001-{number:05}.tape")
    with pytest.raises(Unusable, match="is segment 2, where 1 should follow"):
        list(Tape(str(tmp_path)))


def test_a_torn_segment_in_the_middle_is_no_torn_tail(tmp_path: Path) -> None:
    write(tmp_path, TAPE[:-3], "000001-00000.tape")
    write(tmp_path, TAPE, "000001-00001.tape")
    with pytest.raises(Unusable, match="cut short, but a later segment follows"):
        list(Tape(str(tmp_path)))


def _fields(record: Record) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def test_a_long_tape_is_read_in_flat_memory(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "long.log"
    encoder = TapeEncoder()
    with path.open("wb") as file:
        file.write(encoder.encode([header(TIGHT, POLICY)]))
        block = [TapeEnded(number) for number in range(1000)]
        for _ in range(80):
            file.write(encoder.encode(block))
    assert path.stat().st_size > 1_000_000
    list(Tape(str(golden.PATH)))
    tracemalloc.start()
    count = sum(1 for _ in Tape(str(path)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 80_001
    assert peak < 4_000_000


def test_a_sequence_that_the_tape_does_not_have_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([str(golden.PATH), "--seq", "999"]) == UNUSABLE
    assert "has no sequence 999: nothing was compared" in capsys.readouterr().err
    assert main([str(golden.PATH), "--seq", "1"]) == CLEAN
    assert ", sequence 1 only: " in capsys.readouterr().out
