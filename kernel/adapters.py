"""Adapters: LoRA folders as mlx-lm writes them, several of them in one forward.

Owns their tensors, and what a layer adds to its output for the rows of an adapter:

    y = W x + scale * (x A) B        (Hu et al., LoRA, 2021)

W is computed for all rows at once, as if there were no adapters; then the rows of each adapter are
picked out, and what theirs says is added to them. Which row is whose comes from the namespaces of
the step's sequences. A row whose adapter is not there is refused, never served by the base alone.

A layer that an adapter names gets a subclass of its own class, not a wrapper around it: names and
weights stay where models, loaders and quantised layers look for them. One thread makes every call.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from attrs import define, field, frozen
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from statemachine.events import Namespace

from .adapter_files import A, AdapterFiles, B, read_files, version_of
from .batch import Piece
from .errors import AdapterError
from .metadata import BadBatch, Ints, Longs
from .narrow_layers import NarrowLinear
from .starting import settle

TURNED = ("q_proj", "k_proj")
"""Layers whose rows stand in another order in GGUF files of architecture llama."""

Key = tuple[str, int]
"""An adapter's name and version."""


@frozen(eq=False)
class Pair:
    """What a layer adds: a [in, rank], b [rank, out]."""

    a: mx.array
    b: mx.array
    scale: float

    def of(self, x: mx.array) -> mx.array:
        """For rows [..., in]: [..., out]."""
        return (self.scale * ((x @ self.a) @ self.b)).astype(x.dtype)


@frozen
class Adapter:
    """An adapter that was loaded. digest: that of its files; other weights under the same name are
    another version.
    """

    name: str
    path: str
    digest: str

    @property
    def key(self) -> Key:
        """What rows are told apart by."""
        return self.name, version_of(self.digest)


@frozen(eq=False)
class Lanes:
    """The rows of one call that have adapters. rows: all of the call's. parts: each adapter with
    its rows; None where all rows are its.
    """

    rows: int
    parts: tuple[tuple[Key, mx.array | None], ...]


@define(eq=False)
class _Active:
    """What the layers of a model look at while they are called."""

    lanes: Lanes | None = None


@define(eq=False)
class _Deltas:
    """Of one layer: what it adds, by adapter."""

    name: str
    active: _Active
    pairs: dict[Key, Pair] = field(factory=dict)

    def added(self, lanes: Lanes, x: mx.array, y: mx.array) -> mx.array:
        """`y` [..., out], with what the adapters of its rows say of `x` [..., in]."""
        for key, index in lanes.parts:
            pair = self.pairs.get(key)
            if pair is None:
                continue
            if index is None:
                y = y + pair.of(x)
                continue
            flat = x.reshape(-1, x.shape[-1])
            if len(flat) != lanes.rows:
                raise AdapterError(
                    f"{self.name} is called for {len(flat)} rows in a step of {lanes.rows}, so "
                    "that whose they are is not known: send requests of one adapter at a time"
                )
            mine = y.reshape(-1, y.shape[-1]).at[index].add(pair.of(flat[index]))
            y = mine.reshape(y.shape)
        return y


class _Adapted:
    """Mixed into a layer's class by `_adapted`."""

    adapter_deltas: _Deltas

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = super().__call__(x)  # type: ignore[misc]
        lanes = self.adapter_deltas.active.lanes
        return y if lanes is None else self.adapter_deltas.added(lanes, x, y)


@cache
def _adapted(kind: Any) -> type[Any]:
    made: type[Any] = type(f"Adapted{kind.__name__}", (_Adapted, kind), {})
    return made


class Serving:
    """Whose the rows of a step are. `rows` says so to the layers, for one call of the model."""

    def __init__(self, active: _Active, keys: Sequence[Key], lane: Ints) -> None:
        """lane: [T], each row's place in `keys`, -1 for the base."""
        self._active, self._keys, self._lane = active, keys, lane

    @contextmanager
    def rows(self, rows: Longs | None = None) -> Iterator[None]:
        """While the model is called for these rows of the batch; None: for all."""
        if not self._keys:
            yield
            return
        lane = self._lane if rows is None else self._lane[rows.reshape(-1)]
        self._active.lanes = self._lanes(lane)
        try:
            yield
        finally:
            self._active.lanes = None

    def _lanes(self, lane: Ints) -> Lanes | None:
        present = [number for number in np.unique(lane).tolist() if number >= 0]
        if not present:
            return None
        parts: list[tuple[Key, mx.array | None]] = []
        for number in present:
            mine = np.flatnonzero(lane == number)
            whole = len(mine) == len(lane)
            parts.append((self._keys[number], None if whole else mx.array(mine.astype(np.uint32))))
        return Lanes(len(lane), tuple(parts))


BASE = Serving(_Active(), (), np.empty(0, np.int32))
"""Of a step without adapters: it says nothing to anyone."""


