"""Schedules: who was in which step of two runs, and the first step where that is not the same.

A step's schedule is who was admitted with how many rows found computed, who was preempted, and the
rows of the batch in order. Blocks are left out: which one was taken changes no answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

from msgspec import Struct

from statemachine import events as ev
from statemachine.records import Record, StepPlanned

from .endings import Name, Names
from .reader import Tape

SHOWN = 4

Act = tuple[str, Name | int]
"""What happens in a step, and to whom: a request's name, its id where it has none."""


class ScheduleDifference(Struct, frozen=True):
    """The first step that differs; good, bad: what differs in it, in words, "" for nothing more.

    place: how many acts of the step were the same before.
    """

    step: int
    place: int
    good: str
    bad: str


def first_schedule_difference(good: str, bad: str, shared: set[int]) -> ScheduleDifference | None:
    """None where both runs planned the same. Raises Unusable."""
    runs = _steps(Tape(good), shared), _steps(Tape(bad), shared)
    for left, right in zip_longest(*runs):
        if left is None or right is None:
            step = (left or right)[0]
            ended = "the run has no step any more"
            return ScheduleDifference(
                step,
                0,
                ended if left is None else _words(left[1], left[2]),
                ended if right is None else _words(right[1], right[2]),
            )
        if left[0] != right[0] or left[1] != right[1]:
            pairs = zip(left[1], right[1], strict=False)
            place = next(
                (at for at, (mine, other) in enumerate(pairs) if mine != other),
                min(len(left[1]), len(right[1])),
            )
            return ScheduleDifference(
                left[0],
                place,
                _words(left[1][place:], left[2][place:]),
                _words(right[1][place:], right[2][place:]),
            )
    return None


def _words(acts: list[Act], requests: list[int]) -> str:
    said = [f"{what} of request {seq}" for (what, _), seq in zip(acts, requests, strict=True)]
    more = f" and {len(said) - SHOWN} more" if len(said) > SHOWN else ""
    return (", ".join(said[:SHOWN]) + more) or "nothing more in this step"


def _steps(
    records: Iterable[Record], shared: set[int]
) -> Iterator[tuple[int, list[Act], list[int]]]:
    """Steps: number, what happens, and to which request ids."""
    names = Names(shared)
    for record in records:
        names.feed(record)
        if isinstance(record, StepPlanned):
            told = [pair for event in record.events for pair in _acts(event)]
            acts: list[Act] = [(what, names.live.get(seq, seq)) for what, seq in told]
            yield record.step, acts, [seq for _, seq in told]
        for event in getattr(record, "events", ()):
            if isinstance(event, ev.Closed):
                names.live.pop(event.seq, None)


def _acts(event: ev.Event) -> Iterator[tuple[str, int]]:
    if isinstance(event, ev.AppendedEach):
        yield from ((f"1 {event.purpose} row", seq) for seq in event.seqs)
    elif isinstance(event, ev.Appended):
        yield f"{event.rows} {event.purpose} row{'s' if event.rows > 1 else ''}", event.seq
    elif isinstance(event, ev.PrefixAdopted):
        yield f"adoption of {len(event.tokens)} rows", event.seq
    elif isinstance(event, ev.Preempted):
        yield "preemption", event.seq
    elif isinstance(event, ev.Forked):
        yield "fork", event.child
