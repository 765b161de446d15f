"""Products of few rows with a layer's weights, by paged_source: CUDA's launches of them.

Owns which of the kernels (product_forms.py) multiplies what. MLX hands a product of two rows
or more to cuBLAS, at 17 microseconds of the processor's time each; these take 4, and take along
what stands beside a product in a transformer's layer: the norm before it, the rotation of queries
and keys, the gate, the sum with what the layer was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any, Protocol

import mlx.core as mx
from attrs import frozen

from .fastmath import SWIGLU
from .kernel_text import header
from .product_forms import (
    MULTIPROCESSORS,
    PART,
    PARTS,
    TILE,
    Form,
    Source,
    added_form,
    cut,
    gated_form,
    heads_form,
    narrow_source,
    wide_source,
)

HOPPER = 9
"""Of the compute capability."""
NARROW_ROWS, ROWS_MAX = 8, 64
NARROW_WEIGHTS = 1 << 24
"""For up to NARROW_ROWS, weights of the narrow kernel on Hopper: a block of it has most of its
tile on its way at once, and is done. A block of the wide one takes longer to begin, and then has a
steady part of many tiles on its way.
"""


@frozen(eq=False)
class Rope:
    """How queries and keys are turned. rates: [dim / 2] float32, the angle a position; traditional:
    whether a pair's numbers stand side by side, else half a head apart.
    """

    dim: int
    rates: mx.array
    traditional: bool


@frozen(eq=False)
class Norm:
    """RMSNorm of x before a product."""

    weights: mx.array
    eps: float


Weights = Any
"""Of one layer or of several, as `Products` that hold them take them."""
Shapes = Sequence[tuple[int, ...]]
"""Of a kernel's outputs."""


