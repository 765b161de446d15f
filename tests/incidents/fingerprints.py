"""Fingerprints: what a tape says of each sample, to compare runs bit for bit."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from replay.reader import Tape
from replay.subset import batch_of
from statemachine.records import StepDone, StepPlanned


@frozen
class Sample:
    """A token, its logit, and how far it stood above the next."""

    token: int
    logit: float
    margin: float


def by_request(tape: Path) -> dict[int, list[Sample]]:
    """All samples of a tape whose steps have one piece each, by request."""
    found: dict[int, list[Sample]] = {}
    seqs: list[int] = []
    for item in Tape(str(tape)):
        if isinstance(item, StepPlanned):
            seqs, _ = batch_of(item.events)
        elif isinstance(item, StepDone):
            assert len(seqs) <= 1, f"step {item.step} has rows of {seqs}"
            for said in zip(item.tokens, item.logits, item.margins, strict=True):
                found.setdefault(seqs[0], []).append(Sample(*said))
    return found
