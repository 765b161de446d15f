"""P29 to P32: text of answers through the real engine and HTTP, four in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import openai
import pytest
from msgspec import structs

from statemachine.records import StepDone

from ..fake_engine import byte_tokenizer
from .serving import MODEL, PLAIN, POLICY, WAIT_S, Gate, Read, Served, over_fake, read, replays

TOKENIZER = byte_tokenizer(PLAIN)
STREAMS = ({}, {"stream": True, "stream_options": {"include_usage": True}})
REST = b" and more of it"
"""What a model goes on to say, if nobody stops it."""


def ids(*texts: str | bytes) -> list[int]:
    """One token for a word of the tokenizer's, else one for each byte."""
    found: list[int] = []
    for text in texts:
        found += list(text) if isinstance(text, bytes) else TOKENIZER.encode(text)
    return found


class Sayings:
    """What the model says in each sequence but the first, whatever its prompt: a `script`."""

    def __init__(self, *answers: Sequence[int]) -> None:
        self.answers = answers
        self.prompts: list[int] = []

    def __call__(self, seq: int, position: int) -> int | None:
        if not seq:
            return None
        said = self.answers[(seq - 1) % len(self.answers)]
        at = position - self.prompts[seq - 1]
        return said[at] if 0 <= at < len(said) else ord(".")

    def ask(self, served: Served, contents: Sequence[str], gate: Gate, **fields: object) -> list:
        """All at once, in this order: another request is held until the last of them is there."""
        self.prompts += [len(TOKENIZER.encode(content)) for content in contents]
        posted = [served.post(content, **fields) for content in contents]
        gate.open()
        return [read(connection) for connection in posted]


def together(
    sayings: Sayings, contents: Sequence[str], lookahead: bool, folder: Path, **fields: object
) -> list[Read]:
    """Their answers, after it was held that all ran in one batch and that the tape is clean."""
    gate = Gate(1)
    policy = structs.replace(POLICY, lookahead=lookahead)
    with over_fake(policy=policy, script=sayings, delay=gate) as served:
        first = served.post("hold", max_tokens=1)
        assert gate.reached.wait(WAIT_S)
        answers = sayings.ask(served, contents, gate, **fields)
        assert read(first).tokens == 1
        served.idle()
        assert max(len(batch.pieces) for batch in served.kernel.batches) == len(contents)
        sampled = sum(len(it.sampled) for it in served.capture.records if isinstance(it, StepDone))
        # A row that was issued ahead of the end was sampled too, and its token dropped.
        told = 1 + sum(answer.tokens for answer in answers)
        assert 0 <= sampled - told <= len(answers) * lookahead
    replays(served.capture.records, folder)
    return answers


STOPPED = {
    "inside one token": (["one END two"], "END", "one ", 1),
    "across two tokens": (["a", "DEF", b"G"], "EFG", "aD", 3),
    "across three tokens": ([b"aD", "HI", b"J"], "DHIJ", "a", 4),
    "at the first character": (["DEF"], "D", "", 1),
}


@pytest.mark.parametrize(
    ("stream", "lookahead"),
    [(STREAMS[0], False), (STREAMS[1], True)],
    ids=["whole", "stream-lookahead"],
)
@pytest.mark.parametrize("case", STOPPED)
def test_p29_four_at_once_end_just_before_their_stop_string(
    case: str, stream: dict[str, object], lookahead: bool, tmp_path: Path
) -> None:
    said, stop, text, tokens = STOPPED[case]
    sayings = Sayings(ids(*said, REST))
    contents = ["a", "bc", f"{stop} stands here", "d"]
    answers = together(
        sayings, contents, lookahead, tmp_path, stop=[stop, "never"], max_tokens=12, **stream
    )
    assert [(it.text, it.reason, it.tokens) for it in answers] == [(text, "stop", tokens)] * 4


