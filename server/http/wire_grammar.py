"""Grammar fields: what an answer must match, in OpenAI's words and in vLLM's.

    response_format         text, json_object, json_schema, grammar (llguidance's Lark)
    structured_outputs      vLLM's: one of json, regex, choice, grammar, json_object
    guided_json, guided_regex, guided_choice, guided_grammar      its older names

Owns their way to the one text that Parameters.grammar takes; kernel.grammar says whether it can be
followed. One of them at most may be given.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from msgspec import Struct

from kernel.grammar import check_grammar

from .wire import ApiError

Schema = dict[str, Any] | str
"""A JSON schema, or its text."""


class JsonSchema(Struct):
    """OpenAI's wrapping of a schema; its name and description are for a model's eyes."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """type: text, json_object, json_schema or grammar."""

    type: str
    json_schema: JsonSchema | None = None
    grammar: str | None = None


class StructuredOutputs(Struct):
    """vLLM's; one field of it."""

    json: Schema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Constrained(Struct, kw_only=True):
    """The fields of a body."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def constrained(self) -> bool:
        """Whether any of them is given."""
        return any(getattr(self, name) is not None for name in Constrained.__struct_fields__)


def grammar_of(request: Constrained) -> str:
    """The grammar as the engine takes it; empty for free text.

    Takes a while, for a grammar is compiled to be checked. Raises ApiError (400).
    """
    found = _grammars(request)
    if not found:
        return ""
    if len(found) > 1:
        names = [name for name, _ in found]
        raise ApiError(f"{' and '.join(names)} are both given; send one of them.", param=names[1])
    ((param, grammar),) = found
    text = msgspec.json.encode(grammar).decode()
    if said := check_grammar(text):
        raise ApiError(f"{param}: {said}.", param=param)
    return text


def _grammars(request: Constrained) -> list[tuple[str, dict[str, Any]]]:
    """(field, grammar) for each field that asks for one."""
    vllm = request.structured_outputs or StructuredOutputs()
    given: list[tuple[str, dict[str, Any] | None]] = [
        ("response_format", _of_format(request.response_format)),
        ("structured_outputs.json", _of_schema("structured_outputs.json", vllm.json)),
        ("structured_outputs.regex", _of_text("regex", vllm.regex)),
        ("structured_outputs.choice", _of_choice("structured_outputs.choice", vllm.choice)),
        ("structured_outputs.grammar", _of_text("lark", vllm.grammar)),
        ("structured_outputs.json_object", {"json_object": {}} if vllm.json_object else None),
        ("guided_json", _of_schema("guided_json", request.guided_json)),
        ("guided_regex", _of_text("regex", request.guided_regex)),
        ("guided_choice", _of_choice("guided_choice", request.guided_choice)),
        ("guided_grammar", _of_text("lark", request.guided_grammar)),
    ]
    return [(name, grammar) for name, grammar in given if grammar is not None]


def _of_format(given: ResponseFormat | None) -> dict[str, Any] | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"json_object": {}}
    if given.type == "json_schema":
        if given.json_schema is None or given.json_schema.schema is None:
            param = "response_format.json_schema"
            raise ApiError(f"{param} has no schema; send one.", param=param)
        return {"json_schema": given.json_schema.schema}
    if given.type == "grammar":
        if given.grammar is None:
            param = "response_format.grammar"
            raise ApiError(f"{param} is missing.", param=param)
        return {"lark": given.grammar}
    raise ApiError(
        f"response_format.type is {given.type!r}; it must be text, json_object, json_schema or "
        "grammar.",
        param="response_format.type",
    )


def _of_schema(param: str, given: Schema | None) -> dict[str, Any] | None:
    if given is None:
        return None
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ApiError(f"{param} is no JSON object: {error}.", param=param) from None
    return {"json_schema": given}


def _of_text(kind: str, given: str | None) -> dict[str, Any] | None:
    return None if given is None else {kind: given}


def _of_choice(param: str, given: list[str] | None) -> dict[str, Any] | None:
    """One of some texts, as Lark; its strings are written like JSON's."""
    if given is None:
        return None
    if not all(given) or not given:
        raise ApiError(f"{param} needs texts, none of them empty.", param=param)
    # Lark takes DEL, which JSON has as it is, only escaped.
    texts = (json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in given)
    return {"lark": "start: " + " | ".join(texts)}
