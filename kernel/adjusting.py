"""Adjusting: what a request's parameters do to logits before a token is chosen.

In this order: repetition penalty, then frequency and presence penalty and bias, then the grammar's
mask. Each row by itself and element by element, so that neighbours change nothing; where no row
asks, nothing is computed. Counts and masks are worked out on the host, from what a row is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from attrs import frozen
from msgspec import Struct

from statemachine.records import Parameters

from .batch import Piece
from .masks import WORD_BITS, GrammarFailed, Masks, Words
from .metadata import BadBatch

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]

MASKED = -1e30
"""The logit of a token that a grammar forbids: finite, so that no margin is infinite."""


class Asked(Struct, frozen=True):
    """A sample that asks for more than its own logits: its number in the step, its parameters, the
    answer before it, of which the first `certain` tokens are no guesses, and the prompt.
    """

    row: int
    seq: int
    parameters: Parameters
    answer: tuple[int, ...] = ()
    certain: int = 0
    prompt: tuple[int, ...] = ()


@frozen(eq=False)
class Changes:
    """Logits that change, [N]: their rows and tokens; what divides them (or multiplies, where
    negative), and what is added then.
    """

    rows: Longs
    tokens: Longs
    divisor: Floats
    added: Floats


@frozen(eq=False)
class Masked:
    """Rows that have a grammar, [M], and their packed masks, words [M, W]."""

    rows: Longs
    words: Words


@frozen(eq=False)
class Adjustments:
    """What the rows of a step ask for, as far as any does."""

    changes: Changes | None
    masked: Masked | None


def asked_of(pieces: Iterable[Piece]) -> list[Asked]:
    """The samples of a step that ask for something, in batch order."""
    found: list[Asked] = []
    row = 0
    for piece in pieces:
        parameters = piece.parameters
        if piece.samples and parameters is not None:
            asks = parameters.logit_bias or parameters.reads_answer
            found += _samples(piece, parameters, row) if asks else []
        row += piece.samples
    return found


def _samples(piece: Piece, parameters: Parameters, row: int) -> list[Asked]:
    seq, certain = piece.sequence.id, len(piece.answer)
    if piece.pending and parameters.reads_answer:
        raise BadBatch(f"sequence {seq} is sampled before all of its answer is known", seq)
    guesses = piece.tokens[len(piece.tokens) - piece.samples + 1 :] if piece.samples > 1 else ()
    return [
        Asked(row + place, seq, parameters, piece.answer + guesses[:place], certain, piece.prompt)
        for place in range(piece.samples)
    ]


def plan_adjustments(
    asked: Sequence[Asked], rows: int, vocab: int, masks: Masks | None
) -> Adjustments | None:
    """What `asked` samples of a step's `rows` want; None where they want nothing.

    Raises BadBatch where a grammar cannot be followed.
    """
    changed = [_changes(it) for it in asked if it.parameters.logit_bias or it.parameters.penalised]
    masked = _masks(asked, vocab, masks)
    if not any(len(it.tokens) for it in changed):
        return None if masked is None else Adjustments(None, masked)
    columns = (
        np.concatenate([getattr(it, name) for it in changed])
        for name in ("rows", "tokens", "divisor", "added")
    )
    return Adjustments(Changes(*columns), masked)


def adjusted(logits: mx.array, adjustments: Adjustments | None) -> mx.array:
    """Logits [S, vocab] float32 as a token is chosen from them; the given ones where none asks."""
    if adjustments is None:
        return logits
    count, vocab = logits.shape
    changes = adjustments.changes
    if changes is not None:
        places = mx.array((changes.rows * vocab + changes.tokens).astype(np.uint32))
        divisor, flat = mx.array(changes.divisor), logits.reshape(-1)
        found = flat[places]
        found = mx.where(found > 0, found / divisor, found * divisor) + mx.array(changes.added)
        logits = mx.put_along_axis(flat, places, found, axis=0).reshape(count, vocab)
    masked = adjustments.masked
    return logits if masked is None else _mask(logits, masked)


def _mask(logits: mx.array, masked: Masked) -> mx.array:
    """Logits with those that a row's mask forbids out of the way; other rows are not looked at."""
    (count, vocab), some = logits.shape, len(masked.rows)
    bits = mx.array(masked.words)[:, :, None] >> mx.arange(WORD_BITS, dtype=mx.uint32)
    allowed = (bits & 1).astype(mx.bool_).reshape(some, -1)[:, :vocab]
    if some == count:
        return mx.where(allowed, logits, MASKED)
    rows = mx.array(masked.rows.astype(np.uint32))
    places = np.arange(count, dtype=np.uint32)
    places[masked.rows] = count + np.arange(some)
    changed = mx.where(allowed, logits[rows], MASKED)
    return mx.concatenate([logits, changed])[mx.array(places)]


def _changes(asked: Asked) -> Changes:
    """What one row asks for; only the repetition penalty looks at the prompt too."""
    parameters = asked.parameters
    bias = np.array([token for token, _ in parameters.logit_bias], np.int64)
    said, repeated = bias[:0], bias[:0]
    if parameters.penalised:
        said = np.array(asked.answer, np.int64)
    if parameters.repetition_penalty != 1.0:
        repeated = np.concatenate([said, np.array(asked.prompt, np.int64)])
    tokens = np.unique(np.concatenate([bias, said, repeated]))
    counts = np.bincount(np.searchsorted(tokens, said), minlength=len(tokens))
    added = -parameters.frequency_penalty * counts - parameters.presence_penalty * (counts > 0)
    np.add.at(added, np.searchsorted(tokens, bias), [value for _, value in parameters.logit_bias])
    divisor = np.ones(len(tokens), np.float32)
    divisor[np.searchsorted(tokens, repeated)] = parameters.repetition_penalty
    rows = np.full(len(tokens), asked.row)
    return Changes(rows, tokens, divisor, added.astype(np.float32))


def _masks(asked: Sequence[Asked], vocab: int, masks: Masks | None) -> Masked | None:
    width = -(-vocab // WORD_BITS)
    rows: list[int] = []
    words: list[Words] = []
    for it in asked:
        if not it.parameters.grammar:
            continue
        if masks is None:
            raise BadBatch("this engine was built without grammars", it.seq, wished=True)
        try:
            allowed = masks.allowed(it.seq, it.parameters, it.answer, it.certain, width)
        except GrammarFailed as error:
            said = f"the grammar cannot be followed: {error}"
            raise BadBatch(said, it.seq, wished=True) from error
        if allowed is not None:
            rows.append(it.row)
            words.append(allowed)
    return Masked(np.array(rows, np.int64), np.stack(words)) if rows else None
