"""Attention through block tables on CUDA: launches of paged_source's kernels.

Owns the sources as MLX compiles them, and the counters by which a row's items find out which of
them is the last. Pages are written in place, behind MLX's back; why that is sound stands in
paged_attention.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import mlx.core as mx

from .drawing import CudaSampler, Sampler
from .fastmath import LOG2E
from .kernel_text import TYPES, header
from .paged_attention import Layer, OnGpu, Shape
from .paged_plan import RowsPlan
from .products import CudaProducts, Products

HEADERS = ("cuda.h", "decode.h", "tensor.h")
WARPS, WARPS_LEAST = 8, 4
"""Of a block. Where sequences are few a multiprocessor has one block, which waits for memory the
less the more of its keys are on their way at once.
"""
MIXES_MAX = 1024
"""Numbers that WARPS warps may each leave the block: 32 of the 48 KB that it may share."""
FETCH_THREADS = 256
DECODE_INPUTS = [
    "plan", "queries", "key_pages", "value_pages", "keys", "values", "sinks", "counters",
]  # fmt: skip
FETCH_INPUTS = ["plan", "key_pages", "value_pages", "keys", "values"]


def warps_of(shape: Shape) -> int:
    """Warps of a block that attends."""
    return WARPS if shape.heads * shape.value_dim <= MIXES_MAX else WARPS_LEAST


def decode_outputs(split: bool) -> list[str]:
    """What the kernel gives; parts of rows only where a row is split, since each array more is work
    to MLX.
    """
    return ["out", "parts", "tops"] if split else ["out"]


def decode_body(shape: Shape, split: bool = True) -> str:
    """The kernel's one line."""
    numbers = (
        TYPES[shape.dtype], row_of(shape, TYPES), shape.block_size, shape.key_dim, shape.value_dim,
        shape.kv_heads, shape.shared, shape.heads, warps_of(shape), str(shape.sinks).lower(),
    )  # fmt: skip
    inputs = ", ".join(f"({kind_of(shape, name)} const*){name}" for name in DECODE_INPUTS)
    inputs = inputs.replace("(unsigned const*)counters", "(unsigned*)counters")
    parts = "parts, tops" if split else "(float*)nullptr, (float*)nullptr"
    outputs = f"({TYPES[shape.dtype]}*)out, {parts}"
    return f"decode<{', '.join(map(str, numbers))}>({inputs}, {outputs}, {shape.scale_of_two});"


def fetch_body(shape: Shape) -> str:
    kind = TYPES[shape.dtype]
    dims = (shape.block_size, shape.key_dim, shape.value_dim, shape.kv_heads)
    words = (
        [kind, row_of(shape, TYPES), *map(str, dims)] if shape.group else [kind, *map(str, dims)]
    )
    name = "fetch_words" if shape.group else "fetch"
    return f"{name}<{', '.join(words)}>({', '.join(FETCH_INPUTS)}, out_keys, out_values);"


def row_of(shape: Shape, types: Mapping[mx.Dtype, str]) -> str:
    """decode.h's word for a row of the pages."""
    return f"CodedRow<{shape.group}>" if shape.group else f"PlainRow<{types[shape.dtype]}>"


def kind_of(shape: Shape, name: str) -> str:
    """The type of an input's numbers."""
    kinds = {"plan": "int", "sinks": "float", "counters": "unsigned", "queries": TYPES[shape.dtype]}
    return kinds.get(name, "unsigned" if shape.group else TYPES[shape.dtype])


class CudaDialect(OnGpu):
    """See paged_attention.Dialect. blocks: two for each multiprocessor of an H200; registers leave
    room for three.
    """

    in_place = True
    blocks = 264
    sampler: Sampler | None = CudaSampler()

    def __init__(self) -> None:
        self._counters: dict[int, mx.array] = {}
        self.products: Products | None = CudaProducts()

    def decode(
        self, shape: Shape, plan: mx.array, counts: RowsPlan, queries: mx.array, layer: Layer
    ) -> mx.array:
        heads = queries.shape[1]
        sinks = plan if layer.sinks is None else layer.sinks.astype(mx.float32) * LOG2E
        split = counts.splits > 1
        shapes = [
            (*queries.shape[:-1], shape.value_dim), (counts.items, heads, shape.value_dim),
            (counts.items, heads, 2),
        ]  # fmt: skip
        given = len(decode_outputs(split))
        threads = warps_of(shape) * 32
        out: mx.array
        out, *_ = _decode_kernel(shape, split)(
            inputs=[
                plan, queries, layer.key_pages, layer.value_pages, layer.keys, layer.values,
                sinks, self._counters_of(layer.number, counts.rows * shape.columns),
            ],
            grid=(threads * shape.columns, counts.items, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=shapes[:given],
            output_dtypes=[shape.dtype, mx.float32, mx.float32][:given],
        )  # fmt: skip
        return out

    def fetch(
        self, shape: Shape, plan: mx.array, rows: int, layer: Layer
    ) -> tuple[mx.array, mx.array]:
        threads = rows * shape.kv_heads * shape.row_parts
        keys, values = _fetch_kernel(shape.of_pages)(
            inputs=[plan, layer.key_pages, layer.value_pages, layer.keys, layer.values],
            grid=(-(-threads // FETCH_THREADS) * FETCH_THREADS, 1, 1),
            threadgroup=(FETCH_THREADS, 1, 1),
            output_shapes=[
                (shape.kv_heads, rows, shape.key_dim), (shape.kv_heads, rows, shape.value_dim),
            ],
            output_dtypes=[shape.dtype, shape.dtype],
        )  # fmt: skip
        return keys, values

    def reset(self) -> None:
        self._counters.clear()

    def _counters_of(self, layer: int, count: int) -> mx.array:
        """Zeros, which each call leaves as zeros; a layer's own, since layers may run at once."""
        held = self._counters.get(layer)
        if held is None or held.size < count:
            held = mx.zeros((1 << max(10, (count - 1).bit_length()),), mx.uint32)
            mx.eval(held)
            self._counters[layer] = held
        return held


@cache
def _decode_kernel(shape: Shape, split: bool) -> Any:
    return mx.fast.cuda_kernel(
        name=shape.name if split else f"whole_{shape.name}",
        input_names=DECODE_INPUTS,
        output_names=decode_outputs(split),
        source=decode_body(shape, split),
        header=header(HEADERS),
    )


@cache
def _fetch_kernel(shape: Shape) -> Any:
    return mx.fast.cuda_kernel(
        name=f"fetch_{shape.name}",
        input_names=FETCH_INPUTS,
        output_names=["out_keys", "out_values"],
        source=fetch_body(shape),
        header=header(HEADERS),
    )
