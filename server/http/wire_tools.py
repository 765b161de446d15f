"""Tools in chat bodies: what offers, forces and carries calls, in OpenAI's shapes.

Never touches the engine, a tokenizer or a socket.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from ..dialects.parts import ToolCall
from ..dialects.tools import AUTO, Tool, ToolChoice
from .wire import ApiError


class FunctionDefinition(Struct):
    """A function that may be called; without parameters it takes none."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolDefinition(Struct):
    """An entry of `tools`; only functions are served."""

    type: str
    function: FunctionDefinition | None = None


class FunctionCall(Struct):
    """What is called. arguments: JSON text."""

    name: str
    arguments: str


class MessageCall(Struct):
    """An entry of a message's `tool_calls`."""

    function: FunctionCall
    id: str
    type: str = "function"


class FunctionDelta(Struct, omit_defaults=True):
    """What a chunk adds to a call."""

    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(Struct, omit_defaults=True):
    """What a chunk adds to call `index`; only its first one has id, type and name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


def message_call(call: ToolCall) -> MessageCall:
    """A whole call of an answer."""
    return MessageCall(FunctionCall(call.name, call.arguments), call.id)


def tools_of(definitions: list[ToolDefinition] | None) -> list[Tool]:
    """The tools that a body offers. Raises ApiError (400)."""
    found = []
    for index, definition in enumerate(definitions or ()):
        if definition.type != "function" or definition.function is None:
            raise ApiError(
                f"tools[{index}] is of type {definition.type!r}; this server takes functions, as "
                '{"type": "function", "function": {...}}.',
                param=f"tools[{index}].type",
            )
        function = definition.function
        found.append(tool_of(function.name, function.description, function.parameters))
    return found


def tool_of(name: str, description: str | None, schema: dict[str, Any] | None) -> Tool:
    """A tool; without a schema it takes no arguments."""
    return Tool(name, description or "", schema or {"type": "object", "properties": {}})


def choice_of(given: Any, *, nested: bool = True) -> ToolChoice:
    """The choice that a body makes. Raises ApiError (400).

    nested: a function is named as {"type": "function", "function": {"name": ...}}, else as
    {"type": "function", "name": ...}.
    """
    match given:
        case None | "auto":
            return AUTO
        case "none" | "required":
            return ToolChoice(given)
        case {"type": "function", "function": {"name": str(name)}} if nested and name:
            return ToolChoice("required", name)
        case {"type": "function", "name": str(name)} if name and not nested:
            return ToolChoice("required", name)
    raise ApiError(
        "tool_choice must be none, auto, required, or an object that names a function.",
        param="tool_choice",
    )
