"""The kernels of this device by themselves: attention of a layer, and products of its weights.

SmolLM2's shapes; the kernels that compute a model's steps here, beside MLX's own operations.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from kernel import attention
from kernel.paged_attention import Dialect, shape_of
from kernel.paged_check import disagreement
from kernel.paged_choice import of_device

from .device_layer import LayerCase, call_us
from .table import Table

HEADS = (9, 3, 64)
CASES = ((1, 512), (4, 512), (16, 512), (32, 512), (1, 4096))
"""Rows and context."""
ROWS = (1, 4, 16, 64, 512)
CALLS = 40


def kernels(table: Table, model: Any) -> None:
    """Microseconds a call, in a chain of dependent calls; the ratio is to MLX's operations."""
    attention.install()
    dialect, why = of_device()
    if dialect is None:
        print(f"  none here: {why or 'MLX computes all'}")
        return
    dtype = model.layers[0].self_attn.q_proj.weight.dtype
    cases = [LayerCase(*case, heads=HEADS, dtype=dtype) for case in CASES]
    asked = [(shape_of(it.layer, HEADS[0], it.scale), it.geometry.groups[0]) for it in cases[:1]]
    if why := disagreement(dialect, asked):
        print(f"  not used here: {why}")
        return
    for case in cases:
        _attention(table, dialect, case)
    if dialect.products is not None:
        _products(table, dialect, model.layers[0].mlp.down_proj)


def _attention(table: Table, dialect: Dialect, case: LayerCase) -> None:
    name = f"attention, {case.rows} x {case.context}"
    calls = {"tables": case.tables(dialect), "gather": case.gather()}
    dense = call_us(case.dense(), case.queries, CALLS)
    table.add(f"{name}, dense", dense, "us")
    for way, call in calls.items():
        table.add(f"{name}, {way}", call_us(call, case.queries, CALLS), "us", dense, "dense")


def _products(table: Table, dialect: Dialect, linear: Any) -> None:
    """Of the matrix that leads back from a layer's network, with the sum that follows."""
    products = dialect.products
    assert products is not None
    held = products.hold(linear)
    features, width = linear.weight.shape
    for rows in (it for it in ROWS if it <= products.rows_max):
        x, base = mx.random.normal((rows, width)), mx.random.normal((rows, features))
        x, base = x.astype(linear.weight.dtype), base.astype(linear.weight.dtype)
        mx.eval(x, base)
        ours = call_us(lambda sum_: products.added(x, held, sum_), base, CALLS)  # noqa: B023
        theirs = call_us(lambda sum_: sum_ + linear(x), base, CALLS)  # noqa: B023
        name = f"{features} x {width}, {rows} rows"
        table.add(name, ours, "us", theirs, "MLX's operations")
