"""Scripts: each case under tests/scripts holds, and a script that does not hold names its line."""

from __future__ import annotations

import io
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.check import main
from statemachine.events import PURPOSES, Event
from statemachine.script import ScriptError, check

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.jsonl"))
GEOMETRY = '{"geometry": {"block_size": 4, "groups": [{"num_blocks": 4}]}}'
OPEN = '{"do": "open", "seq": "s"}'
APPEND = '{"do": "append", "seq": "s", "tokens": [1, 2, 3, 4, 5], "purpose": "prompt"}'


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_script_holds(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").split("\n")
    assert check(lines) == sum(1 for line in lines if line and not line.startswith("#"))


def spoilt(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, list):
        return [*value, 0]
    return value + 1


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_each_expectation_of_the_script_can_fail(path: Path) -> None:
    """With one value of an expect line altered, the check fails at that very line."""
    lines = path.read_text(encoding="utf-8").split("\n")
    expecting = [number for number, text in enumerate(lines, 1) if text.startswith('{"expect"')]
    assert expecting
    for number in expecting[:: 1 + len(expecting) // 12]:
        line = json.loads(lines[number - 1])
        names = [name for name in line["expect"] if name not in ("seq", "lookup")]
        name = names[number % len(names)]
        line["expect"][name] = spoilt(line["expect"][name])
        with pytest.raises(ScriptError, match=f"line {number}: {name} is") as failed:
            check([*lines[: number - 1], json.dumps(line)])
        assert failed.value.line == number


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_each_refusal_of_the_script_is_needed(path: Path) -> None:
    """Without its `error`, a line that must be refused fails the check."""
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, text in enumerate(lines, 1):
        line = json.loads(text) if text.startswith("{") else {}
        if line.pop("error", False):
            with pytest.raises(ScriptError) as failed:
                check([*lines[: number - 1], json.dumps(line)])
            assert failed.value.line == number


def write(folder: Path, *lines: str) -> str:
    path = folder / "script.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_check_prints_how_many_lines_hold(tmp_path: Path, capsys: Any) -> None:
    assert main([write(tmp_path, "# a comment", GEOMETRY, "", OPEN, APPEND)]) == 0
    assert capsys.readouterr().out.endswith("script.jsonl: 3 lines hold\n")


def test_check_names_the_line_that_fails(tmp_path: Path, capsys: Any) -> None:
    name = write(tmp_path, GEOMETRY, OPEN, APPEND, '{"expect": {"seq": "s", "offset": 4}}')
    assert main([name]) == 1
    assert capsys.readouterr().out == f"{name}: line 4: offset is 5, not 4\n"


def test_check_reads_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{GEOMETRY}\n{APPEND}\n"))
    assert main(["-"]) == 1
    assert capsys.readouterr().out == "-: line 2: IllegalCommand: sequence 's' was never opened\n"


def test_check_says_which_file_it_cannot_read(tmp_path: Path, capsys: Any) -> None:
    """The worst of several files decides the exit code."""
    good = write(tmp_path, GEOMETRY)
    assert main([good, str(tmp_path / "missing.jsonl")]) == 2
    assert "missing.jsonl: cannot be read" in capsys.readouterr().err
    assert main([]) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "this is no JSON"),
        ("[]", "a line is a JSON object"),
        ("{}", "a line says do, expect or event"),
        ('{"do": "jump"}', "there is no command 'jump'"),
        ('{"do": []}', "'do' must be given, as a text"),
        ('{"do": "trim", "seq": "s"}', "'rows' must be given, as a whole number"),
        ('{"do": "trim", "seq": "s", "rows": true}', "'rows' must be given, as a whole number"),
        ('{"do": "trim", "seq": 1, "rows": 1}', "'seq' must be given, as a text"),
        ('{"do": "trim", "seq": "x", "rows": 1}', "'x' was never opened"),
        ('{"do": "open", "seq": "s"}', "'s' is open already"),
        ('{"do": "append", "seq": "s", "rows": "2", "purpose": "pad"}', "'rows' must be given"),
        ('{"do": "append", "seq": "s", "rows": 2}', "'purpose' must be given"),
        (
            '{"do": "append", "seq": "s", "tokens": ["a"], "purpose": "decode"}',
            "a token must be an unsigned 64-bit integer",
        ),
        (
            '{"do": "append", "seq": "s", "tokens": [1], "purpose": "decode", "written": 0}',
            "written is true or false",
        ),
        ('{"do": "evict", "blocks": "x"}', "'blocks' must be given, as a whole number"),
        ('{"do": "adopt", "seq": "s", "from": "h"}', "nothing was looked up as 'h'"),
        ('{"do": "all", "commands": [5]}', "a command is a JSON object, not 5"),
        ('{"do": "flush", "repeat": 0}', "repeat must be a number from 1 on"),
        ('{"do": "flush", "repeat": "x"}', "'repeat' must be given, as a whole number"),
        ('{"do": "flush", "error": true}', "should have been refused"),
        ('{"do": "flush", "error": "Oops"}', "error is true, or one of IllegalCommand"),
        (
            '{"do": "trim", "seq": "s", "rows": 9, "error": "PoolExhausted"}',
            "was refused as IllegalCommand, not PoolExhausted",
        ),
        ('{"expect": "seq"}', "'expect' must be given, as an object"),
        ('{"expect": {"lookup": []}}', "'lookup' must be given, as a text"),
        ('{"expect": {"seq": "s", "size": 3}}', "there is no 'size' to expect"),
        ('{"event": {"type": "Jumped"}}', "this is no event"),
        ('{"event": {"type": "Trimmed", "seq": "s", "rows": 1}}', "this is no event"),
        ('{"event": {"type": "Trimmed", "seq": 0, "rows": -1}}', "InvariantBroken: sequence 0"),
    ],
)
def test_a_line_that_means_nothing_is_one_clear_sentence(line: str, words: str) -> None:
    with pytest.raises(ScriptError, match="line 4: ") as failed:
        check([GEOMETRY, OPEN, APPEND, line])
    assert words in str(failed.value)


