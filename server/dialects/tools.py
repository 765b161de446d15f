"""Tools: the functions that a request offers, and the splitter that sees them called.

Owns what may stand in a tool, the choice among them, and the way from a marker to a body's reader
and back. The notations are tool_bodies.py's, which of them a model uses is dialect.py's.

Text before, between and behind calls is content, without the white space beside markers. What
looks like a call and is none (a tool that was not offered, JSON that breaks before the name is
known) is content too, markers included: nothing is lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from msgspec import Struct

from ..http.wire import ApiError
from .markers import Finder
from .parts import Part, Splitter, Text, ToolCallBegun
from .tool_bodies import Body, Calls, NotACall

TOOLS_MAX = 128
SCHEMA_DEPTH_MAX = 100
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class Tool(Struct, frozen=True):
    """One function. `parameters`: a JSON schema of an object."""

    name: str
    description: str
    parameters: dict[str, Any]

    def for_template(self) -> dict[str, Any]:
        """As chat templates want it: OpenAI's shape."""
        function = {"name": self.name, "description": self.description}
        return {"type": "function", "function": {**function, "parameters": self.parameters}}


class ToolChoice(Struct, frozen=True):
    """none: no call; auto: as the model likes; required: one call at least, of `name` if given."""

    kind: Literal["none", "auto", "required"] = "auto"
    name: str = ""


AUTO = ToolChoice()


def check_tools(tools: Sequence[Tool], choice: ToolChoice, schema_key: str = "") -> None:
    """Raise ApiError (400) for tools, or a choice among them, that cannot be served.

    schema_key: the path from an entry of the body's `tools` to what holds name and schema, and
    `param` follows it: "function." for chat, empty where they stand in the entry itself.
    """
    if len(tools) > TOOLS_MAX:
        message = f"tools has {len(tools)} entries; at most {TOOLS_MAX} are allowed."
        raise ApiError(message, param="tools")
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        param = f"tools[{index}].{schema_key}name"
        if not _NAME.fullmatch(tool.name):
            raise ApiError(
                f"{param} is {tool.name[:80]!r}; it must have 1 to 64 letters, digits, _ or -.",
                param=param,
            )
        if tool.name in seen:
            raise ApiError(f"{param} is {tool.name!r}, as an earlier tool's is.", param=param)
        seen.add(tool.name)
        _check_schema(tool.parameters, f"tools[{index}].{schema_key}")
    if choice.kind == "required" and not tools:
        raise ApiError("tool_choice asks for a call, but there are no tools.", param="tool_choice")
    if choice.name and choice.name not in seen:
        raise ApiError(f"tool_choice names {choice.name!r}, no tool of these.", param="tool_choice")


def _check_schema(schema: dict[str, Any], where: str) -> None:
    if _depth(schema) > SCHEMA_DEPTH_MAX:
        param = where.rstrip(".")
        raise ApiError(
            f"The schema of {param} is nested more than {SCHEMA_DEPTH_MAX} deep.", param=param
        )
    if schema.get("type", "object") != "object":
        raise ApiError(
            f"The schema of {where.rstrip('.')} is of type {schema['type']!r}; arguments are an "
            "object.",
            param=where.rstrip("."),
        )


def _depth(schema: object) -> int:
    """How deep objects and arrays are nested in it."""
    depth, level = 0, [schema]
    while level := [
        inner
        for value in level
        if isinstance(value, dict | list)
        for inner in (value.values() if isinstance(value, dict) else value)
    ]:
        depth += 1
    return depth


class ToolSplitter:
    """Content and calls, by a marker before each call (or each group of them)."""

    def __init__(
        self,
        begin: Sequence[str],
        noise: Sequence[str],
        body: Callable[[Calls], Body],
        calls: Calls,
        *,
        bare: bool = False,
    ) -> None:
        """begin: markers that a body follows; noise: markers that mean nothing by themselves.

        bare: an answer that begins with { is tried as a body, without a marker.
        """
        self._begin = frozenset(begin)
        self._finder = Finder([*begin, *noise])
        self._new_body = body
        self._calls = calls
        self._body: Body | None = None
        self._raw: list[str] = []
        """What the body read, its marker first."""
        self._bare = bare
        self._fresh = False

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while True:
            if self._bare and self._body is None:
                text = self._try_bare(text)
            if self._body is not None:
                rest = self._read_body(self._body, text, parts)
                if rest is None:
                    return parts
                text = rest
            cut = self._finder.feed(text)
            parts += self._content(cut.before)
            if not cut.marker:
                return parts
            text = cut.rest
            if cut.marker in self._begin:
                self._open(cut.space + cut.marker)
            self._fresh = True

    def finish(self) -> list[Part]:
        if self._body is None:
            return self._content(("".join(self._raw)) + self._finder.finish())
        body, self._body = self._body, None
        try:
            rest = body.finish()
        except NotACall:
            rest, self._fresh = "".join(self._raw), False
        return [*self._calls.take(), *self._content(rest)]

    def _open(self, marker: str) -> None:
        self._body, self._raw = self._new_body(self._calls), [marker]

    def _try_bare(self, text: str) -> str:
        """At the answer's beginning: open a body at {, give the question up at anything else."""
        text = "".join(self._raw) + text
        self._raw = []
        if not text.strip():
            self._raw = [text]
            return ""
        self._bare = False
        if text.lstrip()[0] == "{":
            self._open(text[: len(text) - len(text.lstrip())])
            return text.lstrip()
        return text

    def _read_body(self, body: Body, text: str, parts: list[Part]) -> str | None:
        """The text behind the body's end; None where it has not come yet."""
        self._raw.append(text)
        try:
            rest = body.feed(text)
        except NotACall:
            # Its marker is content, and what followed may hold a true one.
            parts += self._not_a_call(self._raw[0])
            rest = "".join(self._raw[1:])
        parts += self._calls.take()
        if rest is not None:
            self._body, self._raw = None, []
        return rest

    def _not_a_call(self, marker: str) -> list[Part]:
        self._fresh = False
        return self._content(marker)

    def _content(self, text: str) -> list[Part]:
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        return [Text(text)] if text else []


class OneCall:
    """parallel_tool_calls false: what comes after the first call is left out."""

    def __init__(self, inner: Splitter) -> None:
        self._inner = inner
        self._over = False

    def feed(self, text: str) -> list[Part]:
        return [] if self._over else self._until_second(self._inner.feed(text))

    def finish(self) -> list[Part]:
        return [] if self._over else self._until_second(self._inner.finish())

    def _until_second(self, parts: list[Part]) -> list[Part]:
        for at, part in enumerate(parts):
            if isinstance(part, ToolCallBegun) and part.index:
                self._over = True
                return parts[:at]
        return parts
