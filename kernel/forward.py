"""Forward: one packed pass of a model over a step's rows.

Owns the call of the model with tokens [T, 1], the binding of its caches, and logits for sampled
rows only. Never evaluates anything.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from statemachine.geometry import Geometry
from statemachine.records import Observation

from .caches import PagedCache
from .context import StepContext
from .families import body_and_head, layer_groups
from .metadata import Longs, observe
from .pages import PageStep


class Forward:
    """A model with our caches in place of its own."""

    def __init__(self, model: Any, geometry: Geometry) -> None:
        self._body, self._head = body_and_head(model)
        self._split = self._body is not model
        self._caches = [
            PagedCache(layer, group, geometry.groups[group].window)
            for layer, group in enumerate(layer_groups(model))
        ]

    @property
    def shows_hidden(self) -> bool:
        """Whether what the head is fed can be told from its logits."""
        return self._split

    def run(
        self, context: StepContext, pages: PageStep
    ) -> tuple[mx.array | None, mx.array, Observation]:
        """Build the graph: writes go into `pages`.

        Returns logits [S, vocab] float32 of the sampled rows (None where nothing samples); one
        element that depends on every layer's writes; and what the caches saw.
        """
        hidden, seen = self.hidden(context, pages)
        metadata = context.metadata
        logits = self.logits(hidden, metadata.sample_rows) if metadata.sampled else None
        return logits, anchor(hidden), seen

    def hidden(self, context: StepContext, pages: PageStep) -> tuple[mx.array, Observation]:
        """What the head is fed, [T, 1, D], and what the caches saw; writes go into `pages`."""
        metadata = context.metadata
        for cache in self._caches:
            cache.bind(context, pages)
        try:
            hidden = self._body(context.tokens[:, None], cache=self._caches)
            seen = observe(metadata, [cache.used(metadata) for cache in self._caches])
        finally:
            for cache in self._caches:
                cache.release()
        return hidden, seen

    def logits(self, hidden: mx.array, rows: Longs) -> mx.array:
        """Logits [len(rows), vocab] float32 of some rows."""
        return self._head(hidden[_index(rows)])[:, -1].astype(mx.float32)


def anchor(hidden: mx.array) -> mx.array:
    """One element that depends on every layer's writes."""
    return hidden[-1, -1, :1]


def hidden_rows(hidden: mx.array, rows: Longs) -> mx.array:
    """What the head is fed for some rows: [len(rows), D]."""
    return hidden[_index(rows)][:, -1]


def _index(rows: Longs) -> mx.array:
    return mx.array(rows.astype(np.uint32))
