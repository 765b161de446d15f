"""Stop strings: what is shown, what is held back, what is cut (P29, P30, P31)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text import TextStream


class Pieces:
    """A decoder whose token n is the n-th piece of text."""

    def __init__(self, *pieces: str, tail: str = "") -> None:
        self.pieces = pieces
        self.tail = tail

    def add(self, token: int) -> str:
        return self.pieces[token]

    def finish(self) -> str:
        return self.tail


def shown(pieces: list[str], *stop: str, tail: str = "") -> tuple[list[str], bool]:
    """What each piece showed, what finish showed, and whether a stop string was met."""
    stream = TextStream(Pieces(*pieces, tail=tail), stop)
    texts = [stream.feed(token) for token in range(len(pieces))]
    return [*texts, stream.finish()], stream.stopped


@pytest.mark.parametrize(
    ("pieces", "stop", "texts"),
    [
        (["one END two"], "END", ["one ", ""]),
        (["one EN", "D two"], "END", ["one ", "", ""]),
        (["one E", "N", "D two"], "END", ["one ", "", "", ""]),
        (["END"], "END", ["", ""]),
        (["a", "END", "b"], "END", ["a", "", "", ""]),
    ],
)
def test_p29_text_ends_just_before_a_stop_string_wherever_token_edges_fall(
    pieces: list[str], stop: str, texts: list[str]
) -> None:
    assert shown(pieces, stop) == (texts, True)


def test_p30_nothing_of_a_stop_string_is_shown_before_its_last_piece() -> None:
    assert shown(["DEF", "G", "HI", "J"], "DEFGHIJ") == (["", "", "", "", ""], True)


def test_p30_a_false_start_is_shown_in_full_and_once() -> None:
    assert shown(["DEF", "G", "X"], "DEFGHIJ") == (["", "", "DEFGX", ""], False)


def test_what_is_held_back_is_shown_when_the_answer_ends_otherwise() -> None:
    assert shown(["x DEF", "G"], "DEFGHIJ") == (["x ", "", "DEFG"], False)


def test_the_tail_of_the_decoder_can_complete_a_stop_string() -> None:
    assert shown(["x DE"], "DEF", tail="F") == (["x ", ""], True)


def test_a_false_start_may_hold_the_true_one() -> None:
    assert shown(["aab", "aabaac"], "aabaac") == (["", "aab", ""], True)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert shown(["abcde"], "abcde", "bcd") == (["a", ""], True)


def test_of_two_stop_strings_that_end_together_the_longer_one_cuts() -> None:
    assert shown(["xabc"], "bc", "abc") == (["x", ""], True)


def test_without_stop_strings_text_is_shown_as_it_comes() -> None:
    assert shown(["a", "", "b"], tail="c") == (["a", "", "b", "c"], False)


def first_stop(text: str, stops: list[str]) -> str:
    """What may be shown of `text`, by the definition: search each prefix, shortest first."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)]
    return text


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=24),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4),
    cuts=st.sets(st.integers(1, 23)),
)
def test_what_is_shown_does_not_depend_on_token_edges(
    text: str, stops: list[str], cuts: set[int]
) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    texts, _ = shown(pieces, *stops)
    assert "".join(texts) == first_stop(text, stops)
    # Nothing shown is ever taken back: each prefix of the joined text is a prefix of the end.
    assert all(first_stop(text, stops).startswith("".join(texts[:n])) for n in range(len(texts)))
