"""Recurrent: the states of convolutions and state spaces, one a slot, and how a model meets them.

Owns the arrays of states, [num_slots, ...] each, and the only writes to them. Never reads a table
or a length: which slots are read and written stands in a step's metadata.

    slots  [num_slots, ...] --read--> [B, ...] --a call of the model--> [B, ...] --put--> slots

What a step reads is evaluated before its graph is built: MLX donates an array to the scatter that
replaces it, instead of copying all slots, only if no read of it is queued. Nothing is in place
before `commit`, so a build that fails leaves all states as they were.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import mlx.core as mx
import numpy as np
from attrs import define, field, frozen
from mlx_lm.models.cache import ArraysCache

from statemachine.events import NO_BLOCK, BlockCopied
from statemachine.geometry import Geometry

from .errors import ModelError
from .metadata import CacheUse, Longs, StepMetadata
from .scatter import put_slots


@frozen
class ArrayKind:
    """One array of a state, without its first axis, which counts sequences."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.size


@frozen
class StateKind:
    """What one of the model's caches keeps: its arrays in order, None where it never puts one."""

    arrays: tuple[ArrayKind | None, ...]

    @property
    def kept(self) -> tuple[tuple[int, ArrayKind], ...]:
        """Those that it does put, with their places."""
        return tuple((at, kind) for at, kind in enumerate(self.arrays) if kind is not None)


Place = tuple[int, int]
"""A cache that keeps a state, and an array in it."""
Arrays = dict[Place, mx.array]


def slot_bytes(kinds: Items[StateKind]) -> int:
    """Bytes of one slot, over all caches."""
    return sum(kind.nbytes for _, kind in _places(kinds))


class StateCache(ArraysCache):
    """mlx-lm's own cache of arrays, for one call of the model, and how the model used it.

    found: the states of B sequences, [B, ...] each, by their places; none where they begin afresh.
    """

    def __init__(self, number: int, kind: StateKind, found: Arrays) -> None:
        super().__init__(len(kind.arrays))
        self.cache: list[Any] = [found.get((number, at)) for at in range(len(kind.arrays))]
        self._number, self._kind = number, kind
        self._reads = 0
        self._puts = [0] * len(kind.arrays)

    def __getitem__(self, place: int) -> Any:
        self._reads += 1
        return self.cache[place]

    def __setitem__(self, place: int, value: Any) -> None:
        self.cache[place] = value
        self._puts[place] += 1

    def used(self, rows: int) -> CacheUse | None:
        """What the model did with it in a call of so many rows; None where it never does."""
        puts = [self._puts[at] > 0 for at, _ in self._kind.kept]
        if not puts:
            return None
        all_put = all(puts)
        return CacheUse(self._reads, int(all_put), rows * all_put, self._reads, strangers=0)

    def made(self, count: int) -> Arrays:
        """The states behind the call, [count, ...] each. Raises ModelError for other arrays."""
        kinds = enumerate(self._kind.arrays)
        unlike = [at for at, kind in kinds if (kind is None) != (self.cache[at] is None)]
        if unlike:
            raise ModelError(f"state {self._number} is left with other arrays than it had")
        return {
            (self._number, at): self._fitted(self.cache[at], kind, count)
            for at, kind in self._kind.kept
        }

    def _fitted(self, value: mx.array, kind: ArrayKind, count: int) -> mx.array:
        """A window of rows that is shorter than it may be, since there were no more, is as if
        nothing but zeros had been before them.
        """
        wanted = (count, *kind.shape)
        sizes = zip(value.shape, wanted, strict=False)
        short = [at for at, (size, full) in enumerate(sizes) if size < full]
        if len(short) == 1 and short[0]:
            (axis,) = short
            width = [(0, 0)] * value.ndim
            width[axis] = (wanted[axis] - value.shape[axis], 0)
            value = mx.pad(value, width)
        if value.shape != wanted:
            raise ModelError(f"state {self._number} is left {value.shape}, not {wanted}")
        return value.astype(kind.dtype)


