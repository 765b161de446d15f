"""Packing of events: to their wire shapes and back, with what the tracker expects left out.

Each packer and its unpacker walk their trackers through the same steps. What differs from the
expected is written in full, so that unpacking gives back an equal event, whatever its values are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct, structs

from . import events as ev
from . import wire
from .columns import pack_ids, pack_ints, unpack_ints
from .errors import CodecError
from .events import PURPOSES
from .tracker import Tracker


def _purpose(code: int | str) -> str:
    if isinstance(code, str):
        return code
    if not 0 <= code < len(PURPOSES):
        raise CodecError(f"an append has purpose number {code}, which format 1 does not know")
    return PURPOSES[code]


def _stream_or_column(expected: list[int] | tuple[int, ...], tokens: tuple[int, ...]) -> Any:
    """True, or a count, is written for what the stream already says."""
    return True if tokens == tuple(expected) else pack_ints(tokens)


def _pack_adopted(tracker: Tracker, step: int, event: ev.PrefixAdopted) -> Struct:
    count = len(event.tokens)
    known = tuple(tracker.cursor(event.seq).stream[:count]) == event.tokens
    tokens = count if known else pack_ints(event.tokens)
    tracker.adopted(event.seq, event.tokens)
    return wire.PrefixAdopted(event.seq, tokens, event.prompt_rows, event.blocks)


def _unpack_adopted(tracker: Tracker, step: int, packed: wire.PrefixAdopted) -> ev.Event:
    if isinstance(packed.tokens, int):
        tokens = _counted(tracker.cursor(packed.seq).stream, 0, packed.tokens)
    else:
        tokens = unpack_ints(packed.tokens)
    tracker.adopted(packed.seq, tokens)
    return ev.PrefixAdopted(packed.seq, tokens, packed.prompt_rows, packed.blocks)


def _counted(stream: list[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens of a stream from `start` on."""
    tokens = tuple(stream[start : start + count]) if start >= 0 and count >= 0 else ()
    if len(tokens) != count:
        raise CodecError(f"an event refers to {count} tokens of its request, which are not on tape")
    return tokens


def _pack_appended(tracker: Tracker, step: int, event: ev.Appended) -> Struct:
    cursor = tracker.cursor(event.seq)
    tokens: Any = None
    unexpected: tuple[int, ...] = ()
    if event.tokens is not None:
        tokens = _stream_or_column(
            cursor.stream[cursor.offset : cursor.offset + event.rows], event.tokens
        )
        unexpected = () if tokens is True else event.tokens
    tracker.appended(event.seq, event.rows, unexpected, event.purpose)
    purpose = wire.PURPOSE_CODES.get(event.purpose, event.purpose)
    when = None if event.step == step else event.step
    return wire.Appended(event.seq, when, event.rows, tokens, event.blocks, purpose)


def _unpack_appended(tracker: Tracker, step: int, packed: wire.Appended) -> ev.Event:
    purpose = _purpose(packed.purpose)
    tokens: tuple[int, ...] | None = None
    unexpected: tuple[int, ...] = ()
    if isinstance(packed.tokens, bool):
        cursor = tracker.cursor(packed.seq)
        tokens = tuple(cursor.stream[cursor.offset : cursor.offset + packed.rows])
    elif packed.tokens is not None:
        tokens = unexpected = unpack_ints(packed.tokens)
    tracker.appended(packed.seq, packed.rows, unexpected, purpose)
    when = step if packed.step is None else packed.step
    return ev.Appended(packed.seq, when, packed.rows, tokens, packed.blocks, purpose)


def _pack_each(tracker: Tracker, step: int, event: ev.AppendedEach) -> Struct:
    cursors = tracker.cursors(event.seqs)
    tokens: Any = None
    unexpected: tuple[int, ...] = ()
    if event.tokens is not None:
        tokens = _stream_or_column(tracker.next_tokens(cursors), event.tokens)
        unexpected = () if tokens is True else event.tokens
    tracker.appended_each(event.seqs, cursors, unexpected, event.purpose)
    purpose = wire.PURPOSE_CODES.get(event.purpose, event.purpose)
    when = None if event.step == step else event.step
    return wire.AppendedEach(when, pack_ids(event.seqs), tokens, purpose)


def _unpack_each(tracker: Tracker, step: int, packed: wire.AppendedEach) -> ev.Event:
    purpose = _purpose(packed.purpose)
    seqs = unpack_ints(packed.seqs)
    cursors = tracker.cursors(seqs)
    tokens: tuple[int, ...] | None = None
    unexpected: tuple[int, ...] = ()
    if isinstance(packed.tokens, bool):
        tokens = tracker.next_tokens(cursors)
    elif packed.tokens is not None:
        tokens = unexpected = unpack_ints(packed.tokens)
    tracker.appended_each(seqs, cursors, unexpected, purpose)
    when = step if packed.step is None else packed.step
    return ev.AppendedEach(when, seqs, tokens, purpose)


def _pack_committed(tracker: Tracker, step: int, event: ev.Committed) -> Struct:
    cursor, count = tracker.cursor(event.seq), len(event.tokens)
    start = cursor.offset - cursor.tail
    known = start >= 0 and tuple(cursor.stream[start : start + count]) == event.tokens
    tracker.committed(event.seq, event.tokens)
    return wire.Committed(event.seq, count if known else pack_ints(event.tokens))


def _unpack_committed(tracker: Tracker, step: int, packed: wire.Committed) -> ev.Event:
    if isinstance(packed.tokens, int):
        cursor = tracker.cursor(packed.seq)
        tokens = _counted(cursor.stream, cursor.offset - cursor.tail, packed.tokens)
    else:
        tokens = unpack_ints(packed.tokens)
    tracker.committed(packed.seq, tokens)
    return ev.Committed(packed.seq, tokens)


