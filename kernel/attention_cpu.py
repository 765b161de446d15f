"""Attention through block tables on the CPU: launches of native/'s kernels.

Owns nothing but what they are told. Pages are written in place, behind MLX's back; why that is
sound stands in paged_attention.py: MLX runs the operations of a stream one after the other here.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .drawing import Sampler
from .fastmath import LOG2E
from .paged_attention import Layer, Shape
from .paged_plan import RowsPlan
from .products import Products
from .products_cpu import CpuProducts


class CpuDialect:
    """See paged_attention.Dialect. Rows are attended to by themselves however many keys they have,
    those of a piece in tiles; so an item is a whole row.
    """

    in_place = True
    blocks = 1
    row_keys_max = 1 << 62
    dtypes: tuple[mx.Dtype, ...] = (mx.float32,)
    coded_bits: tuple[int, ...] = ()
    sampler: Sampler | None = None

    def __init__(self, module: Any, name: str) -> None:
        self._native = module
        self.native = name
        self._no_sinks = mx.zeros((0,))
        mx.eval(self._no_sinks)
        self.products: Products | None = CpuProducts(module)

    def decode(
        self, shape: Shape, plan: mx.array, counts: RowsPlan, queries: mx.array, layer: Layer
    ) -> mx.array:
        sinks = self._no_sinks
        if layer.sinks is not None:
            sinks = layer.sinks.astype(mx.float32) * LOG2E
        out: mx.array = self._native.attended(
            plan, counts.items, queries, layer.key_pages, layer.value_pages, layer.keys,
            layer.values, sinks, shape.shared, shape.scale * LOG2E,
        )  # fmt: skip
        return out

    def fetch(
        self, shape: Shape, plan: mx.array, rows: int, layer: Layer
    ) -> tuple[mx.array, mx.array]:
        keys, values = self._native.fetched(
            plan, rows, layer.key_pages, layer.value_pages, layer.keys, layer.values
        )
        return keys, values

    def reset(self) -> None:
        """Nothing outlives a call."""
