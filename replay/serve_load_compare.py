"""Serve-load compare: an answer that came back against the one on tape.

By token ids where the server tells them, else by text where there is a tokenizer, else by how many
tokens there were and why they ended. An answer that was cut on one side (its client left, it
failed, the tape ends) is compared as far as it goes, by ids or text only. Sends and prints nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import frozen
from msgspec import Struct

from server.submission import LENGTH, STOP
from server.text import TextStream
from statemachine.records import RequestArrived

from .serve_load_client import Measured
from .serve_load_tape import Ended

if TYPE_CHECKING:
    from kernel.tokenizer import Tokenizer

TOKENS = "tokens"
TEXT = "text"
COUNTS = "counts"
REASON = "finish_reason"
CONTEXT_TOKENS = 8
CONTEXT_CHARACTERS = 40
NO_MORE = "its end"


class Difference(Struct, frozen=True):
    """An answer that is another one. by: tokens, text, counts or finish_reason. place: of the first
    token or character that differs, from 0; -1 where only counts or reasons are known. recorded,
    measured: what stands from there on. sampled: it was drawn at a temperature.
    """

    request: int
    external_id: str
    by: str
    place: int
    recorded: str
    measured: str
    sampled: bool


@frozen
class Compared:
    """by: what was compared, "" for nothing. difference: None where it is the same."""

    by: str
    difference: Difference | None = None


NOTHING = Compared("")


def is_whole(ended: Ended) -> bool:
    """Whether the tape has all of the answer."""
    return ended.reason in (STOP, LENGTH)


def compare(
    arrived: RequestArrived, ended: Ended, measured: Measured, tokenizer: Tokenizer | None
) -> Compared:
    """Compare one answer that did not fail."""
    if arrived.parameters.grammar:
        return NOTHING  # it was sent without: there are no words for it that servers share
    sides: tuple[Sequence[object], Sequence[object]]
    if measured.tokens is not None:
        by = TOKENS
        sides = ended.tokens, _without_end(measured.tokens, arrived.parameters.end_tokens)
    elif tokenizer is not None:
        by = TEXT
        measured_text = _comparable("".join(measured.text), tokenizer)
        sides = text_of(ended, arrived.parameters.stop, tokenizer), measured_text
    else:
        return _compare_counts(arrived, ended, measured)
    place = first_difference(sides[0], sides[1], (is_whole(ended), not measured.left))
    if place >= 0:
        return _different(by, by, arrived, place, *(_shown(side, place) for side in sides))
    return _compare_reasons(by, arrived, ended, measured)


def _compare_counts(arrived: RequestArrived, ended: Ended, measured: Measured) -> Compared:
    recorded, counted = len(ended.tokens), measured.completion_tokens
    if not is_whole(ended) or measured.left or counted is None:
        return NOTHING
    # Some servers count the token that ends an answer.
    if counted - recorded not in (0, int(ended.ended_by_token)):
        return _different(COUNTS, COUNTS, arrived, -1, f"{recorded} tokens", f"{counted} tokens")
    return _compare_reasons(COUNTS, arrived, ended, measured)


def _compare_reasons(
    by: str, arrived: RequestArrived, ended: Ended, measured: Measured
) -> Compared:
    reason = measured.finish_reason
    if not is_whole(ended) or measured.left or reason in (None, ended.reason):
        return Compared(by)
    return _different(by, REASON, arrived, -1, ended.reason, str(reason))


def _different(
    by: str, kind: str, arrived: RequestArrived, place: int, recorded: str, measured: str
) -> Compared:
    sampled = arrived.parameters.temperature > 0
    names = arrived.request, arrived.external_id
    return Compared(by, Difference(*names, kind, place, recorded, measured, sampled))


def first_difference(
    recorded: Sequence[object], measured: Sequence[object], whole: tuple[bool, bool]
) -> int:
    """Where two answers part, -1 where they do not. A side that is not whole may be shorter."""
    pairs = zip(recorded, measured, strict=False)
    both = min(len(recorded), len(measured))
    place = next((at for at, (has, due) in enumerate(pairs) if has != due), both)
    if place < both:
        return place
    longer = (len(recorded) > both and whole[1]) or (len(measured) > both and whole[0])
    return place if longer else -1


def text_of(ended: Ended, stop: tuple[str, ...], tokenizer: Tokenizer) -> str:
    """The text of a recorded answer, as a server would have shown it."""
    from kernel.tokenizer import Detokenizer

    stream = TextStream(Detokenizer(tokenizer), stop)
    text = "".join(map(stream.feed, ended.tokens))
    # What is held back of an answer that goes on may have become a stop string.
    text += stream.finish() if is_whole(ended) else ""
    return _comparable(text, tokenizer)


def _comparable(text: str, tokenizer: Tokenizer) -> str:
    """Servers do not agree on a first space that belongs to the encoding, nor on what an
    incomplete character at the end looks like.
    """
    text = text.rstrip("\ufffd")
    return text.removeprefix(" ") if tokenizer.strips_first_space else text


def _without_end(tokens: list[int], end_tokens: tuple[int, ...]) -> list[int]:
    return tokens[:-1] if tokens and tokens[-1] in end_tokens else tokens


def _shown(side: Sequence[object], place: int) -> str:
    """What stands there and behind it."""
    if isinstance(side, str):
        shown = side[place:][:CONTEXT_CHARACTERS]
        return repr(shown) if shown else NO_MORE
    return " ".join(map(str, side[place:][:CONTEXT_TOKENS])) or NO_MORE
