"""Rotations: rotary positions whose angles are made once a step, for all layers.

Owns the function that stands in place of mx.fast.rope on the CPU, where MLX makes thirty operations
of each call, sines among them. Positions of packed rows come as one array a step,
which can be told from others (`handles.Positions`) and has a place for what its layers share; all
else is MLX's own business. Keeps no position.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import mlx.core as mx
import numpy as np

from .handles import Positions

ROPE = mx.fast.rope


def rope(
    a: mx.array,
    dims: int,
    *,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int | mx.array,
    freqs: mx.array | None = None,
    stream: Any = None,
) -> mx.array:
    """mx.fast.rope; packed rows [T, heads, 1, dims] at Positions of their own by shared angles."""
    packed = a.ndim == 4 and a.shape[2:] == (1, dims) and a.dtype == mx.float32
    if not packed or not isinstance(offset, Positions) or stream is not None:
        return ROPE(
            a,
            dims,
            traditional=traditional,
            base=base,
            scale=scale,
            offset=offset,
            freqs=freqs,
            stream=stream,
        )
    cosines, sines = _angles(offset, dims, traditional, base, scale, freqs)
    return _turned(a, a @ _turn(dims, traditional), cosines, sines)


@partial(mx.compile, shapeless=True)
def _turned(a: mx.array, turned: mx.array, cosines: mx.array, sines: mx.array) -> mx.array:
    return a * cosines + turned * sines


def _angles(
    at: Positions,
    dims: int,
    traditional: bool,
    base: float | None,
    scale: float,
    freqs: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """Cosine and sine of each number's angle: two [T, 1, 1, dims]."""
    key = (dims, traditional, base, scale, id(freqs))
    found = at.angles.get(key)
    if found is None:
        if freqs is None:
            assert base is not None
            half = mx.arange(0, -(dims // 2), -1, dtype=mx.float32)
            speeds = mx.exp(half * (math.log(base) / (dims // 2)))
        else:
            speeds = mx.reciprocal(freqs.astype(mx.float32))
        angles = (at.astype(mx.float32) * scale)[:, None] * speeds
        wide = mx.repeat(angles, 2, axis=-1) if traditional else mx.tile(angles, (1, 2))
        wide = wide[:, None, None, :]
        # Frequencies are kept with what was made of them, or their id could be another's.
        found = at.angles[key] = (mx.cos(wide), mx.sin(wide), freqs)
    return found[0], found[1]


@cache
def _turn(dims: int, traditional: bool) -> mx.array:
    """[dims, dims]: a product with it is each pair (x, y) as (-y, x)."""
    matrix = np.zeros((dims, dims), np.float32)
    half = dims // 2
    for pair in range(half):
        x, y = (2 * pair, 2 * pair + 1) if traditional else (pair, pair + half)
        matrix[y, x], matrix[x, y] = -1.0, 1.0
    return mx.array(matrix)


def install() -> None:
    """Put `rope` in place of MLX's."""
    mx.fast.rope = rope
