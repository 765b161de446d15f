"""Products of few rows with a layer's weights, by product.h and broad.h: CUDA's launches.

Owns which kernels there are, and which of them takes a product. MLX hands a product of two rows or
more to cuBLAS, at 17 microseconds of the processor's time each; these take 4, and take along what
stands beside a product in a transformer's layer: the norm before it, the rotation of queries and
keys, the gate, the sum with what the layer was given.
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
HEADERS = ("cuda.h", "product.h", "broad.h")
WARPS = 8
ROWS_MAX = 64
TILE = 32
"""Rows of weights that a warp takes; product.h's."""
PART = 32
"""The width of x is a multiple of that."""
ACROSS = (8, 4, 2)
"""Tiles that a block takes whose warps share x."""
BLOCKS = 96
"""Fewer blocks leave too much of an H200 idle: then they take fewer tiles."""
SPLITS = 4
"""Blocks that share a sum, where nothing is normed."""


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


@frozen(eq=False)
class Summed:
    """Weights [features, width] of what is added. counters: a zero for each tile, by which blocks
    that share a sum find out which of them is the last; no two launches at once have the same.
    """

    weights: mx.array
    counters: mx.array

    @classmethod
    def of(cls, weights: mx.array) -> Summed:
        counters = mx.zeros((len(weights) // TILE,), mx.uint32)
        mx.eval(counters)
        return cls(weights, counters)


Projections = tuple[mx.array, mx.array, mx.array]
"""Weights of queries, keys and values."""


class Products(Protocol):
    """x: [T, width] bfloat16, up to ROWS_MAX rows; weights: [features, width]. after: weights that
    the next product takes, which may be asked for before it begins.
    """

    def added(self, x: mx.array, summed: Summed, base: mx.array, after: mx.array) -> mx.array:
        """`base` [T, features] and the product with x, of any shape [T, ...]."""

    def gated(self, x: mx.array, norm: Norm, weights: mx.array, after: mx.array) -> mx.array:
        """silu of normed x's product with the first half of `weights`, times the one with the
        other half: [T, features / 2].
        """

    def heads(
        self,
        x: mx.array,
        norm: Norm,
        weights: Projections,
        positions: mx.array,
        rope: Rope,
        after: mx.array,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Of normed x: queries and keys, turned by positions [T] int32, and values, each [T, heads,
        1, dim].
        """


class PlainProducts:
    """Products by MLX's own operations."""

    def added(self, x: mx.array, summed: Summed, base: mx.array, after: mx.array) -> mx.array:
        return mx.addmm(base, x.reshape(len(x), -1), summed.weights.T)

    def gated(self, x: mx.array, norm: Norm, weights: mx.array, after: mx.array) -> mx.array:
        x = mx.fast.rms_norm(x, norm.weights, norm.eps)
        gated: mx.array = SWIGLU(*mx.split(x @ weights.T, 2, axis=-1))
        return gated

    def heads(
        self,
        x: mx.array,
        norm: Norm,
        weights: Projections,
        positions: mx.array,
        rope: Rope,
        after: mx.array,
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
    """A kernel: its name, what it is fed and gives, and the body of it."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str


@frozen
class Form:
    """How a product is cut. tiles: eights of rows that a kernel is compiled for. across: tiles of
    weights that share rows of x; 1 where each block reads them from memory. splits: blocks that
    share a sum.
    """

    tiles: int
    across: int
    splits: int

    @classmethod
    def of(cls, rows: int, features: int, splits: int = 1) -> Form:
        tiles = next(tiles for tiles in (1, 2, 4, 8) if rows <= 8 * tiles)
        count = features // TILE
        fitting = [it for it in ACROSS if count % it == 0 and count * splits // it >= BLOCKS]
        return cls(tiles, fitting[0], splits) if tiles > 1 and fitting else cls(tiles, 1, 1)

    @property
    def words(self) -> tuple[int, ...]:
        return self.tiles, self.across, self.splits

    def blocks(self, features: int) -> int:
        return features // TILE // self.across * self.splits

    def call(self, parts: str = "nullptr, nullptr") -> str:
        """The launch of `layer`, of a width `width`."""
        fed = "x, (int)x_shape[0], width, layer, next, next_shape"
        if self.across == 1:
            return f"product<{T}, {self.tiles}, {WARPS}>({fed});"
        numbers = f"{self.tiles}, {WARPS}, {self.across}, {self.splits}"
        return f"broad_product<{T}, {numbers}>({fed}, {parts});"


T = "__nv_bfloat16"


def added_source(form: Form) -> Source:
    body = f"""
int width = (int)weights_shape[1];
Added<{T}> layer{{weights, base, out, width, (int)weights_shape[0]}};
"""
    inputs, outputs = ("x", "weights", "base", "next"), ("out",)
    if form.splits == 1:
        return _source(("added", *form.words), inputs, outputs, body + form.call())
    call = form.call("const_cast<unsigned*>(counters), parts")
    names = (*inputs, "counters"), (*outputs, "parts")
    return _source(("added", *form.words), *names, body + call)


def gated_source(form: Form, eps: float) -> Source:
    body = f"""
int width = (int)weights_shape[1];
Gated<{T}> layer{{norm, weights, out, width, (int)weights_shape[0] / 2, {eps!r}f}};
"""
    inputs = ("x", "norm", "weights", "next")
    return _source(("gated", *form.words, eps.hex()), inputs, ("out",), body + form.call())


def heads_source(form: Form, eps: float, rope: Rope) -> Source:
    traditional = str(rope.traditional).lower()
    body = f"""
int width = (int)queries_shape[1];
Heads<{T}, {rope.dim}, {traditional}> layer{{
    norm, queries, keys, values, out_queries, out_keys, out_values, (int)queries_shape[0],
    (int)keys_shape[0], (int)values_shape[0], positions, rates, width, {eps!r}f}};
"""
    words = ("heads", *form.words, eps.hex(), rope.dim, int(rope.traditional))
    inputs = ("x", "norm", "queries", "keys", "values", "positions", "rates", "next")
    outputs = ("out_queries", "out_keys", "out_values")
    return _source(words, inputs, outputs, body + form.call())


def _source(
    words: Sequence[object], inputs: tuple[str, ...], outputs: tuple[str, ...], body: str
) -> Source:
    """MLX keeps what it compiled by name: `words` are all that the body depends on."""
    name = "_".join(map(str, words)).translate(str.maketrans(".+-", "___"))
    return Source(name, inputs, outputs, body)


def header() -> str:
    """Files by path: MLX hashes this text at every call, and not what it includes."""
    return "".join(f'#include "{SOURCE / name}"\n' for name in HEADERS)


class CudaProducts:
    """See Products."""

    def added(self, x: mx.array, summed: Summed, base: mx.array, after: mx.array) -> mx.array:
        rows, features = len(x), len(summed.weights)
        form = Form.of(rows, features, SPLITS)
        inputs, shapes = [x, summed.weights, base, after], [(rows, features)]
        dtypes = [mx.bfloat16]
        if form.splits > 1:
            inputs.append(summed.counters)
            shapes.append((form.splits * form.tiles * 8, features))
            dtypes.append(mx.float32)
        return self.launch(added_source(form), inputs, form.blocks(features), shapes, dtypes)[0]

    def gated(self, x: mx.array, norm: Norm, weights: mx.array, after: mx.array) -> mx.array:
        rows, features = len(x), len(weights)
        form = Form.of(rows, features)
        inputs, shapes = [x, norm.weights, weights, after], [(rows, features // 2)]
        source = gated_source(form, norm.eps)
        return self.launch(source, inputs, form.blocks(features), shapes, [mx.bfloat16])[0]

    def heads(
        self,
        x: mx.array,
        norm: Norm,
        weights: Projections,
        positions: mx.array,
        rope: Rope,
        after: mx.array,
    ) -> tuple[mx.array, mx.array, mx.array]:
        rows, features = len(x), sum(len(it) for it in weights)
        form = Form.of(rows, features)
        shapes = [(rows, len(it) // rope.dim, 1, rope.dim) for it in weights]
        inputs = [x, norm.weights, *weights, positions, rope.rates, after]
        source = heads_source(form, norm.eps, rope)
        dtypes = [mx.bfloat16] * 3
        queries, keys, values = self.launch(source, inputs, form.blocks(features), shapes, dtypes)
        return queries, keys, values

    def launch(
        self,
        source: Source,
        inputs: list[mx.array],
        blocks: int,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        """Run a kernel: its outputs."""
        threads = WARPS * 32
        outputs: list[mx.array] = _kernel(source)(
            inputs=inputs,
            grid=(blocks * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=shapes,
            output_dtypes=dtypes,
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
