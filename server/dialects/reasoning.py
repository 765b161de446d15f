"""Reasoning: what a model thinks before it answers, split from the answer.

Owns the markers that chat templates use for it, and how they are told: a template, or the added
tokens, must have them; a model's name says nothing. Never sees tools: what is no reasoning goes on
to another splitter. gpt-oss marks by channels instead (harmony.py).

A prompt may end with the opening marker already; then the answer begins as reasoning. What was
opened and never closed is reasoning. White space beside a marker belongs to the marker.
"""

from __future__ import annotations

from typing import NamedTuple

from kernel.tokenizer import Tokenizer

from .markers import Finder
from .parts import Part, Reasoning, Splitter


class ReasoningMarkers(NamedTuple):
    """The texts that open and close reasoning."""

    begin: str
    end: str

    def opened_by(self, prompt: str) -> bool:
        """Whether `prompt`, as the template made it, leaves reasoning open for the answer."""
        return prompt.rstrip().endswith(self.begin)


MARKERS = (
    ReasoningMarkers("<think>", "</think>"),
    ReasoningMarkers("[THINK]", "[/THINK]"),
    ReasoningMarkers("<seed:think>", "</seed:think>"),
    ReasoningMarkers("<longcat_think>", "</longcat_think>"),
    ReasoningMarkers("<|begin_of_thought|>", "<|end_of_thought|>"),
)


def reasoning_markers(tokenizer: Tokenizer) -> ReasoningMarkers | None:
    """The markers of this model's answers; None where it has none."""
    template = tokenizer.chat_template
    for markers in MARKERS:
        if any(text in template for text in markers):
            return markers
    for markers in MARKERS:
        if all(tokenizer.added_token(text) is not None for text in markers):
            return markers
    return None


class ReasoningSplitter:
    """Reasoning between the markers; the rest is for `inner` to split."""

    def __init__(self, markers: ReasoningMarkers, inner: Splitter, *, opened: bool = False) -> None:
        """opened: the prompt ended with the opening marker."""
        self._markers = markers
        self._inner = inner
        self._open(opened)
        self._fresh = opened

    def _open(self, inside: bool) -> None:
        self._inside = inside
        self._finder = Finder([self._markers.end if inside else self._markers.begin])
        self._fresh = True
        """Whether a marker was the last thing seen: white space after it belongs to it."""

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while True:
            cut = self._finder.feed(text)
            parts += self._split(cut.before)
            if not cut.marker:
                return parts
            self._open(not self._inside)
            text = cut.rest

    def finish(self) -> list[Part]:
        return [*self._split(self._finder.finish()), *self._inner.finish()]

    def _split(self, text: str) -> list[Part]:
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        if not text:
            return []
        return [Reasoning(text)] if self._inside else self._inner.feed(text)
