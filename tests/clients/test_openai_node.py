"""OpenAI's client for Node, as npm installs it: every parameter that it can send."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.real_server import Served

from .environments import node_folder, run_client

SCRIPT = Path(__file__).with_name("openai.mjs")
QUESTION = "Name the capital of France."


@pytest.fixture(scope="module")
def said(served: Served, url: str) -> dict[str, Any]:
    home = node_folder()
    copied = shutil.copy(SCRIPT, home / SCRIPT.name)
    answer: dict[str, Any] = json.loads(
        run_client(["node", str(copied), url, served.model], home, 240.0)
    )
    return answer


@pytest.fixture(scope="module")
def ours(served: Served) -> Any:
    return served.ask(QUESTION, max_tokens=12)


def _text(completion: Any) -> str:
    text: str = completion["choices"][0]["message"]["content"]
    return text


def test_the_one_model_is_listed_and_found(served: Served, said: dict[str, Any]) -> None:
    assert said["models"] == [served.model]
    assert said["model"] == served.model


def test_a_chat_has_the_text_and_usage_that_pythons_client_gets(
    said: dict[str, Any], ours: Any
) -> None:
    assert _text(said["chat"]) == ours.choices[0].message.content
    assert said["chat"]["usage"]["total_tokens"] == ours.usage.total_tokens


def test_a_stream_is_role_content_finish_reason_usage(said: dict[str, Any], ours: Any) -> None:
    *chunks, last, usage = said["chunks"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas) == ours.choices[0].message.content
    assert last["choices"][0]["finish_reason"] == ours.choices[0].finish_reason
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == ours.usage.completion_tokens


def test_two_choices_have_log_probabilities_of_each_token_and_three_others(
    said: dict[str, Any],
) -> None:
    choices = said["choices"]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    for choice in choices:
        content = choice["logprobs"]["content"]
        assert "".join(token["token"] for token in content) == choice["message"]["content"]
        for token in content:
            assert len(token["top_logprobs"]) == 3
            assert token["logprob"] <= token["top_logprobs"][0]["logprob"] <= 0


def test_a_stop_string_ends_the_answer_and_is_not_in_it(said: dict[str, Any], ours: Any) -> None:
    assert "Paris" in ours.choices[0].message.content
    assert _text(said["stopped"]) == ours.choices[0].message.content.split("Paris")[0]
    assert said["stopped"]["choices"][0]["finish_reason"] == "stop"


def test_a_bias_of_100_leaves_no_other_token(said: dict[str, Any]) -> None:
    text = _text(said["biased"])
    assert text == text[: len(text) // 3] * 3


def test_penalties_of_2_leave_an_answer_that_repeats_less(said: dict[str, Any]) -> None:
    words = _text(said["penalised"]).split()
    assert words
    assert all(words.count(word) <= 2 for word in words)


def test_an_answer_under_a_schema_is_json_of_that_schema(said: dict[str, Any]) -> None:
    place = json.loads(_text(said["json"]))
    assert list(place) == ["city", "large"]
    assert isinstance(place["large"], bool)


def test_a_required_tool_is_called_with_arguments_of_its_schema(said: dict[str, Any]) -> None:
    choice = said["tools"]["choices"][0]
    (call,) = choice["message"]["tool_calls"][:1]
    assert choice["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "weather"
    assert list(json.loads(call["function"]["arguments"])) == ["city"]


def test_a_streamed_call_adds_up_to_the_same_call(said: dict[str, Any]) -> None:
    whole = said["tools"]["choices"][0]["message"]["tool_calls"][0]["function"]
    deltas = [chunk["choices"][0]["delta"] for chunk in said["toolChunks"] if chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ()) if not call["index"]]
    assert calls[0]["function"]["name"] == whole["name"]
    assert "".join(call["function"].get("arguments", "") for call in calls) == whole["arguments"]


def test_completions_echo_two_prompts_with_log_probabilities(said: dict[str, Any]) -> None:
    first, second = said["completions"]["choices"]
    assert first["text"].startswith("One, two,")
    assert second["text"].startswith("Red, green,")
    assert first["logprobs"]["token_logprobs"][0] is None
    assert len(first["logprobs"]["tokens"]) == len(first["logprobs"]["token_logprobs"])
    assert "".join(first["logprobs"]["tokens"]) == first["text"]


def test_a_prompt_of_token_ids_is_taken_as_it_is(said: dict[str, Any]) -> None:
    assert said["fromTokens"]["usage"]["prompt_tokens"] == 3


def test_embeddings_have_the_models_width(said: dict[str, Any]) -> None:
    assert said["embedding"] == [576, 576]


def test_the_responses_api_gives_the_chats_answer(said: dict[str, Any], ours: Any) -> None:
    assert said["response"] == ours.choices[0].message.content


def test_a_wrong_value_is_a_400_that_names_the_field(said: dict[str, Any]) -> None:
    assert said["error"] == {"status": 400, "param": "temperature"}
