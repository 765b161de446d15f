"""Wire: the shapes of format 1, one array a record or event, told apart by a number.

A field whose value both ends can work out (tracker.py) travels as None, as True, or as a count.
The numbers are part of the format: they are only ever added to. Events 20 and 21 are reserved for
events.RESERVED.
"""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec
from msgspec import Struct

from . import events as ev
from . import records as rec
from .columns import Column, FloatColumn
from .events import PURPOSES

EVENT_TYPES: tuple[type[Struct], ...] = ev.Event.__args__
RESERVED = range(20, 20 + len(ev.RESERVED))
"""Numbers of events.RESERVED."""
EVENT_NUMBERS = tuple(number for number in range(1, 256) if number not in RESERVED)
"""In the order of the union: Opened is 1, BlockLoaded 19, and CommittedEach 22."""

PURPOSE_CODES = {purpose: code for code, purpose in enumerate(PURPOSES)}


class PrefixAdopted(Struct, frozen=True, array_like=True, tag=2):
    """tokens: how many of the stream's first, or the tokens."""

    seq: int
    tokens: int | Column
    prompt_rows: int
    blocks: tuple[tuple[int, ...], ...]


class Appended(Struct, frozen=True, array_like=True, tag=3):
    """step None: the record's; tokens True: the stream's next; purpose: a number, or its text."""

    seq: int
    step: int | None
    rows: int
    tokens: bool | Column | None
    blocks: tuple[tuple[int, ...], ...]
    purpose: int | str


class AppendedEach(Struct, frozen=True, array_like=True, tag=4):
    """As Appended, in columns."""

    step: int | None
    seqs: Column
    tokens: bool | Column | None
    purpose: int | str


class StepWritten(Struct, frozen=True, array_like=True, tag=5):
    """step None: the record's."""

    step: int | None


class Committed(Struct, frozen=True, array_like=True, tag=6):
    """tokens: how many of the stream's next after the committed rows, or the tokens."""

    seq: int
    tokens: int | Column


class CommittedEach(Struct, frozen=True, array_like=True, tag=22):
    """tokens True: the stream's next after the committed rows of each."""

    seqs: Column
    tokens: bool | Column


class BlockCopied(Struct, frozen=True, array_like=True, tag=10):
    """step None: the record's."""

    seq: int
    step: int | None
    group: int
    index: int
    source: int
    target: int
    rows: int


class BlockLoaded(Struct, frozen=True, array_like=True, tag=19):
    """step None: the record's."""

    seq: int
    step: int | None
    group: int
    block: int
    parent: int
    tokens: Column
    key: int


_SPECIAL = (
    PrefixAdopted,
    Appended,
    AppendedEach,
    StepWritten,
    Committed,
    BlockCopied,
    BlockLoaded,
    CommittedEach,
)


def _plain(kind: type[Struct], tag: int) -> type[Struct]:
    """An array with the fields of `kind` as they are."""
    hints = get_type_hints(kind)
    fields = [(name, hints[name]) for name in kind.__struct_fields__]
    return msgspec.defstruct(kind.__name__, fields, array_like=True, tag=tag, frozen=True)


_special_names = {kind.__name__: kind for kind in _SPECIAL}
EVENT_WIRES: tuple[type[Struct], ...] = tuple(
    _special_names.get(kind.__name__) or _plain(kind, number)
    for number, kind in zip(EVENT_NUMBERS, EVENT_TYPES, strict=False)
)
WireEvent: Any = EVENT_WIRES[0]
for _wire in EVENT_WIRES[1:]:
    WireEvent |= _wire


class Changes(Struct, frozen=True, array_like=True):
    """Where a column differs from the expected one; `full` where that cannot be told."""

    places: Column = ()
    values: Column = ()
    full: Column | None = None


class Nested(Struct, frozen=True, array_like=True):
    """Tuples that do not have one entry for each piece and group: as they are."""

    rows: tuple[tuple[int, ...], ...]


class Observation(Struct, frozen=True, array_like=True):
    """Columns are None where they are what the plan says (tracker.py).

    counters: offset_reads, updates, rows_updated, attends (smallest, largest), strangers.
    visible, tables: a column, or a change list, for each group; tables change against what was last
    read of the same sequences.
    """

    counters: tuple[int, ...] | None
    starts: Column | None
    rows: Column | None
    visible: tuple[Column | None, ...] | None
    tables: tuple[Changes | None, ...] | None
    visible_nested: Nested | None = None
    tables_nested: Nested | None = None


class Header(Struct, frozen=True, array_like=True, tag=1):
    header: rec.Header


class RequestArrived(Struct, frozen=True, array_like=True, tag=2):
    request: int
    external_id: str
    tokens: Column
    parameters: rec.Parameters
    namespace: ev.Namespace
    parent: int = rec.NO_PARENT


class StepPlanned(Struct, frozen=True, array_like=True, tag=5):
    step: int
    events: tuple[WireEvent, ...]
    digest: int


class StepDone(Struct, frozen=True, array_like=True, tag=6):
    """sampled None: every piece; offsets None: what the events lead to."""

    step: int
    observation: Observation
    shadow: rec.ShadowReport
    sampled: Column | None
    tokens: Column
    logits: FloatColumn
    margins: FloatColumn
    events: tuple[WireEvent, ...]
    offsets: Changes | None
    digest: int


class StepScored(Struct, frozen=True, array_like=True, tag=13):
    """A StepDone that scored prompt tokens."""

    done: StepDone
    scored: Column
    scores: FloatColumn


class StepFailed(Struct, frozen=True, array_like=True, tag=7):
    step: int
    stage: str
    error: str
    blamed: tuple[int, ...]
    events: tuple[WireEvent, ...]
    digest: int


class StepTimed(Struct, frozen=True, array_like=True, tag=8):
    """parts None: the names of the last one."""

    step: int
    parts: tuple[str, ...] | None
    values_us: tuple[int, ...]


class RequestSnapshot(Struct, frozen=True, array_like=True):
    arrived: RequestArrived
    output: Column
    running: bool
    cached_tokens: int
    passed: int


class Checkpoint(Struct, frozen=True, array_like=True, tag=10):
    step: int
    state: bytes
    requests: tuple[RequestSnapshot, ...]
    digest: int
    alone: tuple[int, ...]
    stuck: bool
    flush: bool = False


class CheckpointOffered(Struct, frozen=True, array_like=True, tag=15):
    """A Checkpoint with requests that may load kept blocks: request, first, end of each."""

    checkpoint: Checkpoint
    offered: tuple[tuple[int, int, int], ...]


class CheckpointDrafted(Struct, frozen=True, array_like=True, tag=17):
    """A Checkpoint with the pool of a draft model."""

    checkpoint: Checkpoint | CheckpointOffered
    draft: rec.DraftSnapshot


class Drafted(Struct, frozen=True, array_like=True, tag=16):
    record: StepPlanned | StepDone | StepScored | StepFailed


RequestCancelled = _plain(rec.RequestCancelled, 3)
Finished = _plain(rec.Finished, 4)
Gap = _plain(rec.Gap, 9)
TapeEnded = _plain(rec.TapeEnded, 11)
FlushRequested = _plain(rec.FlushRequested, 12)
BlocksOffered = _plain(rec.BlocksOffered, 14)

WireRecord: Any = Header | RequestArrived | RequestCancelled | Finished | StepPlanned | StepDone
WireRecord |= StepFailed | StepTimed | Gap | Checkpoint | TapeEnded | FlushRequested | StepScored
WireRecord |= BlocksOffered | CheckpointOffered | Drafted | CheckpointDrafted
