"""Advice: what a class of divergence usually means, and what to run next, with this tape's numbers.

Names only commands that this version has.
"""

from __future__ import annotations

import shlex

from msgspec import Struct

from .cli import COMMANDS
from .divergence import CONTENT, CRASH, FOLD, OBSERVATION, PLAN, TOKEN, Divergence
from .reader import STDIN
from .run import FORWARD, REFERENCE, Outcome
from .run import PLAN as PLAN_DEPTH

MEANING = {
    FOLD: (
        "the events on tape do not lead to the state that is on tape. An event was lost, changed "
        "or emitted wrongly, the state machine was wrong when it ran, or the tape is of another "
        "version."
    ),
    OBSERVATION: (
        "the kernel's caches did not see the lengths or tables that the state has: a second copy "
        "of a length went its own way (rows that were trimmed are still there, or an offset that "
        "was not moved back). Observed minus derived is the number of rows by which."
    ),
    CONTENT: (
        "a row of the pages is not the row that its sequence should read there: a pad row left "
        "visible, a block of another request, a block that was freed or never written. Lengths "
        "and tables are right."
    ),
    PLAN: (
        "the scheduler of this version does not decide what is on tape. Its rules were changed "
        "since, it depends on something that is no input, or an input is missing on tape."
    ),
    TOKEN: (
        "the model does not give what is on tape, although lengths and tables are right: wrong "
        "numbers in rows with right addresses, other weights, or another arithmetic."
    ),
    CRASH: "a step was issued and its result never came: the process died inside the forward.",
}


class NextStep(Struct, frozen=True):
    """A command to run, and what it tells."""

    command: str
    tells: str


def next_steps(found: Divergence, outcome: Outcome) -> tuple[NextStep, ...]:
    """What to run next, most useful first."""
    tape = "TAPE" if outcome.path == STDIN else shlex.quote(outcome.path)
    steps = [(f"replay show {tape} --at {found.step}", "the pool, the batch and all of that step")]
    if found.sequence >= 0:
        life = (f"replay show {tape} --seq {found.sequence}", "the life of the sequence")
        steps.insert(found.kind not in (FOLD, PLAN), life)
    if found.block >= 0:
        group = f" --group {found.group}" if found.group > 0 else ""
        block = f"replay show {tape} --block {found.block}{group}"
        steps.insert(0, (block, "who held that block before, and wrote it last"))
    steps += _deeper(found, outcome, tape)
    if "minimize" in COMMANDS and found.kind != CRASH:
        depth = "" if outcome.depth == "fold" else f" --depth {outcome.depth}"
        steps.append(
            (f"replay minimize {tape}{depth} -o small.log", "the least that still diverges")
        )
    return tuple(NextStep(*step) for step in steps)


def _deeper(found: Divergence, outcome: Outcome, tape: str) -> list[tuple[str, str]]:
    """The same tape, looked at in another way."""
    until = f"replay {tape} --until {found.step}"
    software = outcome.header.software if outcome.header is not None else "the tape's version"
    if found.kind == FOLD and outcome.depth != PLAN_DEPTH:
        return [
            (f"{until} --depth plan", "whether the scheduler emits that event again"),
            (f"{until} --invariants event", "whether an earlier event broke the state"),
        ]
    if found.kind == OBSERVATION and outcome.depth != FORWARD:
        what = "whether this version's kernel sees the same: then the bug is still in it"
        return [(f"{until} --depth forward", what)]
    if found.kind == CONTENT and outcome.depth != FORWARD:
        what = "whether this version's kernel writes and reads the same"
        return [(f"{until} --depth forward", what)]
    if found.kind == PLAN:
        what = f"run by {software}, its writer: if it diverges too, an input is not on tape"
        return [(f"{until} --depth plan", what)]
    if found.kind == TOKEN and outcome.depth != REFERENCE:
        what = "each request alone: clean means that the batch is at fault, or the device"
        return [(f"{until} --depth reference", what)]
    if found.kind == TOKEN:
        what = "the same batches: clean means that the batch gave this token, not the device"
        return [(f"{until} --depth forward", what)]
    if found.kind == CRASH and found.step > 1:
        what = "whether the steps before it agree: then the batch or the machine is at fault"
        return [(f"replay {tape} --until {found.step - 1} --depth forward", what)]
    return []
