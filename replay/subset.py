"""Subset: what is left of a tape's parts where only some requests stay. Applies no event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from attrs import field, frozen

from statemachine.events import (
    NO_BLOCK,
    Appended,
    AppendedEach,
    BlockCopied,
    BlockEvicted,
    BlockLoaded,
    BlockPublished,
    BlockStored,
    Event,
    PrefixAdopted,
)
from statemachine.geometry import Geometry
from statemachine.sequence import Sequence

from .observed import Pieces

_FOREVER = 1 << 62


class Refused(Exception):
    """The requests that are left do not make a tape: they need one that was left out."""


@frozen
class Wrong:
    """Where a tape diverges, and by how much what is counted over a whole batch or state is off.

    at: the record's number. digest: the recorded one less what follows, modulo 2^64. checked: rows
    compared less rows due. pieces: the batch, where a StepDone diverges. lost: steps after which
    the pages were lost, which concern everybody.
    """

    at: int
    step: int
    digest: int = 0
    checked: int = 0
    pieces: Pieces | None = None
    lost: frozenset[int] = frozenset()


@frozen
class Kept:
    """What stays: requests, and for some the last step that still concerns them."""

    requests: frozenset[int]
    until: Mapping[int, int] = field(factory=dict)

    def has(self, seq: int, step: int) -> bool:
        """Whether what a step does to a sequence stays."""
        return seq in self.requests and step <= self.until.get(seq, _FOREVER)


def rows_read(geometry: Geometry, sequences: Iterable[Sequence], rows: Iterable[int]) -> int:
    """Rows that the attention of a batch reads, once for each piece and paged group."""
    count = 0
    for sequence, mine in zip(sequences, rows, strict=True):
        end = sequence.offset
        for group, spec in enumerate(geometry.groups):
            if spec.paged:
                low = sequence.starts[group]
                if spec.moves:
                    low = max(low, end - mine - spec.span + 1)
                count += end - low + min(spec.sink, low)
    return count


def batch_of(events: Iterable[Event]) -> tuple[list[int], list[int]]:
    """Sequences and rows of the batch that a plan's appends make, in batch order."""
    seqs: list[int] = []
    rows: list[int] = []
    for event in events:
        if isinstance(event, AppendedEach):
            seqs += event.seqs
            rows += [1] * len(event.seqs)
        elif isinstance(event, Appended) and seqs and seqs[-1] == event.seq:
            rows[-1] += event.rows
        elif isinstance(event, Appended):
            seqs.append(event.seq)
            rows.append(event.rows)
    return seqs, rows


def blocks_of(event: Any) -> Iterator[tuple[int, int]]:
    """(group, block) of every block that an event names."""
    if isinstance(event, Appended | PrefixAdopted):
        for group, blocks in enumerate(event.blocks):
            yield from ((group, block) for block in blocks if block != NO_BLOCK)
    elif isinstance(event, BlockCopied):
        yield from ((event.group, event.source), (event.group, event.target))
    elif isinstance(event, BlockPublished | BlockEvicted | BlockStored | BlockLoaded):
        yield event.group, event.block


def picked(column: tuple[Any, ...], places: Iterable[int], count: int) -> tuple[Any, ...]:
    """The column's values at `places`, and those beyond the `count` that there should be."""
    return (*(column[at] for at in places if at < len(column)), *column[count:])
