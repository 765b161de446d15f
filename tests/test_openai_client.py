"""OpenAI's own Python client against a real server over the scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from server.http.app import create_app
from server.settings import Settings

from .fake_engine import WAIT_S, FakeEngine, byte_tokenizer, scripted
from .http_server import live_server

MODEL = "tiny"
QUESTION: list[Any] = [{"role": "user", "content": "hi"}]
PROMPT_TOKENS = len("<user>hi\n<assistant>")


@contextmanager
def client_of(engine: FakeEngine, **settings: Any) -> Iterator[openai.OpenAI]:
    chosen = Settings(grace_s=0.0, **settings)
    app = create_app(engine, engine.tokenizer, MODEL, chosen)
    with (
        live_server(app, chosen) as server,
        openai.OpenAI(
            base_url=server.url + "/v1", api_key="x", max_retries=0, timeout=WAIT_S
        ) as client,
    ):
        yield client


def test_a_chat_has_its_text_its_end_and_its_usage() -> None:
    with scripted("héllo 😀") as engine, client_of(engine) as client:
        answer = client.chat.completions.create(model=MODEL, messages=QUESTION)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason) == (0, "stop")
    assert (choice.message.role, choice.message.content) == ("assistant", "héllo 😀")
    tokens = len("héllo 😀".encode())
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (PROMPT_TOKENS, tokens)
    assert usage.total_tokens == PROMPT_TOKENS + tokens
    assert usage.prompt_tokens_details.cached_tokens == 3


def test_a_stream_has_role_content_end_and_usage_in_this_order() -> None:
    with scripted("é!") as engine, client_of(engine) as client:
        chunks = list(
            client.chat.completions.create(
                model=MODEL,
                messages=QUESTION,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    *parts, last = chunks
    deltas = [(part.choices[0].delta.role, part.choices[0].delta.content) for part in parts]
    assert deltas == [("assistant", ""), (None, "é"), (None, "!"), (None, None)]
    assert [part.choices[0].finish_reason for part in parts] == [None, None, None, "stop"]
    assert [part.usage for part in parts] == [None] * 4
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (PROMPT_TOKENS, 3)


def test_a_stream_that_asked_for_no_usage_gets_none() -> None:
    with scripted("a") as engine, client_of(engine) as client:
        chunks = list(client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True))
    assert [len(chunk.choices) for chunk in chunks] == [1, 1, 1]
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "stop", "text", "tokens"),
    [
        # Inside one token, over three tokens, at the first character, in the last of four.
        ("a one END two b", "END", "a one ", 3),
        ("x DEFGHI y", "DEFGHI", "x ", 5),
        ("DEF and", "D", "", 1),
        ("x DEFGy", ["no", "never", "not", "Gy"], "x DEF", 5),
    ],
)
def test_p29_an_answer_ends_just_before_a_stop_string(
    answer: str, stop: Any, text: str, tokens: int, stream: bool
) -> None:
    with scripted(answer) as engine, client_of(engine) as client:
        seen = ask(client, stream, stop=stop)
        assert engine.cancels_so_far() == []
    assert seen == (text, "stop", tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_p30_a_false_start_of_a_stop_string_is_sent_in_full(stream: bool) -> None:
    with scripted("DEFGX") as engine, client_of(engine) as client:
        assert ask(client, stream, stop="DEFGHIJ") == ("DEFGX", "stop", 3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_in_the_prompt_only_stops_nothing(stream: bool) -> None:
    with scripted("ho") as engine, client_of(engine) as client:
        assert ask(client, stream, stop="hi") == ("ho", "stop", 2)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_max_tokens_ends_by_length(stream: bool) -> None:
    with scripted("abcdef") as engine, client_of(engine) as client:
        assert ask(client, stream, max_tokens=4) == ("abcd", "length", 4)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_that_the_last_allowed_token_completes_is_a_stop(stream: bool) -> None:
    with scripted("abcdef") as engine, client_of(engine) as client:
        assert ask(client, stream, max_tokens=4, stop="cd") == ("ab", "stop", 4)


def ask(client: openai.OpenAI, stream: bool, **fields: Any) -> tuple[str, str | None, int]:
    """Text, finish reason and completion_tokens of an answer."""
    create: Any = client.chat.completions.create
    if not stream:
        answer = create(model=MODEL, messages=QUESTION, **fields)
        choice = answer.choices[0]
        return choice.message.content, choice.finish_reason, answer.usage.completion_tokens
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(create(model=MODEL, messages=QUESTION, **options, **fields))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join(choice.delta.content or "" for choice in choices)
    return text, choices[-1].finish_reason, chunks[-1].usage.completion_tokens


def test_the_models_are_listed_and_found() -> None:
    with scripted("") as engine, client_of(engine) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).owned_by == "mlxtape"
        with pytest.raises(openai.NotFoundError, match="'large' does not exist"):
            client.models.retrieve("large")


def test_refusals_are_the_clients_own_errors() -> None:
    with scripted("") as engine, client_of(engine, max_body_bytes=3000) as client:
        create: Any = client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as refusal:
            create(model=MODEL, messages=QUESTION, temperature="hot")
        assert refusal.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as unknown:
            create(model="large", messages=QUESTION)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.APIStatusError) as large:
            create(model=MODEL, messages=[{"role": "user", "content": "x" * 100_000}])
        assert large.value.status_code == 413
        engine.healthy = False
        with pytest.raises(openai.InternalServerError) as dead:
            create(model=MODEL, messages=QUESTION)
        assert dead.value.status_code == 503


def test_closing_a_stream_in_the_middle_causes_one_cancel() -> None:
    with FakeEngine(byte_tokenizer()) as engine, client_of(engine) as client:
        request_of = engine.next_request
        create: Any = client.with_options(timeout=WAIT_S).chat.completions.create
        engine_side: list[int] = []

        def feed() -> None:
            request = request_of()
            engine_side.append(request.number)
            request.send(b"once")

        engine.jobs.put(feed)
        stream = create(model=MODEL, messages=QUESTION, stream=True)
        assert next(stream).choices[0].delta.role == "assistant"
        assert next(stream).choices[0].delta.content == "once"
        stream.close()
        assert engine.cancelled.get(timeout=WAIT_S) == engine_side[0]
    assert engine.cancels_so_far() == []


def test_an_error_in_the_middle_of_a_stream_is_raised_by_the_client() -> None:
    tokenizer = byte_tokenizer()
    # A script without an end is an engine that fails.
    with FakeEngine(tokenizer, lambda _: b"ab") as engine, client_of(engine) as client:
        stream = client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
        with pytest.raises(openai.APIError, match="the script ended"):
            list(stream)
