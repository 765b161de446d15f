"""Forward: one pass of a model over a step's rows.

Owns the call of the model over pages, packed or gathered, and logits for sampled rows only. Never
evaluates anything.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import mlx.core as mx
import numpy as np
from attrs import evolve

from statemachine.geometry import ROWS_MAX
from statemachine.records import Observation

from .adapters import BASE, Serving
from .compiled import CompiledCalls
from .context import StepContext
from .drawing import Sampler
from .few_rows import FewRows
from .gathered import GatheredCalls
from .layout import Layout, as_taken, look, paged_caches
from .metadata import CacheUse, Longs, StepMetadata, observe
from .paged_attention import Dialect
from .pages import PageStep
from .split import Body, Head, body_and_head, unchanged
from .starting import settle


class PackedCall:
    """The one call of a model that a packed step takes: tokens [T, 1]."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._caches = paged_caches(layout)

    def run(
        self, body: Body, context: StepContext, pages: PageStep
    ) -> tuple[mx.array, list[CacheUse]]:
        """What leaves the body, [T, 1, D], and what each layer's cache counted."""
        for cache in self._caches:
            cache.bind(context, pages)
        try:
            caches = as_taken(self._layout.slots, self._caches)
            with context.serving.rows():
                hidden = body(context.tokens[:, None], cache=caches)
            written = [cache for cache in self._caches if cache.layer is not None]
            return hidden, [cache.used(context.metadata) for cache in written]
        finally:
            for cache in self._caches:
                cache.release()


