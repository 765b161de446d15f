"""Narrow: the quantised numbers that a float32 weight was made of, kept beside it.

Owns where they stand and the proof that they are still the same. MLX's CPU backend multiplies
float32 fastest, so weights are widened as they are loaded; products_cpu.py reads the narrow ones,
a fifth of the bytes.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from attrs import frozen
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

BITS = (4, 8)
_NAME = "_narrow"
"""An attribute that begins so is no parameter to MLX."""


@frozen(eq=False)
class Narrow:
    """Of weights [features, width], as MLX has affine ones: scale * number + bias.

    words: uint32 [features, width * bits / 32], the first number in the lowest bits. scales,
    biases: [features, width / group], float32.
    """

    words: mx.array
    scales: mx.array
    biases: mx.array
    group: int
    bits: int

    def widened(self) -> mx.array:
        """[features, width] float32."""
        parts = (self.words, self.scales, self.biases)
        return mx.dequantize(*parts, group_size=self.group, bits=self.bits)

    @property
    def form(self) -> tuple[int, int]:
        return self.group, self.bits


def keep(module: Any, narrow: Narrow) -> None:
    """Beside the weight of a linear layer or an embedding."""
    setattr(module, _NAME, narrow)


def narrow_of(module: Any) -> Narrow | None:
    """What a quantised layer or embedding has, where it is of the kind that is read here."""
    if not isinstance(module, (QuantizedLinear, QuantizedEmbedding)):
        return None
    if getattr(module, "mode", "affine") != "affine" or module.bits not in BITS:
        return None
    assert module.biases is not None
    scales, biases = module.scales.astype(mx.float32), module.biases.astype(mx.float32)
    return Narrow(module.weight, scales, biases, module.group_size, module.bits)


def kept(module: Any) -> Narrow | None:
    """What `module.weight` is to the last bit, if known; the weight may be another by now."""
    narrow: Narrow | None = getattr(module, _NAME, None)
    if narrow is None or not mx.array_equal(narrow.widened(), module.weight).item():
        return None
    return narrow
