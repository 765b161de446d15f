"""Scatter: rows put into an array that is kept, so that MLX can donate it.

Owns that one operation; see pages.py for when an array is donated.
"""

from __future__ import annotations

import copy

import mlx.core as mx


def put(held: mx.array, where: tuple[mx.array, ...], rows: mx.array) -> mx.array:
    """`held` with `rows` at `where`; the array that was given stays as it was."""
    if not rows.size:  # MLX divides by the width of rows, which may be none
        return held
    written = copy.copy(held)  # the same array under a second name: item assignment rebinds it
    written[where] = rows.astype(held.dtype)
    return written
