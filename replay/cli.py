"""Command line: `replay TAPE`, `replay show TAPE`, `replay check SCRIPT`.

Owns arguments, output and exit codes: 0 no divergence, 1 diverged, 2 unusable (one sentence on the
error stream), 3 clean but torn.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterable, Sequence

from . import check
from .errors import ReplayError
from .fold import AT_END, EACH_EVENT, EACH_STEP
from .report import as_json, as_text
from .run import CLEAN, DEPTHS, UNUSABLE, Options, replay
from .show import sequence_lines, step_lines

EPILOG = """\
other commands:
  replay show TAPE --at STEP | --seq ID    what the tape says about a step or a sequence
  replay check SCRIPT.jsonl ...            run cache scripts against the state machine

exit codes: 0 no divergence, 1 diverged, 2 unusable, 3 clean but torn
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["check"]:
            return check.main(arguments[1:])
        if arguments[:1] == ["show"]:
            return _show(arguments[1:])
        return _replay(arguments)
    except ReplayError as error:
        print(f"replay: {error}", file=sys.stderr)
        return UNUSABLE
    except BrokenPipeError:
        # Whoever read the output has seen enough; nothing may be written to it any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLEAN
    except KeyboardInterrupt:
        print("replay: interrupted", file=sys.stderr)
        return 130


def _replay(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="replay",
        description="Re-run a capture and name the first step at which cache and record disagree.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tape", help="a capture: file, .zst, folder of segments, or - (stdin)")
    parser.add_argument("--depth", choices=DEPTHS, default=DEPTHS[0])
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument("--model", metavar="PATH", help="the model, if not the tape's own name")
    parser.add_argument(
        "--margin",
        type=_margin,
        metavar="X",
        help="a flip is excused where scores are this close (default: 0.05 on a CPU, else 0.5)",
    )
    parser.add_argument("--until", type=_number, metavar="STEP", help="stop after this step")
    parser.add_argument("--seq", type=_number, metavar="ID", help="compare this sequence only")
    parser.add_argument(
        "--invariants",
        choices=(EACH_EVENT, EACH_STEP, AT_END),
        default=EACH_STEP,
        help="when to check them; `event` checks all after each event and is slow",
    )
    parser.add_argument(
        "--strict", action="store_true", help="a last step without an answer is a crash"
    )
    given = parser.parse_args(arguments)
    outcome = replay(
        given.tape,
        Options(
            depth=given.depth,
            model=given.model,
            margin=given.margin,
            until=given.until,
            only=given.seq,
            invariants=given.invariants,
            strict=given.strict,
            tell=_tell,
        ),
    )
    print(as_json(outcome) if given.json else as_text(outcome))
    return outcome.exit_code


def _show(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="replay show", description="What a tape says about a step or a sequence."
    )
    parser.add_argument("tape", help="a capture: file, .zst, folder of segments, or - (stdin)")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--at", type=_number, metavar="STEP", help="a step's records")
    what.add_argument("--seq", type=_number, metavar="ID", help="a sequence's events")
    given = parser.parse_args(arguments)
    lines: Iterable[str]
    lines = (
        step_lines(given.tape, given.at)
        if given.at is not None
        else sequence_lines(given.tape, given.seq)
    )
    for line in lines:
        print(line)
    return CLEAN


def _tell(text: str) -> None:
    print(f"replay: {text}", file=sys.stderr)


def _margin(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (value := float(text)) >= 0:
            return value
    raise argparse.ArgumentTypeError(f"must be a number of 0 or more, not {text!r}")


def _number(text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number of 0 or more, not {text!r}")


if __name__ == "__main__":
    sys.exit(main())
