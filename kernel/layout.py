"""Layout: what a model does with the caches that mlx-lm makes for it, found by looking.

Owns the map from a model to the layers that pages are made for: their shapes, their windows, which
of the caches they are. A model is looked at by building the graph of one small forward, which is
never computed. Knows no architecture by its name, and decides nothing about how it is served.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from attrs import evolve, frozen
from mlx_lm.models.cache import (
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from statemachine.events import Namespace
from statemachine.geometry import FULL, WINDOW, Geometry, Group
from statemachine.sequence import Sequence

from . import attention
from .batch import Batch, Piece
from .caches import PagedCache
from .context import StepContext
from .errors import ModelError
from .metadata import build
from .pages import LayerShape, PageStep

ROWS = 2
"""Tokens of the forward that is looked at."""


@frozen
class LayerKind:
    """What a layer's rows live like: the last `window` and the first `sink`; window 0 keeps all."""

    window: int = 0
    sink: int = 0


@frozen
class Way:
    """How a model is called over pages.

    packed: all rows of a step at once, [T, 1], attention put in place of mlx-lm's. Otherwise K and
    V are gathered for the model's own attention: decode rows of like lengths together, [B, 1],
    prompts one by one, [1, L]. mask_dims: dimensions of the masks of several sequences. alone:
    never several sequences in a call.
    """

    name: str
    packed: bool = False
    mask_dims: int = 4
    alone: bool = False


PACKED = Way("packed", packed=True)
GATHERED = Way("gathered")
GROUPED = Way("grouped", mask_dims=5)
ALONE = Way("alone", alone=True)


@frozen
class Slot:
    """One cache of the model's. layer: the number of its page arrays, or None where the model
    never writes it. kind: what mlx-lm's cache in this place keeps.
    """

    layer: int | None
    kind: LayerKind


Slots = tuple[Slot | tuple[Slot, ...], ...]


@frozen
class Layout:
    """slots: the model's caches as it takes them, lists among them. kinds and shapes: one for each
    layer, in the order of the caches. reads: layers that ask their cache for its offset.
    vocab_size: the width of the logits. split: whether logits can be made for few rows.
    """

    way: Way
    slots: Slots
    kinds: tuple[LayerKind, ...]
    shapes: tuple[LayerShape, ...]
    reads: frozenset[int]
    vocab_size: int
    split: bool = True

    def groups(self, num_blocks: int) -> tuple[Group, ...]:
        """Groups of `num_blocks` blocks each, in the order in which layers first need them."""
        return tuple(
            Group(WINDOW, num_blocks, kind.window, kind.sink)
            if kind.window
            else Group(FULL, num_blocks)
            for kind in _distinct(self.kinds)
        )


def look(model: Any, way: Way = PACKED) -> Layout:
    """What a model does with its caches. Raises ModelError where pages cannot hold what it keeps,
    or where it cannot be called in this way; computes nothing.
    """
    attention.install()
    caches = make_prompt_cache(model)
    slots = _slots(caches)
    logits = model(mx.zeros((1, ROWS), mx.int32), cache=caches)
    slots, kinds, shapes = _written(slots, caches)
    layout = Layout(way, slots, kinds, shapes, frozenset(), int(logits.shape[-1]))
    return _packed(model, layout) if way.packed else _grouped(layout, kinds, frozenset())


def paged_caches(layout: Layout, known: bool = True) -> list[PagedCache]:
    """A cache object for each slot, lists opened up; `known`: whether their windows are."""
    found = []
    for slot in leaves(layout.slots):
        layer, group, window = slot.layer, 0, None
        if layer is not None:
            group, window = layout.shapes[layer].group, layout.kinds[layer].window
        found.append(PagedCache(layer, group, window if known else None, slot.kind.window))
    return found


def leaves(slots: Slots) -> list[Slot]:
    """All slots, lists of them opened up."""
    return [one for slot in slots for one in (slot if isinstance(slot, tuple) else (slot,))]


def as_taken(slots: Slots, caches: list[Any]) -> list[Any]:
    """Cache objects in the order of `leaves`, in lists where the model takes lists."""
    rest = iter(caches)
    return [
        tuple(next(rest) for _ in slot) if isinstance(slot, tuple) else next(rest) for slot in slots
    ]


