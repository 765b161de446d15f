"""Products of few rows with a layer's weights, by paged_source: CUDA's launches of them.

Owns which kernels there are, and how weights are cut for them. MLX hands a product of two rows
or more to cuBLAS, at 17 microseconds of the processor's time each; these take 4, and take along
what stands beside a product in a transformer's layer: the norm before it, the rotation of queries
and keys, the gate, the sum with what the layer was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import mlx.core as mx
from attrs import evolve, frozen

from .fastmath import SWIGLU
from .kernel_text import header

HEADERS = ("cuda.h", "product.h")
"""For up to NARROW_ROWS."""
WIDE_HEADERS = ("cuda.h", "hopper.h", "product.h", "wide.h")
"""For more, on a GPU that has Hopper's instructions; elsewhere these are left to MLX."""
HOPPER = 9
"""Of the compute capability."""
NARROW_ROWS, ROWS_MAX = 8, 64
NARROW_THREADS = 512
"""An H200 has about as many multiprocessors as some weights have tiles: a block that has one for
itself must keep its memory busy.
"""
TILE = 32
"""Rows of weights that are finished together; product.h's."""
PART = 32
"""The width of x is a multiple of that."""
STEP_BYTES, WIDE_THREADS = 128, 256
"""wide.h's: bytes of a row in a stage, threads of a block."""
MULTIPROCESSORS = 132
"""Of an H200: no more blocks than that share tiles."""
ROOM_BYTES, SLACK_BYTES = 224 << 10, 4 << 10
"""Of a multiprocessor's shared memory, for blocks that run at once; and what no stage is in."""
STAGES_MAX = 8


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
    """A kernel: its name, threads of a block, the bytes that these share beyond what the body says,
    what it is fed and gives, and the body of it.
    """

    name: str
    headers: tuple[str, ...]
    threads: int
    room_bytes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str


