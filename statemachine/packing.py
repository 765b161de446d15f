"""Packing of records: to their wire shapes and back, with what the tracker expects left out.

For each record that can be packed, unpacking gives back an equal one, whatever its values are: what
differs from the expected is in full. Frames and bytes are codec.py's, events packing_events.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct, structs

from . import records as rec
from . import wire
from .columns import pack_floats, pack_ints, unpack_floats, unpack_ints
from .errors import CodecError
from .packing_events import pack_events, unpack_events
from .packing_observation import (
    pack_column,
    pack_observation,
    unpack_column,
    unpack_observation,
)
from .sequence import Sequence
from .snapshot import decode_state
from .tracker import Pieces, Tracker

_NO_PIECES = Pieces([], [], [], [])


def _pack_planned(tracker: Tracker, record: rec.StepPlanned) -> Struct:
    tracker.begin_plan(record.step)
    events = pack_events(tracker, record.step, record.events)
    tracker.end_plan()
    return wire.StepPlanned(record.step, events, record.digest)


def _unpack_planned(tracker: Tracker, packed: wire.StepPlanned) -> rec.Record:
    tracker.begin_plan(packed.step)
    events = unpack_events(tracker, packed.step, packed.events)
    tracker.end_plan()
    return rec.StepPlanned(packed.step, events, packed.digest)


def _pack_done(tracker: Tracker, record: rec.StepDone) -> Struct:
    pieces = tracker.steps.pop(record.step, _NO_PIECES)
    observation = pack_observation(tracker, pieces, record.observation)
    every = record.sampled == tuple(range(len(pieces.seqs)))
    tracker.sampled(pieces, None if every else record.sampled, record.tokens)
    events = pack_events(tracker, record.step, record.events)
    done = wire.StepDone(
        step=record.step,
        observation=observation,
        shadow=record.shadow,
        sampled=None if every else pack_ints(record.sampled),
        tokens=pack_ints(record.tokens),
        logits=pack_floats(record.logits),
        margins=pack_floats(record.margins),
        events=events,
        offsets=pack_column(record.offsets, tracker.expected_offsets(pieces)),
        digest=record.digest,
    )
    if not (record.scored or record.scores):
        return done
    return wire.StepScored(done, pack_ints(record.scored), pack_floats(record.scores))


def _unpack_scored(tracker: Tracker, packed: wire.StepScored) -> rec.Record:
    done = _unpack_done(tracker, packed.done)
    scored, scores = unpack_ints(packed.scored), unpack_floats(packed.scores)
    return structs.replace(done, scored=scored, scores=scores)


def _unpack_done(tracker: Tracker, packed: wire.StepDone) -> rec.StepDone:
    pieces = tracker.steps.pop(packed.step, _NO_PIECES)
    observation = unpack_observation(tracker, pieces, packed.observation)
    every = packed.sampled is None
    sampled = tuple(range(len(pieces.seqs))) if every else unpack_ints(packed.sampled or ())
    tokens = unpack_ints(packed.tokens)
    tracker.sampled(pieces, None if every else sampled, tokens)
    events = unpack_events(tracker, packed.step, packed.events)
    return rec.StepDone(
        step=packed.step,
        observation=observation,
        shadow=packed.shadow,
        sampled=sampled,
        tokens=tokens,
        logits=unpack_floats(packed.logits),
        margins=unpack_floats(packed.margins),
        events=events,
        offsets=unpack_column(packed.offsets, tracker.expected_offsets(pieces)),
        digest=packed.digest,
    )


def _pack_failed(tracker: Tracker, record: rec.StepFailed) -> Struct:
    tracker.steps.pop(record.step, None)
    events = pack_events(tracker, record.step, record.events)
    return wire.StepFailed(
        record.step, record.stage, record.error, record.blamed, events, record.digest
    )


def _unpack_failed(tracker: Tracker, packed: wire.StepFailed) -> rec.Record:
    tracker.steps.pop(packed.step, None)
    events = unpack_events(tracker, packed.step, packed.events)
    return rec.StepFailed(
        packed.step, packed.stage, packed.error, packed.blamed, events, packed.digest
    )


def _pack_timed(tracker: Tracker, record: rec.StepTimed) -> Struct:
    names, values = tuple(record.parts_us), tuple(record.parts_us.values())
    known, tracker.parts = names == tracker.parts, names
    return wire.StepTimed(record.step, None if known else names, values)


def _unpack_timed(tracker: Tracker, packed: wire.StepTimed) -> rec.Record:
    if packed.parts is not None:
        tracker.parts = packed.parts
    if len(tracker.parts) != len(packed.values_us):
        raise CodecError(f"the times of step {packed.step} do not fit their names")
    return rec.StepTimed(packed.step, dict(zip(tracker.parts, packed.values_us, strict=True)))


def _arrived_wire(record: rec.RequestArrived) -> wire.RequestArrived:
    tokens = pack_ints(record.tokens)
    return wire.RequestArrived(
        record.request,
        record.external_id,
        tokens,
        record.parameters,
        record.namespace,
        record.parent,
    )


def _arrived_record(packed: wire.RequestArrived) -> rec.RequestArrived:
    tokens = unpack_ints(packed.tokens)
    return rec.RequestArrived(
        packed.request,
        packed.external_id,
        tokens,
        packed.parameters,
        packed.namespace,
        packed.parent,
    )


def _pack_arrived(tracker: Tracker, record: rec.RequestArrived) -> Struct:
    tracker.arrived(record.request, record.tokens)
    return _arrived_wire(record)


def _unpack_arrived(tracker: Tracker, packed: wire.RequestArrived) -> rec.Record:
    record = _arrived_record(packed)
    tracker.arrived(record.request, record.tokens)
    return record


def _pack_header(tracker: Tracker, record: rec.Header) -> Struct:
    _follow_header(tracker, record)
    return wire.Header(record)


def _unpack_header(tracker: Tracker, packed: wire.Header) -> rec.Record:
    _follow_header(tracker, packed.header)
    return packed.header


def _follow_header(tracker: Tracker, record: rec.Header) -> None:
    tracker.header(record.geometry, None if record.draft is None else record.draft.geometry)


def _pack_checkpoint(tracker: Tracker, record: rec.Checkpoint) -> Struct:
    _follow_checkpoint(tracker, record)
    requests = tuple(
        wire.RequestSnapshot(
            _arrived_wire(it.arrived),
            pack_ints(it.output),
            it.running,
            it.cached_tokens,
            it.passed,
        )
        for it in record.requests
    )
    packed = wire.Checkpoint(
        record.step,
        record.state,
        requests,
        record.digest,
        record.alone,
        record.stuck,
        record.flush,
    )
    offered = tuple((it.request, it.first, it.end) for it in record.offered)
    whole = wire.CheckpointOffered(packed, offered) if offered else packed
    return whole if record.draft is None else wire.CheckpointDrafted(whole, record.draft)


def _unpack_offered(tracker: Tracker, packed: wire.CheckpointOffered) -> rec.Checkpoint:
    record = _unpack_checkpoint(tracker, packed.checkpoint)
    return structs.replace(record, offered=tuple(rec.BlocksOffered(*it) for it in packed.offered))


def _unpack_checkpoint(tracker: Tracker, packed: wire.Checkpoint) -> rec.Checkpoint:
    requests = tuple(
        rec.RequestSnapshot(
            _arrived_record(it.arrived),
            unpack_ints(it.output),
            it.running,
            it.cached_tokens,
            it.passed,
        )
        for it in packed.requests
    )
    record = rec.Checkpoint(
        packed.step,
        packed.state,
        requests,
        packed.digest,
        packed.alone,
        packed.stuck,
        packed.flush,
    )
    _follow_checkpoint(tracker, record)
    return record


def _unpack_checkpoint_drafted(tracker: Tracker, packed: wire.CheckpointDrafted) -> rec.Checkpoint:
    held: Any = packed.checkpoint
    unpack = _unpack_offered if type(held) is wire.CheckpointOffered else _unpack_checkpoint
    record = structs.replace(unpack(tracker, held), draft=packed.draft)
    _follow_checkpoint(tracker, record)
    return record


def _follow_checkpoint(tracker: Tracker, record: rec.Checkpoint) -> None:
    # Where there is no answer yet, the sum is the prompt itself and no copy.
    streams = [(it.arrived.request, it.arrived.tokens + it.output) for it in record.requests]
    tracker.checkpoint(streams, _sequences(record.state))
    if tracker.draft is not None and record.draft is not None:
        tracker.draft.checkpoint(streams, _sequences(record.draft.state))


def _sequences(state: bytes) -> list[Sequence]:
    try:
        return list(decode_state(state).sequences.values())
    except CodecError:
        return []


def _draft_tracker(tracker: Tracker) -> Tracker:
    if tracker.draft is None:
        raise CodecError("it is of a draft model's pool, and the header names no draft model")
    return tracker.draft


def _pack_drafted(tracker: Tracker, record: rec.Drafted) -> Struct:
    return wire.Drafted(pack_record(_draft_tracker(tracker), record.record))


def _unpack_drafted(tracker: Tracker, packed: wire.Drafted) -> rec.Record:
    record: Any = unpack_record(_draft_tracker(tracker), packed.record)
    return rec.Drafted(record)


def _pack_cancelled(tracker: Tracker, record: rec.RequestCancelled) -> Struct:
    tracker.cancelled(record.request)
    return wire.RequestCancelled(record.request, record.reason)


def _unpack_cancelled(tracker: Tracker, packed: Any) -> rec.Record:
    tracker.cancelled(packed.request)
    return rec.RequestCancelled(packed.request, packed.reason)


_RecordPacker = Callable[[Tracker, Any], Any]
_RECORDS: dict[type[Struct], tuple[type[Struct], _RecordPacker, _RecordPacker]] = {
    rec.Header: (wire.Header, _pack_header, _unpack_header),
    rec.RequestArrived: (wire.RequestArrived, _pack_arrived, _unpack_arrived),
    rec.RequestCancelled: (wire.RequestCancelled, _pack_cancelled, _unpack_cancelled),
    rec.StepPlanned: (wire.StepPlanned, _pack_planned, _unpack_planned),
    rec.StepDone: (wire.StepDone, _pack_done, _unpack_done),
    rec.StepFailed: (wire.StepFailed, _pack_failed, _unpack_failed),
    rec.Drafted: (wire.Drafted, _pack_drafted, _unpack_drafted),
    rec.StepTimed: (wire.StepTimed, _pack_timed, _unpack_timed),
    rec.Checkpoint: (wire.Checkpoint, _pack_checkpoint, _unpack_checkpoint),
    rec.Finished: (
        wire.Finished,
        lambda tracker, it: wire.Finished(it.request, it.tokens_kept, it.reason),
        lambda tracker, it: rec.Finished(it.request, it.tokens_kept, it.reason),
    ),
    rec.Gap: (
        wire.Gap,
        lambda tracker, it: wire.Gap(it.records, it.reason),
        lambda tracker, it: rec.Gap(it.records, it.reason),
    ),
    rec.TapeEnded: (
        wire.TapeEnded,
        lambda tracker, it: wire.TapeEnded(it.steps),
        lambda tracker, it: rec.TapeEnded(it.steps),
    ),
    rec.FlushRequested: (
        wire.FlushRequested,
        lambda tracker, it: wire.FlushRequested(it.reason),
        lambda tracker, it: rec.FlushRequested(it.reason),
    ),
    rec.BlocksOffered: (
        wire.BlocksOffered,
        lambda tracker, it: wire.BlocksOffered(it.request, it.first, it.end),
        lambda tracker, it: rec.BlocksOffered(it.request, it.first, it.end),
    ),
}
_PACKERS = {kind: pack for kind, (_, pack, _) in _RECORDS.items()}
_UNPACKERS: dict[type[Struct], _RecordPacker] = {
    **{packed: unpack for packed, _, unpack in _RECORDS.values()},
    wire.StepScored: _unpack_scored,
    wire.CheckpointOffered: _unpack_offered,
    wire.CheckpointDrafted: _unpack_checkpoint_drafted,
}


def pack_record(tracker: Tracker, record: rec.Record) -> Any:
    """A record's wire shape; the tracker goes one record on."""
    return _PACKERS[type(record)](tracker, record)


def unpack_record(tracker: Tracker, packed: Any) -> rec.Record:
    """The record of `pack_record`. Raises CodecError where it cannot be one."""
    record: rec.Record = _UNPACKERS[type(packed)](tracker, packed)
    return record
