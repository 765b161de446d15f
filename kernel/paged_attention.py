"""Attention through block tables: a kernel reads the pages in place of a gather.

Owns which rows of a step go to which kernel, the plans' arrays, and how the outputs are put
together. The kernels are a dialect's (attention_cuda.py, attention_metal.py); what they compute is
in paged_source/decode.h. Decides no length: all bounds come from the step's metadata.

With a dialect that writes `in_place`, the rows of a step never enter the pages' graph: the kernel
that attends over a row also writes it, into the arrays that it reads from. That is sound because
nothing reads, in the step that writes it, a row from the pages: rows of the same step are read from
where the layer made them, and steps follow each other on the device. So page arrays stay the same
arrays, and no write can copy a pool.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Protocol

import mlx.core as mx
import numpy as np
from attrs import evolve, frozen

from .drawing import Sampler
from .fastmath import LOG2E
from .metadata import Longs, StepMetadata
from .paged_plan import RowsPlan, plan_fetch, plan_rows
from .products import Products
from .quantised import Code

ROW_KEYS_MAX = 1 << 16
"""A GPU's row_keys_max: to make keys dense costs as much as that on an H200."""
EARLY = True
DTYPES = (mx.bfloat16, mx.float16, mx.float32)
DIM_MAX = 256


@frozen
class Shape:
    """What a kernel is compiled for: `shared` query heads read each of `kv_heads`.

    dtype: the layer's. scale: in natural units. sinks: whether each head has the score of a key
    without a value. group: where rows are words of 8-bit numbers, how many share a scale; else 0.
    """

    dtype: mx.Dtype
    block_size: int
    kv_heads: int
    shared: int
    key_dim: int
    value_dim: int
    scale: float
    sinks: bool
    group: int = 0

    @property
    def columns(self) -> int:
        """Blocks that share an item: K/V heads, times the parts that their query heads take."""
        return self.kv_heads * -(-self.shared // self.heads_max)

    @property
    def heads(self) -> int:
        """Query heads that a block takes, the most."""
        return -(-self.shared // -(-self.shared // self.heads_max))

    @property
    def heads_max(self) -> int:
        return 4 if self.dtype == mx.float32 or self.group else 8

    @property
    def row_parts(self) -> int:
        """Parts that a head's key and value are fetched in: of four numbers, or a word."""
        parts = (self.key_dim + self.value_dim) // 4
        return parts + (self.key_dim + self.value_dim) // self.group * 2 if self.group else parts

    @property
    def of_pages(self) -> Shape:
        """The part that a fetch depends on."""
        return evolve(self, shared=1, scale=1.0, sinks=False)

    @property
    def name(self) -> str:
        """Unlike for unlike kernels: MLX keeps what it compiled by name."""
        dims = (self.block_size, self.kv_heads, self.shared, self.key_dim, self.value_dim)
        scale = float(self.scale).hex().translate(str.maketrans(".+-", "___"))
        words = [str(self.dtype).split(".")[-1], *map(str, dims), scale, str(int(self.sinks))]
        words += [str(self.group)] if self.group else []
        return "paged_" + "_".join(words)

    @property
    def scale_of_two(self) -> str:
        """The scale of scores in powers of two, as C++ writes it."""
        return f"{float(self.scale * LOG2E)!r}f"


@frozen(eq=False)
class Layer:
    """A layer's arrays in a step. pages: K and V [num_blocks, block_size, KV, dim]; keys, values:
    the step's own [T, KV, 1, dim]; sinks: [H] or None. codes: what words of quantised pages mean.
    """

    number: int
    key_pages: mx.array
    value_pages: mx.array
    keys: mx.array
    values: mx.array
    sinks: mx.array | None = None
    codes: tuple[Code, Code] | None = None

    @property
    def dtype(self) -> mx.Dtype:
        """Of its rows, as they are attended to."""
        return self.key_pages.dtype if self.codes is None else self.codes[0].dtype


class Dialect(Protocol):
    """Kernels of one kind of device."""

    native: str
    """Of kernels that were compiled here, their name: a processor's instructions, and a digest."""
    in_place: bool
    blocks: int
    """How many keep the device busy."""
    row_keys_max: int
    """A piece is attended row by row up to that many keys of all its rows together; beyond it, its
    keys are made dense first.
    """
    dtypes: tuple[mx.Dtype, ...]
    """Of rows as they stand in the pages, or as they are read from words."""
    coded_bits: tuple[int, ...]
    """Of the words of quantised rows that are read."""
    products: Products | None
    """Products of few rows with weights, where there are kernels for them."""
    sampler: Sampler | None
    """Samples in one launch, where there is a kernel for it."""

    def decode(
        self, shape: Shape, plan: mx.array, counts: RowsPlan, queries: mx.array, layer: Layer
    ) -> mx.array:
        """Each planned row of queries [T, H, ..., dim] over its keys: [T, H, ..., value dim], other
        rows undefined.
        """

    def fetch(
        self, shape: Shape, plan: mx.array, rows: int, layer: Layer
    ) -> tuple[mx.array, mx.array]:
        """The K and V that a piece reads, [KV, rows, dim]; its own rows are put into the pages."""

    def reset(self) -> None:
        """Forget what a failed step may have left behind."""


class OnGpu:
    """What dialects of GPUs have in common."""

    native = ""
    row_keys_max = ROW_KEYS_MAX
    dtypes: tuple[mx.Dtype, ...] = DTYPES
    coded_bits: tuple[int, ...] = (8,)


def takes(key_dim: int, value_dim: int) -> bool:
    """Whether there are kernels for heads of these sizes."""
    even = key_dim % 8 == 0 and value_dim % 8 == 0
    return even and value_dim > 0 and max(key_dim, value_dim) <= DIM_MAX


class StepTables:
    """A step's plans, each made once and shared by the layers.

    row_keys_max: the dialect's, if None.
    """

    def __init__(
        self, dialect: Dialect, metadata: StepMetadata, row_keys_max: int | None = None
    ) -> None:
        self._dialect = dialect
        self._metadata = metadata
        most = dialect.row_keys_max if row_keys_max is None else row_keys_max
        long = (metadata.rows > 1) & (metadata.rows * metadata.end > most)
        self._short: Longs = np.flatnonzero(~long)
        self._long: list[int] = np.flatnonzero(long).tolist()
        self._runs = _runs(metadata, long) if self._long else []
        self._plans: dict[tuple[int, int], tuple[mx.array, RowsPlan]] = {}
        self._fetches: dict[tuple[int, int], tuple[mx.array, int, mx.array | str]] = {}

    @property
    def in_place(self) -> bool:
        return self._dialect.in_place

    @property
    def attends(self) -> bool:
        """Whether all rows of the step can be attended to here; otherwise none is."""
        return self.in_place or not self._long

    def attend(self, group: int, queries: mx.array, layer: Layer, scale: float) -> mx.array:
        """Each row of `queries` [T, H, 1, dim] over what its piece may read: [T, H, 1, value dim].

        Writes the step's rows into the pages where the dialect does that in place.
        """
        rows = queries.astype(layer.dtype)
        shape = shape_of(layer, rows.shape[1], scale)
        layer = _as_written(layer)
        short = None
        if len(self._short):
            plan, counts = self.plan(group, shape.columns)
            short = self._dialect.decode(shape, plan, counts, rows, layer)
        if not self._long:
            assert short is not None
            out = short
        else:
            out = mx.concatenate(
                [
                    self._dense(piece, group, shape, rows[begin:end], layer)
                    if piece is not None
                    else _part(short, begin, end)
                    for piece, begin, end in self._runs
                ]
            )
        if EARLY and self._long:
            # A long piece's layers take longer on the device than here: it begins with the first
            # while Python is at the others. What this holds is no page array.
            mx.async_eval(out)  # type: ignore[no-untyped-call]
        return out.astype(queries.dtype)

    @property
    def fixed(self) -> bool:
        """Whether what is launched depends on nothing but the plans."""
        return self.in_place and not self._long

    @property
    def asked(self) -> tuple[tuple[int, int], ...]:
        """Groups and columns of the plans that the layers wanted so far."""
        return tuple(self._plans)

    def with_plans(self, arrays: Mapping[tuple[int, int], mx.array]) -> StepTables:
        """The same step, its plans read from other arrays."""
        other = copy.copy(self)
        other._plans = {key: (array, self._plans[key][1]) for key, array in arrays.items()}
        return other

    def plan(self, group: int, columns: int) -> tuple[mx.array, RowsPlan]:
        """The step's rows as items, for layers of a group."""
        key = (group, columns)
        if key not in self._plans:
            counts = plan_rows(
                self._metadata,
                group,
                self._short,
                in_place=self.in_place,
                columns=columns,
                blocks=self._dialect.blocks,
                roomy=self.in_place,
            )
            self._plans[key] = (mx.array(counts.ints), counts)
        return self._plans[key]

    def _dense(
        self, piece: int, group: int, shape: Shape, queries: mx.array, layer: Layer
    ) -> mx.array:
        """A piece of many rows, [n, H, 1, dim], over its keys made dense: [n, H, 1, value dim]."""
        key = (piece, group)
        if key not in self._fetches:
            planned = plan_fetch(self._metadata, group, piece)
            mask = "causal" if planned.mask is None else mx.array(planned.mask)
            self._fetches[key] = (mx.array(planned.ints), planned.rows, mask)
        plan, rows, mask = self._fetches[key]
        keys, values = self._dialect.fetch(shape, plan, rows, layer)
        out: mx.array = mx.fast.scaled_dot_product_attention(
            queries.transpose(2, 1, 0, 3),
            keys[None],
            values[None],
            scale=shape.scale,
            mask=mask,
            sinks=layer.sinks,
        )
        return out.transpose(2, 1, 0, 3)


def shape_of(layer: Layer, heads: int, scale: float) -> Shape:
    """What a layer's kernels are compiled for."""
    _, size, kv_heads, key_dim = layer.key_pages.shape
    value_dim = layer.value_pages.shape[3]
    group = 0
    if layer.codes is not None:
        key_dim, value_dim = (code.dim for code in layer.codes)
        group = layer.codes[0].group
    return Shape(
        dtype=layer.dtype,
        block_size=size,
        kv_heads=kv_heads,
        shared=heads // kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        scale=scale,
        sinks=layer.sinks is not None,
        group=group,
    )


def put_blocks(dialect: Dialect, layer: Layer, blocks: mx.array) -> None:
    """Write whole blocks in place: `layer` has their rows, [blocks, block_size, KV, dim]. Waits.

    A fetch of a piece that begins at 0 and has these rows: what it gives back is of no use. Blocks
    of words are taken for one row each, since a row of these may have any width.
    """
    arrays = [layer.key_pages, layer.value_pages, layer.keys, layer.values]
    if layer.key_pages.dtype == mx.uint32:
        arrays = [it.reshape(len(it), 1, 1, -1) for it in arrays]
    keys, values = (it.reshape(-1, *it.shape[2:]) for it in arrays[2:])
    head = mx.array(np.array([len(keys), 0, 0, 0, 0], np.int32))
    plan = mx.concatenate([head, blocks.astype(mx.int32)])
    raw = Layer(layer.number, arrays[0], arrays[1], keys, values)
    mx.eval(dialect.fetch(shape_of(raw, keys.shape[1], 1.0), plan, len(keys), raw))


def _as_written(layer: Layer) -> Layer:
    """The step's rows as they are written: in the pages' dtype, or in words."""
    rows = (layer.keys, layer.values)
    if layer.codes is None:
        keys, values = (it.astype(layer.dtype) for it in rows)
    else:
        keys, values = (code.encode(it) for code, it in zip(layer.codes, rows, strict=True))
    sinks = None if layer.sinks is None else layer.sinks.astype(layer.dtype)
    return evolve(layer, keys=keys, values=values, sinks=sinks)


def _runs(metadata: StepMetadata, long: np.ndarray) -> list[tuple[int | None, int, int]]:
    """The batch's rows in order: each long piece, and the rows between these as (None, ...)."""
    runs: list[tuple[int | None, int, int]] = []
    for piece, is_long in enumerate(long.tolist()):
        begin = int(metadata.first[piece])
        end = begin + int(metadata.rows[piece])
        if is_long:
            runs.append((piece, begin, end))
        elif runs and runs[-1][0] is None:
            runs[-1] = (None, runs[-1][1], end)
        else:
            runs.append((None, begin, end))
    return runs


def _part(rows: mx.array | None, begin: int, end: int) -> mx.array:
    assert rows is not None
    return rows[begin:end]
