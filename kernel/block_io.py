"""Block I/O: a block's rows as plain bytes, out of a kernel and into it again.

Owns the shape of what leaves; a kernel that has pages is a `BlockIO`. One group, one block at a
time: tensor by tensor, in the pages' own dtype. Knows no file, and not whose rows they are: tags
say that, and whoever reads or writes compares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Protocol

from msgspec import Struct

DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "U32": 4, "U64": 8}
"""Sizes of dtypes, by the names that safetensors has for them."""


class TensorSpec(Struct, frozen=True):
    """A tensor of a block: dtype by safetensors' name, shape [block_size, ...]."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * prod(self.shape)


class BlockRows(Struct, frozen=True):
    """The rows of one block. tensors: bytes by name, as the spec says, row-major, little-endian.

    tags: of each row: read, those of the shadow (none where it is off); to be written, those of the
    identity that the bytes were kept under.
    """

    tensors: Mapping[str, bytes]
    tags: tuple[int, ...] = ()


class BlockIO(Protocol):
    """Reads and writes whole blocks of a kernel's only group, between its steps."""

    @property
    def block_spec(self) -> Mapping[str, TensorSpec]:
        """The tensors of a block."""

    def read_blocks(self, blocks: Sequence[int]) -> list[BlockRows]:
        """What stands in blocks after all steps that were issued. Of a step that fails nothing is
        known: what was read counts once all steps before the read were collected.
        """

    def write_blocks(self, blocks: Sequence[int], rows: Sequence[BlockRows]) -> None:
        """Put rows into blocks, before any step that is issued later."""
