"""docs/replay.md: each output in it is what is printed, and no command or option is left out.

`python -m tests.test_replay_docs` writes the outputs anew.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from replay.cli import COMMANDS, listing, main
from replay.divergence import CLASSES
from replay.rerun import _parser as rerun_parser
from replay.run import DEPTHS
from replay.show import _parser as show_parser

ROOT = Path(__file__).parent.parent
DOC = ROOT / "docs" / "replay.md"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FIRST, LAST = "<!-- commands: written by the test -->", "<!-- end of commands -->"
TABLE = re.compile(f"{FIRST}.*?{LAST}", re.DOTALL)


def output(line: str) -> str:
    """What a line `$ replay ... [| head -N]` prints, run in the repository's folder."""
    command, _, head = line.removeprefix("$ ").partition(" | head -")
    printed = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(printed):
        code = main(shlex.split(command)[1:])
    lines = printed.getvalue().splitlines(keepends=True)
    assert code in (0, 1, 3), line
    return "".join(lines[: int(head)] if head else lines)


def rendered(text: str) -> str:
    """The document with the output of each of its commands as it is now."""

    def block(found: re.Match[str]) -> str:
        commands = [line for line in found.group(1).splitlines() if line.startswith("$ ")]
        parts = [f"{command}\n{output(command)}" for command in commands]
        return "```console\n" + "\n".join(parts) + "```"

    return TABLE.sub(lambda _: f"{FIRST}\n{_commands()}{LAST}", BLOCK.sub(block, text))


def _commands() -> str:
    """The table of commands that have a page of their own."""
    lines = ["", "| | |", "|---|---|"]
    for name, command in COMMANDS.items():
        if (DOC.parent / "replay" / f"{name}.md").exists():
            lines.append(f"| [replay {name}](replay/{name}.md) | {command.line} |")
    return "\n".join([*lines, "", ""])


def text() -> str:
    return DOC.read_text(encoding="utf-8")


def test_each_output_in_the_documentation_is_what_is_printed() -> None:
    assert len(BLOCK.findall(text())) >= 5
    assert rendered(text()) == text(), "write it anew: python -m tests.test_replay_docs"


def test_every_option_depth_class_and_exit_code_is_documented() -> None:
    document = text()
    options = [
        option
        for parser in (rerun_parser(), show_parser())
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--") and option != "--help"
    ]
    for name in [*options, *(f"`{it}`" for it in (*DEPTHS, *CLASSES))]:
        assert name in document, name
    for code, meaning in ((0, "no divergence"), (1, "diverged"), (2, "unusable"), (3, "torn")):
        assert re.search(rf"\| {code} +\| .*{meaning}", document), code


def test_every_command_has_a_section_or_a_page_of_its_own() -> None:
    document = text()
    for name in COMMANDS:
        page = DOC.parent / "replay" / f"{name}.md"
        link = f"(replay/{name}.md)" in document and page.exists()
        assert link or f"## replay {name}" in document, name
    for page in sorted((DOC.parent / "replay").glob("*.md")):
        assert page.stem in COMMANDS, page


def test_the_help_lists_every_command_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert listing() in shown
    assert "examples:\n" in shown
    for name, command in COMMANDS.items():
        assert re.search(rf"^  replay {name} +{re.escape(command.line)}$", shown, re.MULTILINE)
        at = shown.index(f"  replay {name} ")
        assert shown.rindex(f"{command.group}:\n", 0, at) < at


if __name__ == "__main__":
    DOC.write_text(rendered(text()), encoding="utf-8")
