"""Faults of recurrent states: not reset, another sequence's, of the wrong edge, moved for nothing.

A state has no rows that could be counted: which slots were used, and whose tags stand there, is all
that tells of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from attrs import evolve
from msgspec import structs

from kernel.batch import Batch
from kernel.metadata import build
from statemachine.events import NO_BLOCK
from statemachine.geometry import RECURRENT, Geometry, Group

from . import loads
from .fault import DONE, Catalogue, Witness
from .loads import LFM2, MAMBA2

FAULTS = Catalogue()

FAILING_STEP = 6
SLOTS = Geometry(block_size=4, groups=(Group(RECURRENT, num_blocks=48),))
HYBRID = Geometry(block_size=4, groups=(Group(num_blocks=64), Group(RECURRENT, num_blocks=48)))
MIXED = evolve(loads.MIXED, name="states in slots", geometry=HYBRID)
ALONE = evolve(MIXED, name="nothing but states", geometry=SLOTS)
EDGES = evolve(
    MIXED, name="snapshots at many edges", policy=structs.replace(MIXED.policy, prefill_chunk=4)
)
REUSED = evolve(
    loads.MIXED,
    name="states without a prefix cache",
    geometry=HYBRID,
    policy=structs.replace(MIXED.policy, prefix_cache=False),
)
DRAFTS = evolve(loads.DRAFTS, name="drafts over states", geometry=HYBRID)
BUILD_FAILS = evolve(loads.BUILD_FAILS, name="a build that fails, with states", geometry=HYBRID)


def _laid_out(original: Any, change: Callable[[Any, int], int | None], witness: Witness) -> Any:
    """`change` looks at a step's slots of each recurrent group; the piece at fault, or None."""

    def build(batch: Batch, geometry: Geometry) -> Any:
        metadata = original(batch, geometry)
        for group, spec in enumerate(geometry.groups):
            piece = change(metadata, group) if spec.recurrent and witness.on else None
            if piece is not None:
                witness.note(metadata.seqs[piece])
        return metadata

    return build


def _not_reset(original: Any, witness: Witness) -> Any:
    used: set[int] = set()

    def change(metadata: Any, group: int) -> int | None:
        reads, writes = metadata.state_reads[group], metadata.state_writes[group]
        fresh = [at for at in np.flatnonzero(metadata.start == 0).tolist() if writes[at] in used]
        used.update(writes.tolist())
        reads[fresh] = writes[fresh]
        return fresh[0] if fresh else None

    return _laid_out(original, change, witness)


def _swapped(original: Any, witness: Witness) -> Any:
    def change(metadata: Any, group: int) -> int | None:
        reads = metadata.state_reads[group]
        going = np.flatnonzero(reads != NO_BLOCK)
        if len(going) < 2:
            return None
        one, other = going[:2].tolist()
        reads[[one, other]] = reads[[other, one]]
        return int(one)

    return _laid_out(original, change, witness)


def _wrong_edge(original: Any, witness: Witness) -> Any:
    seen: set[int] = set()
    behind: dict[int, int] = {}

    def change(metadata: Any, group: int) -> int | None:
        reads, wrong = metadata.state_reads[group], None
        for piece, seq in enumerate(metadata.seqs):
            start = int(metadata.start[piece])
            edge = start - 1 - metadata.geometry.block_size
            other = next((slot for slot, last in behind.items() if last == edge), None)
            if seq not in seen and start and other is not None:
                reads[piece], wrong = other, piece if wrong is None else wrong
            seen.add(seq)
        for slot, end in zip(metadata.state_writes[group].tolist(), metadata.end, strict=True):
            behind[slot] = int(end) - 1
        return wrong

    return _laid_out(original, change, witness)


def _snapshot_moves(original: Any, witness: Witness) -> Any:
    def change(metadata: Any, group: int) -> int | None:
        reads, writes = metadata.state_reads[group], metadata.state_writes[group]
        across = np.flatnonzero((reads != NO_BLOCK) & (reads != writes))
        writes[across] = reads[across]
        return int(across[0]) if len(across) else None

    return _laid_out(original, change, witness)


