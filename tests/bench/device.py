"""A GPU at a glance: logits over pages against mlx-lm's caches, then times of real shapes.

`python -m tests.bench.device [checks|whole|model|layer|steps|prefill|memory|more|draft ...]`: all
without a name.
Random weights in bfloat16: times do not depend on them. `tables` is attention by a kernel that
reads block tables, where this device has one; `gather` is what serves without it.
"""

from __future__ import annotations

import statistics
import sys
import time
from itertools import pairwise
from typing import Any
from unittest import mock

from kernel.blas import load_blas

load_blas()

import mlx.core as mx  # noqa: E402
from mlx.utils import tree_map  # noqa: E402
from mlx_lm.models import llama  # noqa: E402
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache  # noqa: E402

from kernel import model_kernel  # noqa: E402
from kernel.model_kernel import ModelKernel  # noqa: E402
from kernel.paged_attention import Dialect  # noqa: E402
from server.engine import Engine  # noqa: E402
from server.parts import Parts  # noqa: E402
from server.policy import Policy  # noqa: E402
from server.submission import Submission, Update  # noqa: E402
from statemachine.geometry import Geometry, Group  # noqa: E402
from statemachine.records import Parameters  # noqa: E402
from tests.bench import device_more  # noqa: E402
from tests.bench.device_check import check, check_lookahead, device_dialect  # noqa: E402
from tests.bench.device_draft import drafts  # noqa: E402
from tests.bench.device_layer import layers  # noqa: E402
from tests.bench.device_model import check_model  # noqa: E402
from tests.bench.device_whole import check_draft, check_few_rows, check_states  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "135M shape": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
    "8B shape": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}
CONTEXT_TOKENS = 512
STEPS = 40
MEMORY_STEPS = 500
PROMPT_TOKENS = 2048
MEMORY_BLOCKS = 16200


def make(shape: dict[str, Any]) -> Any:
    """A model of a shape with random bfloat16 weights."""
    args = llama.ModelArgs(
        model_type="llama", rms_norm_eps=1e-5, max_position_embeddings=8192, **shape
    )
    model = llama.Model(args)
    model.update(tree_map(lambda array: array.astype(mx.bfloat16), model.parameters()))
    mx.eval(model.parameters())
    return model


class _Times:
    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, update: Update) -> None:
        self.at += [time.perf_counter()] * len(update.tokens)


def _parts(model: Any, geometry: Geometry, policy: Policy, dialect: Dialect | None) -> Parts:
    """A kernel with just that dialect: the gather, where there is none."""
    with mock.patch.object(model_kernel, "choose", return_value=(dialect, "")):
        return Parts(ModelKernel(model, geometry, check=False), policy)


def paged_ms(
    model: Any,
    batch: int,
    lookahead: bool,
    dialect: Dialect | None,
    steps: int = STEPS,
    blocks: int = 0,
) -> tuple[float, float]:
    """Median milliseconds of a decode step through the engine, and GB beyond the pool."""
    geometry = Geometry(block_size=16, groups=(Group(num_blocks=blocks or batch * 40),))
    policy = Policy(
        max_batch_tokens=8192, max_running=batch, prefill_chunk=2048, lookahead=lookahead
    )
    engine = Engine(lambda: _parts(model, geometry, policy, dialect))
    engine.open()
    sinks = [_Times() for _ in range(batch)]
    for number, sink in enumerate(sinks):
        prompt = tuple((number * 7 + place) % 997 for place in range(CONTEXT_TOKENS))
        engine.submit(Submission(prompt, Parameters(max_tokens=steps)), sink)
    while engine.step() and not all(sink.at for sink in sinks):
        pass
    begun = len(sinks[0].at)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    while engine.step():
        pass
    at = sinks[0].at[begun:]
    apart = [b - a for a, b in pairwise(at)]
    extra = (mx.get_peak_memory() - before) / 1e9
    engine.stop()
    return statistics.median(apart) * 1e3, extra


