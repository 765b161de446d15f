"""HTTP over a scripted engine: what it answers, what it refuses, and failures of the engine."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from server.http.app import create_app
from server.submission import ERROR, LENGTH, RequestRefused

from ..fake_engine import END, WAIT_S, FakeEngine, byte_tokenizer
from ..http_server import LiveServer, live_server
from .scripted_http import MODEL, SETTINGS, Connect, chat, error_of, post


def test_a_dead_engine_answers_503_everywhere(server: LiveServer, engine: FakeEngine) -> None:
    engine.healthy = False
    response = post(server, chat())
    assert (response.status_code, error_of(response)["code"]) == (503, "engine_stopped")
    assert httpx.get(server.url + "/health").status_code == 503


def test_health_tells_the_counts_of_the_engine(server: LiveServer) -> None:
    response = httpx.get(server.url + "/health")
    assert response.status_code == 200
    assert response.json() == {"status": "ok", "model": MODEL, "running": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_has_a_status_of_its_own(
    connect: Connect, engine: FakeEngine, stream: bool
) -> None:
    client = connect(chat(stream=stream))
    engine.next_request().end(ERROR, "The forward failed.")
    seen = client.read_until(b"}}")
    assert seen.startswith(b"HTTP/1.1 500")
    assert json.loads(seen.split(b"\r\n\r\n", 1)[1])["error"]["message"] == "The forward failed."


def test_an_error_in_the_middle_of_a_stream_is_an_event_and_the_end(
    connect: Connect, server: LiveServer, engine: FakeEngine
) -> None:
    client = connect(chat(stream=True))
    request = engine.next_request()
    request.send(b"once")
    request.end(ERROR, "The forward failed.")
    # A chunk of no bytes ends a chunked response.
    events = client.read_until(b"\r\n0\r\n\r\n")
    assert b'data: {"error":{"message":"The forward failed."' in events
    assert b"[DONE]" not in events
    client.socket.close()
    server.stop()
    assert engine.cancels_so_far() == []


def test_what_the_engine_refuses_is_a_400_with_its_code(
    server: LiveServer, engine: FakeEngine
) -> None:
    engine.refusal = RequestRefused("Needs 9 blocks of 8.", "context_length_exceeded", "messages")
    response = post(server, chat())
    assert response.status_code == 400
    assert error_of(response) == {
        "message": "Needs 9 blocks of 8.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


def test_a_full_queue_is_a_429_so_that_clients_send_again(
    server: LiveServer, engine: FakeEngine
) -> None:
    engine.refusal = RequestRefused("9 requests wait.", "rate_limit_exceeded")
    response = post(server, chat())
    assert (response.status_code, error_of(response)["type"]) == (429, "rate_limit_error")


def test_a_stop_string_is_a_stop_even_where_the_engine_calls_it_length(
    connect: Connect, engine: FakeEngine
) -> None:
    client = connect(chat(stop="cd"))
    request = engine.next_request()
    request.send(b"abcde")
    request.end(LENGTH)
    answer = json.loads(client.read_until(b'"chat.completion"}').split(b"\r\n\r\n", 1)[1])
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("ab", "stop")
    assert answer["usage"]["completion_tokens"] == 4


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(
    server: LiveServer, engine: FakeEngine
) -> None:
    overhead = len("<user>\n<assistant>")
    response = post(server, chat("x" * (400 - overhead)))
    error = error_of(response)
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "400 tokens" in error["message"]
    assert engine.requests == {}


def test_a_prompt_that_leaves_room_for_one_token_may_have_one(
    connect: Connect, engine: FakeEngine
) -> None:
    overhead = len("<user>\n<assistant>")
    connect(chat("x" * (399 - overhead), max_tokens=10))
    assert engine.next_request().submission.parameters.max_tokens == 1


def test_without_max_tokens_an_answer_may_take_the_rest_of_the_context(
    connect: Connect, engine: FakeEngine
) -> None:
    connect(chat("xyz"))
    submission = engine.next_request().submission
    assert submission.parameters.max_tokens == 400 - len("<user>xyz\n<assistant>")


def test_defaults_are_openais_and_each_seed_is_its_own(
    connect: Connect, engine: FakeEngine
) -> None:
    connect(chat())
    connect(chat())
    first = engine.next_request().submission.parameters
    second = engine.next_request().submission.parameters
    assert (first.temperature, first.top_p, first.top_k, first.min_p) == (1.0, 1.0, 0, 0.0)
    assert first.end_tokens == engine.tokenizer.end_tokens
    assert first.seed != second.seed


def test_parameters_reach_the_engine_as_they_were_sent(
    connect: Connect, engine: FakeEngine
) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": -1, "stop": "E"}
    body = chat(max_tokens=5, max_completion_tokens=3, cache_salt="tenant", unknown={"a": [1]})
    connect(body | fields)
    submission = engine.next_request().submission
    parameters = submission.parameters
    assert (parameters.temperature, parameters.top_p) == (0.5, 0.9)
    assert (parameters.top_k, parameters.min_p) == (7, 0.1)
    assert (parameters.seed, parameters.stop) == (2**64 - 1, ("E",))
    assert parameters.max_tokens == 3
    assert submission.namespace.salt == "tenant"
    assert bytes(submission.tokens) == b"<user>hi\n<assistant>"


def test_parts_of_text_are_one_text_and_developer_means_system(
    connect: Connect, engine: FakeEngine
) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b\x00"}]
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    connect({"messages": messages})
    tokens = engine.next_request().submission.tokens
    assert bytes(tokens) == b"<system>be\n<user>ab\x00\n<assistant>"


def test_a_model_without_a_chat_template_is_a_400_that_says_so(engine: FakeEngine) -> None:
    app = create_app(engine, byte_tokenizer(chat_template=None), MODEL, SETTINGS)
    with live_server(app) as server:
        response = post(server, chat())
    assert response.status_code == 400
    assert error_of(response)["message"].startswith("This model has no chat template")


def test_the_model_answers_to_its_name_and_to_the_last_part_of_it(
    server: LiveServer, engine: FakeEngine
) -> None:
    for name in (MODEL, "tiny"):
        assert httpx.get(f"{server.url}/v1/models/{name}").json()["id"] == MODEL
    assert [model["id"] for model in httpx.get(server.url + "/v1/models").json()["data"]] == [MODEL]
    response = httpx.get(server.url + "/v1/models/large")
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
    response = post(server, chat() | {"model": "large"})
    assert (response.status_code, error_of(response)["param"]) == (404, "model")
    assert engine.requests == {}


def test_sixteen_streams_at_once_keep_their_texts_apart() -> None:
    tokenizer = byte_tokenizer()

    def echo(submission: Any) -> list[int]:
        prompt = tokenizer.decode(submission.tokens)
        return tokenizer.encode(prompt.removesuffix("\n<assistant>").removeprefix("<user>") + END)

    with FakeEngine(tokenizer, echo) as engine:
        app = create_app(engine, tokenizer, MODEL, SETTINGS)
        with live_server(app) as server:
            texts = [f"canary {number} é😀 " * (number + 1) for number in range(16)]
            answers: dict[str, str] = {}

            def ask(text: str, stream: bool) -> None:
                response = post(server, chat(text, stream=stream))
                answers[text] = text_of(response) if stream else whole_text_of(response)

            threads = [
                threading.Thread(target=ask, args=(text, at % 2 == 0))
                for at, text in enumerate(texts)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
            assert answers == {text: text for text in texts}
            assert engine.cancels_so_far() == []


def whole_text_of(response: httpx.Response) -> str:
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def text_of(response: httpx.Response) -> str:
    """The joined text of a stream."""
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)
