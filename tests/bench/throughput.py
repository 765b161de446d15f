"""Tokens a second of a real model, in process: over pages, and by mlx-lm's own caches."""

from __future__ import annotations

import statistics
import time
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import BatchKVCache, KVCache

from kernel.model_kernel import ModelKernel
from kernel.weights import LoadedModel
from server.engine import Engine
from server.parts import Parts
from server.policy import Policy
from server.submission import Submission, Update
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters

from .table import Table

BATCHES = (1, 4, 16, 32)
CONTEXT_TOKENS = 128
ANSWER_TOKENS = 24
PREFILL_TOKENS = 512
RUNS = 3


def throughput(table: Table, loaded: LoadedModel) -> dict[int, float]:
    """Prefill of 512 tokens, and decode at each batch size; returns what plain loops decode."""
    engine = _engine(loaded)
    plain = statistics.median(_plain_prefill(loaded.model) for _ in range(RUNS))
    paged = statistics.median(_paged_prefill(engine, run) for run in range(RUNS))
    table.add(f"prefill, {PREFILL_TOKENS} tokens", paged, "tokens/s", plain, "plain loop")
    rates: dict[int, float] = {}
    for batch in BATCHES:
        rates[batch] = statistics.median(_plain_decode(loaded.model, batch) for _ in range(RUNS))
        paged = statistics.median(_paged_decode(engine, batch, run) for run in range(RUNS))
        table.add(f"decode, {batch} rows", paged, "tokens/s", rates[batch], "plain loop")
    engine.stop()
    return rates


def _engine(loaded: LoadedModel) -> Engine:
    geometry = Geometry(block_size=16, groups=(Group(num_blocks=512),))
    policy = Policy(max_batch_tokens=512, prefill_chunk=512, prefix_cache=False)
    engine = Engine(lambda: Parts(ModelKernel(loaded.model, geometry), policy))
    engine.open()
    return engine


def _prompt(seed: int, count: int) -> tuple[int, ...]:
    generator = np.random.default_rng(seed)
    return tuple(generator.integers(1000, 40000, count).tolist())


class _Times:
    """When each token of a request came."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, update: Update) -> None:
        self.at += [time.perf_counter()] * len(update.tokens)


def _paged_prefill(engine: Engine, run: int) -> float:
    times = _Times()
    started = time.perf_counter()
    engine.submit(Submission(_prompt(run, PREFILL_TOKENS), Parameters(max_tokens=1)), times)
    while engine.step():
        pass
    return PREFILL_TOKENS / (times.at[0] - started)


def _paged_decode(engine: Engine, batch: int, run: int) -> float:
    """Tokens a second from the step at which all decode to the last token."""
    sinks = [_Times() for _ in range(batch)]
    for number, sink in enumerate(sinks):
        prompt = _prompt(run * 100 + number, CONTEXT_TOKENS)
        engine.submit(Submission(prompt, Parameters(max_tokens=ANSWER_TOKENS)), sink)
    while engine.step():
        pass
    first = max(sink.at[0] for sink in sinks)
    last = min(sink.at[-1] for sink in sinks)
    tokens = sum(first < at <= last for sink in sinks for at in sink.at)
    return tokens / (last - first)


def _plain_prefill(model: Any) -> float:
    caches = [KVCache() for _ in model.layers]
    tokens = mx.array([_prompt(0, PREFILL_TOKENS)])
    started = time.perf_counter()
    mx.eval(mx.argmax(model(tokens, cache=caches)[:, -1], axis=-1))
    return PREFILL_TOKENS / (time.perf_counter() - started)


def _plain_decode(model: Any, batch: int) -> float:
    """mlx-lm's own batched caches, greedy, no server around them."""
    caches = [BatchKVCache([0] * batch) for _ in model.layers]
    tokens = mx.array([_prompt(number, CONTEXT_TOKENS) for number in range(batch)])
    token = mx.argmax(model(tokens, cache=caches)[:, -1:], axis=-1)
    mx.eval(token)
    started = time.perf_counter()
    for _ in range(ANSWER_TOKENS):
        token = mx.argmax(model(token, cache=caches)[:, -1:], axis=-1)
        mx.eval(token)
    return batch * ANSWER_TOKENS / (time.perf_counter() - started)
