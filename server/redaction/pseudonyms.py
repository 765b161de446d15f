"""Pseudonyms: numbers and words in the place of tokens, names and texts, from a secret key.

A row's number is a keyed hash of all tokens up to it and of its namespace: two rows have the same
one where their prefixes are the same, and nothing is told of which token stands where, or how
often. Where a scheduler looks guesses up in a text, equal tokens of a namespace must stay equal;
then (`repeats`) a row's number is a keyed hash of its token alone. Without the key (BLAKE2b, RFC
7693) none of it can be worked out, nor compared with that of another key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

from statemachine.events import Namespace

from ..submission import CANCELLED, ERROR, LENGTH, STOP

KEY_BYTES = 32
ROOTS_KEPT = 1024
REASONS = frozenset(("", STOP, LENGTH, CANCELLED, ERROR, "diverged"))
"""The server's own words for an end; another one may be anybody's."""
_FOLDERS = re.compile(r"[^\s=:,;()'\"]*/")


class Pseudonyms:
    """See the module. Numbers are unsigned and have 64 bits; equal ones in, equal ones out."""

    def __init__(self, key: bytes, repeats: bool) -> None:
        """`key`: 1 to 64 bytes."""
        self.repeats = repeats
        self._key = key
        self.root = lru_cache(ROOTS_KEPT)(self._root)

    def _root(self, space: Namespace) -> int:
        """What the first row of a namespace builds on."""
        data = f"{len(space.adapter)}:{space.adapter}{space.version}:{space.salt}".encode()
        return self._number(b"root", data)

    def row(self, root: int, before: int, token: int, end: bool = False) -> int:
        """A row's number; `before`: that of the row before it, or the root. `end`: the token ends
        its request, and must be found among its end tokens.
        """
        if self.repeats:
            return self._number(b"token", _bytes(root) + _bytes(token))
        if end:
            return self._number(b"end", _bytes(root) + _bytes(token))
        return self._number(b"row", _bytes(before) + _bytes(token))

    def rows(self, root: int, before: int, tokens: Iterable[int]) -> tuple[int, ...]:
        """The numbers of rows that follow each other."""
        found = []
        for token in tokens:
            before = self.row(root, before, token)
            found.append(before)
        return tuple(found)

    def end(self, root: int, token: int) -> int:
        """An end token of a request."""
        return self.row(root, root, token, end=True)

    def number(self, kind: str, *values: int) -> int:
        """A number for something else that tells of tokens."""
        return self._number(kind.encode(), b"".join(_bytes(it) for it in values))

    def text(self, kind: str, text: str) -> str:
        """A word for a text; "" stays."""
        return f"{kind}-{self._number(kind.encode(), text.encode()):016x}" if text else ""

    def reason(self, text: str) -> str:
        """Why something ended."""
        return text if text in REASONS else self.text("reason", text)

    def namespace(self, space: Namespace) -> Namespace:
        """Adapter and salt as words."""
        return Namespace(
            self.text("adapter", space.adapter), space.version, self.text("salt", space.salt)
        )

    def _number(self, kind: bytes, data: bytes) -> int:
        hashed = blake2b(data, digest_size=8, key=self._key, person=kind[:16])
        return int.from_bytes(hashed.digest(), "little")


def without_folders(text: str) -> str:
    """A text whose paths are cut to their last part."""
    return _FOLDERS.sub("", text)


def _bytes(number: int) -> bytes:
    return (number & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little")
