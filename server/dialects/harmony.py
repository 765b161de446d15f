"""Harmony: answers in channels, as gpt-oss writes them.

Owns the splitter of that format: analysis is reasoning, final is content, commentary is content
or, where it is addressed to a function, a call. The prompt ends behind `<|start|>assistant`, so an
answer begins in the middle of a header. `<|return|>` and `<|call|>` end it and have no text.

    <|channel|>analysis<|message|>THOUGHT<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>JSON

Source: the harmony response format, cookbook.openai.com.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from .markers import Finder
from .parts import Part, Reasoning, Text, ToolCallArguments, ToolCallBegun

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
START, END, CONSTRAIN = "<|start|>", "<|end|>", "<|constrain|>"

_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


class HarmonySplitter:
    """See the module."""

    def __init__(self, names: Collection[str], new_id: Callable[[], str]) -> None:
        """names: the functions that may be called; a call of another one is content."""
        self._names = names
        self._new_id = new_id
        self._calls = 0
        self._finder = Finder([CHANNEL, MESSAGE, START, END, CONSTRAIN])
        self._raw = ""
        """The header so far, markers included; a message's body is never in it."""
        self._make: Callable[[str], Part] | None = None
        """Makes parts of the body's text; None inside of a header."""

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while True:
            cut = self._finder.feed(text)
            parts += self._take(cut.before)
            if not cut.marker:
                return parts
            parts += self._mark(cut.space, cut.marker)
            text = cut.rest

    def finish(self) -> list[Part]:
        parts = self._take(self._finder.finish())
        if self._make is None and CHANNEL not in self._raw and self._raw:
            parts.append(Text(self._raw))
        return parts

    def _take(self, text: str) -> list[Part]:
        if self._make is not None:
            return [self._make(text)] if text else []
        self._raw += text
        return []

    def _mark(self, space: str, marker: str) -> list[Part]:
        if self._make is None and marker == MESSAGE:
            return self._begin_body(self._raw + space)
        if marker in (START, END):
            self._make, self._raw = None, ""
            return []
        if self._make is None:
            self._raw += space + marker
            return []
        return self._take(space + marker)

    def _begin_body(self, header: str) -> list[Part]:
        channel = header.partition(CHANNEL)[2].split(maxsplit=1)
        recipient = _RECIPIENT.search(header)
        self._raw, self._make = "", Text
        if recipient and recipient[1] in self._names:
            return self._begin_call(recipient[1])
        if channel[:1] == ["analysis"]:
            self._make = Reasoning
        return []

    def _begin_call(self, name: str) -> list[Part]:
        index = self._calls
        self._calls += 1
        self._make = lambda text: ToolCallArguments(index, text)
        return [ToolCallBegun(index, self._new_id(), name)]
