"""Sampling in one launch, by paged_source/sample.h: CUDA's.

Owns how a plan of samples is told to the kernel, and the comparison with sampling.py before use.
MLX's own operations take twenty launches for a greedy step, and over a hundred for a drawn one.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from statemachine.records import Parameters

from .errors import describe
from .fastmath import LOG2E
from .kernel_text import header
from .sampling import Samples, SamplingPlan, plan_samples, sample

HEADERS = ("cuda.h", "sample.h")
INPUTS = ["logits", "asked"]
OUTPUTS = ["tokens", "chosen", "margins"]
THREADS = 1024
ASKED = 5
"""Numbers of a row; sample.h's."""
GREEDY_MAX = 256
"""Numbers of rows whose greedy array is kept."""
CHECKED_ROWS = 64
DIFFERENT_MAX = 1
"""Of these: sums in another order may come to lie on the other side of a uniform number."""


class Sampler(Protocol):
    """sampling.sample by other means."""

    def sample(self, logits: mx.array, asked: mx.array) -> Samples:
        """Tokens and fingerprints of logits [S, vocab] float32. asked: see `asked_by`."""


def body() -> str:
    return f"sample<{THREADS}>(logits, (int)logits_shape[1], asked, tokens, chosen, margins);"


def asked_by(plan: SamplingPlan) -> mx.array:
    """What the kernel is told of each row: [S, ASKED] float32."""
    if not plan.drawn:
        return _greedy(plan.rows)
    asked = np.zeros((plan.rows, ASKED), np.float32)
    scale = np.float32(LOG2E) / plan.temperature
    columns = (scale, plan.top_k, plan.top_p, plan.min_p, plan.uniform)
    asked[list(plan.drawn)] = np.stack([it.astype(np.float32) for it in columns], axis=1)
    return mx.array(asked)


@lru_cache(GREEDY_MAX)
def _greedy(rows: int) -> mx.array:
    return mx.array(np.zeros((rows, ASKED), np.float32))


class CudaSampler:
    """See Sampler."""

    def sample(self, logits: mx.array, asked: mx.array) -> Samples:
        rows = len(logits)
        tokens, chosen, margins = _kernel()(
            inputs=[logits, asked],
            grid=(rows * THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(rows,)] * 3,
            output_dtypes=[mx.uint32, mx.float32, mx.float32],
        )
        return Samples(tokens, chosen, margins)


@cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="sample",
        input_names=INPUTS,
        output_names=OUTPUTS,
        source=body(),
        header=header(HEADERS),
    )


def sampler_for(sampler: Sampler | None, vocab: int) -> tuple[Sampler | None, str]:
    """`sampler` where it gives what sampling.py gives, else None and why not."""
    if sampler is None:
        return None, ""
    try:
        reason = disagreement(sampler, vocab)
    except Exception as error:  # a kernel that does not compile, say
        reason = describe(error)
    return (None, reason) if reason else (sampler, "")


def disagreement(sampler: Sampler, vocab: int, rows: int = CHECKED_ROWS) -> str:
    """Why it must not be used, by random logits; empty where it gives what sampling.py gives."""
    rng = np.random.default_rng(0)
    plan = plan_samples((_parameters(number, rng), number) for number in range(rows))
    logits = mx.array(rng.standard_normal((rows, vocab), np.float32) * 3)
    got, wanted = sampler.sample(logits, asked_by(plan)), sample(logits, plan)
    same = np.array(got.tokens) == np.array(wanted.tokens)
    greedy = np.ones(rows, bool)
    greedy[list(plan.drawn)] = False
    if not same[greedy].all() or (~same).sum() > DIFFERENT_MAX:
        return f"{(~same).sum()} of {rows} samples are other tokens than those of MLX's operations"
    if not np.array_equal(np.array(got.logits)[same], np.array(wanted.logits)[same]):
        return "logits of samples are not those of MLX's operations"
    if not np.array_equal(np.array(got.margins), np.array(wanted.margins)):
        return "margins of samples are not those of MLX's operations"
    return ""


def _parameters(number: int, rng: np.random.Generator) -> Parameters | None:
    """Of every kind of cut, alone and together; none for greedy rows."""
    kind = number % 8
    if kind == 0:
        return None
    return Parameters(
        max_tokens=1,
        seed=number,
        temperature=float(rng.uniform(0.3, 1.5)),
        top_k=int(rng.integers(2, 60)) if kind & 1 else 0,
        top_p=float(rng.uniform(0.3, 0.99)) if kind & 2 else 1.0,
        min_p=float(rng.uniform(0.0, 0.1)) if kind & 4 else 0.0,
    )
