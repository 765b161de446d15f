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
from .metadata import observe
from .pages import PageStep


class Forward:
    """A model with our caches in place of its own."""

    def __init__(self, model: Any, geometry: Geometry) -> None:
        self._body, self._head = body_and_head(model)
        self._caches = [
            PagedCache(layer, group, geometry.groups[group].window)
            for layer, group in enumerate(layer_groups(model))
        ]

    def run(
        self, context: StepContext, pages: PageStep
    ) -> tuple[mx.array | None, mx.array, Observation]:
        """Build the graph: writes go into `pages`.

        Returns logits [S, vocab] float32 of the sampled rows (None where nothing samples); one
        element that depends on every layer's writes; and what the caches saw.
        """
        metadata = context.metadata
        for cache in self._caches:
            cache.bind(context, pages)
        try:
            hidden = self._body(context.tokens[:, None], cache=self._caches)
            seen = observe(metadata, [cache.used(metadata) for cache in self._caches])
        finally:
            for cache in self._caches:
                cache.release()
        anchor = hidden[-1, -1, :1]
        if not metadata.sampled:
            return None, anchor, seen
        rows = mx.array(metadata.sample_rows.astype(np.uint32))
        logits = self._head(hidden[rows])[:, -1]
        return logits.astype(mx.float32), anchor, seen
