"""Products whose blocks share x, on the emulator, against MLX's own operations."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kernel import products
from kernel.products import Form, Norm, PlainProducts, Rope, Summed

from .emulated import Change, EmulatedProducts

WIDTH = 160
"""One chunk, and a part of the next."""


def random(*dims: int) -> mx.array:
    rng = np.random.default_rng(sum(dims))
    return mx.array(rng.standard_normal(dims, np.float32)).astype(mx.bfloat16)


def added(kernels: Any, rows: int, features: int, width: int) -> list[mx.array]:
    summed = Summed.of(random(features, width))
    after = random(3, 64)
    out = kernels.added(random(rows, width), summed, random(rows, features), after)
    mx.eval(out)
    assert not np.array(summed.counters).any()
    return [out]


def gated(kernels: Any, rows: int, features: int, width: int) -> list[mx.array]:
    norm = Norm(random(width), 0.5)
    return [kernels.gated(random(rows, width), norm, random(features, width) / 8, random(3, 64))]


def heads(kernels: Any, rows: int, features: int, width: int) -> list[mx.array]:
    norm = Norm(random(width), 0.5)
    weights = (random(features - 64, width), random(32, width), random(32, width))
    rope = Rope(32, mx.array(np.linspace(0.1, 1.0, 16, dtype=np.float32)), False)
    places = mx.arange(rows, dtype=mx.int32) * 7
    return list(kernels.heads(random(rows, width), norm, weights, places, rope, random(3, 64)))


def apart(kind: Any, kernels: EmulatedProducts, *dims: int) -> float:
    """The largest distance of two rows, relative to their length."""
    worst = 0.0
    pairs = zip(kind(kernels, *dims), kind(PlainProducts(), *dims), strict=True)
    for found, wanted in pairs:
        a, b = (np.array(it.astype(mx.float32)).reshape(dims[0], -1) for it in (found, wanted))
        far = np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)
        worst = max(worst, float(far.max()))
    return worst


@pytest.mark.parametrize(
    ("kind", "rows", "features", "width", "across"),
    [
        (added, 11, 64, WIDTH, 2),
        (added, 64, 128, 640, 4),
        (gated, 20, 256, WIDTH, 8),
        (gated, 64, 64, WIDTH, 2),
        (heads, 43, 128, WIDTH, 4),
    ],
)
def test_broad_products_are_those_of_mlx(
    monkeypatch: Any, kind: Any, rows: int, features: int, width: int, across: int
) -> None:
    monkeypatch.setattr(products, "BLOCKS", 1)
    kernels = EmulatedProducts()
    assert apart(kind, kernels, rows, features, width) < 0.02
    (name,) = kernels.sources
    assert name.split("_")[2] == str(across)


BROKEN: dict[str, tuple[Any, Change]] = {
    "a chunk is left out": (added, ("chunks * (split + 1) / SPLITS", "chunks * split / SPLITS")),
    "a block's sums are forgotten": (
        added,
        ("i < SPLITS * 4; ++i) {", "i < SPLITS * 4 - 4; ++i) {"),
    ),
    "the norm is left out": (gated, ("float by = Layer::NORMED ?", "float by = width < 0 ?")),
    "weights come a step late": (gated, ("load(ring[j], i + j + DEPTH,", "load(ring[j], i + j,")),
    "warps all take the first part": (heads, ("% PER * ALONG + along) * PART;", "% PER) * PART;")),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_broad_products_are_seen(monkeypatch: Any, what: str) -> None:
    monkeypatch.setattr(products, "BLOCKS", 1)
    kind, change = BROKEN[what]
    assert apart(kind, EmulatedProducts((change,)), 11, 128, 640) > 0.1


def test_blocks_take_as_many_tiles_as_leave_the_device_busy() -> None:
    """The products of an 8B shape; those of a small model, and of few rows, take one each."""
    forms = [Form.of(64, features) for features in (6144, 28672)]
    assert [it.across for it in forms] == [2, 8]
    assert Form.of(64, 4096, products.SPLITS) == Form(8, 4, 4)
    assert Form.of(8, 28672) == Form(1, 1, 1)
    assert Form.of(64, 576, products.SPLITS) == Form(8, 1, 1)
