"""Attention through block tables on Metal: launches of paged_source's kernels.

Owns the sources as MLX compiles them. Never run on Metal by those who wrote it: the kernels are
compared with the gather at load and left alone where they disagree. Only reads the pages: MLX
orders kernels by the arrays that it knows to be written. Two kernels, for no block can wait for
what another one stored: each item's part, then the merge of a row's parts.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from .attention_cuda import row_of
from .drawing import Sampler
from .fastmath import LOG2E
from .kernel_text import SOURCE
from .paged_attention import Layer, OnGpu, Shape
from .paged_plan import RowsPlan
from .products import Products

HEADERS = ("metal.h", "decode.h")
WARPS = 4
MERGE_THREADS = 128
PARTS_INPUTS = ["plan", "queries", "key_pages", "value_pages"]
MERGE_INPUTS = ["plan", "parts", "tops", "sinks"]
TYPES = {mx.bfloat16: "bfloat16_t", mx.float16: "half", mx.float32: "float"}


def header() -> str:
    """Metal's compiler reads no files of ours: the text itself."""
    texts = [(SOURCE / name).read_text() for name in HEADERS]
    return "\n".join(text.replace("#pragma once", "") for text in texts)


def _types(shape: Shape) -> tuple[str, str]:
    """The element, and the warp that the kernels are made of."""
    kind, heads = TYPES[shape.dtype], _heads(shape)
    dims = f"{shape.block_size}, {shape.key_dim}, {shape.value_dim}"
    return kind, f"PlainWarp<{kind}, {row_of(shape, TYPES)}, {dims}, {heads}>"


def _heads(shape: Shape) -> int:
    """Heads a block: more take more registers than there are."""
    return min(shape.heads, 4)


def parts_body(shape: Shape) -> str:
    """An item's part. Every row is left to the merge, also where it has one item."""
    kind, warp = _types(shape)
    heads = _heads(shape)
    dims = f"{shape.block_size}, {shape.key_dim}, {shape.value_dim}"
    return f"""
threadgroup float mixes[{WARPS * heads * shape.value_dim}];
threadgroup float peaks[{WARPS * heads}], totals[{WARPS * heads}];
Item item = item_at(plan, int(threadgroup_position_in_grid.y));
item.splits = 2;
attend_item<{warp}, {kind}, {row_of(shape, TYPES)}, {dims}, {shape.kv_heads}, {shape.shared},
            {heads}, {WARPS}, false>(
    item, int(threadgroup_position_in_grid.y), int(threadgroup_position_in_grid.x), plan, queries,
    key_pages, value_pages, key_pages, value_pages, parts, (GLOBAL {kind}*)parts, parts, tops,
    {shape.scale_of_two}, mixes, peaks, totals, int(thread_position_in_threadgroup.x));
"""


def merge_body(shape: Shape) -> str:
    """The first item of each row merges them all."""
    kind, _ = _types(shape)
    heads = _heads(shape)
    sinks = "sinks" if shape.sinks else "parts"
    return f"""
Item item = item_at(plan, int(threadgroup_position_in_grid.y));
if (item.first != int(threadgroup_position_in_grid.y)) return;
merge_item<{kind}, {shape.value_dim}, {shape.kv_heads}, {shape.shared}, {heads}, {
        str(shape.sinks).lower()
    }>(
    item, int(threadgroup_position_in_grid.x), {sinks}, out, parts, tops,
    int(thread_position_in_threadgroup.x), {MERGE_THREADS});
"""


def columns(shape: Shape) -> int:
    return shape.kv_heads * -(-shape.shared // _heads(shape))


class MetalDialect(OnGpu):
    """See paged_attention.Dialect."""

    in_place = False
    blocks = 256
    products: Products | None = None
    sampler: Sampler | None = None

    def decode(
        self, shape: Shape, plan: mx.array, counts: RowsPlan, queries: mx.array, layer: Layer
    ) -> mx.array:
        heads = queries.shape[1]
        sinks = plan if layer.sinks is None else layer.sinks.astype(mx.float32) * LOG2E
        grid = columns(shape)
        parts, tops = _parts_kernel(shape)(
            inputs=[plan, queries, layer.key_pages, layer.value_pages],
            grid=(WARPS * 32 * grid, counts.items, 1),
            threadgroup=(WARPS * 32, 1, 1),
            output_shapes=[(counts.items, heads, shape.value_dim), (counts.items, heads, 2)],
            output_dtypes=[mx.float32, mx.float32],
        )
        out: mx.array
        (out,) = _merge_kernel(shape)(
            inputs=[plan, parts, tops, sinks],
            grid=(MERGE_THREADS * grid, counts.items, 1),
            threadgroup=(MERGE_THREADS, 1, 1),
            output_shapes=[(*queries.shape[:-1], shape.value_dim)],
            output_dtypes=[shape.dtype],
        )
        return out

    def fetch(
        self, shape: Shape, plan: mx.array, rows: int, layer: Layer
    ) -> tuple[mx.array, mx.array]:
        raise AssertionError("without writing in place, long pieces are gathered")

    def reset(self) -> None:
        """Nothing outlives a call."""


@cache
def _parts_kernel(shape: Shape) -> Any:
    return mx.fast.metal_kernel(
        name=shape.name,
        input_names=PARTS_INPUTS,
        output_names=["parts", "tops"],
        source=parts_body(shape),
        header=header(),
    )


@cache
def _merge_kernel(shape: Shape) -> Any:
    return mx.fast.metal_kernel(
        name=f"merge_{shape.name}",
        input_names=MERGE_INPUTS,
        output_names=["out"],
        source=merge_body(shape),
        header=header(),
    )
