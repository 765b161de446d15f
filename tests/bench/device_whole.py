"""Whole models on a GPU, against what needs no kernel of ours: few rows, states, a draft model.

Random weights: what is compared is arithmetic and addressing. `python -m tests.bench.device whole`.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from kernel.families import family_of
from kernel.few_rows import few_rows
from kernel.forward import Forward
from kernel.layout import look
from kernel.model_kernel import ModelKernel
from kernel.paged_choice import choose
from server.drafting import DraftParts
from server.engine import Engine
from server.parts import Parts
from server.policy import Policy
from server.submission import Submission, Update
from statemachine.geometry import Geometry
from statemachine.records import DraftModel, Parameters
from tests.paged import Runner, random_tokens
from tests.tiny_architectures import architecture_model

ANSWER_TOKENS = 48
STATES = ("mamba2", "jamba", "granitemoehybrid")
WIDE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}


def check_few_rows() -> None:
    """Logits of steps of 1 to 64 rows: by the body of few rows and by the model's modules, against
    float32 without pages.
    """
    args = llama.ModelArgs(model_type="llama", rms_norm_eps=1e-5, **WIDE)
    model, exact = (llama.Model(args) for _ in range(2))
    model.update(tree_map(lambda it: it.astype(mx.bfloat16), model.parameters()))
    exact.update(tree_map(lambda it: it.astype(mx.float32), model.parameters()))
    mx.eval(model.parameters(), exact.parameters())
    dialect, reason = choose(model, look(model), 16)
    if dialect is None:
        print(f"few rows: no tables: {reason}")
        return
    body, reason = few_rows(model, dialect.products)
    print(f"few rows: {'in use' if body else reason}")
    for count in (1, 8, 20, 43, 64):
        prompts = [random_tokens(seed, 40, 4096) for seed in range(count)]
        wanted = _dense(exact, prompts)
        line = [f"{_apart(model, dialect, it, prompts, wanted):.1e}" for it in (body, None)]
        print(
            f"  {count:>2} rows: off from float32 by {line[0]}, the modules by {line[1]} of a row"
        )


def _dense(model: Any, prompts: list[list[int]]) -> np.ndarray:
    """Logits of the last eight tokens of each, by mlx-lm's caches: [8, rows, vocab]."""
    caches = make_prompt_cache(model)
    logits = model(mx.array(prompts), cache=caches)[:, -8:]
    return np.array(logits.astype(mx.float32)).swapaxes(0, 1)


def _apart(
    model: Any, dialect: Any, body: Any, prompts: list[list[int]], wanted: np.ndarray
) -> float:
    """The mean distance of a row of logits, relative to its length."""
    runner = Runner(model, num_blocks=4 * len(prompts), block_size=16)
    runner.forward = Forward(model, look(model), dialect=dialect, few_rows=body)
    for seq, tokens in enumerate(prompts):
        runner.run(runner.book.append(seq, tokens[:-8]))
    found = [
        runner.run(*[runner.book.append(seq, [it[place]]) for seq, it in enumerate(prompts)])
        for place in range(-8, 0)
    ]
    far = np.linalg.norm(np.stack(found) - wanted, axis=-1)
    return float((far / np.linalg.norm(wanted, axis=-1)).mean())


class _Tokens:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def __call__(self, update: Update) -> None:
        self.tokens += update.tokens
        if update.error:
            print("  error:", update.error)


def _answers(parts: Any, prompts: list[list[int]]) -> tuple[list[list[int]], Engine]:
    """Greedy answers of an engine, all prompts at once."""
    engine = Engine(parts)
    engine.open()
    sinks = [_Tokens() for _ in prompts]
    for prompt, sink in zip(prompts, sinks, strict=True):
        engine.submit(Submission(tuple(prompt), Parameters(max_tokens=ANSWER_TOKENS)), sink)
    while engine.step():
        pass
    engine.stop()
    return [sink.tokens for sink in sinks], engine


def check_states() -> None:
    """Recurrent models: each token of an answer is the dense path's best, or as good as that."""
    for name in STATES:
        model = architecture_model(name)
        family = family_of(model)
        if family.layout is None:
            print(f"{name}: {family.reason}")
            continue
        groups = family.layout.groups(64, 16)
        geometry = Geometry(block_size=4, groups=groups, identity=name)
        prompts = [random_tokens(seed, 5 + 9 * seed) for seed in range(5)]
        policy = Policy(max_batch_tokens=32)
        kernel = ModelKernel(model, geometry, layout=family.layout, sanitize="full")
        answers, engine = _answers(lambda it=(kernel, policy): Parts(*it), prompts)
        worst = max(map(_regret, [model] * len(prompts), prompts, answers))
        print(
            f"{name}: {sum(map(len, answers))} tokens, the worst choice off by {worst:.1e}; "
            f"{engine.status()['divergences']} divergences"
        )


def _regret(model: Any, prompt: list[int], answer: list[int]) -> float:
    """How far below the dense path's best logit a token of the answer is, the most."""
    logits = model(mx.array([[*prompt, *answer[:-1]]]), cache=make_prompt_cache(model))
    rows = np.array(logits[0, len(prompt) - 1 :].astype(mx.float32))
    return float((rows.max(axis=-1) - rows[np.arange(len(answer)), answer]).max())


def check_draft() -> None:
    """A draft model: itself, which is always right, and another, which is not."""
    from kernel.tiny import tiny_llama

    model, other = tiny_llama(3), tiny_llama(4, layers=1)
    prompts = [random_tokens(seed, 6 + 5 * seed, 50) for seed in range(5)]
    geometry = Geometry(block_size=4, groups=look(model).groups(128))

    def parts(draft: Any) -> Parts:
        policy = Policy(lookahead=draft is None, draft_tokens=0 if draft is None else 3)
        drafted = None
        if draft is not None:
            pool = Geometry(block_size=4, groups=look(draft).groups(128))
            told = DraftModel("draft", {}, pool, dict(family_of(draft).flags), 1, 97)
            drafted = DraftParts(ModelKernel(draft, pool), told)
        return Parts(ModelKernel(model, geometry, sanitize="full"), policy, draft=drafted)

    plain, _ = _answers(lambda: parts(None), prompts)
    for name, draft in (("itself", model), ("another", other)):
        found, engine = _answers(lambda it=draft: parts(it), prompts)
        print(
            f"draft model, {name}: the same tokens as without: {found == plain}, "
            f"{engine.status()['steps']} steps, {engine.status()['divergences']} divergences"
        )
