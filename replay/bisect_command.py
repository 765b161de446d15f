"""Bisect command: the first step of a tape with which a command fails, or two commands disagree.

The command gets beginnings of the tape, each up to the answer of a step, as a file of their own.
Owns these files, and what an exit code says: 0 and 3 (clean but torn, as `replay` says of a
beginning) are good, 1 is bad, and any other one ends the search.
"""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from statemachine.codec import TapeEncoder
from statemachine.records import Header, Record, StepDone, StepFailed

from .bisect import BisectReport, Probe
from .errors import Unusable
from .reader import STDIN, Tape, keep_stdin
from .run import CLEAN, DIVERGED, TORN
from .words import plural

PLACE = "{tape}"
BATCH_RECORDS = 1024
GOOD = (CLEAN, TORN)


def bisect_command(path: str, commands: list[str]) -> BisectReport:
    """The first step with which the command exits with 1; of two, with which just one does.
    Raises Unusable.
    """
    if len(commands) > 2:
        raise Unusable("give --command once, or twice to compare two versions")
    parsed = [_parsed(command) for command in commands]
    if path == STDIN:
        keep_stdin()
    steps = [it.step for it in Tape(path) if isinstance(it, StepDone | StepFailed)]
    if not steps:
        raise Unusable(f"{path} has no step that was answered: there is nothing to search")
    probes: list[Probe] = []
    with tempfile.TemporaryDirectory() as folder:
        beginning = Path(folder) / "beginning.log"

        def bad(place: int) -> bool:
            _write(beginning, path, steps[place])
            told = [_failed(command, beginning) for command in parsed]
            found = told[0] if len(told) == 1 else told[0] != told[1]
            probes.append(Probe(-1, path, steps[0], steps[place], found))
            return found

        first = _search(bad, len(steps) - 1)
    step = -1 if first is None else steps[first]
    what = "the command fails" if len(parsed) == 1 else "the commands disagree"
    return BisectReport(
        verdict=(
            f"CLEAN: with the whole tape {what} nowhere ({plural(len(steps), 'step')})"
            if first is None
            else f"FIRST BAD STEP {step}: from there on {what} ({len(probes)} runs)"
        ),
        exit_code=CLEAN if first is None else DIVERGED,
        path=path,
        step=step,
        segment=-1,
        segments=0,
        kind="",
        sequence=-1,
        summary="" if first is None else what,
        probes=tuple(probes),
        trusted=0,
        in_order=False,
        notes=(),
    )


def _parsed(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise Unusable(f"--command {command!r} cannot be read: {error}") from error
    if not any(PLACE in word for word in words):
        raise Unusable(f"--command {command!r} has no {PLACE}, where the tape's path goes")
    return words


def _search(bad: Callable[[int], bool], last: int) -> int | None:
    """The first bad place, if all behind it are; None where the last one is good."""
    if not bad(last):
        return None
    good, found = -1, last
    while found - good > 1:
        middle = (good + found) // 2
        if bad(middle):
            found = middle
        else:
            good = middle
    return found


def _failed(command: list[str], tape: Path) -> bool:
    words = [word.replace(PLACE, str(tape)) for word in command]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as error:
        raise Unusable(f"{words[0]} cannot be run: {error.strerror}") from error
    if done.returncode not in (*GOOD, DIVERGED):
        said = done.stderr.decode(errors="replace").strip().splitlines()
        why = f": {said[-1]}" if said else ""
        raise Unusable(
            f"{words[0]} exited with {done.returncode}, where 0 is good and 1 is bad{why}"
        )
    return done.returncode == DIVERGED


def _write(place: Path, path: str, step: int) -> None:
    """The tape's beginning, up to the answer of a step, as one file."""
    encoder, waiting = TapeEncoder(), list[Record]()
    with place.open("wb") as file:
        for record in _beginning(path, step):
            waiting.append(record)
            if len(waiting) == BATCH_RECORDS:
                file.write(encoder.encode(waiting))
                waiting = []
        file.write(encoder.encode(waiting))


def _beginning(path: str, step: int) -> Iterator[Record]:
    """Of the headers of segments only the first one: it is one file."""
    for place, record in enumerate(Tape(path)):
        if place == 0 or not isinstance(record, Header):
            yield record
        if isinstance(record, StepDone | StepFailed) and record.step == step:
            return
