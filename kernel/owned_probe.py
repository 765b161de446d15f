"""Probe of a model over its own caches, before anything is served.

Owns what a few tokens say of it: which caches count rows, how wide the logits are, and whether
pieces give what all at once gives.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from attrs import frozen

from .errors import ModelError, describe
from .owned_caches import OwnedCaches

PROBE_FIRST = (0, 0)
PROBE_TOKENS = 8
PROBE_PIECES = (3, 3, 1, 1)
PROBE_TOLERANCE = 1e-3
"""Of the largest logit, in float32."""


@frozen(eq=False)
class Found:
    """counted: numbers of the caches whose offset counts rows. tokens, [1, L], and their logits
    over fresh caches, [L, vocab] float32.
    """

    counted: tuple[int, ...]
    tokens: mx.array
    logits: npt.NDArray[np.float32]


def probe(model: Any, check: bool) -> Found:
    """Run a few tokens. Raises ModelError."""
    failure = ""
    try:
        caches = OwnedCaches(model, -1)
        first = np.array(_logits(model, caches, list(PROBE_FIRST)).astype(mx.float32))
        counted = tuple(n for n, offset in caches.offsets().items() if offset)
        vocab = first.shape[-1]
        tokens = [(7 * place + 3) % min(vocab, 1000) for place in range(PROBE_TOKENS)]
        worst = _pieces_differ(model, tokens) if check else 0.0
    except Exception as error:
        failure = describe(error)
    if failure:
        raise ModelError(f"this model cannot be run over its own caches: {failure}")
    if not worst <= PROBE_TOLERANCE:
        raise ModelError(
            f"this model gives other logits in pieces than at once, by {worst:.2g} of the largest "
            f"(at most {PROBE_TOLERANCE:.2g} is rounding): it cannot be served; please report it"
        )
    return Found(counted, mx.array([PROBE_FIRST]), first)


def _pieces_differ(model: Any, tokens: list[int]) -> float:
    """How far logits in pieces are from those at once, relative to the largest.

    Only float32 says anything: in narrower types, rounding alone may choose another expert.
    """
    whole = _logits(model, OwnedCaches(model, -1), tokens)
    if whole.dtype != mx.float32:
        return 0.0
    caches, parts, at = OwnedCaches(model, -1), [], 0
    for rows in PROBE_PIECES:
        parts.append(_logits(model, caches, tokens[at : at + rows]))
        at += rows
    wanted, got = np.array(whole), np.concatenate([np.array(part) for part in parts])
    return float(np.abs(got - wanted).max() / max(1.0, float(np.abs(wanted).max())))


def _logits(model: Any, caches: OwnedCaches, tokens: list[int]) -> mx.array:
    """[len(tokens), vocab], computed."""
    logits: mx.array = caches.feed(model, mx.array([tokens]))[0]
    mx.eval(logits, caches.arrays())
    return logits
