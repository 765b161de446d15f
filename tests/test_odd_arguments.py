"""Odd values of every option of both command lines: a sentence and an exit code, no traceback."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import attrs
import pytest

from kernel.blas import load_blas
from kernel.errors import ModelError
from replay import cli as replay_cli
from server import cli as server_cli
from server.capture import CaptureError, CaptureWriter
from server.settings import Settings
from server.submission import EngineStopped

from .tapes.golden import PATH as GOLDEN

Main = Callable[[Sequence[str]], int]
CODES = {0, 1, 2, 3}
ODD = ("--", "", "-0", "nan", "1e400", "\u0663", "\udcff", "{", "%s", "=", "9" * 5000)
"""Also a digit of another alphabet, a byte that is no UTF-8, and more digits than Python reads."""

GIVEN = {
    "tape": str(GOLDEN),
    "good": str(GOLDEN),
    "bad": str(GOLDEN),
    "scripts": str(GOLDEN),
    "url": "http://127.0.0.1:1",
    "continuations": "b",
    "output": "made",
    "to": "perfetto",
    "set": "max_running=2",
    "prompt": "a",
}
"""What stands where a command must be given something; nobody listens on port 1."""


def built(*_: object) -> NoReturn:
    """For a model and its engine, which no argument here is wrong for."""
    raise EngineStopped("built")


def mlxtape(arguments: Sequence[str]) -> int:
    return server_cli.main(arguments, built)


COMMANDS: dict[str, tuple[Main, list[str]]] = {
    "replay": (replay_cli.main, []),
    **{f"replay {name}": (replay_cli.main, [name]) for name in replay_cli.COMMANDS},
    **{
        f"mlxtape {name}": (mlxtape, [name])
        for name in ("serve", "generate", "chat", "score", "bench", "families")
    },
}


ALIKE = tuple(f"mlxtape {name}" for name in ("generate", "chat", "score", "bench"))


class _Asked(Exception):
    """A parser was about to parse."""


def parser_of(main: Main, command: list[str], patch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """The parser of a command."""

    def stop(parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        raise _Asked(parser)

    with patch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        with pytest.raises(_Asked) as asked:
            main([*command, "x"])
    parser: argparse.ArgumentParser = asked.value.args[0]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices[command[0]]  # type: ignore[no-any-return]
    return parser


def lines(parser: argparse.ArgumentParser) -> Iterator[list[str]]:
    """What may be given to a command, one odd value in each."""
    actions = [it for it in parser._actions if it.nargs != 0]
    needed = [it for it in actions if it.required]
    # A setting is the same option of several commands: tried with one of them.
    tried = attrs.fields_dict(Settings) if parser.prog in ALIKE else {}
    for odd in (it for it in actions if it.option_strings and it.dest not in tried):
        rest = [_written(it, GIVEN[it.dest]) for it in needed if it is not odd]
        yield from ([*rest, _written(odd, value)] for value in ODD)


def _written(action: argparse.Action, value: str) -> str:
    if not action.option_strings:
        return value
    name = action.option_strings[-1]
    return f"{name}={value}" if name.startswith("--") else f"{name}{value}"


@pytest.mark.parametrize("command", COMMANDS)
def test_no_value_of_an_option_ends_in_a_traceback(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    main, words = COMMANDS[command]
    for line in lines(parser_of(main, words, monkeypatch)):
        try:
            code = main([*words, *line])
        except SystemExit as end:
            code = end.code  # type: ignore[assignment]
        said = capsys.readouterr().err
        assert code in CODES, line
        assert said or code == 0, line
        assert "Traceback" not in said, line


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--at=--", "--at needs a value, and -- is none"),
        ("-o--", "-o needs a value, and -- is none"),
        (
            "--model=\udcff",
            "the argument '--model=\\udcff' is not UTF-8: give the file another name",
        ),
    ],
)
def test_both_command_lines_refuse_alike_what_no_command_can_take(
    option: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay_cli.main(["show", str(GOLDEN), option]) == 2
    assert capsys.readouterr().err == f"replay: {said}\n"
    assert mlxtape(["serve", option]) == 2
    assert capsys.readouterr().err == f"mlxtape: {said}\n"


def test_behind_two_dashes_stands_what_is_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert mlxtape(["score", "-p", "a", "--", "--model=--"]) == 1
    assert capsys.readouterr().err == "mlxtape: built\n"


def test_a_path_that_is_too_long_is_refused_in_a_sentence(tmp_path: Path) -> None:
    load_blas()
    from kernel.weights import load_model

    path = "x" * 300
    with pytest.raises(CaptureError, match=r"x: File name too long\)$"):
        CaptureWriter(str(tmp_path / path))
    with pytest.raises(ModelError, match=r"x cannot be looked at \(File name too long\): give a "):
        load_model(path)


def test_a_key_that_no_header_can_carry_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["serve-load", str(GOLDEN), GIVEN["url"], "--api-key=\u0663"]
    assert replay_cli.main(line) == 2
    assert capsys.readouterr().err == (
        "replay: an API key is printable ASCII without spaces: give another one\n"
    )
