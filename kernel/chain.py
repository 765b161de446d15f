"""What lies between two attentions in one launch, by paged_source/chain.h.

Owns the launch and the counters by which its blocks share out the work. Four products of few rows
one after the other leave a GPU's memory at rest between them: each begins with empty queues, and
ends when its slowest block does. Here blocks ask for the weights of the next product while they
wait for the last one's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np
from attrs import frozen

from .products import (
    HEADERS,
    PART,
    TILE,
    WARPS,
    CudaProducts,
    Norm,
    Products,
    Projections,
    Rope,
    Shapes,
    Source,
    T,
    heads_of,
    named,
)

ROWS_MAX = 8
"""One eight of rows: chain.h's."""
BLOCKS = 264
"""The most that are launched: two for each multiprocessor of an H200. Any number is right on any
device; those that find no room begin when others have ended.
"""
RUNS = 2
"""Of weights that a warp has on their way, each of RUN_BYTES of shared memory."""
RUN_BYTES = 2 * TILE * PART * 2
COUNTERS = 6 * 32
"""chain.h's, each in a line of memory of its own."""
CHECKED_ROWS = (1, 5, ROWS_MAX)
CHECKED_TIMES = 8
"""What a block reads too early need not show at once."""
POSITION_MAX = 4096
TOLERANCE = 1e-3
"""Of a row's length: the same sums, but for what a compiler contracts."""


@frozen(eq=False)
class LayerWeights:
    """What the products of a layer are given: `before`, `projections` and `rope` lead to its
    attention; out, `between`, gates and down from there to the next layer. out, down: [width, ...];
    gates: gate and up, [2 * features, width].
    """

    before: Norm
    projections: Projections
    rope: Rope
    out: mx.array
    between: Norm
    gates: mx.array
    down: mx.array


Heads = tuple[mx.array, mx.array, mx.array]
"""Queries, keys and values, [T, heads, 1, dim]."""


class Onward(Protocol):
    """From one attention to the next. mixed: what it made, [T, ...]; hidden: what its layer was
    given, [T, width]; both bfloat16.
    """

    def between(
        self,
        mixed: mx.array,
        hidden: mx.array,
        layer: LayerWeights,
        following: LayerWeights,
        positions: mx.array,
    ) -> tuple[mx.array, Heads]:
        """What leaves `layer`, [T, width], and the heads of the layer after it."""

    def ending(self, mixed: mx.array, hidden: mx.array, layer: LayerWeights) -> mx.array:
        """What leaves the last layer, [T, width]."""


class Apart:
    """One product after the other. See Onward."""

    def __init__(self, products: Products) -> None:
        self._products = products

    def between(
        self,
        mixed: mx.array,
        hidden: mx.array,
        layer: LayerWeights,
        following: LayerWeights,
        positions: mx.array,
    ) -> tuple[mx.array, Heads]:
        left = self.ending(mixed, hidden, layer)
        return left, self.heads(left, following, positions)

    def ending(self, mixed: mx.array, hidden: mx.array, layer: LayerWeights) -> mx.array:
        summed = self._products.added(mixed, layer.out, hidden)
        gated = self._products.gated(summed, layer.between, layer.gates)
        return self._products.added(gated, layer.down, summed)

    def heads(self, hidden: mx.array, layer: LayerWeights, positions: mx.array) -> Heads:
        """Of what a layer is given, [T, width]."""
        it = layer
        return self._products.heads(hidden, it.before, it.projections, positions, it.rope)


