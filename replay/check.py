"""Check: `replay check script.jsonl` runs a script against the state machine alone."""

from __future__ import annotations

import sys
from pathlib import Path

from statemachine.script import ScriptError, check

USAGE = "usage: replay check SCRIPT.jsonl [SCRIPT.jsonl ...]   (- reads standard input)"


def main(arguments: list[str]) -> int:
    """Exit code 0 where every script holds, 1 where a line fails, 2 where one cannot be read."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    worst = 0
    for name in arguments:
        worst = max(worst, _check_one(name))
    return worst


def _check_one(name: str) -> int:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        print(f"{name}: cannot be read: {error}", file=sys.stderr)
        return 2
    try:
        lines = check(text.split("\n"))
    except ScriptError as error:
        print(f"{name}: {error}")
        return 1
    print(f"{name}: {lines} lines hold")
    return 0
