"""OpenAI's client on /v1/completions over the scripted engine: prompts, copies, echo, logprobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from server.http.app import create_app
from server.http.asking import copy_seed
from server.settings import Settings
from server.submission import Submission
from statemachine.records import NO_LOGPROBS, NO_PARENT, NO_SCORES

from .fake_engine import END, WAIT_S, FakeEngine, Request, byte_tokenizer
from .http_server import live_server

MODEL = "tiny"


@contextmanager
def asked(
    text: str = "ok", context_tokens: int = 4096, **chosen: Any
) -> Iterator[tuple[FakeEngine, Any]]:
    """An engine that answers with `text` and the last byte of the prompt; a client's create."""
    tokenizer = byte_tokenizer()

    def script(submission: Submission) -> list[int]:
        return [*tokenizer.encode(text), submission.tokens[-1], *tokenizer.encode(END)]

    with FakeEngine(tokenizer, script, context_tokens=context_tokens) as engine:
        settings = Settings(grace_s=0.0, **chosen)
        app = create_app(engine, tokenizer, MODEL, settings)
        with (
            live_server(app, settings) as server,
            openai.OpenAI(
                base_url=server.url + "/v1", api_key="x", max_retries=0, timeout=WAIT_S
            ) as client,
        ):

            def create(prompt: Any = "Hi", **fields: Any) -> Any:
                return client.completions.create(model=MODEL, prompt=prompt, **fields)

            yield engine, create


def texts(answer: Any) -> list[str]:
    assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
    return [choice.text for choice in answer.choices]


def taken(engine: FakeEngine) -> list[Request]:
    return list(engine.requests.values())


# Prompts and copies


def test_a_completion_has_its_text_its_end_and_its_usage() -> None:
    with asked() as (engine, create):
        answer = create("Hi!")
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, "ok!", "stop")
    assert choice.logprobs is None
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 3, 6)
    assert usage.prompt_tokens_details.cached_tokens == 3
    (request,) = taken(engine)
    assert bytes(request.submission.tokens) == b"Hi!"
    assert request.submission.parameters.max_tokens == 16
    assert request.submission.external_id == answer.id


@pytest.mark.parametrize(
    ("prompt", "answers"),
    [
        ("a", ["oka"]),
        (["a", "b"], ["oka", "okb"]),
        ([65, 66], ["okB"]),
        ([[65, 66], [67]], ["okB", "okC"]),
    ],
)
def test_a_prompt_is_a_text_texts_token_ids_or_lists_of_them(
    prompt: Any, answers: list[str]
) -> None:
    with asked() as (_, create):
        answer = create(prompt)
    assert texts(answer) == answers
    assert answer.usage.completion_tokens == 3 * len(answers)


def test_choices_stand_in_prompt_order_and_copies_share_their_prompts_rows() -> None:
    with asked() as (engine, create):
        answer = create(["a", "b"], n=2, seed=5, temperature=1)
        assert texts(answer) == ["oka", "oka", "okb", "okb"]
        requests = taken(engine)
    assert [request.submission.parent for request in requests] == [NO_PARENT, 0, NO_PARENT, 2]
    names = [request.submission.external_id for request in requests]
    assert names == [answer.id, f"{answer.id}/1", f"{answer.id}/2", f"{answer.id}/3"]
    seeds = [request.submission.parameters.seed for request in requests]
    assert seeds == [5, copy_seed(5, 1), 5, copy_seed(5, 1)]
    assert seeds[1] == 3251636641499494125
    # A prompt counts once, whoever shares it.
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 12)
    assert answer.usage.prompt_tokens_details.cached_tokens == 6


