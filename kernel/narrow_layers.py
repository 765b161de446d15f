"""Narrow layers: linear layers and embeddings that multiply by products_cpu.py's kernels.

Owns which modules of a model do. For models whose body few_rows.py does not know: the modules stay
mlx-lm's in all else. Only where the numbers are narrower than float32, since MLX's library is as
fast with these.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from .extension import extension
from .machine import on_cpu
from .products_cpu import CpuProducts


class NarrowLinear(Linear):
    """A Linear, with the same parameters."""

    _products: CpuProducts
    _held: Any

    def __call__(self, x: mx.array) -> mx.array:
        product = _multiplied(self, x)
        if product is None:
            whole: mx.array = super().__call__(x)
            return whole
        return product + self["bias"] if "bias" in self else product


class NarrowEmbedding(Embedding):
    """An Embedding, with the same parameters, that logits come from."""

    _products: CpuProducts
    _held: Any

    def as_linear(self, x: mx.array) -> mx.array:
        product = _multiplied(self, x)
        return x @ self.weight.T if product is None else product


_NARROW: dict[Any, Any] = {Linear: NarrowLinear, Embedding: NarrowEmbedding}


def quicken(model: Any) -> int:
    """Have a model's layers multiply so, on a CPU that there are kernels for; returns how many do.
    Calling it again changes nothing.
    """
    native = extension().module if on_cpu() else None
    if native is None:
        return 0
    products = CpuProducts(native)
    if products.lacks(model):
        return 0
    return narrow_layers(model, products)


def narrow_layers(model: Any, products: CpuProducts) -> int:
    """The same, with these products."""
    count = 0
    for _, module in model.named_modules():
        if type(module) not in _NARROW or module.weight.ndim != 2:
            continue
        held = products.hold_narrow(module)
        if held is not None:
            module._products, module._held = products, held
            module.__class__ = _NARROW[type(module)]
            count += 1
    return count


def _multiplied(module: NarrowLinear | NarrowEmbedding, x: mx.array) -> mx.array | None:
    """None where MLX does it: of another dtype, or of more rows than it is quick for."""
    products, width = module._products, module._held.width
    if x.dtype not in products.dtypes or x.size > products.rows_max * width:
        return None
    return products.multiplied(x, module._held).reshape(*x.shape[:-1], -1)
