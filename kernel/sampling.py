"""Sampling: from logits to tokens and fingerprints, inside the graph.

A row's token is a function of (its logits, its parameters, its seed, its position) and of nothing
else: no generator has a state, and every operation works on a row by itself. So neighbours, batch
size, preemption and replay change nothing. Owns no random source; never evaluates.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from attrs import frozen
from xxhash import xxh3_64_intdigest

from statemachine.records import Parameters

from .fastmath import EXPONENT_MIN, LOG2E, exp2

Floats = npt.NDArray[np.float32]

UNIFORM_BITS = 22
"""Few enough that a uniform number times a float32 sum stays below that sum."""
BISECTIONS = 16
"""Halvings in search of a nucleus' edge: to 0.0005 in log2 of the probability, or better."""
TEMPERATURE_MIN = 1e-30
"""Below it is greedy: float32 cannot divide logits by much less, and the draw would be of NaNs."""


@frozen(eq=False)
class SamplingPlan:
    """What each of S rows asks for; columns are [S].

    drawn: numbers of the rows that are not greedy; the columns after it are theirs alone. top_k is
    0 where off; uniform is in (0, 1).
    """

    rows: int
    drawn: tuple[int, ...]
    temperature: Floats
    top_k: npt.NDArray[np.int32]
    top_p: Floats
    min_p: Floats
    uniform: Floats


@frozen(eq=False)
class Samples:
    """tokens [S] uint32; logits, the chosen ones, and margins, top less runner-up: [S] float32."""

    tokens: mx.array
    logits: mx.array
    margins: mx.array


def row_key(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit numbers for a sample: a hash of its request's seed and the position it fills."""
    digest = xxh3_64_intdigest(struct.pack("<QQ", seed & (2**64 - 1), position))
    return digest >> 32, digest & (2**32 - 1)


def uniform(seed: int, position: int) -> float:
    """In (0, 1), from the first number of the row's key."""
    high, _ = row_key(seed, position)
    return float((high >> (32 - UNIFORM_BITS)) + 0.5) / float(1 << UNIFORM_BITS)


def is_greedy(parameters: Parameters | None) -> bool:
    """Whether only the largest logit can be chosen."""
    return parameters is None or parameters.temperature < TEMPERATURE_MIN or parameters.top_k == 1


def plan_samples(asked: Iterable[tuple[Parameters | None, int]]) -> SamplingPlan:
    """From (parameters, sample position) of each row; no parameters means greedy."""
    listed = list(asked)
    drawn, rows = [], []
    for number, (parameters, position) in enumerate(listed):
        if parameters is not None and not is_greedy(parameters):
            drawn.append(number)
            rows.append((parameters, uniform(parameters.seed, position)))
    return SamplingPlan(
        rows=len(listed),
        drawn=tuple(drawn),
        temperature=np.array([p.temperature for p, _ in rows], np.float32),
        top_k=np.array([p.top_k for p, _ in rows], np.int32),
        top_p=np.array([p.top_p for p, _ in rows], np.float32),
        min_p=np.array([p.min_p for p, _ in rows], np.float32),
        uniform=np.array([number for _, number in rows], np.float32),
    )


def sample(logits: mx.array, plan: SamplingPlan) -> Samples:
    """Tokens and fingerprints of logits [S, vocab] float32."""
    top = mx.argmax(logits, axis=-1)
    margins = _at(logits, top) - _runner_up(logits, top)
    tokens = top
    if len(plan.drawn) == plan.rows:
        tokens = _draw(logits, plan)
    elif plan.drawn:
        rows = mx.array(np.array(plan.drawn, np.uint32))
        tokens = mx.put_along_axis(top, rows, _draw(logits[rows], plan), axis=0)
    return Samples(tokens, _at(logits, tokens), margins)


def _at(logits: mx.array, tokens: mx.array) -> mx.array:
    return mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]


