"""Faults of lengths: offsets, visible rows, positions and tokens that go apart from each other."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
from msgspec import structs

from kernel.batch import Batch
from kernel.metadata import StepMetadata
from statemachine.events import Event, Trimmed
from statemachine.geometry import Geometry
from statemachine.sequence import Sequence

from . import loads
from .fault import DONE, FAILED, PLANNED, Catalogue, Witness

FAULTS = Catalogue()


class _Padded:
    """Metadata as an engine makes it that never takes pad rows back.

    A sequence's RoPE position goes on behind its pads, and its rows see what stands after them in
    their last block. shift: by sequence, the pads that it had.
    """

    def __init__(self, original: Any, witness: Witness) -> None:
        self._original = original
        self._witness = witness
        self._shift: dict[int, int] = {}

    def __call__(self, batch: Batch, geometry: Geometry) -> StepMetadata:
        metadata: StepMetadata = self._original(batch, geometry)
        positions, until = metadata.positions.copy(), metadata.until.copy()
        for number, piece in enumerate(batch.pieces):
            seq = piece.sequence.id
            shift = self._shift.get(seq, 0) if piece.start else 0
            if shift:
                self._witness.note(seq)
                first = int(metadata.first[number])
                rows = slice(first, first + piece.rows)
                held = int(metadata.covers[number]) * geometry.block_size
                positions[rows] += shift
                until[rows] = np.minimum(until[rows] + shift, held)
            self._shift[seq] = shift + piece.pads
        return attrs.evolve(metadata, positions=positions, until=until)


@FAULTS.add(
    "S1",
    "pad rows stay: after a padded prefill the offset goes on behind the pads, which stay visible",
    "kernel.metadata:build",
    loads.PADDED,
    "fold",
    "observation",
    "start 64",
    "37",
)
def pads_stay(original: Any, witness: Witness) -> Any:
    return _Padded(original, witness)


@FAULTS.add(
    "S2",
    "cohort padding: prompts of 17 and 50 that are prefilled together both count as 50",
    "kernel.metadata:build",
    loads.COHORT,
    "fold",
    "observation",
    "start 50",
    "17",
)
def cohort_stays(original: Any, witness: Witness) -> Any:
    return _Padded(original, witness)


@FAULTS.add(
    "S3",
    "a failed step takes its blocks back and leaves the offset where it was, ahead of the pool",
    "statemachine.trimming:_cut",
    loads.BUILD_FAILS,
    "fold",
    "fold",
    "digest",
)
def offset_stays(original: Any, witness: Witness) -> Any:
    def cut(draft: Any, old: Sequence, rows: int) -> Sequence:
        witness.note(-1, FAILED)
        new = original(draft, old, rows)
        return structs.replace(
            new, committed=old.committed, tail=old.tail, keys=old.keys, packed=old.packed
        )

    return cut


@FAULTS.add(
    "S3-one-ahead",
    "a failed step unwinds one row less than it issued",
    "server.failing:_undo",
    loads.BUILD_FAILS,
    "plan",
    "plan",
    "event 0 of StepFailed",
)
def undone_but_one(original: Any, witness: Witness) -> Any:
    def undo(view: Any, plan: Any, blamed: tuple[int, ...]) -> tuple[Event, ...]:
        events = []
        for event in original(view, plan, blamed):
            if isinstance(event, Trimmed):
                witness.note(event.seq, FAILED)
                if event.rows == 1:
                    continue
                event = Trimmed(event.seq, event.rows - 1)
            events.append(event)
        return tuple(events)

    return undo


@FAULTS.add(
    "S4",
    "a prompt that is found whole in the prefix index is adopted whole, its last row too",
    "statemachine.prefix:adoption_limit",
    loads.REPEATS,
    "fold",
    "fold",
    "adopted 32 rows of a prompt of 32",
    "at most 31",
)
def adopted_whole(original: Any, witness: Witness) -> Any:
    return lambda prompt_rows: (_note_whole(witness, prompt_rows), prompt_rows)[1]


def _note_whole(witness: Witness, prompt_rows: int) -> None:
    # The first prompt finds an empty index; its limit changes nothing.
    if witness.step > 1:
        witness.note(1)


@FAULTS.add(
    "pads-not-trimmed",
    "the trim after a padded prefill loops over nothing, so that nothing is trimmed (S5)",
    "server.closing:_close_piece",
    loads.PADDED,
    "plan",
    "plan",
    "of StepDone",
)
def pads_not_trimmed(original: Any, witness: Witness) -> Any:
    def close(state: Any, plan: Any, seq: int, pads: int, reason: Any) -> tuple[Event, ...]:
        if pads:
            witness.note(seq, DONE)
        return tuple(original(state, plan, seq, 0, reason))

    return close


@FAULTS.add(
    "pad-visible",
    "the mask of the first row after a pad reaches one row too far: a pad row is attended to",
    "kernel.metadata:build",
    loads.PADDED,
    "fold",
    "observation",
    "visible rows",
)
def pad_visible(original: Any, witness: Witness) -> Any:
    padded: set[int] = set()

    def build(batch: Batch, geometry: Geometry) -> StepMetadata:
        metadata: StepMetadata = original(batch, geometry)
        until = metadata.until.copy()
        for number, piece in enumerate(batch.pieces):
            seq = piece.sequence.id
            if seq in padded and piece.sequence.offset % geometry.block_size:
                witness.note(seq)
                until[int(metadata.first[number])] += 1
                padded.discard(seq)
            if piece.pads:
                padded.add(seq)
        return attrs.evolve(metadata, until=until)

    return build


@FAULTS.add(
    "row-hidden",
    "the mask of decode rows is sized from the rows before them: the newest row sees not itself",
    "kernel.metadata:build",
    loads.MIXED,
    "fold",
    "observation",
    "visible rows",
)
def row_hidden(original: Any, witness: Witness) -> Any:
    def build(batch: Batch, geometry: Geometry) -> StepMetadata:
        metadata: StepMetadata = original(batch, geometry)
        until = metadata.until.copy()
        for number, piece in enumerate(batch.pieces):
            if piece.rows == 1 and piece.start:
                witness.note(piece.sequence.id)
                until[int(metadata.first[number])] -= 1
        return attrs.evolve(metadata, until=until)

    return build


@FAULTS.add(
    "rows-fed-shifted",
    "a chunk of a prompt is fed from one token too late; the events say what was meant",
    "server.scheduler:batch",
    loads.TINY_MIXED,
    "forward",
    "token",
    "logit",
)
def fed_shifted(original: Any, witness: Witness) -> Any:
    def batch(view: Any, plan: Any) -> Batch:
        made: Batch = original(view, plan)
        pieces = list(made.pieces)
        for number, piece in enumerate(pieces):
            if len(piece.tokens) > 2 and piece.start:
                witness.note(piece.sequence.id, DONE)
                fed = (*piece.tokens[1:], piece.tokens[-1])
                pieces[number] = structs.replace(piece, tokens=fed)
        return structs.replace(made, pieces=tuple(pieces))

    return batch


@FAULTS.add(
    "row-issued-twice",
    "a decode row is in the batch twice",
    "server.scheduler:batch",
    loads.MIXED,
    "fold",
    "observation",
    "pieces",
)
def issued_twice(original: Any, witness: Witness) -> Any:
    def batch(view: Any, plan: Any) -> Batch:
        made: Batch = original(view, plan)
        twice = [piece for piece in made.pieces if piece.rows == 1 and piece.start]
        if not twice:
            return made
        witness.note(-1, DONE)
        extra = structs.replace(twice[-1], samples=0, parameters=None)
        return structs.replace(made, pieces=(*made.pieces, extra))

    return batch


@FAULTS.add(
    "S14-sink",
    "the sinks of a window are dropped once the window moved on",
    "kernel.metadata:build",
    loads.WINDOWS,
    "fold",
    "observation",
    "visible rows",
)
def sinks_dropped(original: Any, witness: Witness) -> Any:
    def build(batch: Batch, geometry: Geometry) -> StepMetadata:
        metadata: StepMetadata = original(batch, geometry)
        for number, piece in enumerate(batch.pieces):
            last = int(metadata.first[number]) + piece.rows - 1
            if any(
                spec.sink and metadata.live_from[group, last]
                for group, spec in enumerate(geometry.groups)
            ):
                witness.note(piece.sequence.id)
        groups = tuple(structs.replace(spec, sink=0) for spec in geometry.groups)
        return attrs.evolve(metadata, geometry=structs.replace(geometry, groups=groups))

    return build


@FAULTS.add(
    "S14-window",
    "a window keeps one row too few",
    "kernel.metadata:_first_key",
    loads.WINDOWS,
    "fold",
    "observation",
    "visible rows",
)
def window_short(original: Any, witness: Witness) -> Any:
    def first_key(group: Any, starts: Any, positions: Any) -> Any:
        found = original(group, starts, positions)
        if group.kind != "window":
            return found
        short = np.maximum(starts, positions - group.window + 2)
        if (short != found).any():
            witness.note(-1, PLANNED)
        return short

    return first_key


@FAULTS.add(
    "S14-append",
    "rows that are appended together all keep the last one's window: the first see too few rows",
    "kernel.metadata:_live_from",
    loads.WINDOWS,
    "fold",
    "content",
    "rows in the pages were compared",
)
def append_into_ring(original: Any, witness: Witness) -> Any:
    def live_from(pieces: Any, piece_of: Any, positions: Any, geometry: Any) -> Any:
        found = original(pieces, piece_of, positions, geometry)
        for number in range(len(pieces)):
            rows = np.flatnonzero(piece_of == number)
            if (found[:, rows] != found[:, rows[-1:]]).any():
                witness.note(record=DONE)
                found[:, rows] = found[:, rows[-1:]]
        return found

    return live_from
