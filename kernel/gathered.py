"""Gathered: a model over pages with its own attention, fed K and V as one array a call.

Owns cache objects that write rows to the pages and gather what a call's sequences may read, and the
calls that a step takes: pieces of as many rows and like lengths together, [B, n], others one by
one. Keeps no length and patches nothing: masks are arrays made of the step's metadata.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .context import StepContext
from .handles import HandleMisused
from .layout import Layout, as_taken, leaves
from .metadata import CacheUse, StepMetadata
from .pages import PageStep
from .quantised import Code
from .recurrent import StateCache
from .split import Body


class GatheredCache:
    """The cache of one layer. `bind` it to one call of a step, `release` it after the last.

    window_max: no window that a mask names is wider; only a probe narrows them. start_position:
    what models of chunks call the position of the first row that is fetched.
    """

    start_position = 0

    def __init__(self, layer: int | None, group: int, layout: Layout, window_max: int) -> None:
        self.layer = layer
        self._group = group
        self._way = layout.way
        self._dtype = layout.shapes[0].row_dtype if layout.shapes else mx.float32
        self._window_max = window_max
        self._context: StepContext | None = None
        self._pages: PageStep | None = None
        self._bucket = 0
        self._fetched: tuple[mx.array, mx.array] | None = None
        # Models order what is computed by assigning these; here that is ordered already.
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._offset_reads = self._updates = self._rows_updated = 0

    def bind(self, context: StepContext, pages: PageStep, bucket: int) -> None:
        """Start a call: count from nothing."""
        self._context, self._pages, self._bucket = context, pages, bucket
        self._fetched = self.keys = self.values = None
        self._offset_reads = self._updates = self._rows_updated = 0

    def release(self) -> None:
        """End a step, failed or not: hold no page array any more."""
        self._context = self._pages = self._fetched = self.keys = self.values = None

    def maybe_trim_front(self) -> None:
        """Models of chunks ask for it; nothing is, for they mask the chunks that they left."""

    @property
    def fetched(self) -> tuple[mx.array, ...]:
        """What the last update returned; empty where there was none."""
        return self._fetched or ()

    def used(self, metadata: StepMetadata) -> CacheUse:
        """What was counted since `bind`. What was fetched is attended to by the model itself."""
        return CacheUse(
            offset_reads=self._offset_reads,
            updates=self._updates,
            rows_updated=self._rows_updated,
            attends=self._updates,
            strangers=int(self._use().metadata is not metadata),
        )

    @property
    def offset(self) -> int | mx.array:
        """Position of each sequence's first row: [B] int32, a number where there is one."""
        self._offset_reads += 1
        context = self._use()
        first = context.metadata.positions[context.buckets[self._bucket].rows[:, 0]]
        return int(first[0]) if len(first) == 1 else mx.array(first)

    def make_mask(
        self, rows: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """True where a row sees a key, or what is added there: [n, S], or [B, 1, n, S] and more
        dimensions of one; None where all is seen.
        """
        context = self._use()
        bucket = context.buckets[self._bucket]
        if rows != bucket.rows.shape[1]:
            raise HandleMisused(
                f"layer {self.layer} asks for a mask of {rows} rows in a call of "
                f"{bucket.rows.shape[1]}"
            )
        asked = None if window_size is None else min(window_size, self._window_max)
        mask = bucket.views[self._group].mask(asked)
        if mask.all():
            return None
        ones = [1] * (self._way.mask_dims - 3)
        wide = mx.array(mask[0] if len(mask) == 1 else mask.reshape(-1, *ones, *mask.shape[1:]))
        return self._added(wide) if self._way.added else wide

    def _added(self, mask: mx.array) -> mx.array:
        hidden = mx.array(mx.finfo(self._dtype).min, self._dtype)
        return mx.where(mask, mx.array(0, self._dtype), hidden)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write rows [B, heads, n, dim]; returns all that the call may see: [B, heads, S, dim]."""
        context, pages, layer = self._use(), self._pages, self.layer
        assert pages is not None
        if layer is None:
            raise HandleMisused("a cache is written that was not when the model was looked at")
        count, rows = context.buckets[self._bucket].rows.shape
        if keys.ndim != 4 or (keys.shape[0], keys.shape[2]) != (count, rows):
            raise HandleMisused(
                f"layer {layer} updates with keys {keys.shape}, not [{count}, heads, {rows}, dim]"
            )
        self._updates += 1
        self._rows_updated += count * rows
        mine = context.query_rows(self._bucket)
        blocks, inside = context.write_index(self._group)
        flat = (
            it.swapaxes(1, 2).reshape(count * rows, it.shape[1], it.shape[3])
            for it in (keys, values)
        )
        pages.write(layer, (blocks[mine], inside[mine]), *flat)
        index = context.read_index(self._bucket, self._group, keys.shape[1])
        held = (pages.keys[layer], pages.values[layer])
        codes = pages.codes_of(layer) or (None, None)
        self.keys, self.values = map(_gather, held, (index, index), codes)
        self._fetched = (self.keys, self.values)
        return self._fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the last update returned: models share it between layers."""
        if self._fetched is None:
            raise HandleMisused(f"layer {self.layer} is read before it is written")
        return self._fetched

    def _use(self) -> StepContext:
        if self._context is None:
            raise HandleMisused(f"the cache of layer {self.layer} is used outside of a forward")
        return self._context


class GatheredCalls:
    """The calls of a model that a step takes."""

    def __init__(self, layout: Layout, window_max: int) -> None:
        self._layout = layout
        self._caches = [
            GatheredCache(
                slot.layer,
                0 if slot.layer is None else layout.shapes[slot.layer].group,
                layout,
                window_max,
            )
            for slot in leaves(layout.slots)
            if slot.state is None
        ]

    def run(
        self, body: Body, context: StepContext, pages: PageStep
    ) -> tuple[mx.array, list[CacheUse]]:
        """What leaves the body, [T, 1, D], and what each layer's cache counted."""
        outs: list[mx.array] = []
        uses: dict[int, list[CacheUse]] = {}
        states = pages.states
        if states is not None:
            states.read(context.metadata)
        try:
            for number in range(len(context.buckets)):
                for cache in self._caches:
                    cache.bind(context, pages, number)
                bucket = context.buckets[number]
                rows = bucket.rows
                pieces = bucket.pieces(context.metadata)
                kept = [] if states is None else states.caches(pieces)
                tokens = context.tokens[context.query_rows(number)].reshape(rows.shape)
                with context.serving.rows(rows):
                    out = body(tokens, cache=self._taken(kept))
                # A model need not use all that it writes, and what nothing uses piles up unwritten.
                fetched = [array for cache in self._caches for array in cache.fetched]
                (out,) = mx.depends([out.reshape(rows.size, 1, *out.shape[2:])], fetched)
                outs.append(out)
                for cache in self._caches:
                    if cache.layer is not None:
                        uses.setdefault(cache.layer, []).append(cache.used(context.metadata))
                for place, state in enumerate(kept, len(self._layout.kinds)):
                    if (use := state.used(rows.size)) is not None:
                        uses.setdefault(place, []).append(use)
                if states is not None:
                    states.put(pieces, kept)
            if states is not None:
                states.finish(context.metadata)
        finally:
            for cache in self._caches:
                cache.release()
        hidden = mx.concatenate(outs)
        if context.order is not None:
            hidden = hidden[context.order]
        return hidden, [_over_calls(uses[layer]) for layer in sorted(uses)]

    def _taken(self, states: list[StateCache]) -> list[Any]:
        """All caches as the model takes them."""
        rest, kept = iter(self._caches), iter(states)
        slots = self._layout.slots
        held = [next(rest if slot.state is None else kept) for slot in leaves(slots)]
        return as_taken(slots, held)


def _gather(pages: mx.array, index: mx.array, code: Code | None) -> mx.array:
    """Rows of one head each: [B, heads, S, dim]. A model may keep values of no width."""
    if not pages.size:
        return mx.zeros((*index.shape, 0), pages.dtype if code is None else code.dtype)
    found = pages.reshape(-1, pages.shape[-1])[index]
    return found if code is None else code.decode(found).astype(code.dtype)


def _over_calls(uses: list[CacheUse]) -> CacheUse:
    """A step's counts of a layer: rows of all calls, all else of the call that had most."""
    return CacheUse(
        offset_reads=max(use.offset_reads for use in uses),
        updates=max(use.updates for use in uses),
        rows_updated=sum(use.rows_updated for use in uses),
        attends=max(use.attends for use in uses),
        strangers=sum(use.strangers for use in uses),
    )
