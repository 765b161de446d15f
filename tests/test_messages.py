"""/v1/messages: Anthropic's client over a real socket, and what it cannot send."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest

from .speaking import MODEL, speaking

ASK: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 400,
    "messages": [{"role": "user", "content": "Hi"}],
}
ADD: anthropic.types.ToolParam = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
    },
}
CALL = 'Let me.\n<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'


def client_of(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)


def refused(body: dict[str, Any], path: str = "/v1/messages") -> tuple[int, Any]:
    with speaking("") as server:
        response = httpx.post(server.url + path, json=body)
        return response.status_code, response.json()


def test_a_message_has_the_text_the_end_and_the_usage() -> None:
    with speaking("Hello.") as server, client_of(server.url) as client:
        message = client.messages.create(
            **ASK, system="Be kind.", extra_headers={"x-request-id": "r1"}
        )
        assert server.prompts == ["<system>Be kind.;<user>Hi;<assistant>"]
    assert message.model_dump(exclude_unset=True) == {
        "id": "msg_r1",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Hello."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len("<system>Be kind.;<user>Hi;<assistant>") - 3,
            "output_tokens": 6,
            "cache_read_input_tokens": 3,
            "cache_creation_input_tokens": 0,
        },
    }


def test_reasoning_is_a_thinking_block_before_the_text() -> None:
    with speaking("<think>Hm.</think>\nHello.") as server, client_of(server.url) as client:
        message = client.messages.create(**ASK)
    assert [block.model_dump(exclude_unset=True) for block in message.content] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Hello."},
    ]


def test_a_call_is_a_tool_use_block_with_an_object() -> None:
    with speaking(CALL) as server, client_of(server.url) as client:
        message = client.messages.create(**ASK, tools=[ADD])
        assert server.prompts == ["[add]<user>Hi;<assistant>"]
    text, call = message.content
    assert text.type == "text"
    assert text.text == "Let me."
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("add", {"x": 1})
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("arguments", ["{x}", '{"x": "\\ud800"}', '{"x":' * 5000])
def test_arguments_that_are_no_object_are_given_as_text(arguments: str) -> None:
    broken = f'<tool_call>{{"name": "add", "arguments": {arguments}'
    with speaking(broken) as server, client_of(server.url) as client:
        (call,) = client.messages.create(**{**ASK, "max_tokens": 4000}, tools=[ADD]).content
    assert call.type == "tool_use"
    assert list(call.input) == ["INVALID_JSON"]
    assert arguments.startswith(str(call.input["INVALID_JSON"]))


def test_a_stream_adds_up_to_the_whole_message() -> None:
    said = f"<think>Hm.</think>{CALL}Done."
    with speaking(said) as server, client_of(server.url) as client:
        whole = client.messages.create(**ASK, tools=[ADD])
        with client.messages.stream(**ASK, tools=[ADD]) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "text"]
    assert _plain(streamed) == _plain(whole)
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]


def _plain(message: anthropic.types.Message) -> list[object]:
    blocks = [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]
    return [blocks, message.stop_reason, message.stop_sequence, message.usage.output_tokens]


def test_events_come_in_their_order_each_with_its_name() -> None:
    with speaking("<think>a</think>b") as server:
        response = httpx.post(server.url + "/v1/messages", json={**ASK, "stream": True})
    events = [event.split("\n") for event in response.text.strip().split("\n\n")]
    data = [json.loads(line.removeprefix("data: ")) for _, line in events]
    assert [name for name, _ in events] == [f"event: {each['type']}" for each in data]
    assert [(each["type"], each.get("index")) for each in data] == [
        ("message_start", None),
        ("ping", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("message_delta", None),
        ("message_stop", None),
    ]
    assert data[0]["message"]["content"] == []
    assert data[0]["message"]["stop_reason"] is None
    assert data[8]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


def test_a_stream_that_fails_in_the_middle_ends_with_an_error_event() -> None:
    with speaking("ab", fails=True) as server:
        text = httpx.post(server.url + "/v1/messages", json={**ASK, "stream": True}).text
    name, data = text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    assert json.loads(data[6:])["error"] == {"type": "api_error", "message": "the script ended"}


def test_a_stop_sequence_is_named_and_a_limit_is_max_tokens() -> None:
    with speaking("One two three") as server, client_of(server.url) as client:
        stopped = client.messages.create(**ASK, stop_sequences=["xyz", " t"])
        cut = client.messages.create(**{**ASK, "max_tokens": 3})
        (text,) = stopped.content
    assert text.type == "text"
    assert (text.text, stopped.stop_reason, stopped.stop_sequence) == ("One", "stop_sequence", " t")
    assert (cut.stop_reason, cut.stop_sequence, cut.usage.output_tokens) == ("max_tokens", None, 3)


def test_calls_results_and_thoughts_go_back_to_the_template() -> None:
    turns: Any = [
        {"role": "user", "content": [{"type": "text", "text": "1+1"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Sure."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "two"},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    with speaking("Two.") as server, client_of(server.url) as client:
        client.messages.create(**{**ASK, "messages": turns}, tools=[ADD])
        counted = client.messages.count_tokens(model=MODEL, messages=turns, tools=[ADD])
        (prompt,) = server.prompts
    assert prompt == (
        "[add]<user>1+1;<assistant><think>Hm.</think>Sure.<tool_call>"
        '{"name": "add", "arguments": {"x": 1}}</tool_call>;<tool>two;<user>So?;<assistant>'
    )
    assert counted.input_tokens == len(prompt)


def test_a_last_message_of_the_assistant_begins_the_answer() -> None:
    turns = [*ASK["messages"], {"role": "assistant", "content": "Well, "}]
    with speaking("yes.") as server, client_of(server.url) as client:
        client.messages.create(**{**ASK, "messages": turns})
        assert server.prompts == ["<user>Hi;<assistant>Well, "]


@pytest.mark.parametrize(
    ("choice", "rule"),
    [
        ({"type": "any"}, "call: call_0 | call_1"),
        ({"type": "tool", "name": "sub"}, '"const": "sub"'),
        ({"type": "auto"}, ""),
    ],
)
def test_a_choice_that_forces_a_call_becomes_a_grammar(choice: Any, rule: str) -> None:
    tools: Any = [ADD, {**ADD, "name": "sub"}]
    with speaking(CALL) as server, client_of(server.url) as client:
        client.messages.create(**ASK, tools=tools, tool_choice=choice)
        grammar = server.engine.next_request().submission.parameters.grammar
    assert rule in (json.loads(grammar)["lark"] if grammar else "")
    assert bool(grammar) == bool(rule)


def test_vllms_fields_make_a_grammar() -> None:
    with speaking("7") as server, client_of(server.url) as client:
        client.messages.create(**ASK, extra_body={"guided_regex": "[0-9]"})
        grammar = server.engine.next_request().submission.parameters.grammar
    assert json.loads(grammar) == {"regex": "[0-9]"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": None}, "max_tokens: Expected int, got null."),
        ({"messages": []}, "messages is empty; send at least one."),
        ({"stop_sequences": [""]}, "stop_sequences has a string of 0 characters; each must have 1"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0] must be a tool of your"),
        ({"tools": [ADD, ADD]}, "tools[1].name is 'add', as an earlier tool's is."),
        ({"tool_choice": {"type": "tool"}}, "tool_choice must be of type auto, any, none, or tool"),
        ({"tool_choice": {"type": "any"}}, "tool_choice asks for a call, but there are no tools."),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0] is of type 'image'; it must be text or tool_use",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id is missing.",
        ),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role is 'tool'; it must be"),
        ({"n": 2}, "n is not served here; send several requests."),
    ],
)
def test_a_body_that_cannot_be_served_is_refused_in_anthropics_shape(
    changes: dict[str, Any], message: str
) -> None:
    status, body = refused({**ASK, **changes})
    assert status == 400
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["error"]["message"].startswith(message)


def test_an_unknown_model_raises_the_clients_not_found_error() -> None:
    with speaking("") as server, client_of(server.url) as client:
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**ASK, "model": "other"})
        with pytest.raises(anthropic.NotFoundError):
            client.messages.count_tokens(model="other", messages=ASK["messages"])
