"""Rerun: `replay TAPE`, the command without a name: does the tape hold, at the depth asked for."""

from __future__ import annotations

import argparse

from .arguments import TAPE_HELP, count, margin, named_folder, number, tell
from .cli import listing
from .errors import Unusable
from .fold import AT_END, EACH_EVENT, EACH_STEP
from .parallel import replay_segments
from .report import ReplayReport, as_json, as_text
from .run import DEPTHS, FOLD, PLAN, Options, replay

__all__ = ["ReplayReport", "main"]

EXAMPLES = """examples:
  replay capture.log                          does the cache agree with the record (no model)
  replay capture.log --depth plan             does the scheduler decide the same again
  replay capture.log --depth forward          does the model say the same, in the same batches
  replay captures/ --from 9000 --until 9100   a part of a long capture, from its checkpoint on
  zstdcat old.tape.zst | replay - --json      from a pipe, the report for a program
"""
EXIT_CODES = "exit codes: 0 no divergence, 1 diverged, 2 unusable, 3 clean but torn"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="replay",
        usage="replay TAPE [options]\n       replay COMMAND ... (replay COMMAND --help)",
        description="Re-run a capture and name the first step at which cache and record disagree.",
        epilog=f"{listing()}\n{EXAMPLES}\n{EXIT_CODES}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tape", metavar="TAPE", help=TAPE_HELP)
    how = parser.add_argument_group("how deep")
    how.add_argument(
        "--depth",
        choices=DEPTHS,
        default=DEPTHS[0],
        help="fold: apply the events again; plan: run the scheduler again, too; forward: run the "
        "model again, in the same batches; reference: each request alone, through mlx-lm",
    )
    how.add_argument(
        "--invariants",
        choices=(EACH_EVENT, EACH_STEP, AT_END),
        default=EACH_STEP,
        help="when to check them; `event` checks all after each event and is slow",
    )
    how.add_argument(
        "--strict", action="store_true", help="a last step without an answer is a crash"
    )
    how.add_argument(
        "--jobs",
        type=count,
        default=1,
        metavar="N",
        help="replay the segments of a folder in so many processes (fold and plan)",
    )
    part = parser.add_argument_group("which part")
    part.add_argument(
        "--from",
        dest="start",
        type=number,
        metavar="STEP",
        help="begin at the last checkpoint before this step",
    )
    part.add_argument("--until", type=number, metavar="STEP", help="stop after this step")
    part.add_argument(
        "--seq", type=number, metavar="ID", help="compare what was seen of this sequence only"
    )
    model = parser.add_argument_group("the model, for forward and reference")
    model.add_argument("--model", metavar="PATH", help="where it is, if not where the tape says")
    model.add_argument("--draft-model", metavar="PATH", help="where the model that guessed is")
    model.add_argument(
        "--adapter",
        action="append",
        default=[],
        type=named_folder,
        metavar="NAME=PATH",
        help="where an adapter is, if not where the tape says; may be repeated",
    )
    model.add_argument(
        "--margin",
        type=margin,
        metavar="X",
        help="a flip is excused where scores are this close (default: 0.05 on a CPU, else 0.5)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="the report as JSON")
    return parser


def main(arguments: list[str]) -> int:
    """Replay a tape and print the report; returns the exit code."""
    given = _parser().parse_args(arguments)
    if None not in (given.start, given.until) and given.until < given.start:
        raise Unusable(f"--until {given.until} is before --from {given.start}: nothing is between")
    options = Options(
        depth=given.depth,
        model=given.model,
        adapters=tuple(given.adapter),
        margin=given.margin,
        start=given.start,
        until=given.until,
        only=given.seq,
        invariants=given.invariants,
        strict=given.strict,
        progress=True,
        tell=tell,
        draft_model=given.draft_model,
    )
    if given.jobs == 1:
        outcome = replay(given.tape, options)
    else:
        _require_whole_tape(options)
        outcome = replay_segments(given.tape, options, given.jobs)
    print(as_json(outcome) if given.json else as_text(outcome))
    return outcome.exit_code


def _require_whole_tape(options: Options) -> None:
    """Raise Unusable where --jobs is asked for with what it does not go with."""
    if options.depth not in (FOLD, PLAN):
        raise Unusable(f"--jobs is for {FOLD} and {PLAN}: at {options.depth}, the model is shared")
    if options.start is not None or options.until is not None:
        raise Unusable("--jobs replays a whole tape: leave out --from and --until, or --jobs")
