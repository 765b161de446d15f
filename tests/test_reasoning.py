"""Reasoning: split where the template marks it, wherever the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.dialects.parts import PlainSplitter, Text, Whole, join
from server.dialects.reasoning import ReasoningMarkers, ReasoningSplitter, reasoning_markers

from .fake_engine import byte_tokenizer

THINK = ReasoningMarkers("<think>", "</think>")


def split(pieces: list[str], *, opened: bool = False) -> tuple[str, str]:
    """(reasoning, content)."""
    splitter = ReasoningSplitter(THINK, PlainSplitter(), opened=opened)
    parts = [part for piece in pieces for part in splitter.feed(piece)]
    whole = join([*parts, *splitter.finish()])
    return whole.reasoning, whole.text


CLOSED = {
    "<think>\nTwo and two.\n</think>\n\nFour.\n": ("Two and two.", "Four.\n"),
    "<think>\n\n</think>\n\nFour.": ("", "Four."),
    " \n<think>a": ("a", ""),
    "<think>never closed </thin": ("never closed </thin", ""),
    "No <thought> at all, 1 < 2 <thin": ("", "No <thought> at all, 1 < 2 <thin"),
    "Before <think>a <think> b</think> behind <think>c</think>": ("a <think> bc", "Beforebehind"),
    "  a </think> b ": ("", "  a </think> b "),
    "": ("", ""),
}
OPENED = {
    "\nTwo and two.\n</think>\n\nFour.": ("Two and two.", "Four."),
    "never closed\n": ("never closed\n", ""),
    "</think>Four.": ("", "Four."),
    "a</think>b<think>c": ("ac", "b"),
}


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_goes_from_marker_to_marker_without_the_space_beside_them(opened: bool) -> None:
    for text, expected in (OPENED if opened else CLOSED).items():
        assert split([text], opened=opened) == expected


@pytest.mark.parametrize("opened", [False, True])
def test_every_single_cut_and_one_character_at_a_time_give_the_same_split(opened: bool) -> None:
    for text, expected in (OPENED if opened else CLOSED).items():
        assert split(list(text), opened=opened) == expected
        for at in range(len(text)):
            assert split([text[:at], text[at:]], opened=opened) == expected


BITS = st.sampled_from(["<think>", "</think>", "<", "think>", "</", " ", "\n", "a"])


@settings(max_examples=300, deadline=None)
@given(st.lists(BITS, max_size=12), st.booleans())
def test_no_cut_changes_the_split(bits: list[str], opened: bool) -> None:
    text = "".join(bits)
    assert split(list(text), opened=opened) == split([text], opened=opened)
    assert split(bits, opened=opened) == split([text], opened=opened)


def test_no_half_of_a_marker_is_ever_shown() -> None:
    splitter = ReasoningSplitter(THINK, PlainSplitter())
    shown = [join(splitter.feed(piece)) for piece in ["a <", "th", "ink", ">b</thi", "nk", ">c"]]
    nothing = Whole("", "", ())
    told = [Whole("a", "", ()), Whole("", "b", ()), Whole("c", "", ())]
    assert shown == [told[0], nothing, nothing, told[1], nothing, told[2]]


def test_content_is_split_by_the_inner_splitter_and_reasoning_is_not() -> None:
    inner = ReasoningSplitter(ReasoningMarkers("[", "]"), PlainSplitter())
    splitter = ReasoningSplitter(THINK, inner)
    whole = join([*splitter.feed("<think>[a]</think>b[c"), *splitter.finish()])
    assert whole == Whole("b", "[a]c", ())


def test_markers_are_told_by_the_template_and_never_where_it_has_none() -> None:
    assert reasoning_markers(byte_tokenizer("{{ x.split('</think>')[-1] }}")) == THINK
    assert reasoning_markers(byte_tokenizer("[THINK]")) == ReasoningMarkers("[THINK]", "[/THINK]")
    assert reasoning_markers(byte_tokenizer("thinking")) is None


def test_a_prompt_opens_reasoning_only_where_its_end_does() -> None:
    assert THINK.opened_by("<assistant><think>\n")
    assert not THINK.opened_by("<think>\n\n</think>\n\n")
    assert not THINK.opened_by("<user>what is <think>?<assistant>")
    assert splitter_text("plain") == [Text("plain")]


def splitter_text(text: str) -> list[object]:
    splitter = ReasoningSplitter(THINK, PlainSplitter())
    return [*splitter.feed(text), *splitter.finish()]
