"""Markers: finding them in a text that comes in pieces, and where a JSON value ends in one.

Knows no format and makes no parts. Every result depends on the text alone, never on its cuts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import NamedTuple


class Cut(NamedTuple):
    """Text up to a marker. Joined, the four are the text that was fed; `space` stands before the
    marker and belongs to it. Without a marker (empty) there is neither space nor rest.
    """

    before: str
    space: str = ""
    marker: str = ""
    rest: str = ""


class Finder:
    """Finds the first of some markers; holds back what may yet become one, and space before it."""

    def __init__(self, markers: Iterable[str]) -> None:
        """No marker may be the beginning of another one."""
        self._markers = tuple(markers)
        self._pattern = re.compile("|".join(map(re.escape, self._markers)))
        self._first = re.compile("|".join({re.escape(marker[0]) for marker in self._markers}))
        self._longest = max(map(len, self._markers))
        self._held = ""

    def feed(self, text: str) -> Cut:
        """The text up to the next marker, or as much of it as is surely followed by none."""
        text, self._held = self._held + text, ""
        if found := self._pattern.search(text):
            before = text[: found.start()]
            shown = before.rstrip()
            return Cut(shown, before[len(shown) :], found[0], text[found.end() :])
        shown = text[: len(text) - self._begun(text)].rstrip()
        self._held = text[len(shown) :]
        return Cut(shown)

    def finish(self) -> str:
        """What was held back; no more text follows."""
        text, self._held = self._held, ""
        return text

    def _begun(self, text: str) -> int:
        """Length of the longest end of `text` with which a marker begins."""
        earliest = max(0, len(text) - self._longest + 1)
        for found in self._first.finditer(text, earliest):
            end = text[found.start() :]
            if any(marker.startswith(end) for marker in self._markers):
                return len(end)
        return 0


class Broken(Exception):
    """What was read cannot become JSON any more."""


_OUTSIDE = re.compile(r'["{}\[\]]|[^\s\d:,.+\-eEtrufalsn]')
_INSIDE = re.compile(r'["\\]')
_ESCAPES = {code: json.dumps(chr(code))[1:-1] for code in range(32)}


class JsonEnd:
    """Follows one JSON object (or array) to its end.

    Line breaks and other control characters inside of strings, which models write and JSON
    forbids, are escaped on the way.
    """

    def __init__(self, *, strict: bool = True) -> None:
        """strict: raise Broken at a character that no JSON has there."""
        self._strict = strict
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False
        self.ended = False

    def feed(self, text: str) -> tuple[str, str]:
        """(what of `text` is the value's, what comes after it). The value begins at once."""
        taken: list[str] = []
        at = 0
        while at < len(text) and not self.ended:
            start, inside = at, self._in_string
            at = self._to_quote(text, at) if inside else self._to_bracket(text, at)
            piece = text[start:at]
            taken.append(piece.translate(_ESCAPES) if inside else piece)
        return "".join(taken), text[at:]

    def _to_quote(self, text: str, at: int) -> int:
        """To the string's end, or past one escape."""
        if self._escaped:
            self._escaped = False
            return at + 1
        found = _INSIDE.search(text, at)
        if found is None:
            return len(text)
        self._escaped = found[0] == "\\"
        self._in_string = self._escaped
        return found.end()

    def _to_bracket(self, text: str, at: int) -> int:
        """To the next bracket or string."""
        found = _OUTSIDE.search(text, at)
        if found is None:
            return len(text)
        match found[0]:
            case '"':
                self._in_string = True
            case "{" | "[" as opener:
                self._closers.append("}" if opener == "{" else "]")
            case "}" | "]" as closer:
                opened = self._closers.pop() if self._closers else ""
                if self._strict and opened != closer:
                    raise Broken
                self.ended = not self._closers
            case _ if self._strict:
                raise Broken
        return found.end()
