"""Families: what an architecture needs of pages, read off the caches that mlx-lm makes for it.

Owns the map from a model to groups of layers, to capabilities in words, and to the place where its
logits can be computed for few rows. Never runs a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from attrs import frozen
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from statemachine.geometry import FULL, OPAQUE, WINDOW, Group

from .errors import ModelError
from .pages import LayerShape

PACKED = ("llama",)
"""Architectures known to be right when packed; every other keeps mlx-lm's own caches."""


@frozen
class Capability:
    """Whether a family can do something, and why."""

    able: bool
    reason: str


@frozen
class Capabilities:
    """batch: many sequences in a forward. pad: rows that are trimmed afterwards. rewind: rows
    taken back at the tail. share: rows adopted by other sequences.
    """

    batch: Capability
    pad: Capability
    rewind: Capability
    share: Capability

    def as_flags(self) -> dict[str, bool | int | str]:
        """For the tape's header: name -> able, and name_reason -> why not."""
        flags: dict[str, bool | int | str] = {
            "batch": self.batch.able,
            "pad": self.pad.able,
            "rewind": self.rewind.able,
            "share": self.share.able,
        }
        for name in tuple(flags):
            capability: Capability = getattr(self, name)
            if not capability.able:
                flags[f"{name}_reason"] = capability.reason
        return flags


@frozen
class LayerKind:
    """What a layer's rows live like: window 0 keeps all."""

    window: int = 0
    sink: int = 0


@frozen
class Family:
    """Where a model's rows live: in pages, or in caches of its own; and why."""

    paged: bool
    reason: str


def family_of(model: Any) -> Family:
    """How a model is served: over pages where that is known to be right, else over its caches."""
    try:
        check_family(model)
        layer_kinds(model)
    except ModelError as error:
        return Family(False, str(error))
    return Family(True, f"architecture {_kind(model)!r} is known to be right over pages")


def check_family(model: Any) -> None:
    """Raise ModelError where the architecture is none that is served over pages."""
    if _kind(model) not in PACKED:
        raise ModelError(
            f"architecture {_kind(model)!r} is not served over pages, only over caches of its own "
            f"(over pages: {', '.join(PACKED)})"
        )


def _kind(model: Any) -> str:
    return str(getattr(model, "model_type", type(model).__module__))


def layer_kinds(model: Any) -> tuple[LayerKind, ...]:
    """One for each of the model's caches, in their order. Raises ModelError for unknown kinds."""
    kinds = []
    for number, cache in enumerate(make_prompt_cache(model)):
        if type(cache) is KVCache:
            kinds.append(LayerKind())
        elif type(cache) is RotatingKVCache:
            kinds.append(LayerKind(cache.max_size, cache.keep))
        else:
            name = type(cache).__name__
            raise ModelError(f"layer {number} keeps a {name}, which pages cannot hold yet")
    return tuple(kinds)


def layer_groups(model: Any) -> tuple[int, ...]:
    """The group of each layer."""
    kinds = layer_kinds(model)
    distinct = _distinct(kinds)
    return tuple(distinct.index(kind) for kind in kinds)


def groups_for(model: Any, num_blocks: int) -> tuple[Group, ...]:
    """Groups of `num_blocks` blocks each, in the order in which layers first need them."""
    check_family(model)
    return tuple(
        Group(WINDOW, num_blocks, kind.window, kind.sink)
        if kind.window
        else Group(FULL, num_blocks)
        for kind in _distinct(layer_kinds(model))
    )


def _distinct(kinds: tuple[LayerKind, ...]) -> list[LayerKind]:
    return list(dict.fromkeys(kinds))


def owned_groups() -> tuple[Group, ...]:
    """The groups of a model that keeps its own caches: it holds no blocks."""
    return (Group(OPAQUE),)


OWNED = Capabilities(
    batch=Capability(False, "the model's own caches hold one sequence at a time"),
    pad=Capability(False, "pad rows cannot be taken back out of the model's own caches"),
    rewind=Capability(False, "the model's own caches cannot give back the rows at their tail"),
    share=Capability(
        False, "rows in the model's own caches are in no block that others could read"
    ),
)


def capabilities_of(groups: tuple[Group, ...]) -> Capabilities:
    """What follows from the groups."""
    if any(group.kind == OPAQUE for group in groups):
        return OWNED
    windows = [group.window for group in groups if group.kind == WINDOW]
    yes = Capability(True, "every layer's rows are in pages")
    if not windows:
        return Capabilities(batch=yes, pad=yes, rewind=yes, share=yes)
    kept = Capability(
        True, f"windows of {min(windows)} rows: only as far as the rows needed are still held"
    )
    return Capabilities(batch=yes, pad=kept, rewind=kept, share=kept)


def layer_shapes(model: Any) -> tuple[LayerShape, ...]:
    """Sizes of each layer's rows, seen by running one token through mlx-lm's own caches."""
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[0]]), cache=caches))
    shapes = []
    for group, cache in zip(layer_groups(model), caches, strict=True):
        keys, values = cache.keys, cache.values
        shapes.append(LayerShape(group, keys.shape[1], keys.shape[3], values.shape[3], keys.dtype))
    return tuple(shapes)


Hidden = Callable[..., mx.array]
Head = Callable[[mx.array], mx.array]


def body_and_head(model: Any) -> tuple[Hidden, Head]:
    """The part before the logits, and the part that makes them, so that few rows need the latter.

    A model that is not cut in mlx-lm's usual way is its own body: logits are made for all rows.
    """
    body = getattr(model, "model", None)
    if callable(body) and hasattr(body, "embed_tokens"):
        if "lm_head" in model:
            return body, model.lm_head
        if getattr(getattr(model, "args", None), "tie_word_embeddings", False):
            return body, body.embed_tokens.as_linear
    return model, lambda logits: logits
