"""Export script: a tape's events as a script for `replay check` (docs/scripts.md).

The first line is the geometry; then each event as the tape has it, under a comment with its step,
and what the pool is expected to be once the step is answered. A script cannot say a digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from statemachine.expectation import pool_values
from statemachine.records import Checkpoint, Gap, Header, Record, StepDone, StepFailed, StepPlanned

from .errors import Unusable
from .export import Options
from .following import Following


def as_script(records: Iterable[Record], options: Options, notes: list[str]) -> Iterator[bytes]:
    """Lines. Raises Unusable for a tape that does not begin with an empty pool."""
    following, begun, planned = Following(), False, False
    for record in records:
        if isinstance(record, Gap):
            notes.append("records are missing from a place on: the script ends there")
            return
        following.feed(record)
        if isinstance(record, Header) and not begun:
            begun = True
            yield _line({"geometry": record.geometry})
        elif isinstance(record, Checkpoint) and not planned:
            _require_empty(following)
        elif isinstance(record, StepPlanned | StepDone | StepFailed) and record.events:
            planned = True
            yield f"# step {record.step}, {type(record).__name__}\n".encode()
            for event in record.events:
                yield _line({"event": event})
            if following.broken:
                notes.append(f"`replay check` will fail at the script's end: {following.broken}")
                return
            if not isinstance(record, StepPlanned):
                yield _line({"expect": pool_values(following.state)})


def _line(value: object) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _require_empty(following: Following) -> None:
    state = following.state
    if state.sequences or state.entries or state.issued_step:
        raise Unusable(
            "the tape begins in the middle of a run, with blocks in use, which a script cannot "
            "say: give a tape from the server's start"
        )
