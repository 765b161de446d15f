"""Attention over pages: a gather by the step's tables, and the dispatch that models call.

Owns the function that stands in place of mlx-lm's `scaled_dot_product_attention`, and the
arithmetic behind it. Reads the pages only, first chunks too, so that a layer's writes are
always evaluated. Knows no sequence: rows, slots and masks come from the step's context.

It also owns how models count positions on by numpy, for which they would have to be numbers.

Shapes: T rows; B pieces of n rows in a bucket; S keys; H query heads, each R = H / KV of them
sharing a K/V head. Scores are in powers of two: log2(e) goes into the scale.
"""

from __future__ import annotations

import sys
from functools import reduce
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import base

from .buckets import MANY_QUERIES
from .context import StepContext
from .fastmath import LOG2E, exp2_below
from .handles import HandleMisused, KeyHandle, MaskHandle, Positions, ScoresHandle
from .paged_attention import Layer
from .pages import Codes
from .quantised import Code

SEAM = "scaled_dot_product_attention"
ORIGINAL = base.scaled_dot_product_attention


def dispatch(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's signature. Goes by what `keys` is, never by `cache`: models pass others' there."""
    if not isinstance(keys, KeyHandle):
        return ORIGINAL(queries, keys, values, cache, scale, mask, sinks)
    layer = keys.paged_cache
    if isinstance(mask, ScoresHandle):
        return _latent(queries, keys, values, scale, mask, sinks)
    if mask is not None and not isinstance(mask, MaskHandle):
        raise HandleMisused(f"layer {layer.layer} brings a mask of its own; pages cannot honour it")
    asked = None if mask is None else mask.window
    context, key_pages, value_pages = layer.read(keys, values, asked)
    if context.tables is not None and context.tables.attends:
        assert layer.layer is not None
        arrays = Layer(layer.layer, key_pages, value_pages, *layer.rows, sinks, layer.codes)
        return context.tables.attend(layer.group, queries, arrays, scale)
    return attend(context, layer.group, queries, key_pages, value_pages, scale, sinks, layer.codes)


def _latent(
    queries: mx.array,
    keys: KeyHandle,
    values: Any,
    scale: float,
    scores: ScoresHandle,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of a model that keeps compressed rows: the keys are the values as well, and to
    their scores those of what stands in the values' pages are added.
    """
    layer = keys.paged_cache
    if values is not keys:
        raise HandleMisused(f"layer {layer.layer} adds scores to values that are not its keys")
    context, key_pages, value_pages = layer.read(keys, scores.values)
    if context.tables is not None:
        raise HandleMisused(f"layer {layer.layer} adds scores, which no kernel does")
    wide = [queries.astype(mx.float32) * scale, scores.queries.astype(mx.float32)]
    both, pages = mx.concatenate(wide, axis=-1), (key_pages, value_pages)
    out = attend(context, layer.group, both, *pages, 1.0, sinks, layer.codes, latent=True)
    return out.astype(queries.dtype)


class _Numpy:
    """numpy, as model modules see it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def arange(self, start: Any, *rest: Any, **named: Any) -> Any:
        """Counted on from the positions of packed rows, [T], it is each one's own: [T, 1]."""
        if isinstance(start, Positions) and len(rest) == 1 and not named:
            return start[:, None]
        return np.arange(start, *rest, **named)


def install() -> tuple[ModuleType, ...]:
    """Put `dispatch` in place in every loaded model module but base; returns those that have it."""
    modules = patchable()
    for module in modules:
        setattr(module, SEAM, dispatch)
        if getattr(module, "np", None) is np:
            setattr(module, "np", _Numpy())  # noqa: B010 - a module has no such attribute to mypy
    return modules


def patchable() -> tuple[ModuleType, ...]:
    """Loaded mlx_lm model modules that took the attention function from base."""
    found = []
    for name, module in sorted(sys.modules.items()):
        inside = name.startswith("mlx_lm.models.") and module is not base
        if inside and getattr(module, SEAM, None) in (ORIGINAL, dispatch):
            found.append(module)
    return tuple(found)


def attend(
    context: StepContext,
    group: int,
    queries: mx.array,
    key_pages: mx.array,
    value_pages: mx.array,
    scale: float,
    sinks: mx.array | None = None,
    codes: Codes | None = None,
    *,
    latent: bool = False,
) -> mx.array:
    """Each row of `queries` [T, H, 1, dim] over what its piece may read: [T, H, 1, value dim].

    sinks: [H], scores of a key that every query sees and that has no value. codes: what the words
    of quantised pages mean. latent: what the pages keep as K is the values; keys are K beside V.
    """
    rows = queries.squeeze(2).astype(mx.float32) * (scale * LOG2E)
    if sinks is not None:
        sinks = sinks.astype(mx.float32) * LOG2E
    pages = (key_pages, value_pages)
    parts = [
        _attend_bucket(context, number, group, rows, pages, sinks, codes, latent)
        for number in range(len(context.buckets))
    ]
    out = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    if context.order is not None:
        out = out[context.order]
    return out[:, :, None, :].astype(queries.dtype)


def _attend_bucket(
    context: StepContext,
    number: int,
    group: int,
    queries: mx.array,
    pages: tuple[mx.array, mx.array],
    sinks: mx.array | None,
    codes: Codes | None,
    latent: bool,
) -> mx.array:
    """One bucket: queries [T, H, dim] in, [B * n, H, value dim] out."""
    bucket = context.buckets[number]
    pieces, count = bucket.rows.shape
    kv_heads = pages[0].shape[2]
    if bucket.contiguous:
        begin = int(bucket.rows[0, 0])
        mine = queries[begin : begin + pieces * count]
    else:
        mine = queries[context.query_rows(number)]
    mine = mine.reshape(pieces, count, kv_heads, -1, queries.shape[-1])
    common, shared = bucket.views[group].common, None
    index = context.read_index(number, group, kv_heads, common)
    keys, values = _fetch(pages, index, codes, latent)
    if common:
        index = context.read_index(number, group, kv_heads, common, shared=True)
        shared = _fetch(pages, index, codes, latent)
    outs = []
    for place, tile in enumerate(bucket.views[group].tiles):
        part = mine[:, tile.begin : tile.end].transpose(0, 2, 3, 1, 4)
        bias, own = context.bias(number, group, place), slice(tile.keys - common)
        reach = (keys[:, :, own], values[:, :, own])
        if shared is None and tile.end - tile.begin >= MANY_QUERIES:
            outs.append(_columns(part, *reach, bias, tile.clear, sinks))
        else:
            outs.append(_rows(part, *reach, bias, sinks, shared))
    out = outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=3)
    return out.transpose(0, 3, 1, 2, 4).reshape(pieces * count, -1, out.shape[-1])


