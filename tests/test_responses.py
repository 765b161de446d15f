"""/v1/responses: OpenAI's client over a real socket, and what it cannot send."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import FunctionToolParam
from pydantic import BaseModel

from .speaking import MODEL, speaking

ADD: FunctionToolParam = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    "strict": False,
}
CALL = 'Let me.\n<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0)


def test_a_response_has_the_text_the_status_and_the_usage() -> None:
    with speaking("Hello.") as server, client_of(server.url) as client:
        response = client.responses.create(
            model=MODEL,
            input="Hi",
            instructions="Be kind.",
            temperature=0.5,
            store=True,
            extra_headers={"x-request-id": "r1"},
        )
        assert server.prompts == ["<system>Be kind.;<user>Hi;<assistant>"]
    assert response.output_text == "Hello."
    assert (response.id, response.status, response.model) == ("resp_r1", "completed", MODEL)
    assert (response.temperature, response.top_p, response.instructions) == (0.5, 1.0, "Be kind.")
    assert response.usage is not None
    assert response.usage.model_dump(exclude_unset=True) == {
        "input_tokens": 37,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 43,
    }


def test_reasoning_text_and_calls_are_items_in_their_order() -> None:
    with speaking(f"<think>Hm.</think>{CALL}Done.") as server, client_of(server.url) as client:
        response = client.responses.create(model=MODEL, input="Hi", tools=[ADD])
        assert server.prompts == ["[add]<user>Hi;<assistant>"]
    key = response.id.removeprefix("resp_")
    thought, text, call, done = [item.model_dump(exclude_unset=True) for item in response.output]
    assert thought == {
        "id": f"rs_{key}_0",
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    }
    assert text == {
        "id": f"msg_{key}_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Let me.", "annotations": [], "logprobs": []}],
    }
    assert call.pop("call_id").startswith("call_")
    assert call == {
        "id": f"fc_{key}_2",
        "type": "function_call",
        "name": "add",
        "arguments": '{"x": 1}',
        "status": "completed",
    }
    assert done["content"][0]["text"] == "Done."
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 3


def test_the_clients_stream_adds_up_to_the_whole_response() -> None:
    said = f"<think>Hm.</think>{CALL}Done."
    with speaking(said) as server, client_of(server.url) as client:
        whole = client.responses.create(model=MODEL, input="Hi", tools=[ADD])
        with client.responses.stream(model=MODEL, input="Hi", tools=[ADD]) as stream:
            events = list(stream)
            final = stream.get_final_response()
    assert [_plain(item) for item in final.output] == [_plain(item) for item in whole.output]
    assert final.usage == whole.usage
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-5:] == [
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [kind for kind in kinds if kind.endswith("done")] == [
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]


def _plain(item: BaseModel) -> Any:
    found = item.model_dump(exclude={"id", "call_id", "parsed_arguments"})
    for part in found.get("content") or ():
        part.pop("parsed", None)
    return found


def test_deltas_are_what_their_done_event_says() -> None:
    with speaking(f"<think>Hm.</think>{CALL}") as server, client_of(server.url) as client:
        deltas: dict[str, str] = {}
        for event in client.responses.create(model=MODEL, input="Hi", tools=[ADD], stream=True):
            match event.type:
                case (
                    "response.output_text.delta"
                    | "response.reasoning_text.delta"
                    | "response.function_call_arguments.delta"
                ):
                    deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
                case "response.output_text.done" | "response.reasoning_text.done":
                    assert deltas[event.item_id] == event.text
                case "response.function_call_arguments.done":
                    assert deltas[event.item_id] == event.arguments
                    assert event.to_dict()["name"] == "add"
    assert sorted(deltas.values()) == ["Hm.", "Let me.", '{"x": 1}']


def test_a_limit_makes_a_response_incomplete_streamed_or_not() -> None:
    with speaking("Hello.") as server, client_of(server.url) as client:
        whole = client.responses.create(model=MODEL, input="Hi", max_output_tokens=3)
        events = list(
            client.responses.create(model=MODEL, input="Hi", max_output_tokens=3, stream=True)
        )
    last = events[-1]
    assert last.type == "response.incomplete"
    for response in (whole, last.response):
        assert (response.status, response.output_text) == ("incomplete", "Hel")
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        (message,) = response.output
        assert message.type == "message"
        assert message.status == "incomplete"


def test_items_go_back_to_the_template() -> None:
    items: Any = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "1+1"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Sure.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "two"},
    ]
    with speaking("Two.") as server, client_of(server.url) as client:
        client.responses.create(model=MODEL, input=items, tools=[ADD])
        assert server.prompts == [
            "[add]<system>Be kind.;<user>1+1;<assistant><think>Hm.</think>Sure.<tool_call>"
            '{"name": "add", "arguments": {"x": 1}}</tool_call>;<tool>two;<assistant>'
        ]


class Sum(BaseModel):
    value: int


def test_a_text_format_becomes_a_grammar_that_lets_the_model_think_and_call() -> None:
    with speaking('<think>1</think>{"value": 2}') as server, client_of(server.url) as client:
        parsed = client.responses.parse(model=MODEL, input="1+1", text_format=Sum, tools=[ADD])
        grammar = server.engine.next_request().submission.parameters.grammar
    assert parsed.output_parsed == Sum(value=2)
    first, *rules = json.loads(grammar)["lark"].split("\n")
    assert first == 'start: ("<think>" thought)? (calls | answer)'
    assert any('"title": "Sum"' in rule for rule in rules)


def test_vllms_fields_make_a_grammar_where_text_asks_for_none() -> None:
    with speaking("7") as server, client_of(server.url) as client:
        extra = {"guided_regex": "[0-9]"}
        client.responses.create(model=MODEL, input="1+1", extra_body=extra)
        grammar = server.engine.next_request().submission.parameters.grammar
    assert json.loads(grammar) == {"regex": "[0-9]"}


def test_a_stream_that_fails_in_the_middle_ends_with_a_failed_response() -> None:
    with speaking("ab", fails=True) as server:
        body = {"model": MODEL, "input": "Hi", "stream": True}
        text = httpx.post(server.url + "/v1/responses", json=body).text
    data = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    last = data[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the script ended"}
    assert last["response"]["output"][0]["content"][0]["text"] == "ab"
    assert last["response"]["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"input": None}, "input", "input: Expected str | array, got null."),
        ({"input": []}, "input", "input is empty; send some text."),
        (
            {"previous_response_id": "resp_1"},
            "previous_response_id",
            "previous_response_id is not served: no response is kept here. Send all items as",
        ),
        ({"background": True}, "background", "background other than false is not served."),
        ({"n": 2}, "n", "n other than 1 is not served."),
        ({"max_output_tokens": -1}, "max_output_tokens", "max_output_tokens is -1; it must be"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "tools[0] is of type 'web_search'"),
        ({"tools": [{**ADD, "name": "a b"}]}, "tools[0].name", "tools[0].name is 'a b'; it must"),
        (
            {"tools": [{**ADD, "parameters": {"type": "array"}}]},
            "tools[0]",
            "The schema of tools[0] is of type 'array'; arguments are an object.",
        ),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice asks for a call, but there"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}},
            "tool_choice",
            "tool_choice names 'sub', no tool of these.",
        ),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "text.format is of type 'xml'; it"),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input[0].type",
            "input[0] is of type 'item_reference'; it must be message",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "input[0].content[0] is of type 'input_image'; this server takes text only.",
        ),
        ({"input": [{"role": "user"}]}, "input[0].content", "input[0].content is missing."),
    ],
)
def test_a_body_that_cannot_be_served_is_refused_with_its_field(
    changes: dict[str, Any], param: str, message: str
) -> None:
    with speaking("") as server:
        body = {"model": MODEL, "input": "Hi", **changes}
        response = httpx.post(server.url + "/v1/responses", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(message)
