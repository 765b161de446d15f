"""`from server import Engine`: answers, streams and scores in a program, sync and async."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay.reader import Tape
from server import ApiError, Engine
from server.settings import Settings
from statemachine.records import RequestArrived, TapeEnded

from .fake_engine import FakeEngine, byte_tokenizer, logprob_of, scripted
from .real_server import tiny_folder


class Stoppable(FakeEngine):
    """A scripted engine that counts how often it is stopped."""

    stops = 0

    def stop(self) -> None:
        self.stops += 1


@contextmanager
def answering(text: str) -> Iterator[Engine]:
    """A program's engine whose every answer is `text`."""
    with scripted(text) as engine:
        engine.stop = lambda: None  # type: ignore[attr-defined]
        with Engine(engine, engine.tokenizer, Settings()) as local:  # type: ignore[arg-type]
            yield local


def test_an_answer_says_its_text_its_end_and_its_tokens() -> None:
    with answering("hello") as engine:
        answer = engine.generate("abc", max_tokens=9)
    assert answer.text == "hello"
    assert answer.finish_reason == "stop"
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (3, 5, 3)


def test_several_prompts_and_copies_give_a_list_prompt_by_prompt() -> None:
    with answering("hello") as engine:
        answers = engine.generate(["a", "bcd"], n=2, max_tokens=2)
    assert [answer.text for answer in answers] == ["he"] * 4
    assert [answer.prompt_tokens for answer in answers] == [1, 1, 3, 3]


def test_a_chat_takes_a_text_or_messages() -> None:
    with answering("hello") as engine:
        from_text = engine.chat("hi")
        from_turns = engine.chat([{"role": "user", "content": "hi"}])
    assert from_text == from_turns
    assert from_text.prompt_tokens == len("<user>hi\n<assistant>")


def test_streamed_pieces_join_to_the_whole_answer() -> None:
    with answering("hello") as engine:
        assert list(engine.stream("abc")) == ["h", "e", "l", "l", "o"]
        assert "".join(engine.chat_stream("abc", stop="lo")) == "hel"


def test_log_probabilities_come_with_their_tokens() -> None:
    with answering("hA") as engine:
        answer = engine.generate("abc", logprobs=2)
    assert answer.logprobs == (logprob_of(ord("h"), 2), logprob_of(ord("A"), 2))


def test_a_score_is_the_sum_over_the_continuation_and_greedy_where_each_token_is_likeliest() -> (
    None
):
    with answering("x") as engine:
        low, capital = engine.score("The cat ", ["sat", "SAT"])
    assert low.logprob == pytest.approx(-0.25 * len(" sat"))
    assert low.greedy
    assert "".join(chr(token.token) for token in low.tokens) == " sat"
    assert capital.logprob == pytest.approx(-0.25 - 9.0 * len("SAT"))
    assert not capital.greedy


def test_everything_has_a_twin_for_asyncio() -> None:
    async def run(engine: Engine) -> list[object]:
        streamed = [piece async for piece in engine.astream("abc")]
        chatted = [piece async for piece in engine.achat_stream("abc")]
        whole, chat, scores = await asyncio.gather(
            engine.agenerate("abc"), engine.achat("abc"), engine.ascore("a", ["b"])
        )
        return [streamed, chatted, whole.text, chat.text, scores[0].logprob]

    with answering("hey") as engine:
        found = asyncio.run(run(engine))
    assert found == [["h", "e", "y"], ["h", "e", "y"], "hey", "hey", -0.25]


def test_calls_from_several_threads_are_answered_side_by_side() -> None:
    found: list[str] = []
    with answering("hello") as engine:

        def ask() -> None:
            found.append(engine.generate("abc").text)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == ["hello"] * 8


def test_what_is_wrong_is_told_in_one_sentence() -> None:
    with answering("x") as engine:
        with pytest.raises(ApiError, match=r"^temperature is 3.0; it must be between 0 and 2\.$"):
            engine.generate("a", temperature=3.0)
        with pytest.raises(ApiError, match=r"^Only one answer can be streamed at once"):
            list(engine.stream("a", n=2))
        with pytest.raises(ApiError, match=r"^Neither the context nor a continuation may be empty"):
            engine.score("", ["b"])
        with pytest.raises(TypeError, match=r"^there is no parameter 'maxtokens'; known are "):
            engine.generate("a", maxtokens=3)


NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
PENALTIES = ("presence_penalty", "frequency_penalty")
COUNTS = ("top_k", "seed", "max_tokens", "n", "priority", "logprobs")


@pytest.mark.parametrize("name", [*NUMBERS, *PENALTIES, *COUNTS])
@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, np.float32("nan"), True, "1", b"1", 2**70, -(2**70)]
)
def test_a_number_that_no_request_can_have_is_refused_by_its_name(name: str, value: object) -> None:
    with answering("x") as engine, pytest.raises(ApiError) as refused:
        engine.generate("a", **{name: value})
    assert refused.value.param == name


def test_penalties_go_from_minus_two_to_two_and_nan_is_in_no_range() -> None:
    with answering("x") as engine:
        for name in PENALTIES:
            for value in (-2, 2.0, np.float32(-2)):
                engine.generate("a", **{name: value})
            for value in (-2.001, 2.001, math.nan):
                with pytest.raises(ApiError) as refused:
                    engine.chat("a", **{name: value})
                assert str(refused.value) == f"{name} is {value}; it must be between -2 and 2."
        with pytest.raises(ApiError) as refused:
            engine.generate("a", logit_bias={3: math.nan})
        assert str(refused.value) == (
            "logit_bias of token 3 is nan; it must be between -100 and 100."
        )


def test_numbers_and_tokens_may_come_from_numpy_and_ids_as_they_are() -> None:
    with answering("hello") as engine:
        answer = engine.generate(
            np.arange(4), temperature=np.float64(0.5), max_tokens=np.int64(2), logit_bias={7: 1}
        )
    assert (answer.text, answer.prompt_tokens) == ("he", 4)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (b"abc", "prompt: Expected str | array, got bytes."),
        (
            range(3),
            "A value is of type range; it must be a text, number, bool, list or dict.",
        ),
        (
            "\ud800",
            "A text has half of a surrogate pair, which UTF-8 has no bytes for; replace it.",
        ),
        ({(1, 2): 3}, "Only dicts with str-like or number-like keys are supported."),
    ],
)
def test_what_no_body_can_hold_is_told_in_one_sentence(prompt: Any, said: str) -> None:
    with answering("x") as engine, pytest.raises(ApiError) as refused:
        engine.generate(prompt)
    assert str(refused.value) == said


def test_a_stream_that_is_left_gives_its_request_up_once() -> None:
    tokenizer = byte_tokenizer()
    with Stoppable(tokenizer) as scripted_engine:
        with Engine(scripted_engine, tokenizer, Settings()) as engine:
            pieces = engine.stream("abc")
            threading.Timer(0.0, lambda: scripted_engine.next_request().send(b"xyz")).start()
            assert next(pieces) == "xyz"
            pieces.close()  # type: ignore[attr-defined]
            assert scripted_engine.cancelled.get(timeout=20) == 0
        assert scripted_engine.cancels_so_far() == []
        assert scripted_engine.stops == 1


def test_a_closed_engine_says_so() -> None:
    with answering("x") as engine:
        pass
    engine.close()
    with pytest.raises(ApiError, match=r"^This engine was closed: load another one\.$"):
        engine.generate("a")


def test_a_real_model_scores_its_own_greedy_answer_as_greedy(tmp_path: Path) -> None:
    tape = tmp_path / "run.tape"
    folder = tiny_folder(tmp_path / "model")
    with Engine.load(str(folder), num_blocks=64, capture=str(tape)) as engine:
        answer = engine.generate("abcdef", max_tokens=6, temperature=0, logprobs=0)
        (score, other) = engine.score("abcdef", [answer.text, "~~~~~~"])
    assert score.greedy
    assert score.logprob == pytest.approx(sum(it.logprob for it in answer.logprobs), abs=1e-4)
    assert other.logprob < score.logprob
    records = list(Tape(str(tape)))
    names = [it.external_id for it in records if isinstance(it, RequestArrived)]
    assert names == ["python-1", "python-2", "python-3"]
    assert isinstance(records[-1], TapeEnded)
