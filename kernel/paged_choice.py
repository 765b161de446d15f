"""Which kernels attend through block tables for a model, on this device.

Owns the choice, made once at load: a device that has a dialect, heads that there are kernels for,
and no disagreement with the gather on random data. Anything else is served by the gather.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from statemachine.events import Namespace
from statemachine.geometry import Geometry
from statemachine.sequence import Sequence

from .attention_cpu import CpuDialect
from .attention_cuda import CudaDialect
from .attention_metal import MetalDialect
from .batch import Batch, Piece
from .drawing import Sampler, asked_by
from .errors import describe
from .extension import extension
from .forward import Forward
from .layout import Layout
from .metadata import build
from .paged_attention import Dialect, Layer, OnGpu, Shape, takes
from .paged_check import disagreement
from .paged_plan import RowsPlan
from .pages import PageStep
from .products import Products
from .sampling import plan_samples


def choose(model: Any, layout: Layout, block_size: int) -> tuple[Dialect | None, str]:
    """The dialect to use, or None and why not; no reason where nobody would expect one."""
    dialect, reason = of_device()
    if dialect is None or not layout.way.packed:
        return None, reason
    coded = {code.bits for it in layout.shapes for code in it.codes or ()}
    if missing := coded - set(dialect.coded_bits):
        return None, f"no kernel reads rows of {min(missing)} bits through block tables here"
    return suited(model, layout, block_size, dialect)


def suited(
    model: Any, layout: Layout, block_size: int, dialect: Dialect
) -> tuple[Dialect | None, str]:
    """`dialect` where it serves every layer right, else None and why not."""
    for number, it in enumerate(layout.shapes):
        dtype, dims = it.dtype, (it.key_dim, it.value_dim)
        if it.codes is not None:
            dtype, dims = it.codes[0].dtype, (it.codes[0].dim, it.codes[1].dim)
        if dtype not in dialect.dtypes or not takes(*dims):
            heads = f"heads of {dims[0]} and {dims[1]} in {dtype}"
            return None, f"layer {number} has {heads}, which no kernel reads through block tables"
    groups = layout.groups(1)
    try:
        asked = [(shape, groups[group]) for shape, group in asked_shapes(model, layout, block_size)]
    except Exception as error:  # rows that nothing attends over, say
        return None, describe(error)
    reason = disagreement(dialect, asked)
    return (None, reason) if reason else (dialect, "")


def asked_shapes(model: Any, layout: Layout, block_size: int) -> list[tuple[Shape, int]]:
    """The kernels that a model's layers ask for, each with its group; nothing is computed."""
    recorder = _Recorder()
    _feed_one_row(Forward(model, layout, dialect=recorder), layout, block_size)
    asked = [(shape, layout.shapes[number].group) for shape, number in recorder.asked]
    return list(dict.fromkeys(asked))


def not_shared(forward: Forward, layout: Layout, block_size: int) -> str:
    """Why steps of the forward cannot share graphs (compiled.py), tried at load, so that it stands
    on tape; empty where they can, or where nobody would expect them to. Nothing is computed.
    """
    for _ in range(2):  # the first shows which plans are asked for
        _feed_one_row(forward, layout, block_size)
    forward.reset()
    return f"each step is built anew: {forward.failure}" if forward.failure else ""


def _feed_one_row(forward: Forward, layout: Layout, block_size: int) -> None:
    """Build a step of one row over pages of one block, sampled where that is part of its graph."""
    geometry = Geometry(block_size=block_size, groups=layout.groups(1))
    count = len(geometry.groups)
    sequence = Sequence(0, Namespace(), 0, committed=1, tables=((0,),) * count, starts=(0,) * count)
    metadata = build(Batch(0, (Piece(sequence, (0,), samples=1),)), geometry)
    pages = PageStep(
        [mx.zeros((1, block_size, it.kv_heads, it.key_dim), it.dtype) for it in layout.shapes],
        [mx.zeros((1, block_size, it.kv_heads, it.value_dim), it.dtype) for it in layout.shapes],
        tuple(it.codes for it in layout.shapes),
    )
    context = forward.context(metadata)
    if forward.draws(context):
        forward.drawn(context, pages, asked_by(plan_samples([(None, 1)])))
    else:
        forward.hidden(context, pages)


class _Recorder(OnGpu):
    """A dialect that only listens."""

    in_place = True
    blocks = 1
    products: Products | None = None
    sampler: Sampler | None = None

    def __init__(self) -> None:
        self.asked: list[tuple[Shape, int]] = []

    def decode(
        self, shape: Shape, plan: mx.array, counts: RowsPlan, queries: mx.array, layer: Layer
    ) -> mx.array:
        self.asked.append((shape, layer.number))
        return mx.zeros((*queries.shape[:-1], shape.value_dim), shape.dtype)

    def fetch(
        self, shape: Shape, plan: mx.array, rows: int, layer: Layer
    ) -> tuple[mx.array, mx.array]:
        raise AssertionError("a row alone is never fetched for")

    def reset(self) -> None:
        """Nothing is held."""


def of_device() -> tuple[Dialect | None, str]:
    """This device's kernels, unchecked; None where it has none, and why one might expect some."""
    if mx.default_device() == mx.Device(mx.cpu):
        found = extension()
        if found.module is None:
            return None, found.reason
        return CpuDialect(found.module, found.name), ""
    if mx.cuda.is_available():
        return CudaDialect(), ""
    return (MetalDialect(), "") if mx.metal.is_available() else (None, "")