@define(eq=False)
class StateStep:
    """One step's use of the slots. slots: the arrays that its graph has come to. kinds: of each
    cache that keeps a state.
    """

    kinds: tuple[StateKind, ...]
    slots: Arrays
    _read: Arrays = field(init=False, factory=dict)
    _found: dict[int, int] = field(init=False, factory=dict)
    """By piece, where its states stand in what was read."""
    _made: list[tuple[Longs, Arrays]] = field(init=False, factory=list)

    def read(self, metadata: StepMetadata) -> None:
        """Fetch all states that the step's pieces go on from."""
        read = metadata.state_reads[_group(metadata.geometry)]
        on = np.flatnonzero(read != NO_BLOCK)
        self._found = {piece: place for place, piece in enumerate(on.tolist())}
        if len(on):
            index = mx.array(read[on].astype(np.uint32))
            self._read = {place: array[index] for place, array in self.slots.items()}
            mx.eval(self._read)

    def caches(self, pieces: Longs) -> list[StateCache]:
        """What a call with these pieces takes: either all go on, or it is one that does not."""
        places = [self._found[piece] for piece in pieces.tolist() if piece in self._found]
        if places and len(places) < len(pieces):
            raise ModelError("a sequence that begins afresh stands beside others in a call")
        found: Arrays = {}
        if places == list(range(len(self._found))):
            found = self._read
        elif places:
            index = mx.array(np.array(places, np.uint32))
            found = {place: array[index] for place, array in self._read.items()}
        return [StateCache(number, kind, found) for number, kind in enumerate(self.kinds)]

    def put(self, pieces: Longs, caches: list[StateCache]) -> None:
        """Keep what a call left in its caches."""
        made: Arrays = {}
        for cache in caches:
            made |= cache.made(len(pieces))
        self._made.append((pieces, made))

    def finish(self, metadata: StepMetadata) -> None:
        """Put all states into their slots."""
        order = np.concatenate([pieces for pieces, _ in self._made])
        written = metadata.state_writes[_group(metadata.geometry)][order]
        for place, held in self.slots.items():
            parts = [made[place] for _, made in self._made]
            rows = mx.concatenate(parts) if len(parts) > 1 else parts[0]
            self.slots[place] = put_slots(held, written, rows)
        self._read, self._found, self._made = {}, {}, []


class StateSlots:
    """The states of every cache, in slots. `begin` a step, `commit` it, as with pages."""

    def __init__(self, geometry: Geometry, kinds: tuple[StateKind, ...]) -> None:
        self._group = _group(geometry)
        self._count = geometry.groups[self._group].num_blocks
        self._kinds = kinds
        self._slots: Arrays = {}

    @property
    def arrays(self) -> list[mx.array]:
        """All of them."""
        return list(self._slots.values())

    def reset(self) -> None:
        """Throw the arrays away unread and make new ones, zeroed."""
        # In place: a failed step's frames, kept by its exception, may still name this one.
        self._slots.clear()
        for place, kind in _places(self._kinds):
            self._slots[place] = mx.zeros((self._count, *kind.shape), kind.dtype)
        mx.eval(self._slots)

    def begin(self) -> StateStep:
        """Arrays for a step's graph. Nothing here changes before `commit`."""
        return StateStep(self._kinds, dict(self._slots))

    def commit(self, step: StateStep) -> None:
        """The step's graph was built: its arrays are the slots now."""
        self._slots = step.slots

    def copy(self, copies: Items[BlockCopied]) -> None:
        """Copy whole slots, all read before any is written. Nothing changes where this raises."""
        mine = [copied for copied in copies if copied.group == self._group]
        if not mine:
            return
        sources = mx.array(np.array([copied.source for copied in mine], np.uint32))
        targets = np.array([copied.target for copied in mine], np.int32)
        read = {place: array[sources] for place, array in self._slots.items()}
        mx.eval(read)
        for place, rows in read.items():
            self._slots[place] = put_slots(self._slots[place], targets, rows)


def _places(kinds: Items[StateKind]) -> list[tuple[Place, ArrayKind]]:
    return [((number, at), it) for number, kind in enumerate(kinds) for at, it in kind.kept]


def _group(geometry: Geometry) -> int:
    """The recurrent group, of which a model has one."""
    return next(number for number, group in enumerate(geometry.groups) if group.recurrent)
