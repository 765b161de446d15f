"""Tapes with one thing changed: what a replay must find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import structs

from replay.divergence import Divergence
from replay.run import Options, Outcome, replay
from statemachine.codec import TapeEncoder
from statemachine.records import Record


def first_step(records: list[Record], holds: Callable[[Any], bool]) -> int:
    """Place of the first record for which `holds` is true."""
    return next(place for place, record in enumerate(records) if holds(record))


def changed(records: list[Record], place: int, **fields: Any) -> list[Record]:
    """The records, one of them with other fields."""
    return [
        structs.replace(record, **fields) if at == place else record
        for at, record in enumerate(records)
    ]


def observed(records: list[Record], place: int, **fields: Any) -> list[Record]:
    """The records, one step's observation with other fields."""
    seen: Any = getattr(records[place], "observation")  # noqa: B009
    return changed(records, place, observation=structs.replace(seen, **fields))


def with_item(items: tuple[Any, ...], place: int, item: Any) -> tuple[Any, ...]:
    """A tuple with one other item."""
    return (*items[:place], item, *items[place + 1 :])


def write(folder: Path, records: list[Record]) -> str:
    """The records as a tape's file."""
    path = folder / "tampered.log"
    path.write_bytes(TapeEncoder().encode(records))
    return str(path)


def outcome_of(folder: Path, records: list[Record], **options: Any) -> Outcome:
    """What a replay of the records comes to."""
    return replay(write(folder, records), Options(**options))


def divergence_of(folder: Path, records: list[Record], **options: Any) -> Divergence:
    """The divergence that a replay of the records finds."""
    found = outcome_of(folder, records, **options).divergence
    assert found is not None
    return found
