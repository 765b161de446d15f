"""Products of few rows with a layer's weights, by paged_source/product.h: CUDA's launches.

Owns which kernels there are, and which products are left to MLX. MLX hands a product of two rows
or more to cuBLAS, at 17 microseconds of the processor's time each; these take 4, and take along
what stands beside a product in a transformer's layer: the norm before it, the rotation of queries
and keys, the gate, the sum with what the layer was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
from attrs import frozen

from .fastmath import SWIGLU

SOURCE = Path(__file__).parent / "paged_source"
HEADERS = ("cuda.h", "product.h")
ROWS_MAX = 64
TILE = 32
"""Rows of weights that a warp takes; product.h's."""
PART = 32
"""The width of x is a multiple of that."""
LARGE = 1 << 25
"""Weights from that number on are left to cuBLAS, where rows are more than LARGE_ROWS: loads of the
rows then take longer than those of the weights.
"""
LARGE_ROWS = 8


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


Projections = tuple[mx.array, mx.array, mx.array]
"""Weights of queries, keys and values."""
Shapes = Sequence[tuple[int, ...]]
"""Of a kernel's outputs."""


class Products(Protocol):
    """x: [T, width] bfloat16, up to ROWS_MAX rows; weights: [features, width]."""

    def added(self, x: mx.array, weights: mx.array, base: mx.array) -> mx.array:
        """`base` [T, features] and the product with x, of any shape [T, ...]."""

    def gated(self, x: mx.array, norm: Norm, weights: mx.array) -> mx.array:
        """silu of normed x's product with the first half of `weights`, times the one with the
        other half: [T, features / 2].
        """

    def heads(
        self, x: mx.array, norm: Norm, weights: Projections, positions: mx.array, rope: Rope
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Of normed x: queries and keys, turned by positions [T] int32, and values, each [T, heads,
        1, dim].
        """


class PlainProducts:
    """Products by MLX's own operations."""

    def added(self, x: mx.array, weights: mx.array, base: mx.array) -> mx.array:
        return mx.addmm(base, x.reshape(len(x), -1), weights.T)

    def gated(self, x: mx.array, norm: Norm, weights: mx.array) -> mx.array:
        x = mx.fast.rms_norm(x, norm.weights, norm.eps)
        gated: mx.array = SWIGLU(*mx.split(x @ weights.T, 2, axis=-1))
        return gated

    def heads(
        self, x: mx.array, norm: Norm, weights: Projections, positions: mx.array, rope: Rope
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


@frozen
class Source:
    """A kernel: its name, warps of a block, what it is fed and gives, and the body of it."""

    name: str
    warps: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str


T = "__nv_bfloat16"


def warps_of(tiles: int) -> int:
    """Of a block. An H200 has about as many multiprocessors as some weights have tiles: a block
    that has one for itself must keep its memory busy. For sums of many rows sixteen warps have too
    few registers, and such a launch fails without a word.
    """
    return 16 if tiles == 1 else 8


def tiles_of(rows: int) -> int:
    """Eights of rows that a kernel is compiled for."""
    return next(tiles for tiles in (1, 2, 4, 8) if rows <= 8 * tiles)


def is_large(rows: int, *weights: mx.array) -> bool:
    """Whether a product is left to MLX."""
    return rows > LARGE_ROWS and sum(it.size for it in weights) >= LARGE


def added_source(tiles: int) -> Source:
    body = f"""
int width = (int)weights_shape[1];
Added<{T}> layer{{weights, base, out, width, (int)weights_shape[0]}};
"""
    inputs = ("x", "weights", "base")
    return _source("added", tiles, (), inputs, ("out",), body)


def gated_source(tiles: int, eps: float) -> Source:
    body = f"""
int width = (int)weights_shape[1];
Gated<{T}> layer{{norm, weights, out, width, (int)weights_shape[0] / 2, {eps!r}f}};
"""
    inputs = ("x", "norm", "weights")
    return _source("gated", tiles, (eps.hex(),), inputs, ("out",), body)


def heads_source(tiles: int, eps: float, rope: Rope) -> Source:
    traditional = str(rope.traditional).lower()
    body = f"""
int width = (int)queries_shape[1];
Heads<{T}, {rope.dim}, {traditional}> layer{{
    norm, queries, keys, values, out_queries, out_keys, out_values, (int)queries_shape[0],
    (int)keys_shape[0], (int)values_shape[0], positions, rates, width, {eps!r}f}};
"""
    words = (eps.hex(), rope.dim, int(rope.traditional))
    inputs = ("x", "norm", "queries", "keys", "values", "positions", "rates")
    outputs = ("out_queries", "out_keys", "out_values")
    return _source("heads", tiles, words, inputs, outputs, body)


def _source(
    kind: str,
    tiles: int,
    words: Sequence[object],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    layer: str,
) -> Source:
    """The product of `layer`, of a width `width`. MLX keeps what it compiled by name: `words` are
    all that the layer depends on.
    """
    name = "_".join(map(str, (kind, tiles, *words))).translate(str.maketrans(".+-", "___"))
    warps = warps_of(tiles)
    body = f"{layer}product<{T}, {tiles}, {warps}>(x, (int)x_shape[0], width, layer);"
    return Source(name, warps, inputs, outputs, body)


def header() -> str:
    """Files by path: MLX hashes this text at every call, and not what it includes."""
    return "".join(f'#include "{SOURCE / name}"\n' for name in HEADERS)


class CudaProducts:
    """See Products."""

    def __init__(self) -> None:
        self._plain = PlainProducts()

    def added(self, x: mx.array, weights: mx.array, base: mx.array) -> mx.array:
        rows, features = len(x), len(weights)
        if is_large(rows, weights):
            return self._plain.added(x, weights, base)
        source = added_source(tiles_of(rows))
        return self.launch(source, [x, weights, base], features, [(rows, features)])[0]

    def gated(self, x: mx.array, norm: Norm, weights: mx.array) -> mx.array:
        rows, features = len(x), len(weights)
        if is_large(rows, weights):
            return self._plain.gated(x, norm, weights)
        source, inputs = gated_source(tiles_of(rows), norm.eps), [x, norm.weights, weights]
        return self.launch(source, inputs, features, [(rows, features // 2)])[0]

    def heads(
        self, x: mx.array, norm: Norm, weights: Projections, positions: mx.array, rope: Rope
    ) -> tuple[mx.array, mx.array, mx.array]:
        rows, features = len(x), sum(len(it) for it in weights)
        if is_large(rows, *weights):
            return self._plain.heads(x, norm, weights, positions, rope)
        source = heads_source(tiles_of(rows), norm.eps, rope)
        inputs = [x, norm.weights, *weights, positions, rope.rates]
        shapes = [(rows, len(it) // rope.dim, 1, rope.dim) for it in weights]
        queries, keys, values = self.launch(source, inputs, features, shapes)
        return queries, keys, values

    def launch(
        self, source: Source, inputs: list[mx.array], features: int, shapes: Shapes
    ) -> list[mx.array]:
        """Run a kernel: its outputs. features: of all weights."""
        threads = source.warps * 32
        outputs: list[mx.array] = _kernel(source)(
            inputs=inputs,
            grid=(features // TILE * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=shapes,
            output_dtypes=[mx.bfloat16] * len(shapes),
        )
        return outputs


@cache
def _kernel(source: Source) -> Any:
    return mx.fast.cuda_kernel(
        name=source.name,
        input_names=list(source.inputs),
        output_names=list(source.outputs),
        source=source.body,
        header=header(),
    )
