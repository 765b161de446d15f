"""Product forms: the kernels of paged_source's products, as CUDA's compiler is handed them.

Owns what each product is fed and gives, which numbers a kernel is compiled for, and how weights are
cut for blocks. Launches nothing.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx
from attrs import evolve, frozen

from .kernel_text import TYPES

HEADERS = ("cuda.h", "product.h")
"""Of the narrow kernel."""
WIDE_HEADERS = ("cuda.h", "hopper.h", "product.h", "wide.h")
"""Of the wide one, for GPUs that have Hopper's instructions."""
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
PARTS = "parts"
"""The output of float32 sums that blocks leave each other; only where they do: to MLX each array
more is work.
"""


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
    kernel's arguments that it names. words: all that it depends on beside `type`, CUDA's word for
    its numbers, since MLX keeps what it compiled by name.
    """

    kind: str
    type: str
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


@cache
def cut(rows: int, features: int, width: int) -> Cut:
    """The quickest way, by a guess in microseconds: a step takes a while however little it reads,
    all blocks together read 4.3 TB/s, weights from memory and x, at half the cost, from a cache,
    and to add up what blocks leave each other takes 6.
    """
    steps = -(-width * 2 // STEP_BYTES)
    asked = next(it for it in (8, 16, 32, 64) if rows <= it)

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


def added_form(dtype: mx.Dtype) -> Form:
    kind = TYPES[dtype]
    text = f"""
int width = (int)weights_shape[1], features = (int)weights_shape[0];
Added<{kind}> layer{{weights, base, out, width, features}};
"""
    return Form("added", kind, (), ("x", "weights", "base"), ("out",), text)


def gated_form(dtype: mx.Dtype, eps: float | None) -> Form:
    """eps: None where x comes normed."""
    kind, (norm, flag, more) = TYPES[dtype], _norm(eps, "weights")
    text = f"""
int width = (int)weights_shape[1], features = (int)weights_shape[0];
Gated<{kind}, {flag}> layer{{{norm}, weights, out, width, features / 2, {eps or 0.0!r}f}};
"""
    return Form("gated", kind, (_word(eps),), ("x", *more, "weights"), ("out",), text)


def heads_form(dtype: mx.Dtype, eps: float | None, dim: int, is_traditional: bool) -> Form:
    """eps: None where x comes normed."""
    kind, (norm, flag, more) = TYPES[dtype], _norm(eps, "queries")
    traditional = str(is_traditional).lower()
    text = f"""
int of_queries = (int)queries_shape[0], of_keys = (int)keys_shape[0];
int of_values = (int)values_shape[0], features = of_queries + of_keys + of_values;
int width = (int)queries_shape[1];
Heads<{kind}, {dim}, {traditional}, {flag}> layer{{
    {norm}, queries, keys, values, out_queries, out_keys, out_values, of_queries, of_keys,
    of_values, positions, rates, width, {eps or 0.0!r}f}};
"""
    words = (_word(eps), dim, int(is_traditional))
    inputs = ("x", *more, "queries", "keys", "values", "positions", "rates")
    return Form("heads", kind, words, inputs, ("out_queries", "out_keys", "out_values"), text)


def _norm(eps: float | None, instead: str) -> tuple[str, str, tuple[str, ...]]:
    """The norm's weights as a form names them, whether it norms, and what it is fed for that."""
    return (instead, "false", ()) if eps is None else ("norm", "true", ("norm",))


def _word(eps: float | None) -> str:
    return "normed" if eps is None else eps.hex()


def narrow_source(form: Form) -> Source:
    """The kernel for up to 8 rows: a block a tile."""
    numbers = f"{form.type}, {NARROW_THREADS // 32}"
    body = f"{form.text}product<{numbers}>(x, (int)x_shape[0], width, layer);"
    name = _name(form, "narrow")
    return Source(name, HEADERS, NARROW_THREADS, 0, form.inputs, form.outputs, body)


def wide_source(form: Form, cut: Cut) -> Source:
    """The kernel for up to `cut.rows`: `cut.splits` blocks a group."""
    numbers = f"{cut.rows}, {cut.tiles}, {cut.splits}, {cut.stages}"
    left = (PARTS,) if cut.splits > 1 else ()
    body = f"""{form.text}wide_product<{form.type}, {numbers}>(
    x, (int)x_shape[0], width, features / {TILE}, {PARTS if left else "(float*)nullptr"},
    (unsigned*)counters, layer);"""
    room_bytes = cut.stages * cut.stage_bytes + SLACK_BYTES
    if "norm" in form.inputs:
        room_bytes += cut.norm_bytes
    # MLX asks for a kernel's room once a name.
    name = _name(form, cut.rows, cut.tiles, cut.splits, cut.stages, room_bytes)
    inputs, outputs = (*form.inputs, "counters"), (*form.outputs, *left)
    return Source(name, WIDE_HEADERS, WIDE_THREADS, room_bytes, inputs, outputs, body)


def _name(form: Form, *more: object) -> str:
    words = "_".join(map(str, (form.kind, form.type, *more, *form.words)))
    return words.translate(str.maketrans(".+-", "___"))