class Forward:
    """A model with our caches in place of its own, called as its layout says.

    window_max: no window that a mask names is wider; only a probe narrows them. dialect: kernels
    that attend through block tables, for models called packed. few_rows: the body of steps of few
    rows. sampler: what draws samples in a step's own graph.
    """

    def __init__(
        self,
        model: Any,
        layout: Layout | None = None,
        *,
        window_max: int = ROWS_MAX,
        dialect: Dialect | None = None,
        few_rows: FewRows | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self._layout = layout or look(model)
        self._few_rows = few_rows
        self._sampler = sampler
        self._dialect = dialect
        self._body: Body = model
        self._head: Head = unchanged
        if self._layout.split:
            self._body, self._head = body_and_head(model)
        self._split = self._body is not model
        self._calls: PackedCall | CompiledCalls | GatheredCalls
        if not self._layout.way.packed:
            self._calls = GatheredCalls(self._layout, window_max)
        elif dialect is None or not dialect.in_place:
            self._calls = PackedCall(self._layout)
        else:
            self._calls = CompiledCalls(PackedCall(self._layout).run, self._draw)

    @property
    def shows_hidden(self) -> bool:
        """Whether what the head is fed can be told from its logits."""
        return self._split

    @property
    def failure(self) -> str:
        """Why steps are built anew each time, where they should share graphs; empty if they do."""
        return self._calls.failure if isinstance(self._calls, CompiledCalls) else ""

    @property
    def replayed(self) -> bool:
        """Whether the newest step's graph had run before: all that it holds on to is computed."""
        return isinstance(self._calls, CompiledCalls) and self._calls.replayed

    def reset(self) -> None:
        """Forget what was made of page arrays that are thrown away."""
        if isinstance(self._calls, CompiledCalls):
            self._calls.reset()

    def context(
        self, metadata: StepMetadata, fed: mx.array | None = None, serving: Serving = BASE
    ) -> StepContext:
        """A step's arrays, its rows grouped as they are called."""
        return StepContext(metadata, fed, self._layout.way.alone, serving, self._dialect)

    def run(
        self, context: StepContext, pages: PageStep
    ) -> tuple[mx.array | None, mx.array, Observation]:
        """Build the graph: writes go into `pages`.

        Returns logits [S, vocab] float32 of the sampled rows (None where nothing samples); one
        element that depends on every layer's writes; and what the caches saw.
        """
        hidden, seen = self.hidden(context, pages)
        metadata = context.metadata
        logits = None
        if metadata.sampled:
            logits = self.logits(hidden, metadata.sample_rows, context.serving)
        return logits, anchor(hidden), seen

    def hidden(self, context: StepContext, pages: PageStep) -> tuple[mx.array, Observation]:
        """What the head is fed, [T, 1, D], and what the caches saw; writes go into `pages`."""
        body = self._body_for(context)
        if isinstance(self._calls, CompiledCalls):
            (hidden,), uses = self._calls.run(body, context, pages)
        else:
            settle()
            hidden, uses = self._calls.run(body, context, pages)
        return hidden, self._seen(context, uses)

    def draws(self, context: StepContext) -> bool:
        """Whether a step's samples can be drawn in its own graph: one of each row, in order."""
        metadata = context.metadata
        return (
            self._sampler is not None
            and isinstance(self._calls, CompiledCalls)
            and context.serving is BASE
            and len(metadata.seqs) == len(metadata.sampled) == metadata.total_rows
        )

    def drawn(
        self, context: StepContext, pages: PageStep, asked: mx.array
    ) -> tuple[list[mx.array], Observation]:
        """A step that `draws`: tokens, logits and margins [T], and the tokens as the next step is
        fed them; what the caches saw. asked: see drawing.asked_by.
        """
        assert isinstance(self._calls, CompiledCalls)
        arrays, uses = self._calls.run(self._body_for(context), context, pages, asked)
        return arrays, self._seen(context, uses)

    def _draw(self, hidden: mx.array, asked: mx.array) -> list[mx.array]:
        assert self._sampler is not None
        samples = self._sampler.sample(self._logits(hidden), asked)
        return [samples.tokens, samples.logits, samples.margins, as_fed(samples.tokens)]

    def _seen(self, context: StepContext, uses: Items[CacheUse]) -> Observation:
        return observe(context.metadata, _told(uses, self._layout.reads))

    def _body_for(self, context: StepContext) -> Body:
        """The body that a step's rows go through."""
        tables, few = context.tables, self._few_rows
        if few is None or tables is None or context.serving is not BASE:
            return self._body
        if not tables.fixed:
            return few.ending(_index(_looked_at(context.metadata)))
        return few if context.metadata.total_rows <= few.rows_max else self._body

    def logits(self, hidden: mx.array, rows: Longs, serving: Serving = BASE) -> mx.array:
        """Logits [len(rows), vocab] float32 of some rows."""
        with serving.rows(rows):
            return self._logits(hidden[_index(rows)], serving)

    def _logits(self, hidden: mx.array, serving: Serving = BASE) -> mx.array:
        """Logits of what the head is fed, whose rows are `serving`'s."""
        few = self._few_rows
        if few is not None and few.makes_logits and serving is BASE and len(hidden) <= few.rows_max:
            return few.logits(hidden[:, -1])
        return self._head(hidden)[:, -1].astype(mx.float32)


def _looked_at(metadata: StepMetadata) -> Longs:
    """Rows of which what leaves the body is used; the last is the anchor's."""
    last = np.array([metadata.total_rows - 1])
    rows: Longs = np.unique(np.concatenate([metadata.sample_rows, metadata.score_rows, last]))
    return rows


def _told(uses: Items[CacheUse], reads: frozenset[int]) -> list[CacheUse]:
    """Uses where a layer that takes its positions from another's cache, or has none, counts as
    that other one: many models ask one cache for the offset of all layers.
    """
    most = max(use.offset_reads for use in uses)
    return [
        use if use.offset_reads == most or layer in reads else evolve(use, offset_reads=most)
        for layer, use in enumerate(uses)
    ]


def anchor(hidden: mx.array) -> mx.array:
    """One element that depends on every layer's writes."""
    return hidden[-1, -1, :1]


def as_fed(tokens: mx.array) -> mx.array:
    """Sampled tokens as a model is fed them: int32."""
    return tokens.astype(mx.int32)


def hidden_rows(hidden: mx.array, rows: Longs) -> mx.array:
    """What the head is fed for some rows: [len(rows), D]."""
    return hidden[_index(rows)][:, -1]


def _index(rows: Longs) -> mx.array:
    return mx.array(rows.astype(np.uint32))
