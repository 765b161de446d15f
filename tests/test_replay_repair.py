"""replay repair: what of a torn or damaged tape can be kept is a tape that replays to its end."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import jsonschema
import pytest
import zstandard

from replay import salvage, schema
from replay.cli import main
from replay.errors import Unusable
from replay.reader import ZSTD_MAGIC, Tape
from replay.repair import RepairReport, repair
from replay.run import CLEAN, DIVERGED, PLAN, TORN, UNUSABLE, Options, Outcome, replay
from statemachine.codec import MAGIC, TapeDecoder, TapeEncoder, find_frame
from statemachine.records import Checkpoint, Gap, Header, StepPlanned, TapeEnded

from .following_tapes import segments_in
from .tapes import golden

GOLDEN = golden.PATH.read_bytes()
SEED = 20261129


def frame_ends() -> list[int]:
    """Where the golden tape's frames end."""
    decoder = TapeDecoder()
    return [decoder.position for _ in decoder.feed(GOLDEN)]


def repaired(tmp_path: Path, data: bytes, **options: bool) -> tuple[RepairReport, Outcome]:
    """What becomes of a tape's bytes, and what a replay says of it, at the plan depth."""
    path, out = tmp_path / "broken.log", tmp_path / "whole.log"
    path.write_bytes(data)
    out.unlink(missing_ok=True)
    report = repair(str(path), str(out), **options)
    assert path.read_bytes() == data
    return report, replay(str(out), Options(depth=PLAN))


def test_a_tape_that_is_cut_at_any_place_is_kept_up_to_its_last_whole_record(
    tmp_path: Path,
) -> None:
    ends = frame_ends()
    for cut in [*range(ends[1], len(GOLDEN), 197), *ends[1:-1]]:
        report, outcome = repaired(tmp_path, GOLDEN[:cut])
        whole = max(end for end in ends if end <= cut)
        assert (outcome.exit_code, outcome.divergence) == (CLEAN, None), cut
        (loss,) = report.losses
        assert (loss.position, loss.bytes, loss.until_step) == (whole, cut - whole, None)
        assert report.records == ends.index(whole) + 3, "a gap and an end"
        torn = replay(str(tmp_path / "broken.log"), Options())
        assert torn.exit_code == TORN
        assert outcome.counts.steps == torn.counts.steps


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("read_bytes", [61, 1 << 20])
def test_a_byte_that_is_wrong_costs_what_stands_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool, read_bytes: int
) -> None:
    monkeypatch.setattr(salvage, "READ_BYTES", read_bytes)
    ends = frame_ends()
    for place in range(ends[1], len(GOLDEN), 577):
        data = bytearray(GOLDEN)
        data[place] ^= 4
        report, outcome = repaired(tmp_path, bytes(data), resume=resume)
        kept = max(end for end in ends if end <= place)
        assert outcome.exit_code == CLEAN, place
        (loss,) = report.losses
        assert (loss.position, loss.bytes) == (kept, len(GOLDEN) - kept)
        # The damaged one is not found; where its end is wrong, the one behind it is not either.
        behind = len(ends) - ends.index(kept) - 2
        assert behind - 1 <= loss.records <= behind


def test_a_whole_tape_is_copied_with_each_of_its_records(tmp_path: Path) -> None:
    report, outcome = repaired(tmp_path, GOLDEN)
    assert report.whole
    assert report.losses == ()
    assert outcome.exit_code == CLEAN
    assert [*Tape(str(tmp_path / "whole.log"))] == [*Tape(str(golden.PATH))]


def test_steps_that_were_in_flight_at_the_cut_are_named(tmp_path: Path) -> None:
    tape = [*Tape(str(golden.FLIGHTS))]
    places = [at for at, it in enumerate(tape) if isinstance(it, StepPlanned)]
    cut = next(b for a, b in pairwise(places) if b == a + 1)
    report, outcome = repaired(tmp_path, TapeEncoder().encode(tape[: cut + 1]))
    last = tape[cut]
    assert isinstance(last, StepPlanned)
    assert report.unanswered == (last.step - 1, last.step)
    assert outcome.exit_code == CLEAN


def damaged_folder(tmp_path: Path) -> tuple[Path, list[Path]]:
    folder = segments_in(tmp_path)
    return folder, sorted(folder.glob("*.tape"))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def steps_of(path: Path) -> list[int]:
    return [it.step for it in Tape(str(path)) if isinstance(it, StepPlanned)]


