"""TokenLog: a request's tokens, prompt first, in chunks that versions share.

Appending a token makes a new log at a cost that does not grow with the context: every view of the
scheduler keeps its own version. Never knows what a token is for.
"""

from __future__ import annotations

from msgspec import Struct

CHUNK_TOKENS = 32
"""Appending copies at most this many references, and once a chunk the references to all chunks."""


class TokenLog(Struct, frozen=True, gc=False):
    """`prompt`, then full `chunks` of CHUNK_TOKENS, then the `tail`; `length` counts all."""

    prompt: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...] = ()
    tail: tuple[int, ...] = ()
    length: int = 0

    def __len__(self) -> int:
        return self.length

    def append(self, token: int) -> TokenLog:
        """The log with one token more."""
        tail = (*self.tail, token)
        if len(tail) == CHUNK_TOKENS:
            return TokenLog(self.prompt, (*self.chunks, tail), (), self.length + 1)
        return TokenLog(self.prompt, self.chunks, tail, self.length + 1)

    def last(self) -> int:
        """The newest token. The log must not be empty."""
        if self.tail:
            return self.tail[-1]
        return self.chunks[-1][-1] if self.chunks else self.prompt[-1]

    def slice(self, first: int, end: int) -> tuple[int, ...]:
        """Tokens [first, end); costs end - first, and what is prompt is not copied twice."""
        split = len(self.prompt)
        if end <= split:
            return self.prompt[first:end]
        parts = [self.prompt[first:split]] if first < split else []
        first, end = max(first - split, 0), end - split
        for number in range(first // CHUNK_TOKENS, -(-end // CHUNK_TOKENS)):
            start = number * CHUNK_TOKENS
            chunk = self.chunks[number] if number < len(self.chunks) else self.tail
            parts.append(chunk[max(first - start, 0) : end - start])
        return tuple(token for part in parts for token in part)

    def output(self) -> tuple[int, ...]:
        """The tokens after the prompt."""
        return self.slice(len(self.prompt), self.length)


def log_of(prompt: tuple[int, ...], output: tuple[int, ...] = ()) -> TokenLog:
    """A log that holds a prompt and an answer's tokens so far."""
    full = len(output) // CHUNK_TOKENS * CHUNK_TOKENS
    starts = range(0, full, CHUNK_TOKENS)
    chunks = tuple(output[start : start + CHUNK_TOKENS] for start in starts)
    return TokenLog(prompt, chunks, output[full:], len(prompt) + len(output))
