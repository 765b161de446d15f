"""Cache objects that mlx-lm's layers are given over pages.

Owns the seam between a layer and the pages: counts what the layer does with its cache. Keeps no
length: `offset` is the step's positions. What a layer gets for its K and V is a handle, not an
array (handles.py); attention.py's dispatch is the only one who can do anything with it. A mask that
names a window is a handle too: which layers have that window is known by who brings it there.
"""

from __future__ import annotations

import mlx.core as mx

from .context import StepContext
from .handles import HandleMisused, KeyHandle, MaskHandle, Positions, ValueHandle
from .metadata import CacheUse, StepMetadata
from .pages import Codes, PageStep


class PagedCache:
    """The cache of one layer. `bind` it to a step before the forward, `release` it afterwards.

    layer: the number of its page arrays, None where the model never writes this cache. own: the
    window of the cache that mlx-lm makes in its place, 0 for none. window: the one that its rows
    are masked by, own or asked for; None while that is being found out.
    """

    def __init__(
        self, layer: int | None, group: int, window: int | None = 0, own: int | None = None
    ) -> None:
        self.layer = layer
        self.group = group
        self.window = window
        self.own = (window or 0) if own is None else own
        self.seen_windows: set[int] = set()
        self._context: StepContext | None = None
        self._pages: PageStep | None = None
        self._handles: tuple[KeyHandle, ValueHandle] | None = None
        self._rows: tuple[mx.array, mx.array] | None = None
        self._offset_reads = 0
        self._updates = 0
        self._rows_updated = 0
        self._attends = 0
        self._metadata_used: list[StepMetadata] = []

    def bind(self, context: StepContext, pages: PageStep) -> None:
        """Start a forward: count from nothing."""
        self._context, self._pages, self._handles = context, pages, None
        self._rows = None
        self._offset_reads = self._updates = self._rows_updated = self._attends = 0
        self._metadata_used = []

    def release(self) -> None:
        """End a forward, failed or not: hold no page array any more."""
        self._context = self._pages = self._handles = self._rows = None

    def used(self, metadata: StepMetadata) -> CacheUse:
        """What was counted since `bind`; uses of anything but `metadata` are strangers.

        Raises HandleMisused where rows were left to an attention that never came.
        """
        if self._updates and not self._attends and self._in_place:
            raise HandleMisused(f"layer {self.layer} has rows that nothing attends over")
        return CacheUse(
            offset_reads=self._offset_reads,
            updates=self._updates,
            rows_updated=self._rows_updated,
            attends=self._attends,
            strangers=sum(used is not metadata for used in self._metadata_used),
        )

    @property
    def offset(self) -> Positions:
        """RoPE positions of the batch's rows: [T] int32."""
        self._offset_reads += 1
        offset = self._use().offset
        return offset if isinstance(offset, Positions) else Positions(offset)

    def make_mask(
        self, rows: int, return_array: bool = False, window_size: int | None = None
    ) -> MaskHandle | None:
        """What attention masks by: the step's metadata (None), or another window than the cache's
        own. mlx-lm's caches give None for one row too, asked for an array or not.
        """
        if rows != 1:
            raise HandleMisused(
                f"layer {self.layer} asks for a mask of {rows} rows; packed rows are one each"
            )
        if window_size is None or window_size == self.own:
            return None
        return MaskHandle(self, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[KeyHandle, ValueHandle]:
        """Write this layer's rows, [T, heads, 1, dim], and return handles for them."""
        context, pages = self._use(), self._pages
        assert pages is not None
        total = context.metadata.total_rows
        if keys.ndim != 4 or keys.shape[0] != total or keys.shape[2] != 1:
            raise HandleMisused(
                f"layer {self.layer} updates with keys {keys.shape}, not [{total}, heads, 1, dim]"
            )
        if self.layer is None:
            raise HandleMisused("a cache is written that was not when the model was looked at")
        self._updates += 1
        self._rows_updated += keys.shape[0] * keys.shape[2]
        self._rows = (keys, values)
        if not self._in_place:
            where = context.write_index(self.group)
            pages.write(self.layer, where, keys.squeeze(2), values.squeeze(2))
        self._handles = (KeyHandle(self, keys), ValueHandle(self, values))
        return self._handles

    def keys_and_values(self) -> tuple[KeyHandle, ValueHandle]:
        """What the last update returned: models share it between layers."""
        if self._handles is None:
            raise HandleMisused(f"layer {self.layer} is read before it is written")
        return self._handles

    @property
    def rows(self) -> tuple[mx.array, mx.array]:
        """The step's own K and V, [T, heads, 1, dim], as they were made."""
        assert self._rows is not None
        return self._rows

    @property
    def seen_rows(self) -> mx.array:
        """How many rows each of the batch's sees, [T] int32, where it sees all before it."""
        if self.own:
            raise HandleMisused(
                f"this model counts the keys of layer {self.layer}, which are those of a window"
            )
        return self.offset + 1

    @property
    def _in_place(self) -> bool:
        """Whether the attention over rows writes them."""
        tables = None if self._context is None else self._context.tables
        return tables is not None and tables.in_place

    def read(
        self, keys: object, values: object, asked: int | None = None
    ) -> tuple[StepContext, mx.array, mx.array]:
        """For the dispatch: the step, and this layer's page arrays after its writes.

        asked: the window that the attention's mask names, None for the cache's own.
        """
        if self._handles is None or self._handles[0] is not keys or self._handles[1] is not values:
            raise HandleMisused(
                f"layer {self.layer} attends over keys and values that are not of one update"
            )
        self._check_window(asked)
        context, pages = self._use(), self._pages
        assert pages is not None
        assert self.layer is not None
        self._attends += 1
        return context, pages.keys[self.layer], pages.values[self.layer]

    @property
    def codes(self) -> Codes | None:
        """Of quantised rows, what their words mean."""
        assert self._pages is not None
        assert self.layer is not None
        return self._pages.codes_of(self.layer)

    def _check_window(self, asked: int | None) -> None:
        """The narrower of what is asked for and what the cache holds must be what is paged."""
        window = min(filter(None, (asked, self.own)), default=0)
        if self.window is None:
            self.seen_windows.add(window)
        elif window != self.window:
            raise HandleMisused(
                f"layer {self.layer} attends over a window of {window or 'all'} rows, but its "
                f"pages hold {self.window or 'all'}"
            )

    def _use(self) -> StepContext:
        if self._context is None:
            raise HandleMisused(f"the cache of layer {self.layer} is used outside of a forward")
        self._metadata_used.append(self._context.metadata)
        return self._context