def test_each_choice_of_a_stream_has_its_own_end_and_usage_comes_last() -> None:
    with asked() as (_, create):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(create(["a", "b"], n=2, **options))
    *parts, last = chunks
    assert {part.object for part in parts} == {"text_completion"}
    ends: dict[int, list[str | None]] = {}
    found: dict[int, str] = {}
    for part in parts:
        (choice,) = part.choices
        found[choice.index] = found.get(choice.index, "") + choice.text
        ends.setdefault(choice.index, []).append(choice.finish_reason)
        assert part.usage is None
    assert found == {0: "oka", 1: "oka", 2: "okb", 3: "okb"}
    assert ends == {index: [None, None, None, "stop"] for index in range(4)}
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (2, 12)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": ["a", [65]]}, "prompt[1]"),
        ({"prompt": [65, "a"]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[65], [100_000]]}, "prompt[1]"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": None}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"n": 0}, "n"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"n": 128, "prompt": ["a"] * 5}, "prompt"),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(fields: dict[str, Any], param: str) -> None:
    with asked() as (engine, create):
        with pytest.raises(openai.BadRequestError) as refusal:
            create(extra_body=fields)
        assert refusal.value.param == param
        assert engine.requests == {}


def test_more_answers_than_the_queue_holds_are_a_400_and_no_429() -> None:
    with asked(max_waiting=3) as (engine, create):
        assert len(create(["a", "b", "c"]).choices) == 3
        with pytest.raises(
            openai.BadRequestError, match="make 4 answers; at most 3 are"
        ) as refusal:
            create(["a", "b"], n=2)
        assert refusal.value.param == "prompt"
        with pytest.raises(openai.BadRequestError) as refusal:
            create("a", n=4)
        assert refusal.value.param == "n"
        assert len(engine.requests) == 3


def test_best_of_is_taken_where_it_asks_for_nothing_else() -> None:
    with asked() as (_, create):
        assert texts(create("a", n=2, best_of=2)) == ["oka", "oka"]


def test_a_prompt_too_long_refuses_all_of_them_and_names_the_prompt() -> None:
    with asked(context_tokens=20) as (engine, create):
        with pytest.raises(openai.BadRequestError, match="20 tokens, but") as refusal:
            create(["a", "x" * 20])
        assert (refusal.value.code, refusal.value.param) == ("context_length_exceeded", "prompt")
        assert engine.requests == {}


# Echo, max_tokens 0, log-probabilities


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_puts_the_prompt_before_the_text(stream: bool) -> None:
    with asked() as (engine, create):
        answer = create(["éH", "b"], echo=True, n=2, stream=stream)
        found = joined(answer) if stream else dict(enumerate(texts(answer)))
        scored = [request.submission.parameters.score_from for request in taken(engine)]
    assert found == {0: "éHokH", 1: "éHokH", 2: "bokb", 3: "bokb"}
    assert scored == [NO_SCORES] * 4


def joined(chunks: Any) -> dict[int, str]:
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            found[choice.index] = found.get(choice.index, "") + choice.text
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("echo", "text"), [(False, ""), (True, "Hi")])
def test_max_tokens_0_computes_the_prompt_and_answers_nothing(
    echo: bool, text: str, stream: bool
) -> None:
    with asked() as (engine, create):
        if stream:
            options = {"include_usage": True}
            chunks = list(
                create("Hi", max_tokens=0, echo=echo, stream=True, stream_options=options)
            )
            assert joined(chunks) == {0: text}
            assert [it.finish_reason for chunk in chunks for it in chunk.choices][-1] == "length"
            usage = chunks[-1].usage
        else:
            answer = create("Hi", max_tokens=0, echo=echo)
            assert (texts(answer), answer.choices[0].finish_reason) == ([text], "length")
            usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (2, 0)
        (request,) = taken(engine)
        assert request.submission.parameters.max_tokens == 1


