"""Telling: log-probabilities, scores of prompt tokens and embeddings: what a step tells beside its
tokens, made inside its graph for the rows that ask and for no others.

Log-probabilities are of the model's own logits. A row's are a function of these alone: the twenty
likeliest tokens are looked for however few are told. Never evaluates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from .batch import Logprob, Piece
from .fastmath import EXPONENT_MIN, LOG2E, exp2

TOP_MAX = 20
"""The most tokens that are told beside a chosen one."""
SCORE_ROWS = 32
"""Prompt rows whose logits are made at once: bounds the logits in memory."""

Longs = npt.NDArray[np.int64]
LogitsOf = Callable[[Longs, mx.array], mx.array]


@frozen
class Telling:
    """What is asked for. told: sample numbers, with how many of the likeliest tokens; targets:
    (piece, prompt token, how many of the likeliest); embedded: (piece, its last sample's number).
    """

    told: tuple[tuple[int, int], ...] = ()
    targets: tuple[tuple[int, int, int], ...] = ()
    embedded: tuple[tuple[int, int], ...] = ()


@frozen
class Told:
    """What was told: fields of batch.StepResult."""

    logprobs: tuple[Logprob | None, ...] = ()
    scores: Mapping[int, tuple[Logprob, ...]] = field(factory=dict)
    embeddings: Mapping[int, tuple[float, ...]] = field(factory=dict)


NOTHING = Told()


def plan_telling(pieces: Iterable[Piece]) -> Telling | None:
    """What the pieces of a step ask for; None where they ask for nothing."""
    told: list[tuple[int, int]] = []
    targets: list[tuple[int, int, int]] = []
    embedded: list[tuple[int, int]] = []
    sample = 0
    for number, piece in enumerate(pieces):
        parameters, first = piece.parameters, sample
        sample += piece.samples
        if parameters is None:
            continue
        if parameters.logprobs >= 0:
            told += [(it, parameters.logprobs) for it in range(first, sample)]
        if piece.targets:
            top = max(parameters.logprobs, 0)
            targets += [(number, token, top) for token in piece.targets]
        if parameters.embed and piece.samples:
            embedded.append((number, sample - 1))
    found = Telling(tuple(told), tuple(targets), tuple(embedded))
    return None if found == Telling() else found


def tell(
    telling: Telling,
    logits: mx.array | None,
    tokens: mx.array | None,
    score_rows: Longs,
    hidden: mx.array,
    logits_of: LogitsOf,
    hidden_of: Callable[[Longs], mx.array],
) -> list[mx.array]:
    """The arrays that `read` reads. logits [S, vocab] and tokens [S] are the samples', score_rows
    the rows that predict the targets. hidden: what the head is fed for all rows; logits_of makes
    float32 logits of some rows of it, hidden_of takes out those of some samples.
    """
    arrays: list[mx.array] = []
    if telling.told:
        assert logits is not None
        assert tokens is not None
        rows = mx.array(np.array([row for row, _ in telling.told], np.uint32))
        arrays += _log_probabilities(logits[rows], tokens[rows], any(k for _, k in telling.told))
    for begin, end in _tiles(telling):
        some = telling.targets[begin:end]
        targets = mx.array(np.array([token for _, token, _ in some], np.uint32))
        if begin:
            # One tile after the other, or the logits of all would be in memory at once.
            hidden = mx.depends(hidden, arrays)
        top = any(k for _, _, k in some)
        logits = logits_of(score_rows[begin:end], hidden)
        arrays += _log_probabilities(logits, targets, top)
    if telling.embedded:
        samples = np.array([sample for _, sample in telling.embedded], np.int64)
        arrays.append(hidden_of(samples).astype(mx.float32))
    return arrays


def read(telling: Telling | None, samples: list[int], columns: Iterable[npt.NDArray[Any]]) -> Told:
    """What `tell`'s arrays say, once they are computed; samples: the tokens of all samples."""
    if telling is None:
        return NOTHING
    left = iter(columns)
    logprobs: list[Logprob | None] = []
    if telling.told:
        logprobs = [None] * len(samples)
        tokens = [samples[row] for row, _ in telling.told]
        found = _read(tokens, [k for _, k in telling.told], left)
        for (row, _), it in zip(telling.told, found, strict=True):
            logprobs[row] = it
    scores: dict[int, list[Logprob]] = {}
    for begin, end in _tiles(telling):
        some = telling.targets[begin:end]
        found = _read([token for _, token, _ in some], [k for _, _, k in some], left)
        for (piece, _, _), it in zip(some, found, strict=True):
            scores.setdefault(piece, []).append(it)
    embeddings: dict[int, tuple[float, ...]] = {}
    if telling.embedded:
        rows = next(left).tolist()
        for (piece, _), row in zip(telling.embedded, rows, strict=True):
            embeddings[piece] = tuple(row)
    whole = {piece: tuple(found) for piece, found in scores.items()}
    return Told(tuple(logprobs), whole, embeddings)


def _tiles(telling: Telling) -> Iterator[tuple[int, int]]:
    count = len(telling.targets)
    for begin in range(0, count, SCORE_ROWS):
        yield begin, min(count, begin + SCORE_ROWS)


def _log_probabilities(logits: mx.array, tokens: mx.array, top: bool) -> list[mx.array]:
    """Of `tokens` [n]: [n]; with `top` also the likeliest tokens and theirs: two [n, 20]."""
    best = logits.max(axis=-1, keepdims=True)
    weights = exp2(mx.maximum((logits - best) * LOG2E, EXPONENT_MIN))
    # A product adds a lone row in the same order as one of many.
    total = (mx.ones(weights.shape)[:, None, :] @ weights[:, :, None])[:, 0]
    total = best + mx.log(total)
    found = [(mx.take_along_axis(logits, tokens[:, None], axis=-1) - total)[:, 0]]
    if top:
        most = min(TOP_MAX, logits.shape[-1])
        # A copy: what is cut off would live as long as what is told.
        likely = mx.contiguous(mx.argpartition(-logits, most - 1, axis=-1)[:, :most])
        found += [likely, mx.take_along_axis(logits, likely, axis=-1) - total]
    return found


def _read(
    tokens: list[int], tops: list[int], columns: Iterator[npt.NDArray[Any]]
) -> Iterator[Logprob]:
    """Each token with the likeliest ones at its place; of equals, the lower id first."""
    values = next(columns).tolist()
    if not any(tops):
        yield from (Logprob(*it) for it in zip(tokens, values, strict=True))
        return
    likely, theirs = next(columns).tolist(), next(columns).tolist()
    for token, value, top, ids, logprobs in zip(tokens, values, tops, likely, theirs, strict=True):
        pairs = sorted(zip(ids, logprobs, strict=True), key=lambda pair: (-pair[1], pair[0]))
        yield Logprob(token, value, tuple(pairs[:top]))
