"""Products with a layer's weights on the CPU, by native/: launches of them.

Owns the form in which weights are kept: the narrowest that has the same numbers. MLX multiplies
float32 there, so that a step reads four bytes a weight; these read the four or eight bits of a
quantised file, or the two bytes of a bfloat16 one, and give the same float32 results up to the
order of sums. They take along what stands beside a product in a layer, as those of CUDA do.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from .lent import memory_bytes
from .narrow import kept
from .products import Norm, Rope, Weights
from .tensors import parameters

PART, TILE = 32, 16
"""Widths and features are multiples of these."""
QUICK_LEVEL = "amx"
ROWS_MAX, ROWS_MAX_QUICK = 64, 1 << 20
"""Beyond it MLX's library is quicker, where the processor has no unit for matrices."""


class CpuProducts:
    """See products.Products. x and results are float32."""

    dtypes: tuple[mx.Dtype, ...] = (mx.float32,)
    checked_rows: tuple[int, ...] = (1, 3, 8, 17, 64)
    tolerance = 1e-4

    def __init__(self, module: Any) -> None:
        self._native = module
        self.rows_max = ROWS_MAX_QUICK if module.level() == QUICK_LEVEL else ROWS_MAX

    def lacks(self, model: Any) -> str:
        """Why weights are not kept a second time; empty where there is room for that."""
        layers = [it for _, it in model.named_modules() if isinstance(it, (Linear, Embedding))]
        more = sum(_narrow_bytes(it) for it in layers if self._is_taken(it))
        if sum(array.nbytes for _, array in parameters(model)) + more <= memory_bytes():
            return ""
        return "weights stay float32 alone, since memory has no room for narrow ones beside them"

    def takes(self, features: int, width: int) -> bool:
        return width % PART == 0 and features % TILE == 0

    def hold(self, linear: Any) -> Weights:
        return self._packed(linear)

    def hold_gates(self, gate: Any, other: Any) -> Weights:
        return self._packed(gate, other)

    def hold_projections(self, queries: Any, keys: Any, values: Any) -> Weights:
        """And the features of each."""
        each = (queries, keys, values)
        return self._packed(*each), [len(it.weight) for it in each]

    def hold_head(self, linear: Any) -> Weights | None:
        return self._packed(linear) if "bias" not in linear and self._is_taken(linear) else None

    def hold_narrow(self, layer: Any) -> Weights | None:
        """Where there are kernels for its weights, and these are narrower than float32."""
        narrow = self._is_taken(layer) and _narrow_bytes(layer) < layer.weight.nbytes
        return self._packed(layer) if narrow else None

    def _is_taken(self, layer: Any) -> bool:
        weight = layer.weight
        return weight.dtype in self.dtypes and weight.ndim == 2 and self.takes(*weight.shape)

    def _packed(self, *linears: Any) -> Weights:
        """The weights of layers, one after the other."""
        weights, narrow = [it.weight for it in linears], [kept(it) for it in linears]
        known = [it for it in narrow if it is not None]
        if len(known) == len(weights) and len({it.form for it in known}) == 1:
            group, bits = known[0].form
            words = mx.concatenate([it.words for it in known])
            scales = mx.concatenate([it.scales for it in known])
            biases = mx.concatenate([it.biases for it in known])
            return self._native.Weights.of_affine(words, scales, biases, bits, group)
        whole = mx.concatenate(list(weights))
        return self._native.Weights.of_floats(whole, _is_bfloat(whole))

    def multiplied(self, x: mx.array, weights: Weights) -> mx.array:
        product: mx.array = self._native.multiplied(x, weights)
        return product

    def added(self, x: mx.array, weights: Weights, base: mx.array) -> mx.array:
        summed: mx.array = self._native.added(x, weights, base)
        return summed

    def gated(self, x: mx.array, norm: Norm, weights: Weights) -> mx.array:
        gated: mx.array = self._native.gated(x, norm.weights, norm.eps, weights)
        return gated

    def heads(
        self, x: mx.array, norm: Norm, weights: Weights, positions: mx.array, rope: Rope
    ) -> tuple[mx.array, mx.array, mx.array]:
        held, features = weights
        counts = [it // rope.dim for it in features]
        queries, keys, values = self._native.heads(
            x, norm.weights, norm.eps, held, positions, rope.rates, counts, rope.traditional
        )
        return queries, keys, values


def _is_bfloat(weight: mx.array) -> bool:
    """Whether float32 numbers are what bfloat16 holds."""
    low = mx.bitwise_and(mx.view(weight, mx.uint32), 0xFFFF)
    return not mx.any(low).item()


def _narrow_bytes(layer: Any) -> int:
    """What a layer's weights take a second time, as narrow as they are."""
    size: int = layer.weight.size
    narrow = kept(layer)
    if narrow is not None:
        return narrow.words.nbytes + narrow.scales.nbytes + narrow.biases.nbytes
    return size * (2 if _is_bfloat(layer.weight) else 4)
