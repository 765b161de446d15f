"""Quantised rows: K and V in pages as whole numbers of few bits, with a scale and a bias a group.

Owns the code of a head's row, MLX's affine one (mx.quantize): `group` numbers q of `bits` bits
stand for scale * q + bias. A row is one run of 32-bit words: its packed numbers, then the groups'
scales, then their biases, in float32. So pages stay one array of K and one of V, and whoever moves
blocks needs to know nothing of it.

    | q q q q  q q q q ... | scale scale ... | bias bias ... |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import evolve, frozen

from .errors import ModelError

if TYPE_CHECKING:
    from .layout import Layout

BITS = (4, 8)
GROUPS = (64, 32)
"""Numbers that may share a scale, the best first."""
WORD_BITS = 32
LOW_NIBBLES = 0x0F0F0F0F


@frozen
class Code:
    """Rows [..., dim] and their words [..., words] of uint32. dim may be 0. dtype: the layer's."""

    dim: int
    bits: int
    group: int
    dtype: mx.Dtype

    @property
    def words(self) -> int:
        """Words of a row."""
        return self._packed + 2 * (self.dim // self.group)

    @property
    def _packed(self) -> int:
        return self.dim * self.bits // WORD_BITS

    def encode(self, rows: mx.array) -> mx.array:
        """The words of rows. Each row by itself: whatever it stands beside, its words are these."""
        if not self.dim:
            return rows.astype(mx.uint32)
        wide = rows.astype(mx.float32)
        packed, scales, biases = mx.quantize(wide, group_size=self.group, bits=self.bits)
        return mx.concatenate([packed, *(it.view(mx.uint32) for it in (scales, biases))], axis=-1)

    def decode(self, words: mx.array) -> mx.array:
        """The rows that words stand for, in float32.

        The same numbers as mx.dequantize's, which takes five times as long on a CPU.
        """
        if not self.dim:
            return words.astype(mx.float32)
        groups = self.dim // self.group
        packed, scales, biases = mx.split(words, [self._packed, self._packed + groups], axis=-1)
        numbers = self._unpacked(packed).reshape(*packed.shape[:-1], groups, self.group)
        scales, biases = (it.view(mx.float32)[..., None] for it in (scales, biases))
        found = numbers.astype(mx.float32) * scales + biases
        return found.reshape(*packed.shape[:-1], self.dim)

    def _unpacked(self, packed: mx.array) -> mx.array:
        if self.bits == 8:
            return packed.view(mx.uint8)
        halves = (packed & LOW_NIBBLES, (packed >> 4) & LOW_NIBBLES)
        return mx.stack([it.view(mx.uint8) for it in halves], axis=-1)


def quantised(layout: Layout, bits: int) -> Layout:
    """A layout whose pages hold rows of `bits` bits a number: one of BITS.

    Raises ModelError where a head's rows cannot be cut into groups.
    """
    shapes = []
    for number, it in enumerate(layout.shapes):
        dims = (it.key_dim, it.value_dim)
        group = next((group for group in GROUPS if not any(dim % group for dim in dims)), None)
        if group is None:
            raise ModelError(
                f"layer {number} has heads of {dims[0]} and {dims[1]}, which are no multiples of "
                f"{GROUPS[-1]}, so its rows cannot be quantised: leave kv_bits out"
            )
        keys, values = (Code(dim, bits, group, it.dtype) for dim in dims)
        shapes.append(
            evolve(
                it,
                key_dim=keys.words,
                value_dim=values.words,
                dtype=mx.uint32,
                codes=(keys, values),
            )
        )
    return evolve(layout, shapes=tuple(shapes))


def identity_of(digest: str, bits: int) -> str:
    """The identity of a pool: rows that were rounded are other rows than those that were not."""
    return f"{digest}, {bits}-bit rows" if bits else digest