def _fetch(
    pages: tuple[mx.array, mx.array], index: mx.array, codes: Codes | None, latent: bool
) -> tuple[mx.array, mx.array]:
    """K and V of `index`: [B, KV, S, dim] each."""
    keys, values = (
        _gather(it, index, code) for it, code in zip(pages, codes or (None, None), strict=True)
    )
    return (mx.concatenate([keys, values], axis=-1), keys) if latent else (keys, values)


def _gather(pages: mx.array, index: mx.array, code: Code | None) -> mx.array:
    """Rows of one head each, straight into the layout that matmul wants: [B, KV, S, dim]."""
    found = pages.reshape(-1, pages.shape[-1])[index]
    return found.astype(mx.float32) if code is None else code.decode(found)


def _rows(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    bias: mx.array | None,
    sinks: mx.array | None,
    shared: tuple[mx.array, mx.array] | None = None,
) -> mx.array:
    """Few queries: scores [B, KV, R, n, S]. Queries and result are [B, KV, R, n, dim].

    shared: K and V that stand before those of every piece, [1, KV, S, dim], which bias is not of.
    They are scored for the queries of all pieces at once, [1, KV, S, B * R * n].
    """
    pieces, kv_heads, repeats, count, dim = queries.shape
    flat = queries.reshape(pieces, kv_heads, repeats * count, dim)
    scores = flat @ keys.swapaxes(-1, -2)
    if bias is not None:
        wide = scores.reshape(pieces, kv_heads, repeats, count, -1)
        scores = (wide + bias[:, None, None]).reshape(scores.shape)
    peaks = scores.max(axis=-1, keepdims=True)
    if shared is not None:
        before = shared[0] @ flat.swapaxes(0, 1).reshape(1, kv_heads, -1, dim).swapaxes(-1, -2)
        peaks = mx.maximum(peaks, _by_piece(before.max(axis=-2), peaks))
    if sinks is not None:
        sinks = mx.repeat(sinks.reshape(1, kv_heads, repeats), count, axis=2)[..., None]
        peaks = mx.maximum(peaks, sinks)
    weights = exp2_below(scores, peaks)
    sums, out = weights.sum(axis=-1, keepdims=True), weights @ values
    if shared is not None:
        weights = exp2_below(before, peaks.swapaxes(0, 1).reshape(1, kv_heads, 1, -1))
        sums = sums + _by_piece(weights.sum(axis=-2), sums)
        out = out + _by_piece(weights.swapaxes(-1, -2) @ shared[1], out)
    out = out / _with_sinks(sums, peaks, sinks)
    return out.reshape(pieces, kv_heads, repeats, count, -1)