def _refused_drafts_stay(original: Any, witness: Witness) -> Any:
    left: dict[int, tuple[int, int]] = {}

    def change(metadata: Any, group: int) -> int | None:
        reads, writes = metadata.state_reads[group], metadata.state_writes[group]
        wrong = None
        for piece, seq in enumerate(metadata.seqs):
            slot, end = left.get(seq, (NO_BLOCK, 0))
            if 0 < metadata.start[piece] < end and slot != reads[piece]:
                reads[piece], wrong = slot, piece if wrong is None else wrong
            left[seq] = (int(writes[piece]), int(metadata.end[piece]))
        return wrong

    return _laid_out(original, change, witness)


for _name, _sentence, _load, _says, _make in (
    (
        "state-not-reset",
        "a new sequence goes on from the state that the last user of its slot left there",
        REUSED,
        "visible rows",
        _not_reset,
    ),
    (
        "state-not-reset-model",
        "the same over a real model, whose answer stays plausible",
        evolve(REUSED, kernel=LFM2),
        "visible rows",
        _not_reset,
    ),
    (
        "states-swapped",
        "two sequences of a step go on from each other's states",
        MIXED,
        "another block table",
        _swapped,
    ),
    (
        "states-swapped-alone",
        "the same of a model that keeps nothing but states",
        evolve(ALONE, kernel=MAMBA2),
        "another block table",
        _swapped,
    ),
    (
        "snapshot-of-the-wrong-edge",
        "a sequence that shares a prefix goes on from the snapshot one block before its end",
        EDGES,
        "another block table",
        _wrong_edge,
    ),
    (
        "snapshot-moves-on",
        "a sequence goes on in the slot of a full block: the snapshot moves past its edge",
        MIXED,
        "another block table",
        _snapshot_moves,
    ),
    (
        "state-of-refused-drafts",
        "a sequence goes on from the state that its refused drafts went through",
        DRAFTS,
        "another block table",
        _refused_drafts_stay,
    ),
):
    FAULTS.add(_name, _sentence, "kernel.metadata:build", _load, "fold", "observation", _says)(
        _make
    )


@FAULTS.add(
    "state-written-by-a-failed-build",
    "a build that fails leaves the states that it came to in their slots",
    "kernel.fake:FakeKernel._fails_to_build",
    BUILD_FAILS,
    "fold",
    "content",
    "not the row",
    late_steps=1,
)
def failed_build(original: Any, witness: Witness) -> Any:
    def fails(kernel: Any, batch: Batch, failure: Any) -> bool:
        if not original(kernel, batch, failure):
            return False
        metadata = build(batch, kernel.geometry)
        kernel._shadow.apply(batch, metadata)
        witness.note()
        return True

    return fails


@FAULTS.add(
    "state-kept-by-a-failed-build",
    "the same over a real model, whose tags are right",
    "kernel.model_kernel:ModelKernel._build",
    evolve(MIXED, name="a build that fails over a real model", kernel=LFM2),
    "forward",
    "token",
    "logit",
    late_steps=1,
)
def failed_real_build(original: Any, witness: Witness) -> Any:
    def built(kernel: Any, batch: Batch) -> Any:
        found = original(kernel, batch)
        if batch.step == FAILING_STEP:
            witness.note(record=DONE)
            kernel._pages.commit(found.pages)
            raise RuntimeError("a failure on order")
        return found

    return built


@FAULTS.add(
    "state-handed-to-a-new-sequence",
    "a model is given the state of the first slot where a sequence begins afresh",
    "kernel.recurrent:StateStep.caches",
    evolve(REUSED, kernel=MAMBA2),
    "forward",
    "token",
    "logit",
    late_steps=2,
)
def handed_on(original: Any, witness: Witness) -> Any:
    def caches(step: Any, pieces: Any) -> Any:
        given = original(step, pieces)
        fresh = all(cache.cache[0] is None for cache in given)
        if witness.step >= FAILING_STEP and fresh:
            witness.note(record=DONE)
            for number, cache in enumerate(given):
                for at in range(len(cache.cache)):
                    cache.cache[at] = step.slots[number, at][:1]
        return given

    return caches
