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
WARPS = 8
ROWS_MAX = 64
TILE = 32
"""Rows of weights that a warp takes; product.h's."""
PART = 32
"""The width of x is a multiple of that."""
LARGE = 1 << 25
"""Weights from that number on are left to cuBLAS, where rows are more than LARGE_ROWS: loads of the
rows then take longer than those of the weights, and its own time on the processor is hidden.
"""
LARGE_ROWS = 8
ADDED = (["x", "weights", "base"], ["out"])
GATED = (["x", "norm", "weights"], ["out"])
HEADS = (
    ["x", "norm", "queries", "keys", "values", "positions", "rates"],
    ["out_queries", "out_keys", "out_values"],
)


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


class Products(Protocol):
    """x: [T, width] bfloat16, up to ROWS_MAX rows; weights: [features, width]."""

    def added(self, x: mx.array, weights: mx.array, base: mx.array) -> mx.array:
        """`base` [T, features] and the product with `weights`."""

    def gated(self, x: mx.array, norm: Norm, weights: mx.array) -> mx.array:
        """silu of normed x's product with the first half of `weights`, times the one with the
        other half: [T, features / 2].
        """

    def heads(
        self, x: mx.array, norm: Norm, weights: Projections, positions: mx.array, rope: Rope
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Of normed x: queries and keys, turned by positions [T] int32, and values, each [T, heads,
        dim].
        """


class PlainProducts:
    """Products by MLX's own operations."""

    def added(self, x: mx.array, weights: mx.array, base: mx.array) -> mx.array:
        return mx.addmm(base, x, weights.T)

    def gated(self, x: mx.array, norm: Norm, weights: mx.array) -> mx.array:
        x = mx.fast.rms_norm(x, norm.weights, norm.eps)
        gated: mx.array = SWIGLU(*mx.split(x @ weights.T, 2, axis=-1))
        return gated

    def heads(
        self, x: mx.array, norm: Norm, weights: Projections, positions: mx.array, rope: Rope
    ) -> tuple[mx.array, mx.array, mx.array]:
        x = mx.fast.rms_norm(x, norm.weights, norm.eps)
        rows = [(x @ it.T).reshape(len(x), -1, 1, rope.dim) for it in weights]
        turned = [
            mx.fast.rope(
                it, rope.dim, traditional=rope.traditional, base=None, scale=1.0,
                offset=positions, freqs=1.0 / rope.rates,
            )
            for it in rows[:2]
        ]  # fmt: skip
        queries, keys, values = (it.squeeze(2) for it in (*turned, rows[2]))
        return queries, keys, values


def tiles_of(rows: int) -> int:
    """Eights of rows that a kernel is compiled for."""
    return next(tiles for tiles in (1, 2, 4, 8) if rows <= 8 * tiles)


def is_large(rows: int, *weights: mx.array) -> bool:
    """Whether a product is left to MLX."""
    return rows > LARGE_ROWS and sum(it.size for it in weights) >= LARGE


def header() -> str:
    """Files by path: MLX hashes this text at every call, and not what it includes."""
    return "".join(f'#include "{SOURCE / name}"\n' for name in HEADERS)


T = "__nv_bfloat16"


def added_body(tiles: int) -> str:
    return f"""
Added<{T}> layer{{weights, base, out, (int)x_shape[1], (int)weights_shape[0]}};
product<{T}, {tiles}, {WARPS}>(x, (int)x_shape[0], (int)x_shape[1], layer);
"""


def gated_body(tiles: int, eps: float) -> str:
    return f"""
Gated<{T}> layer{{norm, weights, out, (int)x_shape[1], (int)weights_shape[0] / 2, {eps!r}f}};
product<{T}, {tiles}, {WARPS}>(x, (int)x_shape[0], (int)x_shape[1], layer);
"""


def heads_body(tiles: int, eps: float, dim: int, traditional: bool) -> str:
    return f"""
Heads<{T}, {dim}, {str(traditional).lower()}> layer{{
    norm, queries, keys, values, out_queries, out_keys, out_values, (int)queries_shape[0],
    (int)keys_shape[0], (int)values_shape[0], positions, rates, (int)x_shape[1], {eps!r}f}};
product<{T}, {tiles}, {WARPS}>(x, (int)x_shape[0], (int)x_shape[1], layer);
"""


class CudaProducts:
    """See Products."""

    def __init__(self) -> None:
        self._plain = PlainProducts()

    def added(self, x: mx.array, weights: mx.array, base: mx.array) -> mx.array:
        rows, features = len(x), len(weights)
        if is_large(rows, weights):
            return self._plain.added(x, weights, base)
        inputs = [x, weights, base]
        return _launch(_added(tiles_of(rows)), inputs, features // TILE, [(rows, features)])[0]

    def gated(self, x: mx.array, norm: Norm, weights: mx.array) -> mx.array:
        rows, features = len(x), len(weights)
        if is_large(rows, weights):
            return self._plain.gated(x, norm, weights)
        inputs, kernel = [x, norm.weights, weights], _gated(tiles_of(rows), norm.eps)
        return _launch(kernel, inputs, features // TILE, [(rows, features // 2)])[0]

    def heads(
        self, x: mx.array, norm: Norm, weights: Projections, positions: mx.array, rope: Rope
    ) -> tuple[mx.array, mx.array, mx.array]:
        rows = len(x)
        if is_large(rows, *weights):
            return self._plain.heads(x, norm, weights, positions, rope)
        kernel = _heads(tiles_of(rows), norm.eps, rope.dim, rope.traditional)
        blocks = sum(len(it) for it in weights) // TILE
        shapes = [(rows, len(it) // rope.dim, rope.dim) for it in weights]
        inputs = [x, norm.weights, *weights, positions, rope.rates]
        queries, keys, values = _launch(kernel, inputs, blocks, shapes)
        return queries, keys, values


def _launch(
    kernel: Any, inputs: list[mx.array], blocks: int, shapes: Sequence[tuple[int, ...]]
) -> list[mx.array]:
    threads = WARPS * 32
    outputs: list[mx.array] = kernel(
        inputs=inputs,
        grid=(blocks * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=shapes,
        output_dtypes=[mx.bfloat16] * len(shapes),
    )
    return outputs


def _kernel(words: Sequence[object], names: tuple[list[str], list[str]], source: str) -> Any:
    """MLX keeps what it compiled by name: `words` are all that the source depends on."""
    inputs, outputs = names
    name = "_".join(map(str, words)).translate(str.maketrans(".+-", "___"))
    return mx.fast.cuda_kernel(
        name=name, input_names=inputs, output_names=outputs, source=source, header=header()
    )


@cache
def _added(tiles: int) -> Any:
    return _kernel(("added", tiles), ADDED, added_body(tiles))


@cache
def _gated(tiles: int, eps: float) -> Any:
    return _kernel(("gated", tiles, eps.hex()), GATED, gated_body(tiles, eps))


@cache
def _heads(tiles: int, eps: float, dim: int, traditional: bool) -> Any:
    words = ("heads", tiles, eps.hex(), dim, int(traditional))
    return _kernel(words, HEADS, heads_body(tiles, eps, dim, traditional))
