"""Answers: whatever the cuts, the news of one joined are its text and the tokens of that text."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from kernel.batch import Logprob
from server.dialects.parts import join
from server.http.asking import Ask
from server.http.stream import Answer, News
from server.submission import LENGTH, STOP, Submission, Update
from statemachine.records import Parameters

from .fake_engine import byte_tokenizer

TOKENIZER = byte_tokenizer()
TEXT = st.text("ab é😀\n", max_size=24)


class Nobody:
    """An engine that takes a request and says nothing."""

    def submit(self, submission: Submission, sink: Any) -> int:
        return 7


async def told(tokens: list[int], cuts: list[int], stop: tuple[str, ...]) -> tuple[Answer, Any]:
    """An answer, and its news where its tokens come in pieces of these sizes."""
    parameters = Parameters(max_tokens=99, stop=stop, logprobs=0)
    ask = Ask(((1,),), parameters, "x")
    answer = Answer(Nobody(), TOKENIZER, ask, 0, Submission((1,), parameters))
    news: list[News] = []
    at = 0
    for size in (*cuts, len(tokens)):
        piece = tuple(tokens[at : at + size])
        at += size
        logprobs = tuple(Logprob(token, -1.0) for token in piece)
        news.append(answer.take(Update(7, piece, logprobs=logprobs)))
    news.append(answer.take(Update(7, (), LENGTH)))
    return answer, news


def expected(tokens: list[int], stop: tuple[str, ...]) -> tuple[str, int | None]:
    """The text that may be shown, and how many tokens it took to see that it ends there."""
    for count in range(len(tokens) + 1):
        data = b"".join(map(TOKENIZER.token_bytes, tokens[:count]))
        text = data.decode("utf-8", "ignore")
        for end in range(len(text) + 1):
            found = [it for it in stop if text[:end].endswith(it)]
            if found:
                return text[: end - max(map(len, found))], count
    return text, None


@given(
    TEXT,
    st.lists(st.integers(0, 5), max_size=12),
    st.lists(st.text("ab é😀\n", min_size=1, max_size=4), max_size=4),
)
@example("one END two", [1], ["END"])
@example("aab", [1, 1], ["ab", "aab"])
@example("😀", [3], [])
def test_the_news_of_an_answer_are_its_text_and_the_tokens_of_that_text(
    text: str, cuts: list[int], stops: list[str]
) -> None:
    tokens, stop = TOKENIZER.encode(text), tuple(stops)
    answer, news = asyncio.run(told(tokens, cuts, stop))
    wanted, count = expected(tokens, stop)
    shown = ""
    entries = []
    for one in news:
        shown += join(one.parts).text
        entries += one.tokens
        # Told with its text or after it, never before.
        assert all(entry.start < len(shown) or one.finish_reason for entry in entries)
    assert shown == wanted
    assert "\ufffd" not in shown
    assert answer.finish_reason == news[-1].finish_reason == (LENGTH if count is None else STOP)
    assert answer.completion_tokens == (len(tokens) if count is None else count)
    starts = [
        len(b"".join(map(TOKENIZER.token_bytes, tokens[:place])).decode("utf-8", "ignore"))
        for place in range(answer.completion_tokens)
    ]
    kept = [at for at, start in enumerate(starts) if count is None or start < len(wanted)]
    assert [(e.logprob.token, e.start) for e in entries] == [(tokens[i], starts[i]) for i in kept]


def test_a_character_without_its_end_is_left_out_and_its_tokens_are_told() -> None:
    tokens = [*b"ab", *"😀".encode()[:3]]
    answer, news = asyncio.run(told(tokens, [2, 1], ()))
    assert "".join(join(one.parts).text for one in news) == "ab"
    assert [entry.start for one in news for entry in one.tokens] == [0, 1, 2, 2, 2]
    assert answer.completion_tokens == 5
