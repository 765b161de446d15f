"""OwnedCaches: what mlx-lm keeps of one sequence, and what can be read off it.

Owns a list of mlx-lm's cache objects and the count of rows that went through them. Never moves them
but by a forward, and never evaluates anything.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache


class OwnedCaches:
    """What mlx-lm keeps of one sequence. seq: whose it is. rows_fed: rows of all calls so far."""

    def __init__(self, model: Any, seq: int) -> None:
        self.seq = seq
        self.rows_fed = 0
        self._caches = make_prompt_cache(model)
        self._leaves = _leaves(self._caches)

    def feed(self, model: Any, tokens: mx.array) -> Any:
        """What a model, or its part before the logits, makes of tokens [1, L]: [1, L, ...].

        The caches have moved on.
        """
        rows = model(tokens, cache=self._caches)
        self.rows_fed += tokens.shape[1]
        return rows

    def offsets(self) -> dict[int, int]:
        """Each cache object's own offset, by its number; those that keep none are left out."""
        found = {n: getattr(cache, "offset", None) for n, cache in enumerate(self._leaves)}
        return {n: offset for n, offset in found.items() if type(offset) is int}

    def arrays(self) -> list[mx.array]:
        """All that the caches hold."""
        states = [getattr(cache, "state", ()) for cache in self._leaves]
        flat: Any = tree_flatten(states)
        return [array for _, array in flat if isinstance(array, mx.array)]


def _leaves(caches: Any) -> list[Any]:
    """Cache objects, lists of them opened up."""
    found: list[Any] = []
    for cache in caches:
        inner = getattr(cache, "caches", None)
        found.extend([cache] if inner is None else _leaves(inner))
    return found
