"""Grammar fields: OpenAI's and vLLM's ways to say what an answer must match."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.http.wire import ApiError
from server.http.wire_chat import ChatRequest, read_chat_request
from server.http.wire_grammar import grammar_of

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


def read(**fields: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "hi"}]} | fields
    return read_chat_request(json.dumps(body).encode())


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": {}}),
        ({"response_format": schema_format(SCHEMA)}, {"json_schema": SCHEMA}),
        (
            {"response_format": {"type": "grammar", "grammar": 'start: "a"'}},
            {"lark": 'start: "a"'},
        ),
        ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json_schema": SCHEMA}),
        ({"guided_regex": "[0-9]+"}, {"regex": "[0-9]+"}),
        ({"guided_choice": ["yes", 'n"o\né']}, {"lark": 'start: "yes" | "n\\"o\\né"'}),
        ({"guided_choice": ["\x7f"]}, {"lark": 'start: "\\u007f"'}),
        ({"guided_grammar": 'start: "a"'}, {"lark": 'start: "a"'}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"regex": "a*"}}, {"regex": "a*"}),
        ({"structured_outputs": {"choice": ["a"]}}, {"lark": 'start: "a"'}),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {"lark": 'start: "a"'}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": {}}),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, {"regex": "a"}),
    ],
)
def test_each_way_to_constrain_an_answer_becomes_one_grammar(
    fields: dict[str, Any], grammar: dict[str, Any] | None
) -> None:
    text = grammar_of(read(**fields))
    assert text == "" if grammar is None else json.loads(text) == grammar


def test_a_schemas_properties_keep_their_order() -> None:
    text = grammar_of(read(response_format=schema_format(SCHEMA)))
    assert list(json.loads(text)["json_schema"]["properties"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": schema_format({"type": "nonsense"})}, "response_format"),
        ({"guided_json": {"type": "nonsense"}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_grammar": "begin: x"}, "guided_grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema",
        ),
        ({"response_format": {"type": "grammar"}}, "response_format.grammar"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_choice": "a"}, "guided_choice"),
    ],
)
def test_what_cannot_be_followed_is_a_400_that_names_the_field(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as refusal:
        grammar_of(read(**fields))
    assert (refusal.value.status, refusal.value.param) == (400, param)
    assert str(refusal.value).endswith(".")
    assert param.split(".", maxsplit=1)[0] in str(refusal.value)