def _runner_up(logits: mx.array, top: mx.array) -> mx.array:
    """The largest logit but the one at `top`: [S]. The vocabulary is laid out as a grid, whose
    column maxima are fast, and only the winner's column is looked at twice.
    """
    rows, vocab = logits.shape
    width = _grid_width(vocab)
    grid = logits.reshape(rows, -1, width)
    column, line = top % width, top // width
    others = _without(grid.max(axis=1), column)
    winners = mx.take_along_axis(grid, column[:, None, None], axis=2)[:, :, 0]
    return mx.maximum(others.max(axis=-1), _without(winners, line).max(axis=-1))


def _without(values: mx.array, index: mx.array) -> mx.array:
    return mx.put_along_axis(values, index[:, None], mx.array(-mx.inf), axis=-1)


@cache
def _grid_width(vocab: int) -> int:
    """The divisor of the vocabulary's size that is nearest to 256."""
    divisors = [width for width in range(1, min(vocab, 1024) + 1) if vocab % width == 0]
    return min(divisors, key=lambda width: abs(width - 256))


def _draw(logits: mx.array, plan: SamplingPlan) -> mx.array:
    """A token for each of `plan.drawn`'s rows, from its cut and renormalised distribution.

    Temperature first, then top_k, top_p (of what top_k left) and min_p (against the largest). The
    draw inverts the cumulated distribution at the row's uniform number. Sums are scans and
    products, which add a lone row in the same order as one of many.
    """
    below = (logits - logits.max(axis=-1, keepdims=True)) * (LOG2E / _column(plan.temperature))
    powers = mx.maximum(below, EXPONENT_MIN)
    weights = exp2(powers)
    if plan.top_k.any():
        weights = weights * (weights >= _kth_largest(weights, plan))
    if (plan.top_p < 1).any():
        weights = weights * (powers >= _nucleus_edge(powers, weights, _column(plan.top_p)))
    if plan.min_p.any():
        weights = weights * (weights >= _column(plan.min_p))
    sums = mx.cumsum(weights, axis=-1)
    target = sums[:, -1:] * _column(plan.uniform)
    return (sums <= target).sum(axis=-1).astype(mx.uint32)


def _column(values: Floats | npt.NDArray[np.int32]) -> mx.array:
    """A plan's column as [S, 1]."""
    return mx.array(values[:, None])


def _kth_largest(weights: mx.array, plan: SamplingPlan) -> mx.array:
    """[S, 1]: each row's top_k-th largest weight, 0 where top_k is off or beyond the vocabulary."""
    vocab = weights.shape[-1]
    active = (plan.top_k > 0) & (plan.top_k < vocab)
    if not active.any():
        return mx.zeros((weights.shape[0], 1))
    most = int(plan.top_k[active].max())
    largest = mx.sort(mx.topk(weights, most, axis=-1), axis=-1)
    place = np.where(active, most - plan.top_k, 0).astype(np.int32)
    kth = mx.take_along_axis(largest, _column(place), axis=-1)
    return kth * _column(active.astype(np.float32))


def _nucleus_edge(powers: mx.array, weights: mx.array, top_p: mx.array) -> mx.array:
    """[S, 1]: the largest power at which the weights from there on up hold `top_p` of all.

    Found by halving, at a quarter of the cost of sorting the vocabulary. It starts where tokens
    could not hold the rest, 1 - top_p, even if every one of them were that likely.
    """
    total = _mass(mx.ones(weights.shape), weights)
    low = mx.log2((1.0 - top_p) * total / weights.shape[-1]) - 1.0
    low = mx.maximum(low, EXPONENT_MIN)
    high = mx.zeros(low.shape)
    for _ in range(BISECTIONS):
        middle = (low + high) * 0.5
        enough = _mass((powers >= middle).astype(mx.float32), weights) >= total * top_p
        low = mx.where(enough, middle, low)
        high = mx.where(enough, high, middle)
    return mx.where(top_p < 1, low, EXPONENT_MIN)


def _mass(chosen: mx.array, weights: mx.array) -> mx.array:
    """Sum of the chosen weights, [S, 1]: a product, which is faster than a sum."""
    return (chosen[:, None, :] @ weights[:, :, None])[:, 0]