def _by_piece(rows: mx.array, like: mx.array) -> mx.array:
    """What is by head, then piece, as what is by piece, then head, `like` [B, KV, rows, ...]."""
    pieces, kv_heads, *rest = like.shape
    return rows.reshape(kv_heads, pieces, *rest).swapaxes(0, 1)


def _columns(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    bias: mx.array | None,
    clear: int,
    sinks: mx.array | None,
) -> mx.array:
    """Many queries: the same with scores [B, KV, S, R, n], in two parts where the bias is of the
    keys from `clear` on.
    """
    pieces, kv_heads, repeats, count, dim = queries.shape
    flat = queries.reshape(pieces, kv_heads, repeats * count, dim).swapaxes(-1, -2)
    parts = [slice(clear), slice(clear, None)] if clear else [slice(None)]
    scores = [keys[:, :, part] @ flat for part in parts]
    if bias is not None:
        wide = scores[-1].reshape(pieces, kv_heads, -1, repeats, count)
        turned = bias.swapaxes(-1, -2)[:, None, :, None]
        scores[-1] = (wide + turned).reshape(scores[-1].shape)
    peaks = reduce(mx.maximum, [it.max(axis=-2, keepdims=True) for it in scores])
    if sinks is not None:
        sinks = mx.repeat(sinks.reshape(1, kv_heads, repeats), count, axis=2)[:, :, None]
        peaks = mx.maximum(peaks, sinks)
    weights = [exp2_below(it, peaks) for it in scores]
    sums = reduce(mx.add, [it.sum(axis=-2, keepdims=True) for it in weights])
    totals = _with_sinks(sums, peaks, sinks).swapaxes(-1, -2)
    pairs = zip(weights, parts, strict=True)
    out = reduce(mx.add, [it.swapaxes(-1, -2) @ values[:, :, part] for it, part in pairs]) / totals
    return out.reshape(pieces, kv_heads, repeats, count, -1)


def _with_sinks(totals: mx.array, peaks: mx.array, sinks: mx.array | None) -> mx.array:
    """What weights are divided by: their sum, and the sinks' share of it."""
    if sinks is None:
        return totals
    return totals + exp2_below(sinks, peaks)
