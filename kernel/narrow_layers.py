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

from .errors import describe
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


HEAD = "lm_head"
_NARROW: dict[Any, Any] = {Linear: NarrowLinear, Embedding: NarrowEmbedding}


def quicken(model: Any) -> tuple[str, str]:
    """Have a model's layers multiply so, on a CPU that there are kernels for: the kernels' name, if
    any does, and why none does where one might expect it. Calling it again changes nothing.
    """
    if not on_cpu():
        return "", ""
    found = extension()
    if found.module is None:
        return "", found.reason
    products = CpuProducts(found.module)
    try:
        reason = products.lacks(model) or _quicken(model, products)
    except Exception as error:  # no memory for another copy, say
        reason = describe(error)
    # Those that do so by then stay so: the name tells a tape.
    any_does = any(type(it) in _NARROW.values() for _, it in model.named_modules())
    return (found.name if any_does else ""), reason


def _quicken(model: Any, products: CpuProducts) -> str:
    """The same, with these products; what is wrong, if a layer's is not what it was."""
    modules = model.named_modules()
    has_head = any(name.rpartition(".")[2] == HEAD for name, _ in modules)
    for _, module in modules:
        # Logits come from an embedding only where there is no layer for them.
        asked = type(module) is Linear or (type(module) is Embedding and not has_head)
        held = products.hold_narrow(module) if asked else None
        if held is None:
            continue
        wanted = _of_ones(module)
        module._products, module._held = products, held
        module.__class__ = _NARROW[type(module)]
        if not mx.allclose(_of_ones(module), wanted, rtol=1e-4, atol=1e-4 * _longest(wanted)):
            module.__class__ = type(module).__bases__[0]
            return "a layer's product with narrow numbers is not that with its weights"
    return ""


def _of_ones(module: Any) -> mx.array:
    """What a layer makes of a row of ones."""
    ones = mx.ones((1, module.weight.shape[1]))
    call: Any = module.as_linear if isinstance(module, Embedding) else module
    made: mx.array = call(ones)
    return made


def _longest(row: mx.array) -> float:
    return float(mx.abs(row).max())


def _multiplied(module: NarrowLinear | NarrowEmbedding, x: mx.array) -> mx.array | None:
    """None where MLX does it: of another dtype, or of more rows than it is quick for."""
    products, width = module._products, module._held.width
    if x.dtype not in products.dtypes or x.size > products.rows_max * width:
        return None
    rows = products.multiplied(x.reshape(-1, width), module._held)
    return rows.reshape(*x.shape[:-1], -1)