def _slots(caches: list[Any]) -> Slots:
    """One for each of the model's caches; which are written is not known yet."""
    slots: list[Slot | tuple[Slot, ...]] = []
    for number, cache in enumerate(caches):
        if type(cache) is CacheList:
            slots.append(tuple(Slot(None, _kind(number, inner)) for inner in cache.caches))
        else:
            slots.append(Slot(None, _kind(number, cache)))
    return tuple(slots)


def _kind(number: int, cache: Any) -> LayerKind:
    if type(cache) in (KVCache, ChunkedKVCache):
        return LayerKind()
    if type(cache) is RotatingKVCache:
        return LayerKind(cache.max_size - cache.keep, cache.keep)
    name = type(cache).__name__
    raise ModelError(f"cache {number} is a {name}, which pages cannot hold yet")


def _written(
    slots: Slots, caches: list[Any]
) -> tuple[Slots, tuple[LayerKind, ...], tuple[LayerShape, ...]]:
    """The caches that a forward wrote are the layers: numbered, with their kinds and shapes."""
    held = [one for cache in caches for one in getattr(cache, "caches", (cache,))]
    filled: list[Slot] = []
    kinds: list[LayerKind] = []
    shapes: list[LayerShape] = []
    for slot, cache in zip(leaves(slots), held, strict=True):
        if cache.keys is None:
            filled.append(slot)
            continue
        filled.append(evolve(slot, layer=len(kinds)))
        kinds.append(slot.kind)
        keys, values = cache.keys, cache.values
        if keys.shape[1] != values.shape[1]:
            raise ModelError(f"layer {len(kinds) - 1} has keys and values of unlike heads")
        shapes.append(LayerShape(0, keys.shape[1], keys.shape[3], values.shape[3], keys.dtype))
    if not kinds:
        raise ModelError("none of its caches is written by a forward")
    return tuple(as_taken(slots, filled)), tuple(kinds), tuple(shapes)


def _packed(model: Any, layout: Layout) -> Layout:
    """The layout with the windows that the layers attend over, and who asks for the offset."""
    geometry = Geometry(block_size=ROWS, groups=(Group(FULL, 1),))
    sequence = Sequence(0, Namespace(), 0, committed=ROWS, tables=((0,),), starts=(0,))
    context = StepContext(build(Batch(0, (Piece(sequence, (0,) * ROWS),)), geometry))
    pages = PageStep(
        [mx.zeros((1, ROWS, it.kv_heads, it.key_dim), it.dtype) for it in layout.shapes],
        [mx.zeros((1, ROWS, it.kv_heads, it.value_dim), it.dtype) for it in layout.shapes],
    )
    caches = paged_caches(layout, known=False)
    for cache in caches:
        cache.bind(context, pages)
    try:
        model(context.tokens[:, None], cache=as_taken(layout.slots, caches))
        uses = {cache.layer: cache.used(context.metadata) for cache in caches}
    finally:
        for cache in caches:
            cache.release()
    written = [cache for cache in caches if cache.layer is not None]
    kinds = tuple(map(_seen_kind, written, layout.kinds))
    for layer in range(len(kinds)):
        if uses[layer].updates != 1:
            raise ModelError(f"layer {layer} is written {uses[layer].updates} times in a forward")
    reads = frozenset(n for n in range(len(kinds)) if uses[n].offset_reads)
    return _grouped(layout, kinds, reads)


def _seen_kind(cache: PagedCache, own: LayerKind) -> LayerKind:
    if len(cache.seen_windows) != 1:
        seen = ", ".join(str(window or "all") for window in sorted(cache.seen_windows)) or "none"
        raise ModelError(
            f"layer {cache.layer} attends over several windows of rows, or none: {seen}"
        )
    (window,) = cache.seen_windows
    return LayerKind(window, own.sink)


def _grouped(layout: Layout, kinds: tuple[LayerKind, ...], reads: frozenset[int]) -> Layout:
    """The layout with each layer's group."""
    distinct = _distinct(kinds)
    shapes = tuple(
        evolve(shape, group=distinct.index(kind))
        for shape, kind in zip(layout.shapes, kinds, strict=True)
    )
    return evolve(layout, kinds=kinds, shapes=shapes, reads=reads)


def _distinct(kinds: tuple[LayerKind, ...]) -> list[LayerKind]:
    return list(dict.fromkeys(kinds))