def _pack_committed_each(tracker: Tracker, step: int, event: ev.CommittedEach) -> Struct:
    cursors = tracker.cursors(event.seqs)
    tokens = _stream_or_column(tracker.uncommitted_tokens(cursors), event.tokens)
    tracker.committed_each(cursors, () if tokens is True else event.tokens)
    return wire.CommittedEach(pack_ids(event.seqs), tokens)


def _unpack_committed_each(
    tracker: Tracker, step: int, packed: wire.CommittedEach
) -> ev.CommittedEach:
    seqs = unpack_ints(packed.seqs)
    cursors = tracker.cursors(seqs)
    if isinstance(packed.tokens, bool):
        tokens = tracker.uncommitted_tokens(cursors)
        tracker.committed_each(cursors, ())
    else:
        tokens = unpack_ints(packed.tokens)
        tracker.committed_each(cursors, tokens)
    return ev.CommittedEach(seqs, tokens)


def _pack_written(tracker: Tracker, step: int, event: ev.StepWritten) -> Struct:
    return wire.StepWritten(None if event.step == step else event.step)


def _unpack_written(tracker: Tracker, step: int, packed: wire.StepWritten) -> ev.Event:
    return ev.StepWritten(step if packed.step is None else packed.step)


def _pack_copied(tracker: Tracker, step: int, event: ev.BlockCopied) -> Struct:
    when = None if event.step == step else event.step
    return wire.BlockCopied(
        event.seq, when, event.group, event.index, event.source, event.target, event.rows
    )


def _unpack_copied(tracker: Tracker, step: int, packed: wire.BlockCopied) -> ev.Event:
    when = step if packed.step is None else packed.step
    return ev.BlockCopied(
        packed.seq, when, packed.group, packed.index, packed.source, packed.target, packed.rows
    )


def _pack_loaded(tracker: Tracker, step: int, event: ev.BlockLoaded) -> Struct:
    when = None if event.step == step else event.step
    tokens = pack_ints(event.tokens)
    return wire.BlockLoaded(
        event.seq, when, event.group, event.block, event.parent, tokens, event.key
    )


def _unpack_loaded(tracker: Tracker, step: int, packed: wire.BlockLoaded) -> ev.Event:
    when, tokens = step if packed.step is None else packed.step, unpack_ints(packed.tokens)
    return ev.BlockLoaded(
        packed.seq, when, packed.group, packed.block, packed.parent, tokens, packed.key
    )


_Follow = Callable[[Tracker, Any], object]
# What the tracker does for events whose fields travel as they are.
_FOLLOW: dict[type[Struct], _Follow] = {
    ev.Opened: lambda tracker, event: tracker.opened(event.seq),
    ev.Trimmed: lambda tracker, event: tracker.removed(event.seq, event.rows),
    ev.Rewound: lambda tracker, event: tracker.removed(event.seq, event.rows),
    ev.Forked: lambda tracker, event: tracker.forked(event.seq, event.child),
    ev.Reset: lambda tracker, event: tracker.emptied(event.seq),
    ev.Preempted: lambda tracker, event: tracker.emptied(event.seq),
    ev.Closed: lambda tracker, event: tracker.closed(event.seq),
    ev.PoolReset: lambda tracker, event: tracker.pool_reset(),
}
_Packer = Callable[[Tracker, int, Any], Any]
_SPECIAL: dict[type[Struct], tuple[_Packer, _Packer]] = {
    ev.PrefixAdopted: (_pack_adopted, _unpack_adopted),
    ev.Appended: (_pack_appended, _unpack_appended),
    ev.AppendedEach: (_pack_each, _unpack_each),
    ev.Committed: (_pack_committed, _unpack_committed),
    ev.CommittedEach: (_pack_committed_each, _unpack_committed_each),
    ev.StepWritten: (_pack_written, _unpack_written),
    ev.BlockCopied: (_pack_copied, _unpack_copied),
    ev.BlockLoaded: (_pack_loaded, _unpack_loaded),
}


def _follower(target: type[Struct], source: type[Struct]) -> _Packer:
    """Copies a struct's fields, and lets the tracker see the event."""
    follow = _FOLLOW.get(target) or _FOLLOW.get(source)

    def convert(tracker: Tracker, step: int, value: Any) -> Any:
        if follow is not None:
            follow(tracker, value)
        return target(*structs.astuple(value))

    return convert


_EVENT_PACKERS: dict[type[Struct], _Packer] = {}
_EVENT_UNPACKERS: dict[type[Struct], _Packer] = {}
for _event, _wire in zip(wire.EVENT_TYPES, wire.EVENT_WIRES, strict=True):
    _pair = _SPECIAL.get(_event) or (_follower(_wire, _event), _follower(_event, _wire))
    _EVENT_PACKERS[_event], _EVENT_UNPACKERS[_wire] = _pair


def pack_events(tracker: Tracker, step: int, events: tuple[ev.Event, ...]) -> tuple[Any, ...]:
    """Events of one record of `step`, in order."""
    packers = _EVENT_PACKERS
    return tuple([packers[type(event)](tracker, step, event) for event in events])


def unpack_events(tracker: Tracker, step: int, packed: tuple[Any, ...]) -> tuple[ev.Event, ...]:
    """The events of `pack_events`."""
    unpackers = _EVENT_UNPACKERS
    return tuple([unpackers[type(event)](tracker, step, event) for event in packed])