@frozen
class Form:
    """A struct of product.h, as `layer`, with `width` and `features` (of all weights), and the
    kernel's arguments that it names. words: all that it depends on, since MLX keeps what it
    compiled by name.
    """

    kind: str
    words: tuple[object, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    text: str


@frozen
class Cut:
    """How wide.h cuts a product: rows that it is compiled for, tiles and stages of a block, and
    blocks that share tiles, each a part of the width.
    """

    rows: int
    tiles: int
    splits: int
    stages: int = 1
    norm_bytes: int = 0

    @property
    def stage_bytes(self) -> int:
        return (self.tiles * TILE + self.rows) * STEP_BYTES

    def groups(self, features: int) -> int:
        """Of blocks that share tiles."""
        return -(-features // (TILE * self.tiles))

    @property
    def share(self) -> int:
        """Numbers that a block leaves the last of its group; wide.h's SHARE."""
        return -(-self.tiles // 4) * self.rows // 2 * WIDE_THREADS + self.rows


T = "__nv_bfloat16"


@cache
def cut(rows: int, features: int, width: int) -> Cut:
    """The quickest way, by a guess in microseconds: a step takes a while however little it reads,
    all blocks together read 4.3 TB/s, weights from memory and x, at half the cost, from a cache,
    and to add up what blocks leave each other takes 6.
    """
    steps = -(-width * 2 // STEP_BYTES)
    asked = next(it for it in (16, 32, 64) if rows <= it)

    def guess(tiles: int, splits: int) -> float:
        blocks = Cut(asked, tiles, splits).groups(features) * splits
        read = blocks * (tiles * TILE + asked / 2) * STEP_BYTES
        if splits > 1 and (blocks > MULTIPROCESSORS or splits > steps):
            return float("inf")
        each = max(0.3 + 0.05 * tiles, read / 4.3e6)
        return steps / splits * each + (6.0 if splits > 1 else 0.0)

    sizes = (1, 2, 4)
    tiles, splits = min(((t, s) for t in sizes for s in sizes), key=lambda it: guess(*it))
    norm_bytes = (steps // splits + 1) * STEP_BYTES
    one = Cut(asked, tiles, splits, norm_bytes=norm_bytes)
    at_once = 1 if one.groups(features) * splits <= MULTIPROCESSORS else 2
    stages = (ROOM_BYTES // at_once - SLACK_BYTES - norm_bytes) // one.stage_bytes
    return evolve(one, stages=max(2, min(STAGES_MAX, stages)))


def added_form() -> Form:
    text = f"""
int width = (int)weights_shape[1], features = (int)weights_shape[0];
Added<{T}> layer{{weights, base, out, width, features}};
"""
    return Form("added", (), ("x", "weights", "base"), ("out",), text)


def gated_form(eps: float) -> Form:
    text = f"""
int width = (int)weights_shape[1], features = (int)weights_shape[0];
Gated<{T}> layer{{norm, weights, out, width, features / 2, {eps!r}f}};
"""
    return Form("gated", (eps.hex(),), ("x", "norm", "weights"), ("out",), text)


def heads_form(eps: float, rope: Rope) -> Form:
    traditional = str(rope.traditional).lower()
    text = f"""
int of_queries = (int)queries_shape[0], of_keys = (int)keys_shape[0];
int of_values = (int)values_shape[0], features = of_queries + of_keys + of_values;
int width = (int)queries_shape[1];
Heads<{T}, {rope.dim}, {traditional}> layer{{
    norm, queries, keys, values, out_queries, out_keys, out_values, of_queries, of_keys, of_values,
    positions, rates, width, {eps!r}f}};
"""
    words = (eps.hex(), rope.dim, int(rope.traditional))
    inputs = ("x", "norm", "queries", "keys", "values", "positions", "rates")
    return Form("heads", words, inputs, ("out_queries", "out_keys", "out_values"), text)


def narrow_source(form: Form) -> Source:
    """The kernel for up to NARROW_ROWS: a block a tile."""
    body = f"{form.text}product<{T}, {NARROW_THREADS // 32}>(x, (int)x_shape[0], width, layer);"
    name = _name(form, "narrow")
    return Source(name, HEADERS, NARROW_THREADS, 0, form.inputs, form.outputs, body)


def wide_source(form: Form, cut: Cut) -> Source:
    """The kernel for up to `cut.rows`: `cut.splits` blocks a group."""
    numbers = f"{cut.rows}, {cut.tiles}, {cut.splits}, {cut.stages}"
    body = f"""{form.text}wide_product<{T}, {numbers}>(
    x, (int)x_shape[0], width, features / {TILE}, parts, (unsigned*)counters, layer);"""
    room_bytes = cut.stages * cut.stage_bytes + SLACK_BYTES
    if "norm" in form.inputs:
        room_bytes += cut.norm_bytes
    # MLX asks for a kernel's room once a name.
    name = _name(form, cut.rows, cut.tiles, cut.splits, cut.stages, room_bytes)
    inputs, outputs = (*form.inputs, "counters"), (*form.outputs, "parts")
    return Source(name, WIDE_HEADERS, WIDE_THREADS, room_bytes, inputs, outputs, body)


def _name(form: Form, *more: object) -> str:
    words = "_".join(map(str, (form.kind, *more, *form.words)))
    return words.translate(str.maketrans(".+-", "___"))


class CudaProducts:
    """See Products. Launches of one of these run one after the other: they share counters."""

    def __init__(self) -> None:
        self._plain = PlainProducts()
        self._counters: mx.array | None = None

    def added(self, x: mx.array, weights: mx.array, base: mx.array) -> mx.array:
        rows, features = len(x), len(weights)
        if self.is_left(rows):
            return self._plain.added(x, weights, base)
        return self._run(added_form(), [x, weights, base], weights.shape, [(rows, features)])[0]

    def gated(self, x: mx.array, norm: Norm, weights: mx.array) -> mx.array:
        rows, features = len(x), len(weights)
        if self.is_left(rows):
            return self._plain.gated(x, norm, weights)
        inputs = [x, norm.weights, weights]
        return self._run(gated_form(norm.eps), inputs, weights.shape, [(rows, features // 2)])[0]

    def heads(
        self, x: mx.array, norm: Norm, weights: Projections, positions: mx.array, rope: Rope
    ) -> tuple[mx.array, mx.array, mx.array]:
        rows, size = len(x), (sum(len(it) for it in weights), weights[0].shape[1])
        if self.is_left(rows):
            return self._plain.heads(x, norm, weights, positions, rope)
        inputs = [x, norm.weights, *weights, positions, rope.rates]
        shapes = [(rows, len(it) // rope.dim, 1, rope.dim) for it in weights]
        queries, keys, values = self._run(heads_form(norm.eps, rope), inputs, size, shapes)
        return queries, keys, values

    def is_left(self, rows: int) -> bool:
        """Whether products are left to MLX."""
        return rows > NARROW_ROWS and mx.device_info().get("compute_capability_major") != HOPPER

    def launch(
        self, source: Source, inputs: list[mx.array], blocks: int, shapes: Shapes
    ) -> list[mx.array]:
        """Run a kernel: its outputs."""
        parts = [mx.float32 if name == "parts" else mx.bfloat16 for name in source.outputs]
        outputs: list[mx.array] = _kernel(source)(
            inputs=inputs,
            grid=(blocks * source.threads, 1, 1),
            threadgroup=(source.threads, 1, 1),
            output_shapes=shapes,
            output_dtypes=parts,
        )
        return outputs

    def _run(
        self, form: Form, inputs: list[mx.array], size: tuple[int, ...], shapes: Shapes
    ) -> list[mx.array]:
        """size: features and width of all weights."""
        rows, (features, width) = len(inputs[0]), size
        if rows <= NARROW_ROWS:
            return self.launch(narrow_source(form), inputs, features // TILE, shapes)
        if self._counters is None:
            self._counters = mx.zeros((MULTIPROCESSORS,), mx.uint32)
            mx.eval(self._counters)
        way = cut(rows, features, width)
        blocks = way.groups(features) * way.splits
        parts = (blocks * way.share if way.splits > 1 else 1,)
        inputs = [*inputs, self._counters]
        return self.launch(wide_source(form, way), inputs, blocks, [*shapes, parts])[:-1]


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
