"""A draft model on a GPU: tokens a second with one that is always right, and one that never is.

`python -m tests.bench.device draft`. The 8B shape, whose layers from the fifth on add nothing,
though they cost what they always do; a draft model of the first four layers then guesses what the
whole one says. Its answers name the next token, so that no rounding decides one.
"""

from __future__ import annotations

import gc
import time
from typing import Any
from unittest import mock

import mlx.core as mx
from attrs import frozen
from mlx.utils import tree_map
from mlx_lm.models import llama

from kernel import model_kernel
from kernel.families import family_of
from kernel.layout import look
from kernel.model_kernel import ModelKernel
from kernel.paged_attention import Dialect
from server.drafting import DraftParts
from server.engine import Engine
from server.parts import Parts
from server.policy import Policy
from server.submission import Submission, Update
from statemachine.geometry import Geometry
from statemachine.records import DraftModel, Parameters

DRAFT_LAYERS = 4
SMALL = 0.01
"""What the first layers' outputs are multiplied by: they matter, and decide nothing."""
CONTEXT_TOKENS, ANSWER_TOKENS = 512, 240
BATCHES = (1, 8)
GUESSES = (2, 4, 8)


@frozen
class Rate:
    """Of one run: tokens a second of all requests together, guessed and accepted tokens."""

    tokens_per_s: float
    guessed: int
    accepted: int
    answers: list[list[int]]


class _Sink:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def __call__(self, update: Update) -> None:
        self.tokens += update.tokens


def quiet(model: Any) -> None:
    """Make the first layers add little and the others nothing, and the head name the next token."""
    for number, layer in enumerate(model.layers):
        share = SMALL if number < DRAFT_LAYERS else 0.0
        for it in (layer.self_attn.o_proj, layer.mlp.down_proj):
            it.weight = it.weight * share
    model.lm_head.weight = mx.roll(model.model.embed_tokens.weight, 1, axis=0)
    mx.eval(model.parameters())


def first_layers(model: Any) -> Any:
    """The draft model: the first layers of a model, and its embeddings, norm and head."""
    args = llama.ModelArgs(**{**vars(model.args), "num_hidden_layers": 1, "layer_types": None})
    made = llama.Model(args)
    made.model.layers = model.model.layers[:DRAFT_LAYERS]
    made.model.embed_tokens, made.model.norm = model.model.embed_tokens, model.model.norm
    made.lm_head = model.lm_head
    return made


def another(model: Any) -> Any:
    """A draft model of the same size with random weights, which knows nothing."""
    changed = {"num_hidden_layers": DRAFT_LAYERS, "layer_types": None}
    made = llama.Model(llama.ModelArgs(**{**vars(model.args), **changed}))
    made.update(tree_map(lambda it: it.astype(mx.bfloat16), made.parameters()))
    mx.eval(made.parameters())
    return made


def rate(model: Any, draft: Any, batch: int, guesses: int, dialect: Dialect | None) -> Rate:
    """Decode `batch` requests; without a draft model, one step ahead."""
    pool = Geometry(block_size=16, groups=look(model).groups(batch * 52))
    policy = Policy(
        max_batch_tokens=8192,
        max_running=batch,
        prefill_chunk=2048,
        lookahead=True,
        draft_tokens=guesses if draft is not None else 0,
    )

    def kernel(of: Any) -> ModelKernel:
        geometry = Geometry(block_size=16, groups=look(of).groups(batch * 52))
        with mock.patch.object(model_kernel, "choose", return_value=(dialect, "")):
            return ModelKernel(of, geometry, check=False)

    def parts() -> Parts:
        drafted = None
        if draft is not None:
            told = DraftModel("draft", {}, pool, dict(family_of(draft).flags), 1, 0)
            drafted = DraftParts(kernel(draft), told)
        return Parts(kernel(model), policy, draft=drafted)

    engine = Engine(parts)
    engine.open()
    sinks = [_Sink() for _ in range(batch)]
    for number, sink in enumerate(sinks):
        prompt = tuple((number * 7 + place) % 997 for place in range(CONTEXT_TOKENS))
        engine.submit(Submission(prompt, Parameters(max_tokens=ANSWER_TOKENS)), sink)
    while engine.step() and min(len(it.tokens) for it in sinks) < ANSWER_TOKENS // 4:
        pass
    before, started = sum(len(it.tokens) for it in sinks), time.perf_counter()
    while engine.step() and min(len(it.tokens) for it in sinks) < ANSWER_TOKENS * 3 // 4:
        pass
    told = (sum(len(it.tokens) for it in sinks) - before) / (time.perf_counter() - started)
    while engine.step():
        pass
    counters = engine.counters
    engine.stop()
    gc.collect()
    answers = [it.tokens for it in sinks]
    return Rate(told, counters.guessed_tokens, counters.accepted_tokens, answers)


def drafts(model: Any, dialect: Dialect | None) -> None:
    """A line a run: tokens a second with and without a draft model, and what was accepted."""
    quiet(model)
    for batch in BATCHES:
        plain = rate(model, None, batch, 0, dialect)
        print(f"{batch} rows, no draft model: {plain.tokens_per_s:.0f} tokens/s", flush=True)
        for name, draft in (("always right", first_layers(model)), ("never right", another(model))):
            for guesses in GUESSES:
                found = rate(model, draft, batch, guesses, dialect)
                print(
                    f"{batch} rows, {guesses} guesses, {name}: {found.tokens_per_s:.0f} tokens/s, "
                    f"{found.accepted} of {found.guessed} accepted; the same tokens: "
                    f"{found.answers == plain.answers}",
                    flush=True,
                )
