"""Verdict: what is heard of a broken line, from what its loads told and left on tape."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attrs import frozen

from replay.run import FORWARD, REFERENCE
from server.submission import ERROR
from tests.simulation_play import REFUSED

from .playing import LOADS, Told, replayed

NOTHING = "changes nothing"
SAID = "the engine says so"
FOUND = "replay says so"
WRONG = "wrong answers, and replay says so"
ELSEWHERE = "wrong answers, and replay of sound code says so"
SILENT = "WRONG ANSWERS, AND NOBODY SAYS SO"
VERDICTS = (NOTHING, SAID, FOUND, WRONG, ELSEWHERE, SILENT)
"""From harmless to what must not be."""


@frozen
class Verdict:
    """The worst of a mutant's loads: which of VERDICTS, under which load, and what was said."""

    kind: str
    load: str = ""
    said: str = ""


def judge(sound: Mapping[str, Told], told: Mapping[str, Told], folder: Path) -> Verdict:
    """The worst that became of any load. `folder`: of their tapes."""
    found = [_of(name, sound[name], told.get(name), folder) for name in LOADS]
    return max(found, key=lambda it: VERDICTS.index(it.kind))


def _of(name: str, sound: Told, told: Told | None, folder: Path) -> Verdict:
    if told is None:
        return Verdict(SAID, name, "the process ended")
    tape = folder / f"{name}.log"
    loud = told.trouble or next((it for it in told.reasons if it in (ERROR, REFUSED)), None)
    if told.answers == sound.answers and told.reasons == sound.reasons:
        said = replayed(name, tape, FORWARD)
        return Verdict(FOUND, name, said) if said else Verdict(NOTHING, name)
    if loud:
        return Verdict(SAID, name, loud)
    if told.replayed:
        return Verdict(WRONG, name, told.replayed)
    said = replayed(name, tape, FORWARD) or replayed(name, tape, REFERENCE)
    return Verdict(ELSEWHERE, name, said) if said else Verdict(SILENT, name)
