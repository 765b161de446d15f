"""Check: `replay check script.jsonl` runs a script against the state machine alone."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from msgspec import Struct

from statemachine.script import ScriptError, check

from .report import json_text

EXIT_CODES = "exit codes: 0 every script holds, 1 a line fails, 2 a script cannot be read"


class Checked(Struct, frozen=True):
    """A script: how many of its lines hold, or what is wrong with the first that does not."""

    script: str
    exit_code: int
    lines: int
    error: str


class CheckReport(Struct, frozen=True):
    """What `replay check SCRIPT ... --json` prints. exit_code: the worst of the scripts'."""

    format: int
    exit_code: int
    scripts: tuple[Checked, ...]


def main(arguments: list[str]) -> int:
    """Exit code 0 where every script holds, 1 where a line fails, 2 where one cannot be read."""
    parser = argparse.ArgumentParser(
        prog="replay check",
        description="Drive a cache by hand, in JSON lines, without a model (docs/scripts.md).",
        epilog=EXIT_CODES,
    )
    parser.add_argument("scripts", metavar="SCRIPT.jsonl", nargs="+", help="a script, or - (stdin)")
    parser.add_argument("--json", action="store_true", help="the results as JSON")
    if not arguments:
        parser.print_usage(sys.stderr)
        return 2
    given = parser.parse_args(arguments)
    checked = tuple(_check_one(name) for name in given.scripts)
    worst = max(it.exit_code for it in checked)
    if given.json:
        print(json_text(CheckReport(1, worst, checked)))
        return worst
    for it in checked:
        print(
            f"{it.script}: {it.error or f'{it.lines} lines hold'}",
            file=sys.stderr if it.exit_code == 2 else sys.stdout,
        )
    return worst


def _check_one(name: str) -> Checked:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return Checked(name, 2, 0, f"cannot be read: {error}")
    try:
        return Checked(name, 0, check(text.split("\n")), "")
    except ScriptError as error:
        return Checked(name, 1, 0, str(error))
