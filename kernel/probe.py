"""Probe: a few tokens over pages against mlx-lm's own caches, before anything is served.

Owns the comparison only; uses small pages of its own. Two unlike sequences go through the same
steps, in pieces, over blocks that lie backwards and in between each other's, far beyond the window
of every layer that has one: windows are narrowed to a few rows on both sides.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from attrs import evolve
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from statemachine.events import NO_BLOCK, Namespace
from statemachine.geometry import WINDOW, Geometry, Group
from statemachine.sequence import Sequence

from .batch import Batch, Piece
from .errors import ModelError
from .forward import Forward
from .layout import Layout
from .metadata import build
from .own_rows import at_once, one_by_one
from .pages import Pages
from .split import cut

Rows = npt.NDArray[np.float32]

STEPS = ((5, 2), (3, 3), (3, 1), (1, 1), (1, 1))
"""Rows of each sequence in each step; what the single ones leave behind is gone on with."""
LENGTHS = tuple(sum(rows) for rows in zip(*STEPS, strict=True))
WINDOW_MAX = 5
TOLERANCE = 1e-3
"""Of the largest logit, in float32; narrower types are given their own precision on top, and
only the middle row must agree there: rounding alone may choose another expert.
"""
BLOCK_SIZE = 4
"""Small, so that a few rows cross blocks."""


class References:
    """What a model makes of the probe's tokens over mlx-lm's own caches; made when asked for.

    singly: of one row after the other, where that is another thing than all at once; it becomes
    true where a model cannot take several.
    """

    def __init__(self, model: Any, singly: bool = False) -> None:
        self._model = model
        self.singly = singly
        self._rows: list[Rows] = []
        self._split: bool | None = None

    def tokens(self, vocab: int) -> list[list[int]]:
        """Of each sequence, unlike each other."""
        return [
            [(7 * place + 3 + 31 * seq) % min(vocab, 1000) for place in range(rows)]
            for seq, rows in enumerate(LENGTHS)
        ]

    def rows(self, vocab: int) -> list[Rows]:
        """Logits of each sequence's tokens: [rows, vocab]."""
        if not self._rows:
            for tokens in self.tokens(vocab):
                logits = self._logits(tokens)
                self._rows.append(np.array(logits.astype(mx.float32)))
        return self._rows

    def _logits(self, tokens: list[int]) -> mx.array:
        if not self.singly:
            try:
                return at_once(self._model, tokens, narrowed(self._model))
            except Exception:  # one that takes one row at a time
                self.singly = True
        return one_by_one(self._model, tokens, narrowed(self._model))

    def split(self, vocab: int) -> bool:
        """Whether logits can be made for few rows."""
        if self._split is None:
            model, tokens = self._model, self.tokens(vocab)[-1]
            try:
                whole = at_once(model, tokens, narrowed(model))
            except Exception:  # one that takes one row at a time
                tokens = tokens[:1]
                whole = at_once(model, tokens, narrowed(model))
            wanted = np.array(whole.astype(mx.float32))
            found = cut(model, mx.array([tokens]), lambda: narrowed(model), wanted)
            self._split = found[0] is not model
        return self._split


def narrowed(model: Any) -> list[Any]:
    """mlx-lm's own caches, no window of theirs or of a mask wider than WINDOW_MAX."""
    caches: list[Any] = make_prompt_cache(model)
    for held in caches:
        for cache in getattr(held, "caches", (held,)):
            if type(cache) is RotatingKVCache:
                cache.max_size = min(cache.max_size, WINDOW_MAX + cache.keep)
            if isinstance(cache, KVCache | RotatingKVCache):
                vars(cache)["make_mask"] = _narrow(cache.make_mask)
    return caches


