"""Scatter: rows put into an array that is kept, so that MLX can donate it.

Owns that one operation, of rows and of whole slots; see pages.py for when an array is donated.
"""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np

from .metadata import Ints


def put(held: mx.array, where: tuple[mx.array, ...], rows: mx.array) -> mx.array:
    """`held` with `rows` at `where`; the array that was given stays as it was."""
    if not rows.size:  # MLX divides by the width of rows, which may be none
        return held
    written = copy.copy(held)  # the same array under a second name: item assignment rebinds it
    written[where] = rows.astype(held.dtype)
    return written


def put_slots(held: mx.array, slots: Ints, rows: mx.array) -> mx.array:
    """`held` with rows [B, ...] in whole slots [B].

    On the CPU one after the other: MLX scatters there an element at a time, ten times as slow.
    """
    if mx.default_device() != mx.Device(mx.cpu):
        return put(held, (mx.array(slots.astype(np.uint32)),), rows)
    rows = rows.astype(held.dtype)
    for place, slot in enumerate(slots.tolist()):
        held = mx.slice_update(held, rows[place : place + 1], mx.array([slot]), (0,))
    return held