@pytest.mark.parametrize(
    "first",
    [
        OPEN,
        '{"geometry": 5}',
        '{"geometry": {"block_size": 0}}',
        '{"geometry": {"groups": []}}',
        '{"geometry": {"groups": [{"kind": "ring", "num_blocks": 4}]}}',
        '{"geometry": {"groups": [{"num_blocks": 0}]}}',
        '{"geometry": {"groups": [{"num_blocks": 4, "sink": 1}]}}',
        '{"geometry": {"hash": "md5", "groups": [{"num_blocks": 4}]}}',
    ],
)
def test_the_first_line_is_a_geometry_that_makes_sense(first: str) -> None:
    with pytest.raises(ScriptError, match="line 1: the first line gives the geometry"):
        check([first])


def test_an_empty_script_is_refused() -> None:
    with pytest.raises(ScriptError, match="the script is empty"):
        check(["", "# nothing"])


def test_commands_nested_too_deeply_are_refused() -> None:
    nested = '{"do": "all", "commands": [' * 5000 + "]}" * 5000
    with pytest.raises(ScriptError, match="line 2: "):
        check([GEOMETRY, nested])


def test_all_of_the_commands_are_carried_out_or_none() -> None:
    """Names and look-ups of a group that was refused are gone too."""
    inner = '{"do": "open", "seq": "t"}, {"do": "lookup", "tokens": [1], "as": "h"}'
    bad = '{"do": "trim", "seq": "s", "rows": 6}'
    refused = f'{{"do": "all", "commands": [{inner}, {bad}], "error": "IllegalCommand"}}'
    lines = [GEOMETRY, OPEN, APPEND, refused]
    check([*lines, '{"expect": {"seq": "s", "offset": 5}}', '{"do": "open", "seq": "t"}'])
    with pytest.raises(ScriptError, match="nothing was looked up as 'h'"):
        check([*lines, '{"do": "adopt", "seq": "s", "from": "h"}'])