def _narrow(make_mask: Any) -> Any:
    def narrow(rows: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if window_size is not None:
            window_size = min(window_size, WINDOW_MAX)
        return make_mask(rows, return_array=return_array, window_size=window_size)

    return narrow


def probe(model: Any, layout: Layout, references: References | None = None) -> Layout:
    """The layout, with what was found of `split`. Raises ModelError where logits over pages are
    others than mlx-lm's own: this architecture is not served right in this way.
    """
    references = references or References(model)
    wanted = references.rows(layout.vocab_size)
    layout = evolve(layout, split=references.split(layout.vocab_size))
    got = paged_rows(model, layout, references.tokens(layout.vocab_size))
    worst, tolerance = difference(got, wanted, layout)
    if not worst <= tolerance:
        raise ModelError(
            f"over pages it differs from mlx-lm's own caches by {worst:.2g} of the largest logit "
            f"(at most {tolerance:.2g} is rounding)"
        )
    return layout


def difference(got: list[Rows], wanted: list[Rows], layout: Layout) -> tuple[float, float]:
    """How far rows are apart, relative to the largest logit, and how far they may be."""
    scale = max(1.0, *(float(np.abs(rows[np.isfinite(rows)]).max()) for rows in wanted))
    apart = np.concatenate([_apart(a, b).max(axis=-1) for a, b in zip(got, wanted, strict=True)])
    narrow = any(shape.dtype != mx.float32 for shape in layout.shapes)
    worst = float(np.median(apart) if narrow else apart.max()) / scale
    eps = max(float(mx.finfo(shape.dtype).eps) for shape in layout.shapes) if narrow else 0.0
    return worst, TOLERANCE + 16 * eps


def _apart(got: Rows, wanted: Rows) -> Rows:
    """The distance of each score: none of those that are hidden in both."""
    with np.errstate(invalid="ignore"):
        return np.where(got == wanted, np.float32(0), np.abs(got - wanted))


def paged_rows(model: Any, layout: Layout, tokens: list[list[int]]) -> list[Rows]:
    """Logits of each sequence's tokens over small pages: [rows, vocab]."""
    geometry = small(layout.groups(1), max(LENGTHS), len(tokens))
    forward = Forward(model, layout, window_max=WINDOW_MAX)
    pages = Pages(geometry, layout.shapes, states=layout.states)
    parts: list[list[Rows]] = [[] for _ in tokens]
    done = [0] * len(tokens)
    for number, counts in enumerate(STEPS):
        pieces = []
        for seq, rows in enumerate(counts):
            end = done[seq] + rows
            fed = tuple(tokens[seq][done[seq] : end])
            pieces.append(Piece(_sequence(geometry, seq, done[seq], end), fed, samples=rows))
            done[seq] = end
        step = pages.begin()
        context = forward.context(build(Batch(number, tuple(pieces)), geometry))
        logits, _, _ = forward.run(context, step)
        pages.commit(step)
        ends = np.cumsum(counts)[:-1].tolist()
        for part, rows_of in zip(parts, np.split(np.array(logits), ends), strict=True):
            part.append(rows_of)
    return [np.concatenate(part) for part in parts]


def small(groups: tuple[Group, ...], rows: int, sequences: int) -> Geometry:
    """The same groups with narrow windows, in blocks of BLOCK_SIZE for so many sequences."""
    blocks = sequences * -(-rows // BLOCK_SIZE)
    kept = tuple(
        Group(group.kind, blocks, min(group.window, WINDOW_MAX), group.sink) for group in groups
    )
    return Geometry(block_size=BLOCK_SIZE, groups=kept)


def _sequence(geometry: Geometry, seq: int, start: int, end: int) -> Sequence:
    """A sequence whose rows [start, end) are fed, as front trims would have left it."""
    tables, starts = [], []
    for group in geometry.groups:
        first = max(0, start - group.window + 1) if group.kind == WINDOW else 0
        table = list(range(group.num_blocks))[::-1][seq::2]
        gone = range(geometry.blocks_for(group.sink), first // BLOCK_SIZE)
        tables.append(tuple(NO_BLOCK if at in gone else block for at, block in enumerate(table)))
        starts.append(first)
    return Sequence(seq, Namespace(), 0, committed=end, tables=tuple(tables), starts=tuple(starts))
