"""Requests that ask for more than tokens, over a tiny random llama: what their tests share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from attrs import frozen
from mlx_lm.models.cache import make_prompt_cache
from msgspec import structs

from kernel.batch import Logprob
from kernel.blas import load_blas
from kernel.families import groups_for, owned_groups
from kernel.grammar import Grammars
from kernel.model_kernel import ModelKernel
from kernel.model_owned import ModelOwnedKernel
from kernel.tiny import tiny_llama
from kernel.tokenizer import Tokenizer
from replay import forward, models, reference
from replay.models import Loaded
from replay.run import CLEAN, FOLD, FORWARD, PLAN, REFERENCE, Options, replay
from server.engine import Engine
from server.loop import Parts
from server.policy import Policy
from server.submission import Submission
from statemachine.events import Forked
from statemachine.geometry import Geometry, Group
from statemachine.records import NO_PARENT, Parameters, Record

from .sim import Inbox, MemoryCapture, header
from .tampering import write
from .tiny_models import byte_tokenizer

VOCAB = 259
POLICY = Policy(max_batch_tokens=64, max_running=8, prefill_chunk=16, context_tokens=256)
AHEAD = structs.replace(POLICY, lookahead=True)
GUESSING = structs.replace(POLICY, draft_tokens=4, lookup_ngram=1)
BOTH = structs.replace(GUESSING, lookahead=True)
OWNED = structs.replace(POLICY, max_running=1, prefix_cache=False)
POLICIES = {"plain": POLICY, "ahead": AHEAD, "guessing": GUESSING, "both": BOTH}


@functools.cache
def tokenizer() -> Tokenizer:
    """Each byte is a token; tokens 0 and 2 end an answer."""
    return Tokenizer(byte_tokenizer())


@functools.cache
def tiny(windows: bool = False) -> Any:
    """A tiny llama over bytes; with windows, some of its layers forget."""
    layers = {"sliding_window": 7, "sliding_layers": (1,)} if windows else {}
    return tiny_llama(seed=5, vocab=VOCAB, **layers)


@frozen
class Run:
    """What became of some requests, and the tape."""

    inboxes: list[Inbox]
    records: list[Record]
    used: Any
    status: dict[str, int]
    healthy: bool

    @property
    def forks(self) -> int:
        """How many sequences were forked."""
        events = [event for record in self.records for event in getattr(record, "events", ())]
        return sum(isinstance(event, Forked) for event in events)

    def appended(self, purpose: str) -> int:
        """How many events on tape issued rows of a purpose."""
        events = [event for record in self.records for event in getattr(record, "events", ())]
        return sum(getattr(event, "purpose", "") == purpose for event in events)


def run(
    wanted: Sequence[tuple[Sequence[int], Parameters]],
    policy: Policy = POLICY,
    *,
    blocks: int = 64,
    windows: bool = False,
    owned: bool = False,
    apart: bool = False,
    loaded: Any = None,
    parents: Sequence[int] = (),
) -> Run:
    """Serve requests (prompt, parameters), all at once or, `apart`, one after the other.

    loaded: a model with a tokenizer, in place of the tiny one. parents: of each (n > 1).
    """
    model = tiny(windows) if not owned else tiny_llama(seed=5, vocab=VOCAB)
    used = loaded or SimpleNamespace(model=model, tokenizer=tokenizer(), vocab_size=VOCAB)
    masks, kernel, model = Grammars(used.tokenizer), None, used.model
    if owned:
        pool = Geometry(8, owned_groups())
        kernel = ModelOwnedKernel(model, pool, masks=masks)
    else:
        groups = groups_for(model, blocks) if windows else (Group(num_blocks=blocks),)
        pool = Geometry(8, groups)
        kernel = ModelKernel(model, pool, sanitize="full", masks=masks, check=False)
    capture = MemoryCapture()
    told = {"device": models.device_name(), "blas": load_blas(), "layers": 3}
    head = structs.replace(header(pool, policy), **told, sanitize="off" if owned else "full")
    engine = Engine(lambda: Parts(kernel, policy, capture, head, vocab_size=used.vocab_size))
    engine.open()
    inboxes = []
    for number, (prompt, parameters) in enumerate(wanted):
        inboxes.append(Inbox())
        parent = parents[number] if parents else NO_PARENT
        engine.submit(Submission(tuple(prompt), parameters, parent=parent), inboxes[-1])
        while apart and engine.step():
            pass
    while engine.step():
        pass
    status, healthy = engine.status(), engine.healthy
    engine.stop()
    return Run(inboxes, capture.records, used, status, healthy)


def assert_clean(made: Run, folder: Path, patch: pytest.MonkeyPatch, *, deep: bool = True) -> None:
    """The tape holds at every depth."""
    loaded = Loaded(made.used, True, 0.05, "")
    patch.setattr(forward, "load", lambda *_: loaded)
    patch.setattr(reference, "load", lambda *_: loaded)
    path = write(folder, made.records)
    for depth in (FOLD, PLAN, FORWARD, REFERENCE) if deep else (FOLD, PLAN, FORWARD):
        outcome = replay(path, Options(depth=depth))
        assert (outcome.exit_code, outcome.divergence) == (CLEAN, None), outcome


def dense(tokens: Sequence[int], windows: bool = False) -> np.ndarray:
    """mlx-lm's logits after each token: [n, vocab] float32."""
    model = tiny(windows)
    rows = model(mx.array([list(tokens)]), cache=make_prompt_cache(model))[0]
    return np.array(rows.astype(mx.float32))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def assert_told(told: Logprob, token: int, logits: np.ndarray, top: int) -> None:
    """A log-probability is the dense model's, and its likeliest tokens are."""
    wanted = log_softmax(logits)
    assert told.token == token
    assert abs(told.logprob - wanted[token]) < 1e-4
    assert len(told.top) == top
    best = np.argsort(-wanted, kind="stable")[:top]
    assert [number for number, _ in told.top] == best.tolist()
    np.testing.assert_allclose([value for _, value in told.top], wanted[best], atol=1e-4)
