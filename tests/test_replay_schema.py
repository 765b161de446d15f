"""The JSON of every command: it is what the published schema says, and the schema is current."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from replay import schema
from replay.cli import COMMANDS, main

from .faults import loads
from .faults.catalogue import BY_NAME
from .faults.runner import record as play
from .tapes import golden

TAPE = str(golden.PATH)
DIVERGED = str(golden.PATH.with_name("diverged.tape"))
FLIGHTS = str(golden.PATH.with_name("flights.tape"))
SCHEMA = json.loads(schema.PATH.read_text(encoding="utf-8"))

Printed = Callable[..., tuple[int, Any]]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """Runs a command with --json: its exit code, and what it printed."""

    def run(*arguments: str) -> tuple[int, Any]:
        code = main([*arguments, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def definition(name: str) -> dict[str, Any]:
    """The schema of one report."""
    return {"$schema": SCHEMA["$schema"], "$ref": f"#/$defs/{name}", "$defs": SCHEMA["$defs"]}


def test_the_published_schema_is_that_of_this_version() -> None:
    current = schema.PATH.read_text(encoding="utf-8") == schema.text()
    assert current, "write it anew: python -m replay.schema"


def test_the_schema_is_one_and_describes_each_report() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for names in SCHEMA["commands"].values():
        for name in names:
            told = SCHEMA["$defs"][name]
            assert len(told["description"]) > 20, name
            assert next(iter(told["properties"])) == "format", name
            assert told["properties"]["format"]["type"] == "integer"


def test_every_command_with_json_has_a_report() -> None:
    root = Path(schema.__file__).parent
    for name, command in COMMANDS.items():
        if '"--json"' in (root / f"{command.module}.py").read_text(encoding="utf-8"):
            assert schema.reports().get(name), f"{command.module}.py names no struct ...Report"


EXAMPLES = [
    ("ReplayReport", 0, [TAPE]),
    ("ReplayReport", 0, [TAPE, "--depth", "plan", "--from", "9", "--until", "12", "--seq", "1"]),
    ("ReplayReport", 1, [DIVERGED]),
    ("ReplayReport", 1, [DIVERGED, "--depth", "plan"]),
    ("MomentReport", 0, ["show", TAPE, "--at", "11"]),
    ("MomentReport", 0, ["show", TAPE, "--at", "12"]),
    ("MomentReport", 0, ["show", FLIGHTS, "--at", "-3"]),
    ("LifeReport", 0, ["show", TAPE, "--seq", "3"]),
    ("EventsReport", 0, ["show", TAPE, "--seq", "3", "--events"]),
    ("EventsReport", 0, ["show", TAPE, "--at", "3", "--events"]),
    ("BlockReport", 0, ["show", TAPE, "--block", "8"]),
]


@pytest.mark.parametrize(("name", "code", "arguments"), EXAMPLES)
def test_what_is_printed_is_what_the_schema_says(
    printed: Printed, name: str, code: int, arguments: list[str]
) -> None:
    found, report = printed(*arguments)
    assert found == code
    jsonschema.validate(report, definition(name))
    assert set(report) == set(SCHEMA["$defs"][name]["properties"])
    assert report["format"] == 1


@pytest.mark.parametrize("fault", ["S3", "neighbours-table", "slot-off-by-one", "wrong-victim"])
def test_the_report_of_each_class_is_what_the_schema_says(
    tmp_path: Path, printed: Printed, fault: str
) -> None:
    tape = tmp_path / "tape.log"
    play(BY_NAME[fault].load, tape, BY_NAME[fault])
    code, report = printed(str(tape), "--depth", BY_NAME[fault].depth)
    assert code == 1
    jsonschema.validate(report, definition("ReplayReport"))
    assert report["divergence"]["class"] == BY_NAME[fault].kind


def test_a_changed_report_is_not_what_the_schema_says(printed: Printed) -> None:
    report = printed(TAPE)[1]
    report["counts"]["steps"] = "36"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(report, definition("ReplayReport"))
    del report["counts"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(report, definition("ReplayReport"))


def test_a_report_reads_back_into_its_struct(printed: Printed) -> None:
    kinds = {kind.__name__: kind for many in schema.reports().values() for kind in many}
    report = printed("show", TAPE, "--at", "11")[1]
    moment: Any = msgspec.convert(report, kinds["MomentReport"])
    assert [it.sequence for it in moment.standing] == [0, 3, 4, 1]


def test_scripts_that_hold_fail_and_are_missing_are_told_apart(
    tmp_path: Path, printed: Printed
) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    geometry = '{"geometry": {"block_size": 4, "groups": [{"kind": "full", "num_blocks": 8}]}}\n'
    good.write_text(geometry + '{"do": "open", "seq": "s"}\n')
    bad.write_text(geometry + '{"expect": {"free": 7}}\n')
    code, report = printed("check", str(good), str(bad), str(tmp_path / "none"))
    assert code == report["exit_code"] == 2
    assert [it["exit_code"] for it in report["scripts"]] == [0, 1, 2]
    assert report["scripts"][0]["lines"] == 2
    assert report["scripts"][1]["error"].startswith("line 2: ")
    jsonschema.validate(report, definition("CheckReport"))


def test_a_folder_of_segments_has_the_report_of_a_file(tmp_path: Path, printed: Printed) -> None:
    folder = tmp_path / "captures"
    play(loads.AHEAD_SEGMENTS, folder)
    code, report = printed(str(folder))
    assert code == 0
    assert report["verdict"].startswith("CLEAN at depth fold: ")
    jsonschema.validate(report, definition("ReplayReport"))
