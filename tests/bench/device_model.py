"""SmolLM2 itself on a GPU: the engine's answers against mlx-lm's own caches, and its tapes.

`python -m tests.bench.device model`. Prompts of unequal lengths run at once, most of them behind
one text that they share; the truth is the same weights in float32, each prompt alone and dense.
On CUDA, MLX_ENABLE_TF32=0 makes its products keep all their bits.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
from attrs import frozen
from mlx_lm.models.cache import make_prompt_cache

from kernel import weights
from kernel.bundled import bundled_model
from kernel.gguf import GgufModel, read_gguf
from kernel.tokenizer import Tokenizer
from server.build import build_engine
from server.settings import Settings
from server.submission import Submission, Update
from statemachine.records import Parameters

ANSWER_TOKENS = 64
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
SHARED = (
    "You are a patient teacher. You answer in short sentences, you give one example for each "
    "thing that you explain, and you never use a word that a child of ten would have to look up. "
    "When you are not sure of something, you say so, and you tell the child where it could find "
    "out. You do not talk about yourself, and you do not repeat the question. "
)
QUESTIONS = (
    "Why is the sky blue?",
    "What does a bee do all day, and why do the flowers like it so much?",
    "Tell me about Rome.",
    "How does a boat made of iron float, when a nail of the same iron sinks at once?",
    "What is seven times eight?",
)
ALONE = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time there was a fox who lived at the edge of a forest, and every morning it",
)


@frozen
class Answers:
    """Of one run: each prompt's tokens, and what the engine counted."""

    tokens: list[list[int]]
    cached_tokens: int
    status: dict[str, int]
    tape: Path


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """What is asked, as tokens; the first ones begin with the same text."""
    return [tokenizer.encode(text) for text in (*(SHARED + it for it in QUESTIONS), *ALONE)]


@contextlib.contextmanager
def _loaded_as(dtype: mx.Dtype) -> Iterator[None]:
    """The bundled model's weights are made numbers of this type."""

    def read(path: Path, _: mx.Dtype) -> GgufModel:
        return read_gguf(path, dtype)

    with mock.patch.object(weights, "read_gguf", read):
        yield


class _Sink:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.cached_tokens = 0
        self.over = threading.Event()

    def __call__(self, update: Update) -> None:
        self.tokens += update.tokens
        self.cached_tokens = max(self.cached_tokens, update.cached_tokens)
        if update.finish_reason is not None:
            if update.error:
                print("  error:", update.error)
            self.over.set()


def answers(path: str, tape: Path, lookahead: bool) -> Answers:
    """Greedy answers to all prompts at once, through a server's own engine, on tape."""
    told: list[str] = []
    settings = Settings(model=path, capture=str(tape), lookahead=lookahead, sanitize="full")
    engine, tokenizer = build_engine(settings, told.append)
    print("  " + "; ".join(it for it in told if "attention" in it or "slow" in it))
    asked = prompts(tokenizer)
    sinks = [_Sink() for _ in asked]
    wanted = Parameters(max_tokens=ANSWER_TOKENS)
    for prompt, sink in zip(asked, sinks, strict=True):
        engine.submit(Submission(tuple(prompt), wanted), sink)
    for sink in sinks:
        sink.over.wait()
    status = engine.status()
    engine.stop()
    cached = sum(sink.cached_tokens for sink in sinks)
    return Answers([sink.tokens for sink in sinks], cached, status, tape)


def dense(model: Any, prompt: list[int]) -> np.ndarray:
    """Logits of each token of a greedy answer, by mlx-lm's caches: [ANSWER_TOKENS, vocab]."""
    caches, token, rows = make_prompt_cache(model), mx.array([prompt]), list[np.ndarray]()
    for _ in range(ANSWER_TOKENS):
        rows.append(np.array(model(token, cache=caches)[0, -1].astype(mx.float32)))
        token = mx.array([[int(rows[-1].argmax())]])
    return np.stack(rows)


def compare(found: list[list[int]], exact: list[np.ndarray]) -> str:
    """How many answers are the exact ones; where the others part, and how far the best led."""
    parted = []
    for tokens, rows in zip(found, exact, strict=True):
        best = rows.argmax(axis=-1)
        places = np.flatnonzero(best != np.array(tokens))
        if len(places):
            first = int(places[0])
            two = np.partition(rows[first], -2)[-2:]
            parted.append(f"at {first}, where the best leads by {two[1] - two[0]:.4f}")
    return f"{len(found) - len(parted)} of {len(found)} answers are float32's; {', '.join(parted)}"


def regret(model: Any, asked: list[list[int]], found: list[list[int]]) -> float:
    """How far below the exact best a token of an answer is, given those before it, the most."""
    worst = 0.0
    for prompt, tokens in zip(asked, found, strict=True):
        logits = model(mx.array([[*prompt, *tokens[:-1]]]), cache=make_prompt_cache(model))
        rows = np.array(logits[0, len(prompt) - 1 :].astype(mx.float32))
        worst = max(worst, float((rows.max(-1) - rows[np.arange(len(tokens)), tokens]).max()))
    return worst


def replayed(path: str, tape: Path, depth: str) -> str:
    """A tape's replay: the exit code and the last lines."""
    from replay.cli import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main([str(tape), "--depth", depth, "--model", path])
    return f"{depth}: {code}" + ("" if code == 0 else f"\n{said.getvalue()}")


def check_model() -> None:
    """The engine's answers in each type of numbers, ahead and not, against float32 and dense."""
    path = str(bundled_model("smollm2-135m"))
    with _loaded_as(mx.float32):
        truth = weights.load_model(path)
    asked = prompts(truth.tokenizer)
    exact = [dense(truth.model, prompt) for prompt in asked]
    print(f"SmolLM2, prompts of {', '.join(str(len(it)) for it in asked)} tokens")
    with tempfile.TemporaryDirectory() as folder:
        for dtype, lookahead in itertools.product(DTYPES, (False, True)):
            with _loaded_as(dtype):
                tape = Path(folder) / f"{dtype}-{lookahead}.log"
                found = answers(path, tape, lookahead)
                said = [replayed(path, tape, depth) for depth in ("fold", "plan", "forward")]
            off, status = regret(truth.model, asked, found.tokens), found.status
            print(f"{dtype}, {'ahead' if lookahead else 'read at once'}: ", end="")
            print(f"{compare(found.tokens, exact)}; the worst choice off by {off:.4f}")
            print(
                f"  {found.cached_tokens} prompt tokens shared, {status['steps']} steps, "
                f"{status['divergences']} divergences; replay {'; '.join(said)}",
                flush=True,
            )
