"""Runner: play a fault's load on tape, take the fault off, and let replay find it."""

from __future__ import annotations

import json
import tempfile
from contextlib import nullcontext
from pathlib import Path

from attrs import frozen

from replay.divergence import Divergence
from replay.run import FOLD, FORWARD, PLAN, REFERENCE, Options
from replay.run import replay as run_replay

from . import loads, real
from .fault import Fault, First, Witness
from .loads import FAKE, Load, Played


@frozen
class Result:
    """What became of one fault. found: what each depth that was run came to, in order."""

    fault: Fault
    first: First | None
    found: dict[str, Divergence | None]
    played: Played

    @property
    def divergence(self) -> Divergence | None:
        """What the fault's own depth found."""
        return self.found.get(self.fault.depth)

    @property
    def at_first(self) -> bool:
        """Whether replay named the step, the sequence (where the fault has one) and the record of
        the first wrong event, or the later step that the catalogue expects.
        """
        first, found = self.first, self.divergence
        if first is None or found is None:
            return False
        whose = first.sequence == -1 or first.sequence in named(found)
        where = (first.step + self.fault.late_steps, first.record)
        return whose and (found.step, found.record) == where

    @property
    def holds(self) -> bool:
        """Whether replay says what the catalogue expects, where the first wrong event is."""
        found = self.divergence
        if found is None or not self.at_first or found.kind != self.fault.kind:
            return False
        said = text_of(found)
        return all(word in said for word in self.fault.says)


def named(found: Divergence) -> set[int]:
    """The sequences that a divergence names: its own, and those of the events it compares.

    Where an event is missing on tape, the derived one names the sequence at fault.
    """
    seqs = {found.sequence}
    for value in found.values:
        for text in (value.recorded, value.derived):
            if value.name == "event" and isinstance(text, str) and text.startswith("{"):
                event = json.loads(text)
                seqs.update((event.get("seq", -1), event.get("child", -1)))
                seqs.update(event.get("seqs", ()))
    return seqs


def text_of(found: Divergence) -> str:
    """All that a divergence says, as one text."""
    values = [f"{v.name} {v.recorded} {v.derived} {v.observed}" for v in found.values]
    return "\n".join([found.summary, found.event, *values])


def run(fault: Fault, folder: Path | None = None) -> Result:
    """Play and replay one fault. Its tape lies in `folder`, if that is given."""
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            return run(fault, Path(temporary))
    tape = folder / f"{fault.name}.log"
    witness = Witness()
    played = record(fault.load, tape, fault, witness)
    first = witness.first
    with fault.active(witness) if fault.stays else nullcontext():
        found = {depth: replay(fault.load, tape, depth) for depth in _depths(fault)}
    return Result(fault, first, found, played)


def _depths(fault: Fault) -> tuple[str, ...]:
    """Those that may find the fault, at the cost that its kernel makes."""
    if fault.load.kernel == FAKE:
        return (FOLD, PLAN)
    # With a fault that stays, forward runs the faulty code again: it has nothing to compare with.
    return (FOLD, PLAN, REFERENCE if fault.stays else FORWARD)


def record(
    load: Load, tape: Path, fault: Fault | None = None, witness: Witness | None = None
) -> Played:
    """Play a load, with a fault in or without one."""
    seen = witness or Witness()

    def begin(step: int) -> None:
        seen.step = step

    make = None  # the fake kernel, with a detokeniser for stop strings
    if load.kernel != FAKE:
        real.model(load.kernel)  # loads MLX behind its BLAS, before a fault's target does
        make = real.parts(load)
    with real.attending(load), nullcontext() if fault is None else fault.active(seen):
        return loads.play(load, tape, begin, make)


def replay(load: Load, tape: Path, depth: str) -> Divergence | None:
    """The first divergence at a depth, None where there is none."""
    path = None if load.kernel == FAKE else real.path_of(load.kernel)
    with real.attending(load):
        return run_replay(str(tape), Options(depth, model=path)).divergence
