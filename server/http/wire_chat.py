"""Bodies of /v1/chat/completions, in OpenAI's shapes, and what may stand in them.

Never touches the engine, a tokenizer or a socket.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ..dialects.tools import check_tools
from ..parameters import TOP_LOGPROBS_MAX
from .wire import ApiError, Fields, Usage, check_range, read_body
from .wire_sampling import Sampling, check_sampling
from .wire_tools import CallDelta, MessageCall, ToolDefinition, choice_of, tools_of

ROLES = ("system", "developer", "user", "assistant", "tool")
TEMPLATE_NAMES = frozenset({"messages", "tools", "add_generation_prompt"})
"""Template variables that are the server's own."""


class ContentPart(Struct):
    """One part of a message's content; only text is served."""

    type: str
    text: str | None = None


class Message(Struct):
    """One turn of a conversation. tool_calls: an assistant's; tool_call_id: of a tool's result."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None

    def text(self) -> str:
        """The content as one string; its parts joined as they are."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or "" for part in self.content or ())


class ChatRequest(Sampling, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def slow(self) -> bool:
        """Tools may become a grammar."""
        return self.constrained or bool(self.tools)

    @property
    def answer_tokens_max(self) -> int | None:
        """max_completion_tokens where given (max_tokens is its old name), else max_tokens."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


class TopLogprob(Struct):
    """A token that was likely at its place. bytes: what it is, exactly."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    """A token of the answer, and the likeliest ones at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class Logprobs(Struct):
    """Of a choice, or of what a chunk adds to it."""

    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(Struct, omit_defaults=True):
    """The answer."""

    content: str | None
    role: str
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MessageCall] | UnsetType = UNSET


class Choice(Struct):
    """One answer."""

    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: Logprobs | None = None


class Completion(Struct):
    """Body of an answer that is not streamed."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    system_fingerprint: str
    object: str = "chat.completion"


class Delta(Struct, omit_defaults=True):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChunkChoice(Struct):
    """What a chunk says of one answer."""

    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class Chunk(Struct):
    """One event of a stream. usage: absent unless asked for, then null up to the last."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET


_decoder = msgspec.json.Decoder(ChatRequest)


def read_chat_request(body: bytes | Fields) -> ChatRequest:
    """The request in a body, or of its fields, checked. Raises ApiError (400), with the field's
    name in `param`.
    """
    request = read_body(_decoder, body)
    check_messages(request.messages)
    check_chat(request)
    return request


def check_chat(request: ChatRequest) -> None:
    """Raise ApiError (400) where a field beside the messages is out of its range."""
    check_sampling(request)
    check_range("max_completion_tokens", request.max_completion_tokens, 0, 2**31 - 1)
    check_range("top_logprobs", request.top_logprobs, 0, TOP_LOGPROBS_MAX)
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError("top_logprobs needs logprobs: true beside it.", param="top_logprobs")
    check_tools(tools_of(request.tools), choice_of(request.tool_choice), "function.")
    for name in TEMPLATE_NAMES & (request.chat_template_kwargs or {}).keys():
        raise ApiError(
            f"chat_template_kwargs cannot set {name}.", param=f"chat_template_kwargs.{name}"
        )


def check_messages(messages: list[Message]) -> None:
    """Raise ApiError (400) where one is of no known role, or has no text."""
    if not messages:
        raise ApiError("messages is empty; send at least one.", param="messages")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise ApiError(
                f"messages[{index}].role is {message.role!r}; it must be {' or '.join(ROLES)}.",
                param=f"messages[{index}].role",
            )
        if isinstance(message.content, list):
            _check_parts(message.content, f"messages[{index}].content")
        elif message.content is None and message.role != "assistant":
            param = f"messages[{index}].content"
            raise ApiError(f"{param} is missing.", param=param)


def _check_parts(parts: list[ContentPart], where: str) -> None:
    for index, part in enumerate(parts):
        if part.type != "text":
            raise ApiError(
                f"{where}[{index}] is of type {part.type!r}; this server takes text parts only.",
                param=f"{where}[{index}].type",
            )
        if part.text is None:
            raise ApiError(f"{where}[{index}].text is missing.", param=f"{where}[{index}].text")
