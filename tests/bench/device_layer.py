"""One layer's attention: by a dense kernel, by block tables and by the gather."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx

from kernel.attention import attend
from kernel.batch import Batch, Piece
from kernel.context import StepContext
from kernel.metadata import build
from kernel.paged_attention import Dialect, Layer, StepTables, shape_of
from kernel.paged_check import disagreement
from kernel.paged_choice import of_device
from statemachine.events import Namespace
from statemachine.geometry import Geometry, Group
from statemachine.sequence import Sequence

LAYERS = ((32, 1024), (32, 8192), (1, 32768), (64, 512))
"""Rows and context of the layer that is timed alone: 32 query heads, 8 of K and V, of 128."""
HEADS = (32, 8, 128)
CALLS = 40


class LayerCase:
    """One layer's attention of `rows` sequences of `context` rows each, a row of each in a step.

    heads: of queries, of keys and values, and how many numbers each has.
    """

    def __init__(
        self,
        rows: int,
        context: int,
        ragged: bool = False,
        heads: tuple[int, int, int] = HEADS,
        dtype: mx.Dtype = mx.bfloat16,
    ) -> None:
        self.heads, self.dtype = heads, dtype
        of_queries, of_keys, dim = heads
        lengths = [context] * rows
        if ragged and rows > 1:  # as many tokens in all
            lengths = [context // 2 + context * place // (rows - 1) for place in range(rows)]
        covers = [-(-length // 16) for length in lengths]
        order = mx.random.permutation(sum(covers)).tolist()
        pieces = []
        for seq, (length, cover) in enumerate(zip(lengths, covers, strict=True)):
            table = tuple(order.pop() for _ in range(cover))
            sequence = Sequence(seq, Namespace(), 0, length, tables=(table,), starts=(0,))
            pieces.append(Piece(sequence, (0,)))
        self.geometry = Geometry(block_size=16, groups=(Group(num_blocks=sum(covers)),))
        self.metadata = build(Batch(0, tuple(pieces)), self.geometry)
        self.rows, self.context, self.scale = rows, context, dim**-0.5
        pages, fresh = (sum(covers), 16, of_keys, dim), (rows, of_keys, 1, dim)
        self.layer = Layer(0, *map(self._random, (pages, pages, fresh, fresh)))
        self.queries = self._random((rows, of_queries, 1, dim))
        mx.eval(self.queries, self.layer.key_pages, self.layer.value_pages, self.layer.keys)

    def tables(self, dialect: Dialect) -> Callable[[mx.array], mx.array]:
        tables = StepTables(dialect, self.metadata)
        return lambda queries: tables.attend(0, queries, self.layer, self.scale)

    def gather(self) -> Callable[[mx.array], mx.array]:
        context, layer = StepContext(self.metadata), self.layer
        return lambda queries: attend(
            context, 0, queries, layer.key_pages, layer.value_pages, self.scale
        )

    def dense(self) -> Callable[[mx.array], mx.array]:
        shape = (self.rows, self.heads[1], self.context, self.heads[2])
        keys, values = self._random(shape), self._random(shape)
        mx.eval(keys, values)
        return lambda queries: mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.scale
        )

    def _random(self, dims: tuple[int, ...]) -> mx.array:
        return mx.random.normal(dims, self.dtype)


def call_us(call: Callable[[mx.array], mx.array], queries: mx.array, calls: int = CALLS) -> float:
    """Microseconds of a call in a chain of dependent ones: the slope over their number."""

    def chain(count: int) -> float:
        best = float("inf")
        for _ in range(5):
            out = queries
            for _ in range(count):
                out = call(out)
            started = time.perf_counter()
            mx.eval(out)
            best = min(best, time.perf_counter() - started)
        return best

    chain(2)
    short, long = chain(calls // 4), chain(calls)
    return (long - short) / (calls - calls // 4) * 1e6


def layers() -> None:
    """A table: attention of one layer of a GPU, by a dense kernel, by tables and by the gather."""
    print(
        f"{'rows x context':<16}{'dense us':>10}{'tables us':>11}{'ragged us':>11}{'gather us':>11}"
    )
    for rows, context in LAYERS:
        case = LayerCase(rows, context)
        dialect, _ = of_device()
        asked = shape_of(case.layer, 32, case.scale)
        reason = disagreement(dialect, [(asked, case.geometry.groups[0])]) if dialect else "none"
        dense = call_us(case.dense(), case.queries)
        gather = call_us(case.gather(), case.queries, 8)
        tables = ragged = float("nan")
        if dialect and not reason:
            tables = call_us(case.tables(dialect), case.queries)
            uneven = LayerCase(rows, context, ragged=True)
            ragged = call_us(uneven.tables(dialect), uneven.queries)
        name = f"{rows} x {context}"
        print(f"{name:<16}{dense:>10.1f}{tables:>11.1f}{ragged:>11.1f}{gather:>11.1f} {reason}")
        mx.clear_cache()
