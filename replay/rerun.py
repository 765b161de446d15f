"""Rerun: `replay TAPE`, the command without a name: does the tape hold, at the depth asked for."""

from __future__ import annotations

import argparse

from .arguments import TAPE_HELP, margin, number, tell
from .cli import listing
from .fold import AT_END, EACH_EVENT, EACH_STEP
from .report import as_json, as_text
from .run import DEPTHS, Options, replay

EXIT_CODES = "exit codes: 0 no divergence, 1 diverged, 2 unusable, 3 clean but torn"


def main(arguments: list[str]) -> int:
    """Replay a tape and print the report; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="replay",
        description="Re-run a capture and name the first step at which cache and record disagree.",
        epilog=f"{listing()}\n{EXIT_CODES}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tape", help=TAPE_HELP)
    parser.add_argument("--depth", choices=DEPTHS, default=DEPTHS[0])
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument("--model", metavar="PATH", help="the model, if not the tape's own name")
    parser.add_argument(
        "--margin",
        type=margin,
        metavar="X",
        help="a flip is excused where scores are this close (default: 0.05 on a CPU, else 0.5)",
    )
    parser.add_argument("--until", type=number, metavar="STEP", help="stop after this step")
    parser.add_argument("--seq", type=number, metavar="ID", help="compare this sequence only")
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
            tell=tell,
        ),
    )
    print(as_json(outcome) if given.json else as_text(outcome))
    return outcome.exit_code