LISTS = {
    "tokens": ["A", "b", "o", "k", "b"],
    "token_logprobs": [None, -0.25, -0.25, -0.25, -0.25],
    "top_logprobs": [
        None,
        {"b": -0.25, "c": -0.5},
        {"o": -0.25, "p": -0.5},
        {"k": -0.25, "l": -0.5},
        {"b": -0.25, "c": -0.5},
    ],
    "text_offset": [0, 1, 2, 3, 4],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_an_echo_with_logprobs_tells_those_of_the_prompt_but_for_its_first_token(
    stream: bool, n: int
) -> None:
    with asked() as (engine, create):
        found = logprobs_of(create("Ab", echo=True, logprobs=2, n=n, stream=stream), stream)
        asked_for = [request.submission.parameters for request in taken(engine)]
    assert found == dict.fromkeys(range(n), LISTS)
    assert [parameters.score_from for parameters in asked_for] == [1, NO_SCORES][:n]
    assert [parameters.logprobs for parameters in asked_for] == [2] * n


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_of_special_tokens_has_logprobs_and_no_text(stream: bool) -> None:
    with asked() as (engine, create):
        prompt = engine.tokenizer.encode(END)
        found = logprobs_of(create(prompt, echo=True, logprobs=1, stream=stream), stream)
    assert found[0]["tokens"][0] == END
    assert found[0]["text_offset"][:2] == [0, 0]


def logprobs_of(answer: Any, stream: bool) -> dict[int, dict[str, Any]]:
    """The lists of each choice, chunks joined."""
    found: dict[int, dict[str, Any]] = {}
    for body in answer if stream else [answer]:
        for choice in body.choices:
            if choice.logprobs is not None:
                lists = found.setdefault(choice.index, {name: [] for name in LISTS})
                for name, values in lists.items():
                    values += getattr(choice.logprobs, name)
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_without_an_echo_offsets_begin_with_the_answer(stream: bool) -> None:
    with asked() as (_, create):
        found = logprobs_of(create("Ab", logprobs=2, stream=stream), stream)
    assert found == {0: {name: values[2:] for name, values in LISTS.items()}
                     | {"text_offset": [0, 1, 2]}}  # fmt: skip


def test_the_likeliest_always_have_the_token_itself_and_0_asks_for_none_of_them() -> None:
    with asked("A") as (_, create):
        one = create("b", logprobs=1).choices[0].logprobs
        none = create("b", logprobs=0).choices[0].logprobs
    assert one.tokens == none.tokens == ["A", "b"]
    assert one.token_logprobs == none.token_logprobs == [-9.0, -0.25]
    assert one.top_logprobs == [{"B": -0.25, "A": -9.0}, {"b": -0.25}]
    assert none.top_logprobs is None


def test_with_max_tokens_0_an_echo_with_logprobs_is_the_prompts_alone() -> None:
    with asked() as (_, create):
        answer = create("Ab", echo=True, logprobs=2, max_tokens=0)
    lists = answer.choices[0].logprobs
    assert (lists.tokens, lists.token_logprobs) == (["A", "b"], [None, -0.25])
    assert (answer.choices[0].text, answer.usage.completion_tokens) == ("Ab", 0)


def test_a_token_that_is_a_part_of_a_character_is_written_in_hexadecimal() -> None:
    with asked("é") as (_, create):
        answer = create("b", logprobs=0, max_tokens=2)
    lists = answer.choices[0].logprobs
    assert answer.choices[0].text == "é"
    assert lists.tokens == ["bytes:\\xc3", "bytes:\\xa9"]
    assert lists.text_offset == [0, 0]


def test_without_logprobs_none_are_asked_for() -> None:
    with asked() as (engine, create):
        create("b")
        (request,) = taken(engine)
    assert request.submission.parameters.logprobs == NO_LOGPROBS


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        ("kb", "xo", ["x", "o"]),
        ("k", "xo", ["x", "o"]),
        ("xok", "", []),
        ("no", "xokb", list("xokb")),
    ],
)
def test_a_stop_string_cuts_the_logprobs_with_the_text(
    stop: str, text: str, tokens: list[str], stream: bool
) -> None:
    with asked("xok") as (_, create):
        answer = create("b", stop=stop, logprobs=0, stream=stream)
        chunks = list(answer) if stream else [answer]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == text
    lists = [it.logprobs for chunk in chunks for it in chunk.choices if it.logprobs]
    assert [token for one in lists for token in one.tokens] == tokens
    if stream:
        # None is told before its text.
        seen = ""
        for chunk in chunks:
            for choice in chunk.choices:
                seen += choice.text
                if choice.logprobs:
                    assert max(choice.logprobs.text_offset) < len(seen)
