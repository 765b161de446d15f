"""Pages: the K and V of every layer, in blocks, and recurrent states, in slots.

Owns the page arrays and the only writes to them. Never reads a table or a length: it is told
physical rows. Made and used on one thread.

MLX donates a page array to the scatter that replaces it, instead of copying the whole pool, only
if nothing else holds it. So a step works on a PageStep's lists, `commit` drops the old references
before anything is evaluated, and no one else keeps a page array, or a view of one.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import mlx.core as mx
import numpy as np
from attrs import define, frozen

from statemachine.events import BlockCopied
from statemachine.geometry import Geometry

from .paged_attention import Dialect, Layer, put_blocks
from .quantised import Code
from .recurrent import StateKind, StateSlots, StateStep
from .scatter import put

Codes = tuple[Code, Code]


@frozen
class LayerShape:
    """A layer's rows: its group, K/V heads, and the width of a head's key and value, as they stand
    in the pages. codes: of quantised rows, what their words mean (K, V).
    """

    group: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    codes: Codes | None = None

    @property
    def row_dtype(self) -> mx.Dtype:
        """What the layer's rows are before they are put into the pages."""
        return self.codes[0].dtype if self.codes else self.dtype

    @property
    def row_bytes(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.size


def block_bytes(layers: Items[LayerShape], group: int, block_size: int) -> int:
    """Bytes of one block of `group`, over all of its layers, K and V."""
    return block_size * sum(layer.row_bytes for layer in layers if layer.group == group)


@define(eq=False)
class PageStep:
    """The page arrays that one step's graph has come to: [num_blocks, block_size, heads, dim].

    codes: of each layer; none at all where no rows are quantised. states: where there are any.
    """

    keys: list[mx.array]
    values: list[mx.array]
    codes: tuple[Codes | None, ...] = ()
    states: StateStep | None = None

    def codes_of(self, layer: int) -> Codes | None:
        """What a layer's words mean, where its rows are quantised."""
        return self.codes[layer] if self.codes else None

    def write(
        self, layer: int, where: tuple[mx.array, mx.array], keys: mx.array, values: mx.array
    ) -> None:
        """Put rows [T, heads, dim] at (block [T], row [T]) of a layer."""
        if codes := self.codes_of(layer):
            keys, values = (code.encode(it) for code, it in zip(codes, (keys, values), strict=True))
        self.keys[layer] = put(self.keys[layer], where, keys)
        self.values[layer] = put(self.values[layer], where, values)


class Pages:
    """All page arrays. `begin` a step, build its graph, `commit` it, then evaluate.

    dialect: where it writes in place, arrays stay the same, and a copy of blocks is written so too.
    states: of each cache that keeps one.
    """

    def __init__(
        self,
        geometry: Geometry,
        layers: tuple[LayerShape, ...],
        dialect: Dialect | None = None,
        states: tuple[StateKind, ...] = (),
    ) -> None:
        self._geometry = geometry
        self._states = StateSlots(geometry, states) if states else None
        self._in_place = dialect if dialect is not None and dialect.in_place else None
        self._layers = layers
        self._codes = tuple(layer.codes for layer in layers)
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []
        self.reset()

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        return self._layers

    @property
    def nbytes(self) -> int:
        """Bytes of all page arrays and states."""
        return sum(array.nbytes for array in (*self._keys, *self._values, *self.states))

    @property
    def states(self) -> list[mx.array]:
        """All arrays of states: evaluated with each step, since no sample needs them."""
        return [] if self._states is None else self._states.arrays

    def reset(self) -> None:
        """Throw the arrays away unread and make new ones, zeroed."""
        # In place: a failed step's frames, kept by its exception, may still name these lists.
        self._keys.clear()
        self._values.clear()
        size = self._geometry.block_size
        for layer in self._layers:
            rows = (self._geometry.groups[layer.group].num_blocks, size, layer.kv_heads)
            self._keys.append(mx.zeros((*rows, layer.key_dim), layer.dtype))
            self._values.append(mx.zeros((*rows, layer.value_dim), layer.dtype))
        mx.eval(self._keys, self._values)
        if self._states is not None:
            self._states.reset()

    def begin(self) -> PageStep:
        """Lists for a step's graph. Nothing here changes before `commit`."""
        states = None if self._states is None else self._states.begin()
        return PageStep(list(self._keys), list(self._values), self._codes, states)

    def commit(self, step: PageStep) -> None:
        """The step's graph was built: its arrays are the pages now."""
        self._keys, self._values = step.keys, step.values
        if self._states is not None and step.states is not None:
            self._states.commit(step.states)

    def copy_blocks(self, copies: Items[BlockCopied]) -> None:
        """Copy whole blocks, all read before any is written. Nothing changes where this raises.

        What is read is evaluated at once: a read of a page array that is still queued would make
        the write after it copy the whole pool.
        """
        step = self.begin()
        pending = []
        for number, layer in enumerate(self._layers):
            mine = [copied for copied in copies if copied.group == layer.group]
            if mine:
                sources = mx.array(np.array([copied.source for copied in mine], np.uint32))
                targets = mx.array(np.array([copied.target for copied in mine], np.uint32))
                rows = (step.keys[number][sources], step.values[number][sources])
                pending.append((number, targets, rows))
        mx.eval([rows for _, _, rows in pending])
        self._place(step, pending)
        if self._states is not None:
            self._states.copy(copies)

    def read_blocks(self, blocks: Items[int]) -> list[tuple[mx.array, mx.array]]:
        """K and V of whole blocks, of each layer: [len(blocks), block_size, heads, dim].

        Evaluated at once, as in `copy_blocks`.
        """
        where = mx.array(np.array(blocks, np.uint32))
        rows = [
            (keys[where], values[where])
            for keys, values in zip(self._keys, self._values, strict=True)
        ]
        mx.eval(rows)
        return rows

    def write_blocks(self, blocks: Items[int], rows: Items[tuple[mx.array, mx.array]]) -> None:
        """Put back what `read_blocks` gives."""
        targets = mx.array(np.array(blocks, np.uint32))
        self._place(self.begin(), [(number, targets, it) for number, it in enumerate(rows)])

    def _place(
        self, step: PageStep, pending: Items[tuple[int, mx.array, tuple[mx.array, mx.array]]]
    ) -> None:
        """Write whole blocks: (layer, blocks, their K and V)."""
        if self._in_place is not None:
            for number, targets, rows in pending:
                arrays = Layer(number, step.keys[number], step.values[number], *rows)
                put_blocks(self._in_place, arrays, targets)
            return
        for number, targets, (keys, values) in pending:
            step.keys[number] = put(step.keys[number], (targets,), keys)
            step.values[number] = put(step.values[number], (targets,), values)
        self.commit(step)
