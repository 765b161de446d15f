"""Parts: what the text of an answer is made of, once a model's own markers are read.

Owns the types and the splitter that reads no markers. reasoning.py and tools.py have the others.
Never sees tokens, the engine or a socket.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from msgspec import Struct


class Text(Struct, frozen=True, tag=True):
    """Content: what the user reads. Never empty."""

    text: str


class Reasoning(Struct, frozen=True, tag=True):
    """What the model thought before its answer. Never empty."""

    text: str


class ToolCallBegun(Struct, frozen=True, tag=True):
    """The answer calls a tool. `index` counts the answer's calls from 0; `id` is our own."""

    index: int
    id: str
    name: str


class ToolCallArguments(Struct, frozen=True, tag=True):
    """A piece of the JSON text of the arguments of call `index`. Never empty.

    Joined, the pieces of a call are exactly one JSON object. They come before the next call begins.
    """

    index: int
    json: str


Part = Text | Reasoning | ToolCallBegun | ToolCallArguments


class Splitter(Protocol):
    """Reads the text of one answer, piece by piece, wherever the pieces are cut.

    What the pieces say when joined never depends on the cuts. Belongs to one answer; never shared.
    """

    def feed(self, text: str) -> list[Part]:
        """The parts that `text` completes; what may yet become a marker is held back."""
        ...

    def finish(self) -> list[Part]:
        """The answer is over: what was held back."""
        ...


class PlainSplitter:
    """All text is content."""

    def feed(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        return []


class ToolCall(Struct, frozen=True):
    """A whole call. `arguments` is JSON text, an object."""

    id: str
    name: str
    arguments: str


class Whole(Struct, frozen=True):
    """An answer's parts, joined by kind. `calls` in their order."""

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]


def join(parts: Iterable[Part]) -> Whole:
    """The whole answer that `parts` (all of one answer, in order) make."""
    text: list[str] = []
    reasoning: list[str] = []
    begun: list[ToolCallBegun] = []
    arguments: list[list[str]] = []
    for part in parts:
        match part:
            case Text():
                text.append(part.text)
            case Reasoning():
                reasoning.append(part.text)
            case ToolCallBegun():
                begun.append(part)
                arguments.append([])
            case ToolCallArguments():
                arguments[part.index].append(part.json)
    calls = zip(begun, arguments, strict=True)
    return Whole(
        "".join(text),
        "".join(reasoning),
        tuple(ToolCall(call.id, call.name, "".join(pieces)) for call, pieces in calls),
    )