def dense_ms(model: Any, batch: int) -> float:
    """Median milliseconds of a step over mlx-lm's batched caches, read back each time."""
    caches = [BatchKVCache([0] * batch) for _ in model.layers]
    tokens = mx.array([[(n * 7 + p) % 997 for p in range(CONTEXT_TOKENS)] for n in range(batch)])
    token = mx.argmax(model(tokens, cache=caches)[:, -1:], axis=-1)
    mx.eval(token)
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        token = mx.argmax(model(token, cache=caches)[:, -1:], axis=-1)
        mx.eval(token)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def steps() -> None:
    """A table: a decode step of real shapes, by tables and by gather, read at once and ahead."""
    print(
        f"{'shape':<12}{'rows':>5}{'tables ms':>11}{'ahead ms':>10}{'gather ms':>11}"
        f"{'ahead ms':>10}{'mlx-lm ms':>11}{'tables GB':>11}{'ahead GB':>10}"
    )
    for name, shape in SHAPES.items():
        model = make(shape)
        dialect, reason = device_dialect(model)
        for batch in (1, 8, 32, 64):
            cells = [paged_ms(model, batch, ahead, dialect) for ahead in (False, True)]
            cells += [paged_ms(model, batch, ahead, None) for ahead in (False, True)]
            times = "".join(
                f"{cell[0]:>{width}.2f}"
                for cell, width in zip(cells, (11, 10, 11, 10), strict=True)
            )
            dense = dense_ms(model, batch)
            print(
                f"{name:<12}{batch:>5}{times}{dense:>11.2f}{cells[0][1]:>11.2f}{cells[1][1]:>10.2f}"
                f" {reason}",
                flush=True,
            )
        del model
        mx.clear_cache()


def prefill() -> None:
    """Prompt tokens a second: one prompt in one step, by tables, by gather, and by mlx-lm."""
    model = make(SHAPES["8B shape"])
    dialect, _ = device_dialect(model)
    rates = [prefill_rate(model, kernels) for kernels in (dialect, None)]
    tokens = mx.array([[place % 997 for place in range(PROMPT_TOKENS)]])
    times = []
    for _ in range(4):
        caches = make_prompt_cache(model)
        started = time.perf_counter()
        mx.eval(model(tokens, cache=caches)[:, -1])
        times.append(time.perf_counter() - started)
    print(
        f"{PROMPT_TOKENS} prompt tokens, 8B shape, tokens/s: tables {rates[0]:,.0f}, "
        f"gather {rates[1]:,.0f}, mlx-lm {PROMPT_TOKENS / min(times):,.0f}"
    )


def prefill_rate(model: Any, dialect: Dialect | None) -> float:
    """Prompt tokens a second until the first token is read, the best of several prompts."""
    geometry = Geometry(block_size=16, groups=(Group(num_blocks=1024),))
    policy = Policy(max_batch_tokens=8192, max_running=4, prefill_chunk=PROMPT_TOKENS)
    engine = Engine(lambda: _parts(model, geometry, policy, dialect))
    engine.open()
    best = float("inf")
    for number in range(4):
        sink = _Times()
        prompt = tuple((number * 7 + place) % 997 for place in range(PROMPT_TOKENS))
        started = time.perf_counter()
        engine.submit(Submission(prompt, Parameters(max_tokens=1)), sink)
        while engine.step() and not sink.at:
            pass
        best = min(best, sink.at[0] - started)
    engine.stop()
    return PROMPT_TOKENS / best


def memory() -> None:
    """Peak memory over many steps with lookahead, over a pool of 34 GB."""
    model = make(SHAPES["8B shape"])
    dialect, _ = device_dialect(model)
    _, extra = paged_ms(model, 64, True, dialect, MEMORY_STEPS, MEMORY_BLOCKS)
    print(
        f"{MEMORY_STEPS} steps of 64 rows ahead, 34 GB pool: {extra:.2f} GB beyond it at the peak"
    )


def more() -> None:
    """What stands in device_more.py, of both shapes."""
    for name, shape in SHAPES.items():
        model = make(shape)
        dialect, reason = device_dialect(model)
        if dialect is None:
            print(f"no tables: {reason}")
            return
        if dialect.products is not None and name.startswith("8B"):
            device_more.products(model, dialect.products)
        device_more.drawn(name, model, dialect)
        device_more.captured(name, model, dialect)
        device_more.words(name, model)
        del model
        mx.clear_cache()


def draft() -> None:
    """What stands in device_draft.py."""
    model = make(SHAPES["8B shape"])
    dialect, reason = device_dialect(model)
    print(f"a draft model of the 8B shape's first layers {reason}")
    drafts(model, dialect)


def main() -> None:
    """Checks, then tables."""
    print(mx.default_device(), mx.device_info().get("device_name", ""))
    parts = {"checks": (check, check_lookahead), "layer": (layers,), "steps": (steps,)}
    parts |= {"whole": (check_few_rows, check_states, check_draft)}
    parts |= {"model": (check_model,), "prefill": (prefill,), "memory": (memory,)}
    parts |= {"more": (more,), "draft": (draft,)}
    for name in sys.argv[1:] or parts:
        for part in parts[name]:
            part()


if __name__ == "__main__":
    main()