@pytest.mark.parametrize("stream", STREAMS, ids=["whole", "stream"])
def test_p29_a_stop_string_across_the_join_of_prompt_and_answer_stops_nothing(
    stream: dict[str, object], tmp_path: Path
) -> None:
    """Nor does one that stands in the prompt; a neighbour that says it is stopped."""
    sayings = Sayings(ids(b"F ok"), ids(b"ok F"), ids(b"xDEFy"), ids(b"DE F"))
    contents = ["ABC DE", "DEF DEF", "q", "ABC D"]
    answers = together(sayings, contents, False, tmp_path, stop="DEF", max_tokens=4, **stream)
    assert [(it.text, it.reason) for it in answers] == [
        ("F ok", "length"),
        ("ok F", "length"),
        ("x", "stop"),
        ("DE F", "length"),
    ]


@pytest.mark.parametrize("lookahead", [False, True])
def test_p30_what_may_become_a_stop_string_is_held_back_and_then_sent_once(
    lookahead: bool, tmp_path: Path
) -> None:
    """DEF, G, HI, J is the stop string; DEF, G, X is not."""
    sayings = Sayings(ids("DEF", b"G", "HI", b"J", REST), ids("DEF", b"GX"))
    first, second = together(
        sayings, ["a", "b"], lookahead, tmp_path, stop="DEFGHIJ", max_tokens=8, **STREAMS[1]
    )
    assert (first.text, first.reason, first.tokens) == ("", "stop", 4)
    assert [it for it in first.pieces if it] == []
    assert second.text == "DEFGX....."
    assert next(it for it in second.pieces if it) == "DEFGX"


LETTER, EMOJI, JOINED = "é", "😀", "👨‍👩‍👧"


@pytest.mark.parametrize("lookahead", [False, True])
def test_p31_characters_of_many_tokens_come_whole_in_two_streams_of_one_batch(
    lookahead: bool, tmp_path: Path
) -> None:
    """One byte a token; one is always in the middle of a character where the other is not."""
    texts = (LETTER + EMOJI + JOINED + "!", "a" + JOINED + LETTER + EMOJI)
    for stream in STREAMS:
        sayings = Sayings(*(ids(text.encode()) for text in texts))
        answers = [
            Read(answer.pieces, answer.reason, answer.tokens)
            for answer in together(
                sayings, ["one", "two"], lookahead, tmp_path, max_tokens=25, **stream
            )
        ]
        for text, answer in zip(texts, answers, strict=True):
            assert answer.text == text.ljust(len(text) + 25 - len(text.encode()), ".")
            assert "\ufffd" not in answer.text
            shown = [piece for piece in answer.pieces if piece]
            assert not stream or shown == list(answer.text)


def test_p32_a_prompt_that_ends_inside_a_character_shows_nothing_of_itself() -> None:
    """By token ids: 2 of 3 bytes, and the model says the third.

    What is no character of the answer's own is a mark, as documented for bytes that are no UTF-8.
    """
    euro = "€".encode()
    prompt = (*b"the price in ", *euro[:2])
    said = ids(euro[2:], b"ok")

    def script(seq: int, position: int) -> int:
        return said[position - len(prompt)]

    with over_fake(script=script) as served:
        answer = served.client.completions.create(
            model=MODEL, prompt=list(prompt), max_tokens=len(said), temperature=0
        )
        assert answer.choices[0].text == "\ufffdok"
        served.idle()


@pytest.mark.parametrize("stream", STREAMS, ids=["whole", "stream"])
def test_p32_an_answer_cut_inside_a_character_keeps_what_was_before_it(
    stream: dict[str, object], tmp_path: Path
) -> None:
    """The half character is left out, and its token counted."""
    sayings = Sayings(ids(b"ok ", "€".encode()))
    answers = together(sayings, ["a", "b"], False, tmp_path, max_tokens=4, **stream)
    assert [(it.text, it.reason, it.tokens) for it in answers] == [("ok ", "length", 4)] * 2


def test_p32_an_id_outside_of_the_vocabulary_is_a_400_and_the_engine_lives() -> None:
    with over_fake() as served:
        for token in (TOKENIZER.vocab_size, 2**40, -1):
            with pytest.raises(openai.BadRequestError, match=f"token {token}") as refused:
                served.client.completions.create(model=MODEL, prompt=[1, token, 2], max_tokens=4)
            assert refused.value.param == "prompt"
        assert served.ask("still there", max_tokens=3).usage.completion_tokens == 3
        served.idle()
