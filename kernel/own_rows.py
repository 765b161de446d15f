"""Own rows: a model over mlx-lm's own caches, all rows at once or one by one.

Owns the choice between the two. Some of mlx-lm's modules cannot take several rows: they add the
word that stands for a mask to their scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

Caches = list[Any]


def at_once(model: Any, tokens: Sequence[int], caches: Caches) -> mx.array:
    """Logits [L, vocab] in one forward."""
    logits: mx.array = model(mx.array([tokens], mx.int32), cache=caches)
    return logits[0]


def one_by_one(model: Any, tokens: Sequence[int], caches: Caches) -> mx.array:
    """Logits [L, vocab] in a forward for each row."""
    return mx.concatenate([at_once(model, [token], caches) for token in tokens])


def own_logits(
    model: Any, tokens: Sequence[int], fresh: Callable[[], Caches]
) -> tuple[mx.array, Caches]:
    """Logits [L, vocab], and the caches, `fresh` before: at once, or one by one where a model
    raises of that. Raises what it raises of one row.
    """
    caches = fresh()
    try:
        return at_once(model, tokens, caches), caches
    except Exception:  # whatever a model does; the caches may hold some layers' rows by now
        caches = fresh()
        return one_by_one(model, tokens, caches), caches
