"""What lies between two attentions on a GPU: in one launch, and in four.

Random weights. Compared first: numbers, many times over, then microseconds, then whole steps.
`python -m tests.bench.device chain`.
"""

from __future__ import annotations

import statistics
import time
from typing import Any
from unittest import mock

import mlx.core as mx

from kernel import chain, few_rows
from kernel.chain import Chain, Onward
from kernel.few_rows import FewRows
from kernel.paged_attention import Dialect
from kernel.products import CudaProducts
from tests.bench.device_more import step_ms

ROWS = (1, 8)
TIMES = 200
CALLS = (32, 128)
PAIRS = 3
VARIANTS = ((132, 2), (264, 2), (396, 2), (264, 3), (132, 4))
"""Blocks, and runs of weights that a warp has on their way."""


def chained(name: str, model: Any, dialect: Dialect) -> None:
    """All of it for a model."""
    if not isinstance(dialect.products, CudaProducts):
        print(f"{name}: no products of few rows to chain")
        return
    body = FewRows(model, dialect.products)
    with mock.patch.object(chain, "CHECKED_TIMES", TIMES):
        begun = time.perf_counter()
        reason = body.unchained()
        took = time.perf_counter() - begun
    found = reason or "the same numbers"
    print(f"{name}: {TIMES} comparisons in {took:.1f} s: {found}", flush=True)
    if reason:
        return
    _launches(name, body, dialect.products)
    _steps(name, model, dialect)


def _launches(name: str, body: FewRows, products: CudaProducts) -> None:
    """From a layer's attention to the next one's, by several ways of sharing it out."""
    for rows in ROWS:
        cells = [f"four launches {_call_us(body, body._apart, rows):.1f}"]
        for blocks, runs in VARIANTS:
            with (
                mock.patch.object(chain, "BLOCKS", blocks),
                mock.patch.object(chain, "RUNS", runs),
            ):
                took = _call_us(body, Chain(products), rows)
            cells.append(f"{blocks} x {runs} {took:.1f}")
        print(f"{name}, {rows} rows, us: {'; '.join(cells)}", flush=True)


def _call_us(body: FewRows, onward: Onward, rows: int) -> float:
    """Microseconds of a call in a run of dependent ones, each with another layer's weights."""
    layers = [it.weights for it in body._layers]
    width = layers[0].out.shape[0]
    hidden = mx.random.normal((rows, width), mx.bfloat16)
    places = mx.arange(rows, dtype=mx.int32)
    mx.eval(hidden, places)

    def best(count: int) -> float:
        found = float("inf")
        for _ in range(5):
            left = mixed = hidden
            for number in range(count):
                layer, following = (layers[it % len(layers)] for it in (number, number + 1))
                left, (mixed, _, _) = onward.between(mixed, left, layer, following, places)
            mx.synchronize()
            started = time.perf_counter()
            mx.eval(left, mixed)
            found = min(found, time.perf_counter() - started)
        return found

    few, many = CALLS
    best(few)
    return (best(many) - best(few)) / (many - few) * 1e6


def _steps(name: str, model: Any, dialect: Dialect) -> None:
    """Whole steps, in turn."""
    for rows in ROWS:
        found: dict[int, list[float]] = {0: [], chain.ROWS_MAX: []}
        for turn in range(PAIRS):
            for rows_max in sorted(found, reverse=bool(turn % 2)):
                with (
                    mock.patch.object(few_rows, "CHECKED_ROWS", ROWS),
                    mock.patch.object(chain, "ROWS_MAX", rows_max),
                ):
                    found[rows_max].append(step_ms(model, rows, dialect))
        five, two = found.values()
        print(
            f"{name}, {rows} rows, ms a step: five launches a layer "
            f"{statistics.median(five):.2f}, two {statistics.median(two):.2f}; "
            f"each {' '.join(f'{a:.2f}/{b:.2f}' for a, b in zip(five, two, strict=True))}",
            flush=True,
        )
