"""Elementwise functions that MLX's CPU backend computes one element at a time.

Owns a base-2 exponential from adds, multiplies and shifts, which compilers vectorise: about ten
times as fast as mx.exp on x86 (590,000 elements: 1.2 ms for 11.8), and a SwiGLU made of it. Also
norms, of few operations: each costs some microseconds, which is what a step of few rows is made of.
Never used for anything but softmax, SwiGLU and norms, the latter two only on the CPU.
Also turns weights to the layout in which the CPU's BLAS multiplies few rows fastest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx_lm.models import activations

SWIGLU = activations.swiglu

LOG2E = 1.4426950408889634
EXPONENT_MIN = -126.0
"""Below this a float32 power of two is no normal number any more."""

_ROUND = float(2**23 + 2**22)
# Minimax polynomial of 2^f on [-0.5, 0.5], relative error 2.4e-7, lowest power first.
_C0 = 1.0000000733176138
_C1 = 0.6931469682296734
_C2 = 0.24022114337835304
_C3 = 0.05550709598138937
_C4 = 0.00967575764075293
_C5 = 0.0013277938903218571


@partial(mx.compile, shapeless=True)
def _fraction(y: mx.array) -> mx.array:
    """2^f for what lies between y and the whole number next to it, f in [-0.5, 0.5].

    The powers stand in pairs, because MLX compiles eleven operations after each other into one
    loop, and no more.
    """
    f = y - ((y + _ROUND) - _ROUND)
    squared = f * f
    return ((f * _C5 + _C4) * squared + (f * _C3 + _C2)) * squared + (f * _C1 + _C0)


@partial(mx.compile, shapeless=True)
def _whole(y: mx.array) -> mx.array:
    """The bits of the whole power of two beside it."""
    return mx.left_shift(((y + _ROUND) - _ROUND).astype(mx.int32) + 127, 23)


def exp2(y: mx.array) -> mx.array:
    """2^y, float32, for y in [-126, 126] (not checked); relative error below 5e-7.

    Adding 1.5 * 2^23 rounds to a whole number, which becomes the exponent field of a float. Its
    bits are read as one outside of the compiled part, which may then be shapeless.
    """
    return _fraction(y) * mx.view(_whole(y), mx.float32)


@partial(mx.compile, shapeless=True)
def _below(values: mx.array, peaks: mx.array) -> mx.array:
    return mx.maximum(values - peaks, EXPONENT_MIN)


def exp2_below(values: mx.array, peaks: mx.array) -> mx.array:
    """2^(values - peaks) where no value exceeds its peak; 2^-126 where it would be less."""
    return exp2(_below(values, peaks))


@partial(mx.compile, shapeless=True)
def _negated(gate: mx.array) -> mx.array:
    return mx.clip(gate * -LOG2E, EXPONENT_MIN, -EXPONENT_MIN)


@partial(mx.compile, shapeless=True)
def _gated(gate: mx.array, x: mx.array, fraction: mx.array, whole: mx.array) -> mx.array:
    return gate * x / (1.0 + fraction * whole)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x; anything but float32 is computed in float32 and cast back."""
    wide = gate.astype(mx.float32)
    y = _negated(wide)
    whole = mx.view(_whole(y), mx.float32)
    return _gated(wide, x.astype(mx.float32), _fraction(y), whole).astype(x.dtype)


RMS_NORM = mx.fast.rms_norm
MANY_ROWS = 8
"""From that many on, a norm's root is taken once a row, by an operation of its own; below, that
costs more than a root for each number, in the loop that multiplies.
"""


@cache
def _root(width: int, eps: float) -> Callable[[mx.array], mx.array]:
    def root(squares: mx.array) -> mx.array:
        return mx.rsqrt(squares * (1.0 / width) + eps)

    compiled: Callable[[mx.array], mx.array] = mx.compile(root, shapeless=True)
    return compiled


@cache
def _normed(width: int, eps: float) -> Callable[[mx.array, mx.array, mx.array], mx.array]:
    def normed(x: mx.array, squares: mx.array, weight: mx.array) -> mx.array:
        return x * mx.rsqrt(squares * (1.0 / width) + eps) * weight

    compiled: Callable[[mx.array, mx.array, mx.array], mx.array] = mx.compile(
        normed, shapeless=True
    )
    return compiled


def rms_norm(x: mx.array, weight: mx.array | None, eps: float, *, stream: Any = None) -> mx.array:
    """mx.fast.rms_norm, which MLX makes of ten operations on the CPU, of three, or five."""
    if weight is None or stream is not None or not x.dtype == weight.dtype == mx.float32:
        return RMS_NORM(x, weight, eps, stream=stream)
    squares = x.square().sum(axis=-1, keepdims=True)
    if squares.size >= MANY_ROWS:
        return x * _root(x.shape[-1], eps)(squares) * weight
    return _normed(x.shape[-1], eps)(x, squares, weight)


def install() -> tuple[ModuleType, ...]:
    """Put `swiglu` in place in every loaded model module that has mlx-lm's; returns those. Norms
    are all models' to take from MLX, so theirs is put in place there.
    """
    mx.fast.rms_norm = rms_norm
    found = []
    for name, module in sorted(sys.modules.items()):
        inside = name.startswith("mlx_lm.models.") and module is not activations
        if inside and getattr(module, "swiglu", None) in (SWIGLU, swiglu):
            vars(module)["swiglu"] = swiglu
            found.append(module)
    return tuple(found)


def turn_weights(model: Any) -> int:
    """Store each linear layer's float32 weight by columns; returns how many were turned.

    The same numbers in the same shape: `weight` [out, in] becomes a view of its transpose, so that
    `x @ weight.T` reads rows. One row takes 180 us for 260, 32 rows 390 for 430 (576 to 1536).
    """
    turned = 0
    for _, layer in model.named_modules():
        if isinstance(layer, Linear) and layer.weight.dtype == mx.float32:
            columns = mx.contiguous(layer.weight.T)
            mx.eval(columns)
            layer.weight = columns.T
            mx.eval(layer.weight)
            turned += 1
    return turned
