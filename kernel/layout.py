"""Layout: what a model does with the caches that mlx-lm makes for it, found by looking.

Owns the map from a model to the layers that pages are made for: their shapes, their windows, which
of the caches they are. A model is looked at by building the graph of one small forward, which is
never computed. Knows no architecture by its name, and decides nothing about how it is served.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import mlx.core as mx
from attrs import evolve, frozen
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from statemachine.events import Namespace
from statemachine.geometry import FULL, RECURRENT, WINDOW, Geometry, Group
from statemachine.sequence import Sequence

from . import attention
from .batch import Batch, Piece
from .buckets import Alone
from .caches import PagedCache
from .context import StepContext
from .errors import ModelError
from .metadata import build
from .own_rows import own_logits
from .pages import LayerShape, PageStep
from .recurrent import ArrayKind, StateKind, slot_bytes

ROWS = 2
"""Tokens of the forward that is looked at."""
LOOKS_MAX = 16
"""Forwards after which states must have come to their shapes: some are windows that fill up."""


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
    prompts one by one, [1, L]. split: the same of models that keep states too, which go from row to
    row: no two sequences share a call unless each has one row. mask_dims: dimensions of the masks
    of several sequences. alone: what has a call of its own. added: masks are numbers that are added
    to scores, not true and false.
    """

    name: str
    packed: bool = False
    mask_dims: int = 4
    alone: Alone = ""
    added: bool = False


PACKED = Way("packed", packed=True)
GATHERED = Way("gathered")
GROUPED = Way("grouped", mask_dims=5)
SPLIT = Way("split")
ADDED = Way("added", added=True)
ALONE = Way("alone", alone="pieces")
SINGLE = Way("single", alone="rows")


@frozen
class Slot:
    """One cache of the model's. layer: the number of its page arrays, or None where the model
    never writes it. kind: what mlx-lm's cache in this place keeps. state: the number of its state,
    of a cache that has no rows.
    """

    layer: int | None
    kind: LayerKind
    state: int | None = None


Slots = tuple[Slot | tuple[Slot, ...], ...]


@frozen
class Layout:
    """slots: the model's caches as it takes them, lists among them. kinds and shapes: one for each
    layer, in the order of the caches. reads: layers that ask their cache for its offset.
    vocab_size: the width of the logits. split: whether logits can be made for few rows. states: of
    the caches that keep one, in their order; all of a sequence's are in one slot.
    """

    way: Way
    slots: Slots
    kinds: tuple[LayerKind, ...]
    shapes: tuple[LayerShape, ...]
    reads: frozenset[int]
    vocab_size: int
    split: bool = True
    states: tuple[StateKind, ...] = ()

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: what all caches without rows keep of a sequence."""
        return slot_bytes(self.states)

    def groups(self, num_blocks: int, num_slots: int | None = None) -> tuple[Group, ...]:
        """Groups of `num_blocks` blocks each, in the order in which layers first need them; then
        one of `num_slots` slots (as many as blocks, if nothing is said) where there are states.
        """
        slots = num_blocks if num_slots is None else num_slots
        paged = (
            Group(WINDOW, num_blocks, kind.window, kind.sink)
            if kind.window
            else Group(FULL, num_blocks)
            for kind in _distinct(self.kinds)
        )
        return (*paged, Group(RECURRENT, slots)) if self.states else tuple(paged)


def look(model: Any, way: Way = PACKED) -> Layout:
    """What a model does with its caches. Raises ModelError where pages cannot hold what it keeps,
    or where it cannot be called in this way; computes nothing.
    """
    attention.install()
    caches = make_prompt_cache(model)
    slots = _slots(caches)
    if way.packed and any(slot.state is not None for slot in leaves(slots)):
        raise ModelError("it keeps states that go from row to row, and packed rows stand alone")
    logits, caches = own_logits(model, [0] * ROWS, lambda: make_prompt_cache(model))
    states = _states(model, caches)
    slots, kinds, shapes = _written(slots, caches)
    vocab = int(logits.shape[-1])
    layout = Layout(way, slots, kinds, shapes, frozenset(), vocab, states=states)
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
    states = count()
    slots: list[Slot | tuple[Slot, ...]] = []
    for number, cache in enumerate(caches):
        if type(cache) is CacheList:
            slots.append(tuple(_slot(number, inner, states) for inner in cache.caches))
        else:
            slots.append(_slot(number, cache, states))
    return tuple(slots)


def _slot(number: int, cache: Any, states: Iterator[int]) -> Slot:
    if keeps_state(cache):
        return Slot(None, LayerKind(), next(states))
    return Slot(None, _kind(number, cache))


def keeps_state(cache: Any) -> bool:
    """Whether what a cache holds is behind the last row, not of each row."""
    return type(cache) is ArraysCache


def _states(model: Any, caches: list[Any]) -> tuple[StateKind, ...]:
    """What each state is, once it has its shape: caches go on until nothing changes any more."""
    kept = [cache for cache in opened(caches) if keeps_state(cache)]
    seen = _state_kinds(kept)
    for _ in range(LOOKS_MAX if kept else 0):
        before = seen
        model(mx.zeros((1, ROWS), mx.int32), cache=caches)
        seen = _state_kinds(kept)
        if seen == before:
            return seen
    if kept:
        raise ModelError("it keeps states that grow with every row")
    return ()


def _state_kinds(kept: list[Any]) -> tuple[StateKind, ...]:
    return tuple(StateKind(tuple(map(_array_kind, cache.cache))) for cache in kept)


def _array_kind(array: mx.array | None) -> ArrayKind | None:
    if array is None:
        return None
    if not array.ndim or array.shape[0] != 1:
        raise ModelError(f"it keeps a state {array.shape}, whose first axis counts no sequences")
    return ArrayKind(tuple(array.shape[1:]), array.dtype)


def opened(caches: list[Any]) -> list[Any]:
    """mlx-lm's caches, lists of them opened up."""
    return [one for cache in caches for one in getattr(cache, "caches", (cache,))]


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
    filled: list[Slot] = []
    kinds: list[LayerKind] = []
    shapes: list[LayerShape] = []
    for slot, cache in zip(leaves(slots), opened(caches), strict=True):
        if slot.state is not None or cache.keys is None:
            filled.append(slot)
            continue
        filled.append(evolve(slot, layer=len(kinds)))
        kinds.append(slot.kind)
        keys, values = cache.keys, cache.values
        if keys.shape[1] != values.shape[1]:
            raise ModelError(f"layer {len(kinds) - 1} has keys and values of unlike heads")
        shapes.append(LayerShape(0, keys.shape[1], keys.shape[3], values.shape[3], keys.dtype))
    if not kinds and not any(slot.state is not None for slot in filled):
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
