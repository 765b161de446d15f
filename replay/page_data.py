"""Page data: columns of whole numbers and a description of them, as one short piece of text.

The text is base64 of zlib of: 4 bytes, the description's length (little-endian); the description,
JSON; the columns one behind the other, each as differences to the value before, zigzag, in the
narrowest of 1, 2, 4 or 8 bytes that holds them all. page/data.js reads it. No character of it means
anything in HTML, whatever is inside.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

_WIDTHS = ((1 << 8, "<u1"), (1 << 16, "<u2"), (1 << 32, "<u4"))


class PageData:
    """Add columns, then take the text."""

    def __init__(self) -> None:
        self._columns: dict[str, tuple[int, int]] = {}
        self._parts: list[bytes] = []

    def add(self, name: str, values: Iterable[int]) -> None:
        """A column of whole numbers below 2^52 in size."""
        numbers = np.fromiter(values, dtype=np.int64)
        steps = np.diff(numbers, prepend=np.int64(0))
        zigzag = ((steps << 1) ^ (steps >> 63)).astype(np.uint64)
        most = int(zigzag.max()) if len(zigzag) else 0
        dtype = np.dtype(next((kind for limit, kind in _WIDTHS if most < limit), "<u8"))
        self._columns[name] = (dtype.itemsize, len(numbers))
        self._parts.append(zigzag.astype(dtype).tobytes())

    def text(self, description: dict[str, Any]) -> str:
        """All of it; the description gets the columns' widths and lengths, in their order."""
        told = msgspec.json.encode({**description, "columns": self._columns})
        body = b"".join([len(told).to_bytes(4, "little"), told, *self._parts])
        return base64.b64encode(zlib.compress(body, 9)).decode("ascii")
