"""Text: answer tokens to text that may be shown, with stop strings held back.

Used twice on the same tokens: on the engine's thread to see a stop string, and by each response to
cut the text there. Both come to the same end because both are this class.

The stop string that is complete first wins (of two that end together, the longer one), so that the
text does not depend on how it was cut into tokens. One pass, a few steps a character: stop strings
are matched by automata (Knuth, Morris, Pratt), never by searching what was held back again.
"""

from __future__ import annotations

from typing import Protocol


class IncrementalDecoder(Protocol):
    """Turns tokens to text piece by piece (kernel.tokenizer.Detokenizer)."""

    def add(self, token: int) -> str:
        """The new text that `token` completes; never half a character."""

    def finish(self) -> str:
        """The tail, once no token follows."""


class TextStream:
    """Text of one answer. `text_out` so far never contains, nor will be followed by, a stop string.

    A tail that could still become a stop string is held back until it does or cannot any more.
    """

    def __init__(self, decoder: IncrementalDecoder, stop: tuple[str, ...] = ()) -> None:
        self._decoder = decoder
        self._matchers = [_Matcher(text) for text in stop if text]
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that was complete first."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was complete."""
        return self.stopped_by is not None

    @property
    def held(self) -> int:
        """Characters that are held back."""
        return len(self._held)

    def feed(self, token: int) -> str:
        """Text that may be shown now; none after a stop string, when `stopped` is True."""
        if self.stopped:
            return ""
        return self._release(self._decoder.add(token))

    def finish(self) -> str:
        """The rest, once the answer ended for another reason."""
        if self.stopped:
            return ""
        shown = self._release(self._decoder.finish())
        shown, self._held = shown + self._held, ""
        return shown

    def _release(self, fresh: str) -> str:
        if not self._matchers:
            return fresh
        pending = self._held + fresh
        for end, character in enumerate(fresh, start=len(self._held) + 1):
            complete = [m.length for m in self._matchers if m.advance(character)]
            if complete:
                start = end - max(complete)
                self.stopped_by, self._held = pending[start:end], ""
                return pending[:start]
        shown_end = len(pending) - max(matcher.matched for matcher in self._matchers)
        self._held = pending[shown_end:]
        return pending[:shown_end]


class _Matcher:
    """How much of one stop string the text so far ends with: `matched` characters."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._shorter = _shorter_borders(text)
        self.length = len(text)
        self.matched = 0

    def advance(self, character: str) -> bool:
        """Take the next character; True where it completes the stop string."""
        while self.matched and self._text[self.matched] != character:
            self.matched = self._shorter[self.matched - 1]
        if self._text[self.matched] == character:
            self.matched += 1
        return self.matched == self.length


def _shorter_borders(text: str) -> list[int]:
    """For each prefix of `text`: length of its longest proper prefix that is also its suffix."""
    borders, length = [0] * len(text), 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = borders[length - 1]
        length += text[index] == text[length]
        borders[index] = length
    return borders
