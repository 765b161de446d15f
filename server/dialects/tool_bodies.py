"""Bodies of tool calls: what stands behind a format's opening marker, read piece by piece.

Owns the readers, one a kind of notation. A reader tells calls to a `Calls` and says where its
notation ends; it never sees what stands before or behind. Where the text cannot be a call of a
known tool it raises NotACall, which is allowed only before it told any call.

Arguments leave as the model wrote them once their call is known by name: nobody can take back what
was streamed. Only control characters inside of their strings are escaped, as JSON wants.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from .markers import Broken, JsonEnd
from .parts import Part, ToolCallArguments, ToolCallBegun

HEAD_CHARACTERS_MAX = 512
"""A call's name, and what stands around it, must fit in there."""


_HALF = re.compile("[\ud800-\udfff]")


class NotACall(Exception):
    """This text calls none of the tools; it is content."""


class Calls:
    """The calls of one answer, as they become known."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], new_id: Callable[[], str]) -> None:
        """tools: name -> JSON schema of the arguments."""
        self.tools = tools
        self._new_id = new_id
        self._begun = 0
        self._parts: list[Part] = []

    def begin(self, name: str) -> None:
        """Raises NotACall for a tool that was not offered."""
        if name not in self.tools:
            raise NotACall
        self._parts.append(ToolCallBegun(self._begun, self._new_id(), name))
        self._begun += 1

    def arguments(self, text: str) -> None:
        """The next piece of the arguments of the call that began last."""
        if text:
            self._parts.append(ToolCallArguments(self._begun - 1, text))

    def take(self) -> list[Part]:
        """The parts since the last time."""
        parts, self._parts = self._parts, []
        return parts


class Body(Protocol):
    """One reader of one notation."""

    def feed(self, text: str) -> str | None:
        """None where more may follow, else the text behind the end. Raises NotACall."""
        ...

    def finish(self) -> str:
        """No more text follows: what was read and told nobody. Raises NotACall."""
        ...


_KEYS = r"name|arguments|parameters|function|type|id"
_FIRST_KEY = re.compile(rf'\{{\s*(?:"(?:(?:{_KEYS})(?:"|$)|\w*$)|$)')
_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*"((?:[^"\\\x00-\x1f]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class JsonCalls:
    """{"name": ..., "arguments": {...}}, or several in an array or one after the other.

    `parameters` may stand for arguments, and a string that holds an object for the object. Streams
    where name and arguments come first and in this order; a call of another form is told whole.
    """

    def __init__(self, calls: Calls, close: str = "") -> None:
        """close: the marker behind the calls; with none they end where no call follows."""
        self._calls = calls
        self._close = close or "]"
        self._read: Callable[[str], str] = self._between
        self._told = False
        self._ended = False
        self._raw = ""
        """Of the call that is not told yet, or what may become the closing marker."""
        self._object = JsonEnd()

    def feed(self, text: str) -> str | None:
        while text and not self._ended:
            text = self._read(text)
        return text if self._ended else None

    def finish(self) -> str:
        if not self._told:
            raise NotACall
        return self._raw if self._read == self._in_call else ""

    def _over(self, text: str) -> str:
        """No call follows: `text` is behind the end."""
        if not self._told:
            raise NotACall
        self._ended = True
        return text

    def _between(self, text: str) -> str:
        """Before, behind and between calls."""
        text, self._raw = (self._raw + text).lstrip(), ""
        if text.startswith(self._close):
            return self._over(text[len(self._close) :])
        if self._close.startswith(text):
            self._raw = text
            return ""
        if text[0] == "{":
            self._object, self._read = JsonEnd(), self._in_call
            return text
        return text[1:] if text[0] in ",;[]" else self._over(text)

    def _in_call(self, text: str) -> str:
        """Until name and arguments are known, or the call is whole."""
        seen = self._raw + text
        try:
            early = len(self._raw) < HEAD_CHARACTERS_MAX
            if early and (head := _HEAD.match(seen, 0, HEAD_CHARACTERS_MAX)):
                self._begin(json.loads(f'"{head[1]}"'))
                self._object, self._read = JsonEnd(strict=False), self._in_arguments
                return seen[head.end() :]
            if early and not _FIRST_KEY.match(seen, 0, HEAD_CHARACTERS_MAX):
                raise NotACall
            _, rest = self._object.feed(text)
            self._raw = seen[: len(seen) - len(rest)]
            if self._object.ended:
                self._tell(self._raw)
        except (Broken, NotACall, ValueError):  # a ValueError is a name's bad escape
            return self._over(seen)
        return rest

    def _in_arguments(self, text: str) -> str:
        taken, rest = self._object.feed(text)
        self._calls.arguments(taken)
        if self._object.ended:
            self._object, self._read = JsonEnd(strict=False), self._behind_arguments
            self._object.feed("{")
        return rest

    def _behind_arguments(self, text: str) -> str:
        """The rest of a call whose arguments are told: its closing bracket, maybe an id."""
        _, rest = self._object.feed(text)
        if self._object.ended:
            self._read = self._between
        return rest

    def _begin(self, name: str) -> None:
        self._calls.begin(name)
        self._told, self._raw = True, ""

    def _tell(self, raw: str) -> None:
        name, arguments = _parse_call(raw)
        self._begin(name)
        self._calls.arguments(arguments)
        self._read = self._between


def _parse_call(raw: str) -> tuple[str, str]:
    """Name and JSON arguments of one whole call. Raises NotACall."""
    try:
        call = json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        raise NotACall from None
    if isinstance(call.get("function"), dict):
        call = call["function"]
    name = call.get("name", call.get("function"))
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}", strict=False)
        except (ValueError, RecursionError):
            raise NotACall from None
    if not isinstance(name, str) or not isinstance(arguments, dict | None):
        raise NotACall
    return name, written(arguments or {})


def written(value: Any) -> str:
    """JSON of `value`: readable, unless half a UTF-16 pair, which no UTF-8 can hold, is in it."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or not _HALF.search(text) else json.dumps(value)


class NamedCall:
    """A name, something between, and the JSON object of the arguments: one call."""

    def __init__(self, calls: Calls, head: re.Pattern[str], closers: Collection[str] = ()) -> None:
        """head: all before the object, the name its group 1; closers: what may stand behind it."""
        self._calls = calls
        self._head = head
        self._closers = closers
        self._raw = ""
        self._arguments: JsonEnd | None = None

    def feed(self, text: str) -> str | None:
        if self._arguments is None:
            self._raw += text
            begin = self._raw.find("{", 0, HEAD_CHARACTERS_MAX)
            if begin < 0 and len(self._raw) < HEAD_CHARACTERS_MAX:
                return None
            head = self._head.fullmatch(self._raw, 0, max(begin, 0))
            if head is None:
                raise NotACall
            self._calls.begin(head[1])
            text, self._raw, self._arguments = self._raw[begin:], "", JsonEnd(strict=False)
        if not self._arguments.ended:
            taken, text = self._arguments.feed(text)
            self._calls.arguments(taken)
        return self._behind(text) if self._arguments.ended else None

    def _behind(self, text: str) -> str | None:
        text, self._raw = (self._raw + text).lstrip(), ""
        for closer in self._closers:
            if text.startswith(closer):
                text = text.removeprefix(closer).lstrip()
        if any(closer.startswith(text) for closer in self._closers):
            self._raw = text
            return None
        return text

    def finish(self) -> str:
        if self._arguments is None:
            raise NotACall
        return ""
