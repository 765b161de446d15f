"""Request bodies: what is taken, what is refused, and the name in `param`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.http.wire import ApiError
from server.http.wire_chat import ChatRequest, read_chat_request


def read(**fields: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "hi"}]} | fields
    return read_chat_request(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages[0].content[0].text",
        ),
        ({"model": 3}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": "two"}, "n"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": "x" * 1001}, "stop"),
        ({"stop": [3]}, "stop[0]"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": -100.5}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"priority": 2**31}, "priority"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"user": 5}, "user"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refusal:
        read(**fields)
    assert (refusal.value.status, refusal.value.param) == (400, param)
    assert param.split("[", maxsplit=1)[0] in str(refusal.value)
    assert "`" not in str(refusal.value)


def test_a_sentence_does_not_repeat_megabytes_and_still_says_what_must_be() -> None:
    with pytest.raises(ApiError) as refusal:
        read(messages=[{"role": "r" * 2**20, "content": ""}])
    said = str(refusal.value)
    assert len(said) == 805
    assert said.startswith("messages[0].role is 'rrr")
    assert said.endswith("r'; it must be system or developer or user or assistant or tool.")


def test_a_body_without_messages_says_that_they_are_missing() -> None:
    with pytest.raises(ApiError, match=r"^messages is missing\.$") as refusal:
        read_chat_request(b"{}")
    assert refusal.value.param == "messages"


@pytest.mark.parametrize("body", [b"[]", b"3", b'"x"', b"null"])
def test_a_body_that_is_no_object_is_a_400(body: bytes) -> None:
    with pytest.raises(ApiError, match="must be a JSON object") as refusal:
        read_chat_request(body)
    assert (refusal.value.status, refusal.value.param) == (400, None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{} {}",
        b"\xff\xfe{}",
        b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b'{"messages": [{"role": "user", "content": "\\udc00"}]}',
        b'{"temperature": NaN, "messages": []}',
        b'{"messages": [], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": ' + b'[{"role":' * 100_000,
        b'{"tool_choice": ' + b'{"a":' * 100_000,
    ],
)
def test_bytes_that_are_no_json_are_a_400(body: bytes) -> None:
    with pytest.raises(ApiError) as refusal:
        read_chat_request(body)
    assert refusal.value.status == 400


def test_the_sentence_of_a_wrong_type_says_what_was_expected() -> None:
    with pytest.raises(ApiError, match=r"^max_tokens: Expected int, got str\.$"):
        read(max_tokens="5")


def test_null_and_absent_mean_the_same() -> None:
    names = ("model", "stream", "stop", "n", "seed", "temperature", "max_tokens", "tool_choice")
    assert read(**dict.fromkeys(names)) == read()


def test_unknown_fields_are_ignored() -> None:
    assert read(metadata={"a": [1]}, store=False, service_tier="auto") == read()


def test_harmless_values_of_fields_that_are_not_served_are_taken() -> None:
    read(n=1, logprobs=False, presence_penalty=0, frequency_penalty=0.0, logit_bias={})
    read(response_format={"type": "text"}, tool_choice="auto", tools=[])


def test_max_completion_tokens_wins_over_its_old_name() -> None:
    assert read(max_tokens=5, max_completion_tokens=3).answer_tokens_max == 3
    assert read(max_tokens=5).answer_tokens_max == 5


def test_stop_is_a_string_or_a_list() -> None:
    assert read(stop="a").stops == ("a",)
    assert read(stop=["a", "b"]).stops == ("a", "b")
    assert read(stop=[]).stops == ()


def test_the_content_of_an_assistant_may_be_null() -> None:
    turns = [{"role": "assistant", "content": None}, {"role": "user", "content": "x"}]
    assert [turn.text() for turn in read(messages=turns).messages] == ["", "x"]