def test_rows_wait_for_written_where_the_line_says_so() -> None:
    """Also when a fork's copy reads them: each append is a step of its own."""
    unwritten = APPEND[:-1] + ', "written": false}'
    lines = [GEOMETRY, OPEN, unwritten, '{"do": "publish", "seq": "s"}']
    check(
        [
            *lines,
            '{"expect": {"published": 0}}',
            '{"do": "fork", "seq": "s", "child": "t"}',
            '{"do": "append", "seq": "t", "tokens": [9], "purpose": "decode", "written": false}',
            '{"expect": {"held": 3}}',
            '{"do": "written"}',
            '{"do": "written", "error": "IllegalCommand"}',
            '{"do": "publish", "seq": "s"}',
            '{"expect": {"published": 1}}',
        ]
    )


KEYS = (
    *("do", "seq", "tokens", "rows", "purpose", "group", "child", "as", "from", "expect", "event"),
    *("commands", "error", "written", "blocks", "adapter", "version", "salt", "lookup", "type"),
    *("step", "offset", "table", "free", "index", "source", "target", "key", "seqs"),
)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 9),
        st.sampled_from((2**64, -(2**70), 1.5, "s", "t", "h", "", "\ud800", *PURPOSES)),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=4,
)
DOES = (
    *("open", "append", "written", "commit", "trim", "rewind", "front_trim", "reset", "close"),
    *("preempt", "publish", "fork", "lookup", "adopt", "evict", "flush", "pool_reset", "all"),
    *("load", "store"),
)
EVENTS = (
    *("Appended", "Trimmed", "Opened", "PrefixAdopted", "BlockCopied", "StepWritten"),
    *("BlockLoaded", "BlockStored"),
)
FIELDS = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6)
LINES = st.one_of(
    FIELDS,
    st.builds(lambda fields, do: {**fields, "do": do}, FIELDS, st.sampled_from(DOES)),
    st.builds(lambda fields, do: {**fields, "seq": "s", "do": do}, FIELDS, st.sampled_from(DOES)),
    st.builds(
        lambda fields, kind: {"event": {**fields, "seq": 0, "type": kind}},
        FIELDS,
        st.sampled_from(EVENTS),
    ),
)


@settings(max_examples=600, deadline=None, derandomize=True, database=None)
@given(st.lists(LINES, min_size=1, max_size=4))
def test_lines_at_random_raise_script_error_or_nothing(lines: list[dict[str, Any]]) -> None:
    texts = [json.dumps(line) for line in lines]
    for count in range(len(texts)):
        with suppress(ScriptError):
            check([GEOMETRY, OPEN, APPEND, *texts[count:]])


DOC = (Path(__file__).parent.parent / "docs/scripts.md").read_text(encoding="utf-8")


def test_the_examples_of_the_documentation_hold() -> None:
    examples = [part.split("```")[0] for part in DOC.split("```jsonl\n")[1:]]
    assert [check(example.split("\n")) for example in examples] == [12, 5]


def test_the_documented_failure_is_what_is_printed() -> None:
    example = DOC.split("```jsonl\n")[1].split("```")[0].replace("[0, 2]", "[0, 1]")
    with pytest.raises(ScriptError) as failed:
        check(example.split("\n"))
    assert f"hit.jsonl: {failed.value}" in DOC


def test_every_command_and_every_value_is_documented() -> None:
    with pytest.raises(ScriptError) as failed:
        check([GEOMETRY, '{"do": "?"}'])
    names = str(failed.value).split("there are ")[1].split(", ")
    assert len(names) == len(DOES)
    assert [name for name in (*names, *PURPOSES) if name not in DOC] == []
    cache = (Path(__file__).parent.parent / "docs/cache.md").read_text(encoding="utf-8")
    assert [e.__name__ for e in get_args(Event) if f"**{e.__name__}**" not in cache] == []