class Products(Protocol):
    """x: [T, width], up to `rows_max` rows, of one of `dtypes`, as weights [features, width] are.

    checked_rows: numbers of rows by which all kernels are compared with the model's own modules at
    load, and tolerance: how far a row may be from theirs, of its length.
    """

    rows_max: int
    dtypes: tuple[mx.Dtype, ...]
    checked_rows: tuple[int, ...]
    tolerance: float

    def lacks(self, model: Any) -> str:
        """What is missing to hold the weights of a model; empty where nothing is."""

    def takes(self, features: int, width: int) -> bool:
        """Whether there are kernels for weights of these sizes."""

    def hold(self, linear: Any) -> Weights:
        """The weights of a linear layer."""

    def hold_gates(self, gate: Any, other: Any) -> Weights:
        """Of the two whose products are multiplied, of the same sizes."""

    def hold_projections(self, queries: Any, keys: Any, values: Any) -> Weights:
        """Of those whose products heads are cut from."""

    def hold_head(self, linear: Any) -> Weights | None:
        """Of the layer or the embedding that logits come from; None where that is left to MLX."""

    def multiplied(self, x: mx.array, weights: Weights) -> mx.array:
        """The product of x, [T, features]."""

    def added(self, x: mx.array, weights: Weights, base: mx.array) -> mx.array:
        """`base` [T, features] and the product with x, of any shape [T, ...]."""

    def gated(self, x: mx.array, norm: Norm, weights: Weights) -> mx.array:
        """silu of normed x's product with the first half of `weights`, times the one with the
        other half: [T, features / 2].
        """

    def heads(
        self, x: mx.array, norm: Norm, weights: Weights, positions: mx.array, rope: Rope
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Of normed x: queries and keys, turned by positions [T] int32, and values, each [T, heads,
        1, dim].
        """


class ArrayProducts:
    """Weights as the modules have them: arrays."""

    rows_max = ROWS_MAX
    dtypes: tuple[mx.Dtype, ...] = (mx.bfloat16, mx.float16)
    checked_rows: tuple[int, ...] = (8, 11, 20, ROWS_MAX)
    """One number for each kernel that is compiled."""
    tolerance = 2e-2
    """Products are rounded to 8 bits here and there."""

    def lacks(self, model: Any) -> str:
        return ""

    def takes(self, features: int, width: int) -> bool:
        return width % PART == 0 and features % TILE == 0

    def hold(self, linear: Any) -> Weights:
        return linear.weight

    def hold_gates(self, gate: Any, other: Any) -> Weights:
        """In one array, [2 * features, width]; the modules keep views."""
        gates = mx.concatenate([gate.weight, other.weight])
        mx.eval(gates)
        gate.weight, other.weight = mx.split(gates, 2)
        mx.eval(gate.weight, other.weight)
        return gates

    def hold_projections(self, queries: Any, keys: Any, values: Any) -> Weights:
        return queries.weight, keys.weight, values.weight

    def hold_head(self, linear: Any) -> Weights | None:
        return None

    def multiplied(self, x: mx.array, weights: Weights) -> mx.array:
        product: mx.array = x @ weights.T
        return product


class PlainProducts(ArrayProducts):
    """Products by MLX's own operations."""

    def added(self, x: mx.array, weights: Weights, base: mx.array) -> mx.array:
        return mx.addmm(base, x.reshape(len(x), -1), weights.T)

    def gated(self, x: mx.array, norm: Norm, weights: Weights) -> mx.array:
        x = mx.fast.rms_norm(x, norm.weights, norm.eps)
        gated: mx.array = SWIGLU(*mx.split(x @ weights.T, 2, axis=-1))
        return gated

    def heads(
        self, x: mx.array, norm: Norm, weights: Weights, positions: mx.array, rope: Rope
    ) -> tuple[mx.array, mx.array, mx.array]:
        x = mx.fast.rms_norm(x, norm.weights, norm.eps)
        rows = [(x @ it.T).reshape(len(x), -1, 1, rope.dim) for it in weights]
        queries, keys = (
            mx.fast.rope(
                it, rope.dim, traditional=rope.traditional, base=None, scale=1.0,
                offset=positions, freqs=1.0 / rope.rates,
            )
            for it in rows[:2]
        )  # fmt: skip
        return queries, keys, rows[2]


class CudaProducts(ArrayProducts):
    """See Products. Launches of one of these run one after the other: they share counters."""

    def __init__(self) -> None:
        self._plain = PlainProducts()
        self._counters: mx.array | None = None

    def added(self, x: mx.array, weights: Weights, base: mx.array) -> mx.array:
        rows, features = len(x), len(weights)
        if self.is_left(rows):
            return self._plain.added(x, weights, base)
        form, inputs = added_form(x.dtype), [x, weights, base]
        return self._run(form, inputs, weights.shape, [(rows, features)])[0]

    def gated(self, x: mx.array, norm: Norm, weights: Weights) -> mx.array:
        rows, features = len(x), len(weights)
        if self.is_left(rows):
            return self._plain.gated(x, norm, weights)
        before, eps = _normed(x, norm)
        form, inputs = gated_form(x.dtype, eps), [*before, weights]
        return self._run(form, inputs, weights.shape, [(rows, features // 2)])[0]

    def heads(
        self, x: mx.array, norm: Norm, weights: Weights, positions: mx.array, rope: Rope
    ) -> tuple[mx.array, mx.array, mx.array]:
        rows, size = len(x), (sum(len(it) for it in weights), weights[0].shape[1])
        if self.is_left(rows):
            return self._plain.heads(x, norm, weights, positions, rope)
        before, eps = _normed(x, norm)
        inputs = [*before, *weights, positions, rope.rates]
        shapes = [(rows, len(it) // rope.dim, 1, rope.dim) for it in weights]
        form = heads_form(x.dtype, eps, rope.dim, rope.traditional)
        queries, keys, values = self._run(form, inputs, size, shapes)
        return queries, keys, values

    @cached_property
    def on_hopper(self) -> bool:
        return bool(mx.device_info().get("compute_capability_major") == HOPPER)

    def is_left(self, rows: int) -> bool:
        """Whether products are left to MLX."""
        return rows > NARROW_ROWS and not self.on_hopper

    def launch(
        self, source: Source, inputs: list[mx.array], blocks: int, shapes: Shapes
    ) -> list[mx.array]:
        """Run a kernel: its outputs."""
        dtype = inputs[0].dtype
        dtypes = [mx.float32 if name == PARTS else dtype for name in source.outputs]
        outputs: list[mx.array] = _kernel(source)(
            inputs=inputs,
            grid=(blocks * source.threads, 1, 1),
            threadgroup=(source.threads, 1, 1),
            output_shapes=shapes,
            output_dtypes=dtypes,
        )
        return outputs

    def _run(
        self, form: Form, inputs: list[mx.array], size: tuple[int, ...], shapes: Shapes
    ) -> list[mx.array]:
        """size: features and width of all weights."""
        rows, (features, width) = len(inputs[0]), size
        is_few = features * width <= NARROW_WEIGHTS or not self.on_hopper
        if rows <= NARROW_ROWS and is_few:
            return self.launch(narrow_source(form), inputs, features // TILE, shapes)
        if self._counters is None:
            self._counters = mx.zeros((MULTIPROCESSORS,), mx.uint32)
            mx.eval(self._counters)
        way = cut(rows, features, width)
        blocks = way.groups(features) * way.splits
        left = [(blocks * way.share,)] if way.splits > 1 else []
        inputs = [*inputs, self._counters]
        outputs = self.launch(wide_source(form, way), inputs, blocks, [*shapes, *left])
        return outputs[: len(shapes)]


def _normed(x: mx.array, norm: Norm) -> tuple[list[mx.array], float | None]:
    """What a kernel is fed of x and its norm. Times the norm's weights, and not divided yet, x can
    be larger than float16 holds: it is normed before, by a launch of its own.
    """
    if x.dtype == mx.float16:
        return [mx.fast.rms_norm(x, norm.weights, norm.eps)], None
    return [x, norm.weights], norm.eps


@cache
def _kernel(source: Source) -> Any:
    return mx.fast.cuda_kernel(
        name=source.name,
        input_names=list(source.inputs),
        output_names=list(source.outputs),
        source=source.body,
        header=header(source.headers),
        shared_memory=source.room_bytes,
    )
