"""StepContext: a step's metadata as MLX arrays, each made once and shared by the layers.

Owns nothing but these arrays. Every index comes from the step's host metadata and buckets.
"""

from __future__ import annotations

from functools import cached_property

import mlx.core as mx
import numpy as np

from .adapters import BASE, Serving
from .buckets import Alone, Bucket, group_rows, output_order
from .handles import Positions
from .metadata import Ints, Longs, StepMetadata
from .paged_attention import Dialect, StepTables


class StepContext:
    """What the cache objects of one forward share.

    fed: the tokens of the step's pending rows, [Q] int32, which nobody needs to have read. serving:
    whose the rows are.
    offset: [T] int32, RoPE positions. tokens: [T] int32. tables: what attends through block
    tables, where `dialect` has kernels for that.
    """

    def __init__(
        self,
        metadata: StepMetadata,
        fed: mx.array | None = None,
        alone: Alone = "",
        serving: Serving = BASE,
        dialect: Dialect | None = None,
    ) -> None:
        self.metadata = metadata
        self.serving = serving
        self.tables = None if dialect is None else StepTables(dialect, metadata)
        self._alone = alone
        self.offset: mx.array = Positions(metadata.positions)
        self.tokens = _tokens(metadata, fed)
        self._writes: dict[int, tuple[mx.array, mx.array]] = {}
        self._reads: dict[tuple[int, int, int, int, bool], mx.array] = {}
        self._biases: dict[tuple[int, int, int], mx.array | None] = {}
        self._rows: dict[int, mx.array] = {}

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Rows that are gathered for together; see buckets.py."""
        return group_rows(self.metadata, self._alone)

    @cached_property
    def order(self) -> mx.array | None:
        """From bucket order back to batch order, [T]; None where they are the same."""
        order = output_order(self.buckets)
        return None if order is None else _index(order)

    def write_index(self, group: int) -> tuple[mx.array, mx.array]:
        """Block and row in it of each batch row: two [T]."""
        if group not in self._writes:
            slots, size = self.metadata.slots[group], self.metadata.geometry.block_size
            self._writes[group] = (_index(slots // size), _index(slots % size))
        return self._writes[group]

    def query_rows(self, bucket: int) -> mx.array:
        """Batch rows of a bucket: [B * n]."""
        if bucket not in self._rows:
            self._rows[bucket] = _index(self.buckets[bucket].rows.reshape(-1))
        return self._rows[bucket]

    def read_index(
        self, bucket: int, group: int, heads: int, common: int = 0, shared: bool = False
    ) -> mx.array:
        """Rows of the pages seen as [slots * heads, dim]: [B, heads, S], of keys behind the
        `common` ones; or, where `shared`, of these: [1, heads, common].
        """
        key = (bucket, group, heads, common, shared)
        if key not in self._reads:
            slots = self.buckets[bucket].views[group].slots
            slots = slots[:1, :common] if shared else slots[:, common:]
            scaled = slots.astype(np.uint32)[:, None, :] * np.uint32(heads)
            lanes = np.arange(heads, dtype=np.uint32)[None, :, None]
            self._reads[key] = mx.array(scaled + lanes)
        return self._reads[key]

    def bias(self, bucket: int, group: int, tile: int) -> mx.array | None:
        """What is added to a tile's scores: [B, n, S], or None."""
        key = (bucket, group, tile)
        if key not in self._biases:
            host = self.buckets[bucket].views[group].tiles[tile].bias
            self._biases[key] = None if host is None else mx.array(host)
        return self._biases[key]


def _tokens(metadata: StepMetadata, fed: mx.array | None) -> mx.array:
    if fed is None:
        return mx.array(metadata.tokens)
    if len(metadata.pending) == metadata.total_rows:
        return fed
    rows = _index(metadata.pending_rows)
    return mx.put_along_axis(mx.array(metadata.tokens), rows, fed, axis=0)


def _index(values: Longs | Ints) -> mx.array:
    return mx.array(values.astype(np.uint32))