class Adapters:
    """The adapters of one model; none at first.

    turned_head_dim: rows of a head, where those of q and k stand as in GGUF files of llama.
    """

    def __init__(self, model: Any, turned_head_dim: int = 0) -> None:
        self._model = model
        self._turned = turned_head_dim
        self._active = _Active()
        self._held: dict[Key, Adapter] = {}

    @property
    def held(self) -> tuple[Adapter, ...]:
        """All that rows may have."""
        return tuple(self._held.values())

    def load(self, name: str, path: str) -> Adapter:
        """Read a folder; rows may have it from now on, beside any other version of that name.

        Raises AdapterError where it cannot be read, or is not for this model.
        """
        settle()
        files, layers = read_files(path), dict(self._model.named_modules())
        pairs = {layer: self._pair(files, layer, layers.get(layer)) for layer in files.tensors}
        mx.eval([(pair.a, pair.b) for pair in pairs.values()])
        adapter = Adapter(name, str(files.folder), files.digest)
        for layer, pair in pairs.items():
            self._deltas_of(layer, layers[layer]).pairs[adapter.key] = pair
        self._held[adapter.key] = adapter
        return adapter

    def keep(self, keys: Container[Key]) -> None:
        """Let go of all others."""
        for key in [key for key in self._held if key not in keys]:
            for _, layer in self._model.named_modules():
                if isinstance(layer, _Adapted):
                    layer.adapter_deltas.pairs.pop(key, None)
            del self._held[key]

    def serving(self, pieces: Sequence[Piece]) -> Serving:
        """Whose rows are in a step. Raises BadBatch where one's adapter is not there."""
        if not any(piece.sequence.namespace.adapter for piece in pieces):
            return BASE
        keys = tuple(self._held)
        lanes = [self._lane(piece, keys) for piece in pieces]
        rows = [piece.rows for piece in pieces]
        return Serving(self._active, keys, np.repeat(np.array(lanes, np.int32), rows))

    def serving_alone(self, space: Namespace) -> Serving:
        """A call whose rows are all of one namespace. Raises KeyError where its adapter is not
        there.
        """
        if not space.adapter:
            return BASE
        key = (space.adapter, space.version)
        self._held[key]
        return Serving(self._active, (key,), np.zeros(1, np.int32))

    def _lane(self, piece: Piece, keys: tuple[Key, ...]) -> int:
        space = piece.sequence.namespace
        if not space.adapter:
            return -1
        key = (space.adapter, space.version)
        if key not in self._held:
            raise BadBatch(
                f"adapter {space.adapter} is not loaded in version {space.version:016x}",
                piece.sequence.id,
            )
        return keys.index(key)

    def _deltas_of(self, name: str, layer: Any) -> _Deltas:
        if not isinstance(layer, _Adapted):
            layer.adapter_deltas = _Deltas(name, self._active)
            kind: Any = type(layer)
            layer.__class__ = _adapted(kind)
        deltas: _Deltas = layer.adapter_deltas
        if deltas.active is not self._active:
            raise AdapterError(
                "this model has the adapters of another engine already: load it a second time"
            )
        return deltas

    def _pair(self, files: AdapterFiles, name: str, layer: Any) -> Pair:
        """What is added to a layer. Raises AdapterError where it does not fit this model."""
        folder = files.folder
        if layer is None:
            raise AdapterError(f"{folder} is not for this model, which has no layer {name!r}")
        if _kind(layer) not in (Linear, QuantizedLinear):
            raise AdapterError(
                f"{folder} changes {name} ({type(layer).__name__}), and only linear layers can "
                "have adapters: train it without that layer (lora_parameters.keys)"
            )
        tensors, (outs, ins) = files.tensors[name], _dimensions(layer)
        shapes = {end: tuple(array.shape) for end, array in tensors.items()}
        rank = shapes.get(A, (0, 0))[-1]
        if shapes != {A: (ins, rank), B: (rank, outs)}:
            raise AdapterError(
                f"{folder} is not for this model: {name} takes {A} ({ins}, rank) and {B} "
                f"(rank, {outs}), and it has {shapes}"
            )
        a, b = tensors[A], tensors[B]
        if mx.default_device().type == mx.cpu:
            a, b = a.astype(mx.float32), b.astype(mx.float32)
        if self._turned and name.rpartition(".")[2] in TURNED:
            b = _turned(b, self._turned)
        return Pair(a, b, files.scale)


def _kind(layer: Any) -> Any:
    """A layer's class without adapters; models have subclasses that mean other things."""
    kind = type(layer).__bases__[-1] if isinstance(layer, _Adapted) else type(layer)
    return Linear if kind is NarrowLinear else kind


def _dimensions(layer: Any) -> tuple[int, int]:
    """Rows out and in of a linear layer."""
    outs, ins = layer.weight.shape
    return outs, ins * 32 // layer.bits if isinstance(layer, QuantizedLinear) else ins


def _turned(b: mx.array, head_dim: int) -> mx.array:
    """[rank, out] with each head's two halves interleaved, as GGUF files have them."""
    return b.reshape(len(b), -1, 2, head_dim // 2).swapaxes(2, 3).reshape(b.shape)