class Chain:
    """In one launch, of up to ROWS_MAX rows. See Onward.

    Of one model: no launch may begin before the one before it ended, which holds where each is fed
    what that one made.
    """

    def __init__(self, products: CudaProducts) -> None:
        self._products = products
        self._counters = mx.zeros((COUNTERS,), mx.uint32)
        mx.eval(self._counters)

    def between(
        self,
        mixed: mx.array,
        hidden: mx.array,
        layer: LayerWeights,
        following: LayerWeights,
        positions: mx.array,
    ) -> tuple[mx.array, Heads]:
        weights, rope, norm = following.projections, following.rope, following.before
        inputs = [*self._inputs(mixed, hidden, layer), norm.weights, *weights, positions]
        shapes = [(len(hidden), len(it) // rope.dim, 1, rope.dim) for it in weights]
        source = between_source(layer.between.eps, norm.eps, rope)
        left, *heads = self._launch(source, [*inputs, rope.rates], layer, weights, shapes)
        queries, keys, values = heads
        return left, (queries, keys, values)

    def ending(self, mixed: mx.array, hidden: mx.array, layer: LayerWeights) -> mx.array:
        source = ending_source(layer.between.eps)
        return self._launch(source, self._inputs(mixed, hidden, layer), layer, (), [])[0]

    def _inputs(self, mixed: mx.array, hidden: mx.array, layer: LayerWeights) -> list[mx.array]:
        norm = layer.between.weights
        return [mixed, hidden, layer.out, norm, layer.gates, layer.down, self._counters]

    def _launch(
        self,
        source: Source,
        inputs: list[mx.array],
        layer: LayerWeights,
        projections: tuple[mx.array, ...],
        heads: Shapes,
    ) -> list[mx.array]:
        """What leaves the layer, and the heads."""
        rows, width = inputs[1].shape
        inner = layer.down.shape[1]
        tiles = sum(len(it) for it in (layer.out, layer.gates, layer.down, *projections)) // TILE
        shapes = [(rows, width), (rows, inner), (rows, width), *heads]
        return self._products.launch(source, inputs, min(tiles, BLOCKS), shapes)[2:]


def disagreement(chain: Chain, apart: Apart, layers: Sequence[LayerWeights]) -> str:
    """Why the chain must not be used, by how far it is from products one after the other; empty
    where they agree.
    """
    rng = np.random.default_rng(0)
    for rows in CHECKED_ROWS:
        for number in range(CHECKED_TIMES):
            layer, following = (layers[it % len(layers)] for it in (number, number + 1))
            far = _apart(chain, apart, layer, following, rows, rng)
            if not far <= TOLERANCE:
                return (
                    f"products of {rows} rows in one launch differ from those of one after the "
                    f"other by {far:.2g} of a row"
                )
    return ""


def _apart(
    chain: Chain,
    apart: Apart,
    layer: LayerWeights,
    following: LayerWeights,
    rows: int,
    rng: np.random.Generator,
) -> float:
    places = mx.array(rng.integers(0, POSITION_MAX, rows).astype(np.int32))
    mixed, hidden = (
        mx.array(rng.standard_normal((rows, it.shape[1]), np.float32)).astype(mx.bfloat16)
        for it in (layer.out, layer.gates)
    )
    found = []
    for onward in (chain, apart):
        left, heads = onward.between(mixed, hidden, layer, following, places)
        mx.eval(left, *heads)  # a chain's launches must follow each other
        found.append((left, *heads, onward.ending(mixed, hidden, layer)))
        mx.eval(found[-1])
    return max(distance(one, other) for one, other in zip(*found, strict=True))


def distance(one: mx.array, other: mx.array) -> float:
    """The largest distance of two rows, relative to the other's length."""
    a, b = (np.array(it.astype(mx.float32)) for it in (one, other))
    far = np.linalg.norm(a - b, axis=-1) / np.maximum(np.linalg.norm(b, axis=-1), 1e-6)
    return float(far.max())


INPUTS = ("mixed", "hidden", "out", "norm", "gates", "down", "counters")
OUTPUTS = ("summed", "gated", "left")
HEAD_INPUTS = ("next_norm", "queries", "keys", "values", "positions", "rates")
HEAD_OUTPUTS = ("out_queries", "out_keys", "out_values")


def between_source(eps: float, next_eps: float, rope: Rope) -> Source:
    heads = f"""
{heads_of(rope)} last{{
    next_norm, queries, keys, values, out_queries, out_keys, out_values, (int)queries_shape[0],
    (int)keys_shape[0], (int)values_shape[0], positions, rates, width, {next_eps!r}f}};
"""
    words = (eps.hex(), next_eps.hex(), rope.dim, int(rope.traditional))
    return _source(
        named("chain", RUNS, *words), INPUTS + HEAD_INPUTS, OUTPUTS + HEAD_OUTPUTS, eps, heads
    )


def ending_source(eps: float) -> Source:
    return _source(
        named("chain_end", RUNS, eps.hex()), INPUTS, OUTPUTS, eps, f"NoHeads<{T}> last;\n"
    )


def _source(
    name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], eps: float, last: str
) -> Source:
    body = f"""
int rows = (int)hidden_shape[0], width = (int)hidden_shape[1], inner = (int)down_shape[1];
Added<{T}> first{{out, hidden, summed, (int)out_shape[1], width}};
Gated<{T}> second{{norm, gates, gated, width, inner, {eps!r}f}};
Added<{T}> third{{down, summed, left, inner, width}};
{last}
chain<{T}, {WARPS}, {RUNS}>(mixed, rows, (unsigned*)counters, first, second, third, last);
"""
    return Source(name, inputs, outputs, body, (*HEADERS, "chain.h"), WARPS * RUNS * RUN_BYTES)
