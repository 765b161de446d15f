"""More of a GPU at a glance: products of few rows, drawn samples, a capture, rows of 8 bits."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
from msgspec import structs

from kernel import model_kernel
from kernel.few_rows import FewRows
from kernel.layout import look
from kernel.model_kernel import ModelKernel
from kernel.paged_attention import Dialect
from kernel.paged_choice import choose
from kernel.products import Products
from kernel.quantised import quantised
from server.capture import CaptureWriter
from server.engine import Engine
from server.parts import Parts
from server.policy import Policy
from server.submission import Submission, Update
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters
from tests.sim import header

CONTEXT_TOKENS = 512
STEPS = 120
ROWS = (1, 8, 16, 32, 64)
CALLS = (16, 48)
TURNS = 12
DRAWN: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}


class Times:
    """When each token of a request came."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, update: Update) -> None:
        self.at += [time.perf_counter()] * len(update.tokens)


def step_ms(
    model: Any,
    batch: int,
    dialect: Dialect | None,
    *,
    drawn: bool = False,
    capture: CaptureWriter | None = None,
    bits: int = 0,
    context: int = CONTEXT_TOKENS,
) -> float:
    """Median milliseconds of a decode step of `batch` rows, one step ahead."""
    geometry = Geometry(block_size=16, groups=(Group(num_blocks=batch * 44),))
    policy = Policy(max_batch_tokens=8192, max_running=batch, prefill_chunk=2048, lookahead=True)
    layout = quantised(look(model), bits) if bits else None

    def parts() -> Parts:
        with mock.patch.object(model_kernel, "choose", return_value=(dialect, "")):
            kernel = ModelKernel(model, geometry, check=False, layout=layout)
        if capture is None:
            return Parts(kernel, policy)
        told = structs.replace(header(geometry, policy), sanitize="edges")
        return Parts(kernel, policy, capture, told)

    engine = Engine(parts)
    engine.open()
    sinks = [Times() for _ in range(batch)]
    for number, sink in enumerate(sinks):
        prompt = tuple((number * 7 + place) % 997 for place in range(context))
        wanted: dict[str, Any] = {"seed": number, **DRAWN} if drawn else {}
        engine.submit(Submission(prompt, Parameters(max_tokens=STEPS, **wanted)), sink)
    while engine.step() and not all(sink.at for sink in sinks):
        pass
    begun = len(sinks[0].at)
    while engine.step():
        pass
    engine.stop()
    gc.collect()  # the kernel's own weights are part of a cycle
    return statistics.median(b - a for a, b in pairwise(sinks[0].at[begun:])) * 1e3


def product_us(call: Callable[[int], mx.array]) -> float:
    """Microseconds of a call: the slope over their number, each with another layer's weights."""

    def best(count: int) -> float:
        found = float("inf")
        for _ in range(4):
            outs = [call(number) for number in range(count)]
            mx.synchronize()
            started = time.perf_counter()
            mx.eval(outs)
            found = min(found, time.perf_counter() - started)
        return found

    few, many = CALLS
    return (best(many) - best(few)) / (many - few) * 1e6


def products(model: Any, kernels: Products) -> None:
    """A table: a layer's four products, by one launch each and by MLX's operations."""
    from kernel.products import PlainProducts

    body = FewRows(model, kernels)
    print(f"{'rows':>5}{'heads us':>16}{'out us':>16}{'gated us':>16}{'down us':>16}")
    for rows in ROWS:
        cells = [_products_us(body, rows, it) for it in (kernels, PlainProducts())]
        line = "".join(f"{f'{a:.1f} / {b:.1f}':>16}" for a, b in zip(*cells, strict=True))
        print(f"{rows:>5}{line}", flush=True)


def _products_us(body: FewRows, rows: int, products: Products) -> list[float]:
    layers = body._layers
    width = layers[0].attention.o_proj.weight.shape[0]
    inner = layers[0].network.down_proj.weight.shape[1]
    x, y = (mx.random.normal((rows, it), mx.bfloat16) for it in (width, inner))
    places = mx.arange(rows, dtype=mx.int32)
    mx.eval(x, y, places)

    def heads(number: int) -> mx.array:
        it = layers[number % len(layers)]
        return products.heads(x, it.before, it.projections, places, it.rope)[0]

    def out(number: int) -> mx.array:
        it = layers[number % len(layers)]
        return products.added(x, it.out, x)

    def gated(number: int) -> mx.array:
        it = layers[number % len(layers)]
        return products.gated(x, it.between, it.gates)

    def down(number: int) -> mx.array:
        it = layers[number % len(layers)]
        return products.added(y, it.down, x)

    return [product_us(it) for it in (heads, out, gated, down)]


class _WithoutSampler:
    """A dialect that leaves sampling to MLX's operations."""

    sampler = None

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dialect, name)


def drawn(name: str, model: Any, dialect: Dialect) -> None:
    """Steps whose samples are drawn, in one launch and by operations."""
    without: Any = _WithoutSampler(dialect)
    for batch in (1, 64):
        cells = [
            step_ms(model, batch, it, drawn=is_drawn)
            for it in (dialect, without)
            for is_drawn in (False, True)
        ]
        print(
            f"{name}, {batch} rows, ms a step: one launch, greedy {cells[0]:.2f}, drawn "
            f"{cells[1]:.2f}; operations, greedy {cells[2]:.2f}, drawn {cells[3]:.2f}",
            flush=True,
        )


def captured(name: str, model: Any, dialect: Dialect, batch: int = 64) -> None:
    """A step with a capture and without, in many short turns; which comes first changes."""
    pairs: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(TURNS):
            found = {}
            for is_on in (turn % 2 == 0, turn % 2 == 1):
                file = CaptureWriter(Path(folder) / f"{turn}.log") if is_on else None
                found[is_on] = step_ms(model, batch, dialect, capture=file, context=128)
            pairs.append((found[False], found[True]))
    off, on = (statistics.median(it) for it in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    print(f"{name}, {batch} rows, capture off {off:.2f} ms, on {on:.2f} ms, ratio {ratio:.3f}")
    print("  each pair:", " ".join(f"{a:.2f}/{b:.2f}" for a, b in pairs), flush=True)


def words(name: str, model: Any) -> None:
    """Rows of 8 bits: by tables and by the gather."""
    layout = quantised(look(model), 8)
    dialect, reason = choose(model, layout, 16)
    for batch in (1, 64):
        plain = step_ms(model, batch, choose(model, look(model), 16)[0])
        by_tables = step_ms(model, batch, dialect, bits=8) if dialect else float("nan")
        gathered = step_ms(model, batch, None, bits=8)
        print(
            f"{name}, {batch} rows, ms a step: 16 bits {plain:.2f}, 8 bits by tables "
            f"{by_tables:.2f}, by the gather {gathered:.2f} {reason}",
            flush=True,
        )
