"""replay upgrade: the records of an older tape, written as this version writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec import structs

from replay import reader, schema
from replay import upgrade as upgrade_module
from replay.cli import main
from replay.errors import Unusable
from replay.reader import Tape
from replay.run import CLEAN, DIVERGED, TORN, UNUSABLE, Options, replay
from replay.upgrade import upgrade
from statemachine.records import FORMAT, Header

from .following_tapes import segments_in
from .tapes import golden


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tapes say that they are of the format before this one, as the reader of an older one does."""
    records = reader.Tape.__iter__

    def with_older_header(tape: Tape) -> Any:
        for record in records(tape):
            old = isinstance(record, Header) and not record.redacted
            yield structs.replace(record, format=FORMAT - 1) if old else record

    monkeypatch.setattr(reader.Tape, "__iter__", with_older_header)


@pytest.mark.usefixtures("older")
def test_an_older_tape_is_written_in_this_version_s_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new.tape"
    report = upgrade(str(golden.PATH), str(out))
    assert (report.from_format, report.to_format, report.current) == (FORMAT - 1, FORMAT, False)
    assert report.verdict == "CLEAN at depth fold: 36 steps, 370 rows agree"
    assert main(["upgrade", str(golden.PATH), "-o", str(tmp_path / "other")]) == CLEAN
    assert capsys.readouterr().out.startswith(f"UPGRADED: {tmp_path}/other is of format {FORMAT}")
    assert main(["upgrade", str(golden.PATH)]) == UNUSABLE
    assert "give -o FILE" in capsys.readouterr().err
    monkeypatch.undo()
    assert [*Tape(str(out))] == [*Tape(str(golden.PATH))]


def test_a_tape_that_is_current_is_left_alone_or_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = str(golden.FLIGHTS), tmp_path / "copy.tape.zst"
    assert main(["upgrade", path]) == CLEAN
    assert capsys.readouterr().out == (
        f"CURRENT: {path} is of format {FORMAT}, the newest: nothing to do\n"
    )
    assert main(["upgrade", path, "-o", str(out)]) == CLEAN
    assert capsys.readouterr().out.splitlines()[0].startswith(f"CURRENT: {out} is a copy, ")
    assert [*Tape(str(out))] == [*Tape(path)]


@pytest.mark.parametrize("code", [CLEAN, DIVERGED, TORN])
def test_what_a_tape_says_it_says_afterwards(tmp_path: Path, code: int) -> None:
    path, out = golden.PATH, tmp_path / "out"
    if code == DIVERGED:
        path = golden.DIVERGED
    elif code == TORN:
        path = tmp_path / "torn"
        path.write_bytes(golden.PATH.read_bytes()[:5000])
    report = upgrade(str(path), str(out))
    before, after = (replay(str(it), Options()) for it in (path, out))
    assert before.exit_code == after.exit_code == code
    assert before.divergence == after.divergence
    assert report.verdict is not None
    assert [*Tape(str(out))] == [*Tape(str(path))]


def test_a_folder_becomes_a_file_of_its_segments(tmp_path: Path) -> None:
    folder, out = segments_in(tmp_path), tmp_path / "out"
    upgrade(str(folder), str(out))
    assert [*Tape(str(out))] == [*Tape(str(folder))]
    assert [it.segment for it in Tape(str(out)) if isinstance(it, Header)][:3] == [0, 1, 2]
    step = 6
    later = [replay(str(it), Options(start=step)) for it in (folder, out)]
    assert later[0].started_after == later[1].started_after
    assert later[1].exit_code == CLEAN


def test_a_record_that_would_come_back_as_another_one_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(record: Any) -> Any:
        if hasattr(record, "logits") and next(calls) == 5:
            return structs.replace(record, margins=(0.5,) * len(record.margins))
        return structs.replace(record, format=FORMAT) if isinstance(record, Header) else record

    calls = iter(range(10_000))
    monkeypatch.setattr(upgrade_module, "_current", forgetful)
    with pytest.raises(Unusable, match="a StepDone, would come back as another one"):
        upgrade(str(golden.PATH), str(tmp_path / "out"))
    assert [*tmp_path.iterdir()] == []


def test_nothing_is_written_over_and_damage_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"mine")
    assert main(["upgrade", str(golden.PATH), "-o", str(out)]) == UNUSABLE
    assert "is there already" in capsys.readouterr().err
    assert out.read_bytes() == b"mine"
    data = golden.PATH.read_bytes()
    out.write_bytes(data[:4000] + b"?" + data[4001:])
    assert main(["upgrade", str(out), "-o", str(tmp_path / "new")]) == UNUSABLE
    assert "corrupt at byte" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [out]
    assert main(["upgrade", str(golden.PATH), "--json"]) == CLEAN
    told = json.loads(schema.PATH.read_text(encoding="utf-8"))
    wanted = {"$schema": told["$schema"], "$ref": "#/$defs/UpgradeReport", "$defs": told["$defs"]}
    jsonschema.validate(json.loads(capsys.readouterr().out), wanted)
