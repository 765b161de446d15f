"""Playing: `python -m tests.mutants.playing FOLDER ...`, with whatever code is on the path.

    --lines          also write which lines of the code ran, to lines.json
    --against FILE   replay the tapes of loads whose answers are others than that file's

Runs each load on a tiny model, with a tape in FOLDER, and writes what became of it to told.json.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from attrs import evolve
from msgspec import Struct, structs

from replay.run import REFERENCE, Options
from replay.run import replay as run_replay
from statemachine.geometry import Geometry, Group
from tests.faults import loads, real
from tests.faults.loads import Load, Request, play, tokens

PACKAGES = ("kernel", "server", "statemachine")

_LONG = tokens(650, 1)
LOADS: dict[str, Load] = {
    "mixed": loads.TINY_MIXED,
    "tight": loads.TINY_TIGHT,
    "ahead": loads.TINY_AHEAD,
    "tables": evolve(loads.TINY_AHEAD, tables=True),
    "drafts": loads.TINY_DRAFTS,
    "forks": loads.TINY_FORKS,
    "states": evolve(loads.MIXED, kernel=loads.LFM2),
    "shared": Load(
        "a long beginning that decoding sequences share",
        tuple(
            Request(
                tokens(144, 1) + tokens(3 + 5 * number, 10 + number), 10, at=1 + 4 * (number > 0)
            )
            for number in range(5)
        ),
        structs.replace(loads.WIDE, lookahead=True),
        Geometry(block_size=16, groups=(Group(num_blocks=64),)),
        kernel=loads.TINY,
    ),
    "long": Load(
        "long prompts, of which one begins as the other",
        (
            Request(_LONG, 6),
            Request(tokens(30, 2), 12),
            Request(_LONG[:600] + tokens(40, 5), 5, at=6),
        ),
        structs.replace(loads.WIDE, max_batch_tokens=800, prefill_chunk=700, context_tokens=1024),
        Geometry(block_size=16, groups=(Group(num_blocks=256),)),
        kernel=loads.TINY,
    ),
}


class Told(Struct):
    """What clients and the operator heard of a load.

    trouble: what the engine itself said. replayed: what replay says, run by the same code.
    """

    answers: tuple[tuple[int, ...], ...] = ()
    reasons: tuple[str | None, ...] = ()
    trouble: str = ""
    replayed: str = ""


def main(arguments: list[str]) -> None:
    """Play all loads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--against", type=Path)
    asked = parser.parse_args(arguments)
    sound = {} if asked.against is None else read(asked.against)
    folder: Path = asked.folder
    folder.mkdir(parents=True, exist_ok=True)
    for kernel in {load.kernel for load in LOADS.values()}:
        real.model(kernel)
    ran: dict[str, set[int]] = defaultdict(set)
    if asked.lines:
        trace = _tracer(Path.cwd(), ran)
        threading.settrace(trace)
        sys.settrace(trace)
    told: dict[str, Told] = {}
    for name, load in LOADS.items():
        tape = folder / f"{name}.log"
        told[name] = _told(load, tape)
        if name in sound and told[name].answers != sound[name].answers:
            told[name].replayed = replayed(name, tape, REFERENCE)
        (folder / "told.json").write_bytes(msgspec.json.encode(told))
    sys.settrace(None)
    if asked.lines:
        found = {path: sorted(numbers) for path, numbers in ran.items()}
        (folder / "lines.json").write_bytes(msgspec.json.encode(found))


def read(told: Path) -> dict[str, Told]:
    """What a run of this wrote; nothing where it came to nothing."""
    if not told.exists():
        return {}
    return msgspec.json.decode(told.read_bytes(), type=dict[str, Told])


def replayed(name: str, tape: Path, depth: str) -> str:
    """What replay finds in a load's tape; empty where it is clean, or there is none."""
    if not tape.exists():
        return ""
    options = Options(depth, model=real.path_of(LOADS[name].kernel))
    try:
        with real.attending(LOADS[name]):
            found = run_replay(str(tape), options).divergence
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if found is None else f"{found.kind} at step {found.step}: {found.summary}"


def _told(load: Load, tape: Path) -> Told:
    try:
        with real.attending(load):
            played = play(load, tape, make=real.parts(load))
    except Exception as error:
        return Told(trouble=f"{type(error).__name__}: {error}")
    return Told(played.answers, played.reasons, played.error or played.failure)


def _tracer(root: Path, ran: dict[str, set[int]]) -> Callable[..., Any]:
    """A trace function that notes the lines of PACKAGES."""

    def call(frame: FrameType, _event: str, _argument: object) -> Callable[..., Any] | None:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(root) or path.relative_to(root).parts[0] not in PACKAGES:
            return None
        numbers = ran[str(path.relative_to(root))]

        def line(frame: FrameType, _event: str, _argument: object) -> Callable[..., Any]:
            numbers.add(frame.f_lineno)
            return line

        return line

    return call


if __name__ == "__main__":
    main(sys.argv[1:])