@pytest.mark.parametrize("depth", ["fold", "plan"])
@pytest.mark.parametrize(
    "harm", ["a byte", "a torn segment", "no header", "a segment is gone", "zstd"]
)
def test_with_resume_it_goes_on_at_the_next_segment(tmp_path: Path, harm: str, depth: str) -> None:
    folder, files = damaged_folder(tmp_path)
    third = files[2]
    lost, behind = steps_of(third), steps_of(files[3])
    if harm == "a byte":
        flip(third, len(third.read_bytes()) - 100)
    elif harm == "a torn segment":
        third.write_bytes(third.read_bytes()[:-9])
    elif harm == "no header":
        flip(third, len(MAGIC) + 20)
    elif harm == "a segment is gone":
        third.unlink()
    else:
        packed = zstandard.ZstdCompressor().compress(third.read_bytes())
        third.with_name(third.name + ".zst").write_bytes(packed[: len(packed) // 2])
        third.unlink()
    kept, whole = tmp_path / "kept.log", tmp_path / "resumed.log"
    report = repair(str(folder), str(kept))
    assert replay(str(kept), Options(depth=depth)).exit_code == CLEAN
    assert report.steps < behind[0]
    assert report.steps_behind == steps_of(files[-1])[-1]
    report = repair(str(folder), str(whole), resume=True)
    outcome = replay(str(whole), Options(depth=depth))
    assert (outcome.exit_code, outcome.counts.gaps) == (CLEAN, 1)
    (loss,) = report.losses
    assert loss.until_step == behind[0] - 1
    found = steps_of(whole)
    assert set(found) >= {*range(1, lost[0]), *range(behind[0], steps_of(files[-1])[-1] + 1)}
    later = replay(str(whole), Options(depth=depth, start=behind[0]))
    assert (later.exit_code, later.started_after) == (CLEAN, behind[0] - 1)


def test_a_checkpoint_in_the_middle_of_a_file_is_a_place_to_go_on(tmp_path: Path) -> None:
    tape = [*Tape(str(golden.PATH))]
    encoder = TapeEncoder()
    begun, first = encoder.encode(tape[:40]), tape[1]
    assert isinstance(first, Checkpoint)
    gap = encoder.encode([Gap(3, "full"), first])
    rest = encoder.encode([*tape[2:]])
    data = bytearray(begun + gap + rest)
    data[len(begun) - 50] ^= 1
    report, outcome = repaired(tmp_path, bytes(data), resume=True)
    assert (outcome.exit_code, outcome.counts.gaps) == (CLEAN, 2)
    assert report.losses[0].bytes > 50
    assert report.steps == 36
    kept = [*Tape(str(tmp_path / "whole.log"))]
    place = next(at for at, it in enumerate(kept) if isinstance(it, Gap))
    assert [type(it) for it in kept[place : place + 3]] == [Gap, Gap, Checkpoint]
    assert kept[place + 2 :] == tape[1:]


@pytest.mark.parametrize("from_end", [5, 400])
def test_segments_that_stand_one_behind_the_other_are_segments(
    tmp_path: Path, from_end: int
) -> None:
    _, files = damaged_folder(tmp_path)
    parts = [file.read_bytes() for file in files]
    whole, outcome = repaired(tmp_path, b"".join(parts))
    assert whole.whole
    flip(files[1], len(parts[1]) - from_end)
    joined = b"".join(file.read_bytes() for file in files)
    report, outcome = repaired(tmp_path, joined, resume=True)
    assert outcome.exit_code == CLEAN
    assert report.steps == whole.steps
    (loss,) = report.losses
    assert len(parts[0]) < loss.position < len(parts[0] + parts[1])
    assert loss.position + loss.bytes == len(parts[0] + parts[1]) + header_bytes(parts[2])


def header_bytes(segment: bytes) -> int:
    """Where a segment's checkpoint begins."""
    decoder = TapeDecoder()
    next(iter(decoder.feed(segment)))
    return decoder.position


def test_a_compressed_output_and_a_folder_are_one_tape(tmp_path: Path) -> None:
    folder, files = damaged_folder(tmp_path)
    out = tmp_path / "one.tape.zst"
    report = repair(str(folder), str(out))
    assert report.whole
    assert out.read_bytes().startswith(ZSTD_MAGIC)
    before, after = (replay(str(it), Options(depth=PLAN)) for it in (folder, out))
    assert (after.exit_code, after.counts.steps) == (CLEAN, before.counts.steps)
    assert sum(isinstance(it, Header) for it in Tape(str(out))) == len(files)
    assert sum(isinstance(it, Checkpoint) for it in Tape(str(out))) == len(files)


def test_a_tape_that_diverges_still_does_and_the_report_says_so(tmp_path: Path) -> None:
    report, outcome = repaired(tmp_path, golden.DIVERGED.read_bytes())
    assert outcome.exit_code == DIVERGED
    assert report.diverged
    assert report.verdict.startswith("DIVERGED at step ")


def test_nothing_is_written_over_and_nothing_is_left_where_nothing_can_be_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "tape.log", tmp_path / "out.log"
    path.write_bytes(GOLDEN)
    out.write_bytes(b"mine")
    for output in (out, path):
        assert main(["repair", str(path), "-o", str(output)]) == UNUSABLE
        assert "is there already" in capsys.readouterr().err
    assert (out.read_bytes(), path.read_bytes()) == (b"mine", GOLDEN)
    for data, said in (
        (b"\xff\xd8\xff\xe0" + bytes(5_000), "this is not a tape"),
        (GOLDEN[:30], "stops inside of a record"),
        (b"", "stops without its end"),
        (GOLDEN[:40] + b"?" + GOLDEN[41:], "does not fit its checksum"),
    ):
        path.write_bytes(data)
        for resume in ([], ["--resume"]):
            assert main(["repair", str(path), "-o", str(tmp_path / "new.log"), *resume]) == UNUSABLE
            printed = capsys.readouterr().err
            assert said in printed
            assert printed.count("\n") == 1
    assert sorted(it.name for it in tmp_path.iterdir()) == ["out.log", "tape.log"]
    assert main(["repair", str(path), "-o", str(tmp_path / "no" / "new.log")]) == UNUSABLE
    assert "cannot be written" in capsys.readouterr().err


def test_whatever_is_done_to_a_tape_what_is_kept_replays(tmp_path: Path) -> None:
    generator = random.Random(SEED)
    ends = frame_ends()
    for number in range(80):
        data = bytearray(GOLDEN)
        for _ in range(generator.randint(1, 3)):
            place = generator.randrange(ends[1], len(data))
            harm = generator.choice(("flip", "drop", "insert", "zero"))
            size = generator.randint(1, 400)
            if harm == "flip":
                data[place] ^= 1 << generator.randrange(8)
            elif harm == "drop":
                del data[place : place + size]
            elif harm == "insert":
                data[place:place] = generator.choice((generator.randbytes(size), GOLDEN[:size]))
            else:
                data[place : place + size] = bytes(len(data[place : place + size]))
        for resume in (False, True):
            report, outcome = repaired(tmp_path, bytes(data), resume=resume)
            assert outcome.exit_code == CLEAN, (SEED, number, resume)
            assert report.records >= 3


def test_frames_are_found_by_what_the_one_before_them_ends_with() -> None:
    ends = frame_ends()
    for start in (ends[3] + 1, ends[4]):
        crc = int.from_bytes(GOLDEN[ends[4] - 4 : ends[4]], "little")
        assert find_frame(GOLDEN, start) == (ends[4], crc, True)
    assert find_frame(GOLDEN[: ends[5] - 1], ends[4]) == (ends[4], crc, False)
    assert find_frame(GOLDEN[: ends[5] - 1], ends[4] + 1) is None
    decoder = TapeDecoder()
    decoder.resume(ends[4], crc)
    assert [*decoder.feed(GOLDEN[ends[4] :])] == []
    assert decoder.passed_over == len(ends) - 5
    assert decoder.position == len(GOLDEN)


def test_the_report_is_what_the_schema_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "torn.log"
    path.write_bytes(GOLDEN[:5000])
    assert main(["repair", str(path), "-o", str(tmp_path / "new"), "--json"]) == CLEAN
    told = json.loads(schema.PATH.read_text(encoding="utf-8"))
    printed = json.loads(capsys.readouterr().out)
    wanted = {"$schema": told["$schema"], "$ref": "#/$defs/RepairReport", "$defs": told["$defs"]}
    jsonschema.validate(printed, wanted)
    assert printed["unanswered"] == [17]
    assert main(["repair", str(path), "-o", str(tmp_path / "other")]) == CLEAN
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"REPAIRED: {tmp_path}/other holds 62 records, up to step 17"
    assert said[2] == "note      in flight there, so never answered: step 17"


def test_a_tape_without_an_end_gets_one(tmp_path: Path) -> None:
    tape = [*Tape(str(golden.PATH))]
    report, _ = repaired(tmp_path, TapeEncoder().encode(tape[:-1]))
    assert [*Tape(str(tmp_path / "whole.log"))][-1] == TapeEnded(36)
    assert report.losses[0].why == "the tape stops without its end"
    with pytest.raises(Unusable, match="does not exist"):
        repair(str(tmp_path / "none"), str(tmp_path / "new"))
