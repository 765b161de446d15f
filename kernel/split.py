"""Split: a model in two, its body and what makes logits of what leaves the body.

Owns the place where the body stands in an mlx-lm model. Whatever a model does around its body,
scaled or capped logits included, stays its own code: for a call the body is replaced by something
that keeps what leaves it, or that hands on what it was given. Knows no rows and no caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

Body = Callable[..., mx.array]
Head = Callable[[mx.array], mx.array]

WRAPPED = "language_model"
"""Where models of text and more keep the one of text."""
BODIES = ("model", "backbone", "transformer")
"""What mlx-lm's modules call the part before the logits."""


class NotSplit(Exception):
    """The body does not stand where it was looked for, or was not called just once."""


class _Tap:
    """Stands for a body in one call, and keeps what leaves it."""

    def __init__(self, body: Any) -> None:
        self._body = body
        self.left: list[Any] = []

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        out = self._body(*arguments, **named)
        self.left.append(out)
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)


class _Given(_Tap):
    """Stands for a body in one call, and says that `rows` left it."""

    def __init__(self, body: Any, rows: mx.array) -> None:
        super().__init__(body)
        self._rows = rows

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self._rows


class Split:
    """A model and the place of its body in it. One thread, one call at a time."""

    def __init__(self, model: Any, holder: Any, name: str) -> None:
        self._model, self._holder, self._name = model, holder, name

    def body(self, tokens: mx.array, cache: Any = None) -> mx.array:
        """What leaves the body, [B, L, D]. Logits are never computed: nobody asks for them."""
        tap = _Tap(self._holder[self._name])
        with self._standing(tap):
            self._model(tokens, cache=cache)
        if len(tap.left) != 1 or not isinstance(tap.left[0], mx.array):
            raise NotSplit(f"{self._name} was called {len(tap.left)} times, not for one array")
        return tap.left[0]

    def head(self, hidden: mx.array) -> mx.array:
        """Logits of what left the body: [B, L, vocab]."""
        tokens = mx.zeros(hidden.shape[:2], mx.int32)
        with self._standing(_Given(self._holder[self._name], hidden)):
            logits: mx.array = self._model(tokens)
        return logits

    @contextmanager
    def _standing(self, stand_in: _Tap) -> Iterator[None]:
        body = self._holder[self._name]
        self._holder[self._name] = stand_in
        try:
            yield
        finally:
            self._holder[self._name] = body


def body_and_head(model: Any) -> tuple[Body, Head]:
    """The part before the logits, and the part that makes them, so that few rows need the latter.

    A model that is not cut in mlx-lm's usual way is its own body: logits are made for all rows.
    """
    holder = model
    while isinstance(holder, Module) and WRAPPED in holder:
        holder = holder[WRAPPED]
    for name in BODIES:
        if isinstance(holder, Module) and isinstance(holder.get(name), Module):
            split = Split(model, holder, name)
            return split.body, split.head
    return model, unchanged


def cut(
    model: Any, tokens: mx.array, caches: Callable[[], Any], whole: npt.NDArray[np.float32]
) -> tuple[Body, Head]:
    """`body_and_head`, only where both say to the last bit what the model says; else the model.

    tokens: [1, L], whose logits over fresh caches are `whole`, [L, vocab].
    """
    body, head = body_and_head(model)
    if body is model:
        return body, head
    try:
        parts = np.array(head(body(tokens, cache=caches()))[0].astype(mx.float32))
    except Exception:  # whatever a model does that is called in another way than it expects
        return model, unchanged
    return (body, head) if np.array_equal(whole, parts) else (model, unchanged)


def hidden_size(model: Any) -> int:
    """D of what leaves the body, which embeddings are; 0 where it is not told from the logits.

    Nothing is computed for it.
    """
    body, _ = body_and_head(model)
    if body is model:
        return 0
    return body(mx.zeros((1, 1), mx.int32), cache=make_prompt_cache(model)).shape[-1]


def unchanged(logits: mx.array) -> mx.array:
    """The head of a model that makes all logits itself."""
    return logits
