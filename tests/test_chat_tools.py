"""Tools and reasoning in chat completions: OpenAI's client over a real socket."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionFunctionToolParam

from .speaking import MODEL, speaking

ADD: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0)


def test_calls_stand_in_the_message_and_end_it() -> None:
    with speaking(f"<think>Hm.</think>{CALL}\n{CALL}") as server, client_of(server.url) as client:
        completion = client.chat.completions.create(**ASK, tools=[ADD])
        assert server.prompts == ["[add]<user>Hi;<assistant>"]
    (choice,) = completion.choices
    message = choice.message.to_dict()
    calls: Any = message.pop("tool_calls")
    assert message == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "Hm.",
    }
    assert choice.finish_reason == "tool_calls"
    first, second = (call.pop("id") for call in calls)
    assert first != second
    assert calls == [{"type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}] * 2


def test_chunks_begin_a_call_with_its_name_and_go_on_with_its_arguments() -> None:
    body = {**ASK, "tools": [ADD], "stream": True}
    with speaking(f"Sure. {CALL}") as server:
        text = httpx.post(server.url + "/v1/chat/completions", json=body).text
    lines = [line[6:] for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines]
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("content", "") for delta in deltas) == "Sure."
    first, *more = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    (begun,) = first
    assert begun.pop("id").startswith("call_")
    assert begun == {"index": 0, "type": "function", "function": {"name": "add", "arguments": ""}}
    assert all(list(call) == ["index", "function"] for (call,) in more)
    assert "".join(call["function"]["arguments"] for (call,) in more) == '{"x": 1}'
    assert [choice["finish_reason"] for choice in choices[-2:]] == [None, "tool_calls"]
    assert deltas[-1] == {}


def test_the_clients_stream_adds_up_to_the_whole_message() -> None:
    with speaking(f"Sure. {CALL} {CALL}Done.") as server, client_of(server.url) as client:
        whole = client.chat.completions.create(**ASK, tools=[ADD])
        with client.chat.completions.stream(**ASK, tools=[ADD]) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion()
    one, other = (completion.choices[0] for completion in (whole, streamed))
    assert one.finish_reason == other.finish_reason == "tool_calls"
    assert one.message.content == other.message.content == "Sure.Done."
    assert [_call(call) for call in one.message.tool_calls or ()] == [("add", '{"x": 1}')] * 2
    assert [_call(call) for call in other.message.tool_calls or ()] == [("add", '{"x": 1}')] * 2


def _call(call: Any) -> tuple[str, str]:
    return call.function.name, call.function.arguments


def test_without_parallel_calls_there_is_one() -> None:
    with speaking(f"{CALL}{CALL}") as server, client_of(server.url) as client:
        completion = client.chat.completions.create(**ASK, tools=[ADD], parallel_tool_calls=False)
    assert len(completion.choices[0].message.tool_calls or ()) == 1


def test_a_call_that_the_limit_cuts_ends_with_length() -> None:
    with speaking(CALL) as server, client_of(server.url) as client:
        completion = client.chat.completions.create(**ASK, tools=[ADD], max_tokens=45)
    (choice,) = completion.choices
    (call,) = choice.message.tool_calls or [None]
    assert choice.finish_reason == "length"
    assert _call(call) == ("add", '{"x"')


def test_with_the_choice_none_nothing_is_offered_and_nothing_is_a_call() -> None:
    with speaking(CALL) as server, client_of(server.url) as client:
        completion = client.chat.completions.create(**ASK, tools=[ADD], tool_choice="none")
        assert server.prompts == ["<user>Hi;<assistant>"]
    assert completion.choices[0].message.content == CALL
    assert completion.choices[0].message.tool_calls is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_call_is_sampled_under_a_grammar(choice: Any) -> None:
    with speaking(CALL) as server, client_of(server.url) as client:
        client.chat.completions.create(**ASK, tools=[ADD], tool_choice=choice)
        grammar = server.engine.next_request().submission.parameters.grammar
    assert '"const": "add"' in json.loads(grammar)["lark"]


def test_calls_and_their_results_go_back_to_the_template() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x":1}'}}
    turns: Any = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "two"},
    ]
    with speaking("Two.") as server, client_of(server.url) as client:
        client.chat.completions.create(model=MODEL, messages=turns, tools=[ADD])
        assert server.prompts == [
            "[add]<user>1+1;<assistant><think>Hm.</think><tool_call>"
            '{"name": "add", "arguments": {"x": 1}}</tool_call>;<tool>two;<assistant>'
        ]


def test_template_variables_reach_the_template() -> None:
    template = "{% if not enable_thinking %}<no>{% endif %}{{ reasoning_effort }}"
    body = {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}
    with speaking("", template) as server:
        httpx.post(server.url + "/v1/chat/completions", json={**ASK, **body})
        assert server.prompts == ["<no>low"]


DEEP = json.loads('{"a":' * 101 + "{}" + "}" * 101)
BAD_ARGUMENTS = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{"}}


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        (
            {"tools": [{"type": "function"}]},
            "tools[0].type",
            "tools[0] is of type 'function'; this server takes functions, as",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a.b"}}]},
            "tools[0].function.name",
            "tools[0].function.name is 'a.b'; it must have 1 to 64 letters, digits, _ or -.",
        ),
        (
            {"tools": [ADD, ADD]},
            "tools[1].function.name",
            "tools[1].function.name is 'add', as an earlier tool's is.",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
            "tools[0].function.parameters: Expected object, got array.",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": 1}}}]},
            "tools[0].function",
            "The schema of tools[0].function is of type 1; arguments are an object.",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": DEEP}}]},
            "tools[0].function",
            "The schema of tools[0].function is nested more than 100 deep.",
        ),
        ({"tools": [ADD] * 129}, "tools", "tools has 129 entries; at most 128 are allowed."),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": ""}}},
            "tool_choice",
            "tool_choice must be none, auto, required, or",
        ),
        ({"tool_choice": "any"}, "tool_choice", "tool_choice must be none, auto, required, or"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice asks for a call, but there are"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [BAD_ARGUMENTS]}]},
            "messages[0].tool_calls[0].function.arguments",
            "messages[0].tool_calls[0].function.arguments must be the text of a JSON object.",
        ),
        (
            {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs.messages",
            "chat_template_kwargs cannot set messages.",
        ),
    ],
)
def test_tools_that_cannot_be_served_are_refused_with_their_field(
    changes: dict[str, Any], param: str, message: str
) -> None:
    with speaking("") as server:
        response = httpx.post(server.url + "/v1/chat/completions", json={**ASK, **changes})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(message)
