"""Fingerprints: what a tape says of each sample, to compare runs bit for bit."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from replay.reader import Tape
from statemachine.events import Appended, AppendedEach
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
    seqs: tuple[int, ...] = ()
    for item in Tape(str(tape)):
        if isinstance(item, StepPlanned):
            seqs = order(item)
        elif isinstance(item, StepDone):
            assert len(seqs) <= 1, f"step {item.step} has rows of {seqs}"
            for said in zip(item.tokens, item.logits, item.margins, strict=True):
                found.setdefault(seqs[0], []).append(Sample(*said))
    return found


def order(planned: StepPlanned) -> tuple[int, ...]:
    """The sequences that a step has rows of, in batch order."""
    seqs: dict[int, None] = {}
    for event in planned.events:
        if isinstance(event, AppendedEach):
            seqs.update(dict.fromkeys(event.seqs))
        elif isinstance(event, Appended):
            seqs[event.seq] = None
    return tuple(seqs)
