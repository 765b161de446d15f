"""Text: answer tokens to text that may be shown, with stop strings held back.

Used twice on the same tokens: on the engine's thread to see a stop string, and by each response to
cut the text there. Both come to the same end because both are this class.
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
        self._stop = tuple(text for text in stop if text)
        self._held = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        """Text that may be shown now; after a stop string, `stopped` is True and nothing follows."""
        if self.stopped:
            return ""
        return self._release(self._decoder.add(token))

    def finish(self) -> str:
        """The rest, once the answer ended for another reason."""
        if self.stopped:
            return ""
        shown = self._release(self._decoder.finish())
        shown, self._held = shown + ("" if self.stopped else self._held), ""
        return shown

    def _release(self, fresh: str) -> str:
        pending = self._held + fresh
        found = [at for at in (pending.find(text) for text in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return pending[: min(found)]
        keep = self._possible_start(pending)
        shown, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        return shown

    def _possible_start(self, pending: str) -> int:
        """Length of the longest tail of `pending` that some stop string begins with."""
        longest = max((len(text) for text in self._stop), default=1) - 1
        for length in range(min(longest, len(pending)), 0, -1):
            if any(text.startswith(pending[-length:]) for text in self._stop):
                return length
        return 0
