"""Speculation by prompt lookup: guess that a text goes on as it did where it last read the same.

The last `lookup_ngram` tokens are looked up among all before them; what followed them the last time
is the draft (Saxena, "Prompt Lookup Decoding", 2023). Pure. A guess is only ever accepted where the
target itself samples the same token, so it changes no answer, greedy or sampled.
"""

from __future__ import annotations

from collections.abc import Iterable

from immutables import Map

from .tokenlog import TokenLog

Ngrams = Map[tuple[int, ...], int]
"""From `lookup_ngram` tokens to the position of the token that followed them the last time."""


def index(stream: TokenLog, ngram: int) -> Ngrams:
    """All of a text. Costs its length, once; `extend` keeps it up to date."""
    tokens = stream.slice(0, stream.length)
    places = {tokens[at - ngram : at]: at for at in range(ngram, len(tokens))}
    return Map(places)


def extend(ngrams: Ngrams, stream: TokenLog, fresh: int, ngram: int) -> Ngrams:
    """With the last `fresh` tokens of a text, which was indexed without them."""
    for at in range(max(ngram, stream.length - fresh), stream.length):
        ngrams = ngrams.set(stream.slice(at - ngram, at), at)
    return ngrams


def followed_at(stream: TokenLog, ngrams: Ngrams, ngram: int) -> int | None:
    """The position after the last earlier occurrence of the text's end; None where it is new."""
    if stream.length < ngram:
        return None
    return ngrams.get(stream.slice(stream.length - ngram, stream.length))


def propose(stream: TokenLog, ngrams: Ngrams, ngram: int, most: int) -> tuple[int, ...]:
    """At most `most` tokens that may come next."""
    at = followed_at(stream, ngrams, ngram) if most > 0 else None
    return () if at is None else stream.slice(at, min(at + most, stream.length))


def accepted(drawn: Iterable[int], guessed: Iterable[int]) -> int:
    """How many guesses the target drew itself, up to the first that it did not."""
    count = 0
    for token, guess in zip(drawn, guessed, strict=False):
        if token != guess:
            break
        count += 1
    return count
