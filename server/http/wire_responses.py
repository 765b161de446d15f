"""Bodies of /v1/responses, in OpenAI's shapes, and what may stand in them.

The server keeps no responses: what refers to an earlier one is refused, and `store` means nothing.
Beside OpenAI's fields those of wire_sampling.Sampling are taken. Never touches the engine, a
tokenizer or a socket.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct, field

from kernel.grammar import check_grammar

from ..dialects.tools import Tool, ToolChoice, check_tools
from .wire import ApiError, check_range, read_body
from .wire_grammar import grammar_of
from .wire_sampling import Sampling, check_sampling
from .wire_tools import choice_of, tool_of

TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
ROLES = ("system", "developer", "user", "assistant")


class Part(Struct):
    """One part of an item's content; only text is served."""

    type: str
    text: str | None = None


class Item(Struct):
    """One item of the input; which fields count depends on its type (a message, if it has none)."""

    type: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class ToolDefinition(Struct):
    """An entry of `tools`; only functions are served."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class TextFormat(Struct):
    """type: text, json_object or json_schema."""

    type: str = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None


class TextField(Struct):
    """What the text of the answer must be."""

    format: TextFormat | None = None


class ReasoningField(Struct):
    """effort goes to the template."""

    effort: str | None = None


class ResponsesRequest(Sampling, kw_only=True):
    """Body of POST /v1/responses."""

    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextField | None = None
    reasoning: ReasoningField | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    top_logprobs: int | None = None

    @property
    def slow(self) -> bool:
        """Tools and formats may become a grammar."""
        return self.constrained or bool(self.text or self.tools)

    @property
    def answer_tokens_max(self) -> int | None:
        """OpenAI's name for it here."""
        return self.max_output_tokens

    @property
    def offered(self) -> list[Tool]:
        """The tools. Raises ApiError (400)."""
        found = []
        for index, tool in enumerate(self.tools or ()):
            if tool.type != "function" or tool.name is None:
                raise ApiError(
                    f"tools[{index}] is of type {tool.type!r}; this server takes functions with a "
                    "name.",
                    param=f"tools[{index}].type",
                )
            found.append(tool_of(tool.name, tool.description, tool.parameters))
        return found

    @property
    def choice(self) -> ToolChoice:
        """The choice among them. Raises ApiError (400)."""
        return choice_of(self.tool_choice, nested=False)

    @property
    def grammar(self) -> str:
        """What the text must match, as the engine takes it. Raises ApiError (400)."""
        wanted = (self.text and self.text.format) or TextFormat()
        match wanted:
            case TextFormat("text"):
                return grammar_of(self)
            case TextFormat("json_object"):
                grammar: dict[str, Any] = {"json_object": {}}
            case TextFormat("json_schema", schema=dict(schema)):
                grammar = {"json_schema": schema}
            case _:
                raise ApiError(
                    f"text.format is of type {wanted.type!r}; it must be text, json_object, or "
                    "json_schema with a schema.",
                    param="text.format",
                )
        text = msgspec.json.encode(grammar).decode()
        if said := check_grammar(text):
            raise ApiError(f"text.format: {said}.", param="text.format")
        return text


class OutputText(Struct, tag_field="type", tag="output_text"):
    """Text of a message."""

    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """Text of reasoning."""

    text: str


class MessageItem(Struct, tag_field="type", tag="message"):
    """What the user reads."""

    id: str
    content: list[OutputText]
    status: str = "in_progress"
    role: str = "assistant"


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    """What the model thought; nobody sums it up here."""

    id: str
    content: list[ReasoningText]
    status: str = "in_progress"
    summary: list[Any] = field(default_factory=list)


class CallItem(Struct, tag_field="type", tag="function_call"):
    """A call."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"


OutputItem = MessageItem | ReasoningItem | CallItem


class InputDetails(Struct):
    """cached_tokens: prompt tokens whose rows were computed before."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct):
    """reasoning_tokens: as many as the tokenizer makes of the reasoning's text."""

    reasoning_tokens: int


class ResponsesUsage(Struct):
    """Tokens of the prompt as the template made it, and of the answer as it was delivered."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Struct):
    """Why a response is incomplete."""

    reason: str


class ErrorField(Struct):
    """Why a response failed."""

    code: str
    message: str


class ResponseBody(Struct, kw_only=True):
    """A response. status: in_progress at its beginning, then completed, incomplete or failed."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[OutputItem]
    temperature: float
    top_p: float
    tools: list[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool
    text: dict[str, Any]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    user: str | None
    reasoning: dict[str, Any]
    completed_at: int | None = None
    error: ErrorField | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponsesUsage | None = None
    object: str = "response"
    background: bool = False
    previous_response_id: None = None
    store: bool = False
    truncation: str = "disabled"


_decoder = msgspec.json.Decoder(ResponsesRequest)


def read_responses_request(body: bytes) -> ResponsesRequest:
    """The request in `body`, checked. Raises ApiError (400), with the field's name in `param`."""
    request = read_body(_decoder, body)
    check_sampling(request)
    check_range("max_output_tokens", request.max_output_tokens, 0, 2**31 - 1)
    _check_served(request)
    check_tools(request.offered, request.choice)
    if isinstance(request.input, list):
        if not request.input:
            raise ApiError("input is empty; send some text.", param="input")
        for index, item in enumerate(request.input):
            _check_item(item, f"input[{index}]")
    return request


def _check_served(request: ResponsesRequest) -> None:
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(request, name) is not None:
            raise ApiError(
                f"{name} is not served: no response is kept here. Send all items as input.",
                param=name,
                code="unsupported_parameter",
            )
    for name, wanted in (("background", False), ("top_logprobs", 0), ("n", 1)):
        if getattr(request, name) not in (None, wanted):
            raise ApiError(
                f"{name} other than {str(wanted).lower()} is not served.",
                param=name,
                code="unsupported_parameter",
            )


_NEEDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


def _check_item(item: Item, where: str) -> None:
    kind = item.type or "message"
    if kind not in _NEEDS:
        raise ApiError(
            f"{where} is of type {kind!r}; it must be {' or '.join(_NEEDS)}.", param=f"{where}.type"
        )
    for name in _NEEDS[kind]:
        if getattr(item, name) is None:
            raise ApiError(f"{where}.{name} is missing.", param=f"{where}.{name}")
    if kind == "message" and item.role not in ROLES:
        raise ApiError(
            f"{where}.role is {item.role!r}; it must be {' or '.join(ROLES)}.",
            param=f"{where}.role",
        )
    for name in ("content", "output"):
        parts = getattr(item, name)
        for at, part in enumerate(parts if isinstance(parts, list) else ()):
            if part.type not in TEXT_PARTS or part.text is None:
                raise ApiError(
                    f"{where}.{name}[{at}] is of type {part.type!r}; this server takes text only.",
                    param=f"{where}.{name}[{at}].type",
                )
