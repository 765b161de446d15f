"""Bodies of /v1/messages, in Anthropic's shapes, and what may stand in them.

Beside Anthropic's fields those of wire_sampling.Sampling are taken. Never touches the engine, a
tokenizer or a socket.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from ..dialects.tools import AUTO, Tool, ToolChoice, check_tools
from .wire import ApiError, read_body
from .wire_sampling import Sampling, check_sampling
from .wire_tools import tool_of

TEXT_TYPES = ("text",)
BLOCK_TYPES = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")


class Block(Struct):
    """One block of content; which fields count depends on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None


class Message(Struct):
    """One turn of a conversation."""

    role: str
    content: str | list[Block]


class ToolDefinition(Struct):
    """An entry of `tools`; only the client's own tools are served."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None


class ToolChoiceField(Struct):
    """type: auto, any, tool (with a name) or none."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct):
    """type: enabled, adaptive or disabled."""

    type: str


class Counted(Sampling, kw_only=True):
    """What makes the prompt: the body of POST /v1/messages/count_tokens."""

    messages: list[Message]
    system: str | list[Block] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoiceField | None = None
    thinking: Thinking | None = None
    stop_sequences: list[str] | None = None

    @property
    def slow(self) -> bool:
        """Tools may become a grammar."""
        return self.constrained or bool(self.tools)

    @property
    def stops(self) -> tuple[str, ...]:
        """Anthropic's name for stop strings."""
        return tuple(self.stop_sequences or ())

    @property
    def offered(self) -> list[Tool]:
        """The tools."""
        return [tool_of(it.name, it.description, it.input_schema) for it in self.tools or ()]

    @property
    def choice(self) -> ToolChoice:
        """The choice among them. Raises ApiError (400)."""
        match self.tool_choice:
            case None | ToolChoiceField("auto"):
                return AUTO
            case ToolChoiceField("none"):
                return ToolChoice("none")
            case ToolChoiceField("any"):
                return ToolChoice("required")
            case ToolChoiceField("tool", str(name)) if name:
                return ToolChoice("required", name)
        message = "tool_choice must be of type auto, any, none, or tool with the tool's name."
        raise ApiError(message, param="tool_choice")

    @property
    def parallel(self) -> bool:
        """Whether several tools may be called at once."""
        return not (self.tool_choice and self.tool_choice.disable_parallel_tool_use)


class MessagesRequest(Counted, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: int


class TextBlock(Struct, tag_field="type", tag="text"):
    """What the user reads."""

    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """What the model thought; nobody signs it here."""

    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A call."""

    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesUsage(Struct):
    """input_tokens: of the prompt, without those whose rows were computed before."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class MessageAnswer(Struct):
    """An answer; a stream's begins without content and end."""

    id: str
    model: str
    content: list[AnswerBlock]
    usage: MessagesUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    type: str = "message"
    role: str = "assistant"


_messages = msgspec.json.Decoder(MessagesRequest)
_counted = msgspec.json.Decoder(Counted)


def read_messages_request(body: bytes) -> MessagesRequest:
    """The request in `body`, checked. Raises ApiError (400)."""
    request = read_body(_messages, body)
    _check(request)
    return request


def read_count_request(body: bytes) -> Counted:
    """The request in `body`, checked. Raises ApiError (400)."""
    request = read_body(_counted, body)
    _check(request)
    return request


def _check(request: Counted) -> None:
    check_sampling(request, stops_param="stop_sequences")
    if request.n not in (None, 1):
        raise ApiError("n is not served here; send several requests.", param="n")
    for index, tool in enumerate(request.tools or ()):
        if tool.type not in (None, "custom") or tool.input_schema is None:
            said = f"tools[{index}] must be a tool of your own, with an input_schema."
            raise ApiError(said, param=f"tools[{index}]")
    check_tools(request.offered, request.choice)
    _check_messages(request)


def _check_messages(request: Counted) -> None:
    if isinstance(request.system, list):
        check_blocks(request.system, "system", TEXT_TYPES)
    if not request.messages:
        raise ApiError("messages is empty; send at least one.", param="messages")
    for index, message in enumerate(request.messages):
        where = f"messages[{index}]"
        if message.role not in ("user", "assistant", "system"):
            said = f"{where}.role is {message.role!r}; it must be user or assistant."
            raise ApiError(said, param=f"{where}.role")
        if isinstance(message.content, list):
            check_blocks(message.content, f"{where}.content", BLOCK_TYPES)


_NEEDS = {
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}


def check_blocks(blocks: list[Block], where: str, types: tuple[str, ...]) -> None:
    """Raise ApiError (400) where a block is of another type, or lacks what its type needs."""
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if block.type not in types:
            said = f"{at} is of type {block.type!r}; it must be {' or '.join(types)}."
            raise ApiError(said, param=f"{at}.type")
        for name in _NEEDS.get(block.type, ()):
            if getattr(block, name) is None:
                raise ApiError(f"{at}.{name} is missing.", param=f"{at}.{name}")
        if isinstance(block.content, list):
            check_blocks(block.content, f"{at}.content", TEXT_TYPES)
