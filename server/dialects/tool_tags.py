"""Tool tags: calls that are written with one tag a parameter.

Owns the reader of that kind (a tool_bodies.Body) and its three notations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .tool_bodies import HEAD_CHARACTERS_MAX, Calls, NotACall, written


class TaggedNotation:
    """How a call with one tag a parameter is written.

    name: matches the tool's name (group 1). begin, key, between, close: what stands around a
    parameter's key (group 1 of `key`) and its value. end: what stands behind the call.
    """

    def __init__(
        self, *, name: str, begin: str, key: str, between: str, close: str, end: str
    ) -> None:
        """name and key are patterns, the others texts; white space may follow each of them."""
        opened = rf"{re.escape(begin)}({key})\s*{between}"
        self.name = re.compile(name + r"\s*")
        self.opened = re.compile(opened)
        self.parameter = re.compile(f"{opened}(.*?){close}\\s*", re.DOTALL)
        self.begin, self.close, self.end = begin, close, end


FUNCTION_TAGS = TaggedNotation(
    name=r"([^<>\s]+)>",
    begin="<parameter=",
    key="[^<>]+",
    between=">",
    close="</parameter>",
    end="</function>",
)
INVOKE_TAGS = TaggedNotation(
    name=r'([^<>"]+)">',
    begin='<parameter name="',
    key='[^<>"]+',
    between='">',
    close="</parameter>",
    end="</invoke>",
)
ARGUMENT_TAGS = TaggedNotation(
    name=r"\s*([^<>\s]+)(?=\s*<)",
    begin="<arg_key>",
    key="[^<>]+",
    between=r"</arg_key>\s*<arg_value>",
    close="</arg_value>",
    end="</tool_call>",
)


class TaggedCall:
    """One call whose parameters are tags. Each parameter is told when its tag is closed.

    A value is text; the tool's schema says whether it stands for something else.
    """

    def __init__(self, calls: Calls, notation: TaggedNotation) -> None:
        self._calls = calls
        self._notation = notation
        self._raw = ""
        self._schema: Mapping[str, Any] | None = None
        self._told = 0
        self._searched = 0
        """Characters in which no value ends: a long one is not searched again for each piece."""

    def feed(self, text: str) -> str | None:
        self._raw += text
        if self._schema is None and not self._take_name():
            return None
        self._raw = self._raw.lstrip()
        while self._value_closed() and (found := self._notation.parameter.match(self._raw)):
            self._raw, self._searched = self._raw[found.end() :], 0
            self._tell(found[1].strip(), found[2])
        return self._over()

    def _over(self) -> str | None:
        """The text behind the call, if it is over: at its end tag, or at what is no tag of it."""
        raw, notation = self._raw, self._notation
        if raw.startswith(notation.begin) or notation.begin.startswith(raw):
            return None
        if notation.end.startswith(raw) and raw != notation.end:
            return None
        self._calls.arguments("}" if self._told else "{}")
        return raw.removeprefix(notation.end)

    def finish(self) -> str:
        if self._schema is None:
            raise NotACall
        if found := self._notation.opened.match(self._raw):
            # As far as it came, as with JSON that is cut.
            self._tell(found[1].strip(), self._raw[found.end() :], whole=False)
            return ""
        return self._raw

    def _value_closed(self) -> bool:
        close = self._notation.close
        if self._raw.find(close, self._searched) >= 0:
            return True
        self._searched = max(0, len(self._raw) - len(close))
        return False

    def _take_name(self) -> bool:
        found = self._notation.name.match(self._raw)
        if found is None:
            if len(self._raw) >= HEAD_CHARACTERS_MAX:
                raise NotACall
            return False
        self._calls.begin(found[1])
        self._schema = self._calls.tools[found[1]]
        self._raw = self._raw[found.end() :]
        return True

    def _tell(self, key: str, said: str, *, whole: bool = True) -> None:
        schema = (self._schema or {}).get("properties", {}).get(key, {})
        value = _value_of(said, schema) if whole else said.removeprefix("\n")
        text = written(value)
        member = f"{written(key)}: {text if whole else text[:-1]}"
        self._calls.arguments((", " if self._told else "{") + member)
        self._told += 1


def _value_of(text: str, schema: Any) -> Any:
    """What a parameter's text stands for: itself where the schema allows a string, else JSON."""
    text = text.removeprefix("\n").removesuffix("\n")
    kinds = schema.get("type") if isinstance(schema, dict) else None
    if kinds == "string" or (isinstance(kinds, list) and "string" in kinds):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
