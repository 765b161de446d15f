"""Command line: `replay TAPE` and its commands, `replay COMMAND ...`.

Owns the list of commands, what an error looks like, and the exit codes: 0 no divergence (or done),
1 diverged (or different), 2 unusable (one sentence on the error stream), 3 clean but torn, and what
a shell says of a program that was interrupted, or whose output nobody reads any more. Each command
is a module with `main(arguments) -> exit code`, imported when it is asked for.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence

from msgspec import Struct

from server.arguments import check_arguments

from .errors import ReplayError, Unusable
from .run import UNUSABLE

INTERRUPTED = 130
NOT_READ = 141


class Command(Struct, frozen=True):
    """A command: the module that has it, its group in the help, and a line on what it does."""

    module: str
    group: str
    line: str


LOOK = "what happened"
CUT = "make it small"
COMPARE = "compare"
CHANGE = "change a tape"

COMMANDS: dict[str, Command] = {
    "show": Command("show", LOOK, "a moment, a sequence's life or a block's, from a tape"),
    "stat": Command("stat", LOOK, "what a tape adds up to: requests, tokens, rows, pool, times"),
    "minimize": Command("minimize", CUT, "the smallest tape that still diverges in the same way"),
    "test": Command("pytestfile", CUT, "a pytest file that fails while the fault is in the code"),
    "html": Command("html", LOOK, "a page for a browser: pool, batches, requests over the steps"),
    "check": Command("check", CUT, "run cache scripts against the state machine"),
    "diff": Command("diff", COMPARE, "the first place where two runs answer otherwise, by request"),
    "what-if": Command("what_if", COMPARE, "a recorded load under other settings, without a model"),
    "serve-load": Command(
        "serve_load", COMPARE, "a recorded load sent to a server, its answers compared"
    ),
    "export": Command(
        "export", CHANGE, "a tape for other tools: Perfetto, vLLM's KV events, Mooncake, ..."
    ),
    "repair": Command(
        "repair", CHANGE, "what can be kept of a torn or damaged tape, as a whole one"
    ),
    "redact": Command("redact", CHANGE, "a tape without what users said, to give away"),
    "upgrade": Command("upgrade", CHANGE, "a tape of an older format in this version's"),
    "follow": Command("follow", LOOK, "check a server's capture while it is written"),
    "bisect": Command(
        "bisect", COMPARE, "the first bad step of a long capture, by its checkpoints"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    _open_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    module, rest = "rerun", arguments
    if name in COMMANDS:
        module, rest = COMMANDS[name].module, arguments[1:]
    try:
        _check(arguments)
        code = int(importlib.import_module(f"{__package__}.{module}").main(rest))
        print(end="", flush=True)  # standard output may be closed: print knows
        return code
    except ReplayError as error:
        _say(str(error))
        return UNUSABLE
    except BrokenPipeError:
        _let_go_of_output()
        return NOT_READ
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        _say(f"{where}{error.strerror or error}")
        _let_go_of_output()
        return UNUSABLE
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED


def _open_streams() -> None:
    """A stream that whoever began this closed is one that nothing comes from, or goes to."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _say(sentence: str) -> None:
    """On the error stream; an exit code says the rest where that cannot be written."""
    with contextlib.suppress(OSError):
        print(f"replay: {sentence}", file=sys.stderr, flush=True)


def _check(arguments: list[str]) -> None:
    try:
        check_arguments(arguments)
    except ValueError as error:
        raise Unusable(str(error)) from None


def _let_go_of_output() -> None:
    """Nothing more can be written to it: what is left would be tried again as Python ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def listing() -> str:
    """All commands by group, for the help."""
    lines: list[str] = []
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines.append(f"{group}:")
        for name, command in COMMANDS.items():
            if command.group == group:
                lines.append(f"  replay {name:<10} {command.line}")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
