"""A GPU at a glance: logits over pages against mlx-lm's caches, then step times of real shapes.

`python -m tests.bench.device`. Random weights in bfloat16: times do not depend on them.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from kernel.blas import load_blas

load_blas()

import mlx.core as mx  # noqa: E402
from mlx.utils import tree_map  # noqa: E402
from mlx_lm.models import llama  # noqa: E402
from mlx_lm.models.cache import BatchKVCache  # noqa: E402

from kernel.model_kernel import ModelKernel  # noqa: E402
from kernel.tiny import tiny_llama  # noqa: E402
from server.engine import Engine  # noqa: E402
from server.loop import Parts  # noqa: E402
from server.policy import Policy  # noqa: E402
from server.submission import Submission, Update  # noqa: E402
from statemachine.geometry import Geometry, Group  # noqa: E402
from statemachine.records import Parameters  # noqa: E402

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
STEPS = 30


def check() -> None:
    """Tiny models of both kinds of head, on this device."""
    from kernel.layout import look
    from kernel.probe import References, difference, paged_rows

    for tied in (True, False):
        model = tiny_llama(3, tied=tied)
        layout, references = look(model), References(model)
        tokens, wanted = references.tokens(layout.vocab_size), references.rows(layout.vocab_size)
        worst, _ = difference(paged_rows(model, layout, tokens), wanted, layout)
        print(
            f"tiny llama, {'tied' if tied else 'untied'}: off by {worst:.1e} of the largest logit"
        )


def check_lookahead() -> None:
    """A step issued before the last one was read draws the same tokens."""
    from kernel.families import groups_for

    model = tiny_llama(3)
    geometry = Geometry(block_size=4, groups=groups_for(model, 64))
    answers = []
    for policy in (
        Policy(),
        Policy(lookahead=True),
        Policy(draft_tokens=4, lookup_ngram=1),
        Policy(lookahead=True, draft_tokens=4, lookup_ngram=1),
    ):
        engine = Engine(lambda policy=policy: Parts(ModelKernel(model, geometry), policy))
        engine.open()
        sinks = [_Tokens() for _ in range(5)]
        for number, sink in enumerate(sinks):
            prompt = tuple((number + place % 3) % 50 for place in range(5 + 3 * number))
            engine.submit(Submission(prompt, Parameters(max_tokens=24)), sink)
        while engine.step():
            pass
        answers.append([sink.tokens for sink in sinks])
        engine.stop()
    same = [answer == answers[0] for answer in answers]
    print(f"lookahead, drafts, both: the same tokens as neither: {same[1:]}")


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


class _Tokens:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def __call__(self, update: Update) -> None:
        self.tokens += update.tokens


def paged_ms(model: Any, batch: int, lookahead: bool) -> tuple[float, float]:
    """Median milliseconds of a decode step through the engine, and GB beyond the pool."""
    geometry = Geometry(block_size=16, groups=(Group(num_blocks=batch * 40),))
    policy = Policy(
        max_batch_tokens=8192, max_running=batch, prefill_chunk=2048, lookahead=lookahead
    )
    engine = Engine(lambda: Parts(ModelKernel(model, geometry, check=False), policy))
    engine.open()
    sink = _Times()
    for number in range(batch):
        prompt = tuple((number * 7 + place) % 997 for place in range(CONTEXT_TOKENS))
        parameters = Parameters(max_tokens=STEPS)
        engine.submit(Submission(prompt, parameters), sink if number == 0 else _Times())
    while engine.step() and not sink.at:
        pass
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    while engine.step():
        pass
    steps = [b - a for a, b in zip(sink.at, sink.at[1:], strict=False)]
    return statistics.median(steps) * 1e3, (mx.get_peak_memory() - before) / 1e9


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


def main() -> None:
    """Checks, then a table."""
    print(mx.default_device(), mx.device_info().get("device_name", ""))
    check()
    check_lookahead()
    print(
        f"{'shape':<12}{'rows':>5}{'paged ms':>10}{'ahead ms':>10}{'mlx-lm ms':>11}"
        f"{'over pool GB':>14}{'ahead GB':>10}"
    )
    for name, shape in SHAPES.items():
        model = make(shape)
        for batch in (1, 8, 32, 64):
            paged, extra = paged_ms(model, batch, lookahead=False)
            ahead, ahead_extra = paged_ms(model, batch, lookahead=True)
            dense = dense_ms(model, batch)
            print(
                f"{name:<12}{batch:>5}{paged:>10.2f}{ahead:>10.2f}{dense:>11.2f}"
                f"{extra:>14.2f}{ahead_extra:>10.2f}",
                flush=True,
            )
        del model
        mx.clear_cache()


if __name__ == "__main__":
    main()
