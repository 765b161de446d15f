"""Clients: who hears of which request, and the text of those that have stop strings.

Owns sinks and detokenisers, both of which are others' code: whichever raises loses its own request
(`lost`, cancels that the next step takes as inputs) and no other. Knows nothing of the pool.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from statemachine.records import RequestArrived, RequestCancelled

from .submission import ERROR, Sink, Update
from .text import IncrementalDecoder, TextStream

log = structlog.get_logger()


class Clients:
    """Sinks and texts by request, from arrival until the last update."""

    def __init__(self, decoder: Callable[[], IncrementalDecoder] | None) -> None:
        """`decoder` makes a detokeniser; without one, stop strings are not seen."""
        self._decoder = decoder
        self._sinks: dict[int, Sink] = {}
        self._texts: dict[int, TextStream] = {}
        self.lost: list[RequestCancelled] = []

    def __len__(self) -> int:
        return len(self._sinks)

    @property
    def reading(self) -> bool:
        """Whether the text of anyone's tokens is looked at."""
        return bool(self._texts)

    def add(self, record: RequestArrived, sink: Sink) -> None:
        """A request came in."""
        self._sinks[record.request] = sink
        if not record.parameters.stop or self._decoder is None:
            return
        try:
            self._texts[record.request] = TextStream(self._decoder(), record.parameters.stop)
        except Exception:
            self._lose(record.request, "its detokeniser could not be made")

    def take_lost(self) -> list[RequestCancelled]:
        """Requests that were lost since the last call, as inputs."""
        lost, self.lost = self.lost, []
        return lost

    def stopped(self, request: int, token: int) -> bool:
        """Feed a token to a request's text; whether a stop string is complete."""
        text = self._texts.get(request)
        if text is None:
            return False
        try:
            text.feed(token)
        except Exception:
            del self._texts[request]
            self._lose(request, "its tokens could not be turned into text")
            return False
        return text.stopped

    def tell(self, update: Update) -> None:
        """Hand news to a request's sink; nobody hears of a request after its end."""
        sink = self._sinks.get(update.request)
        if sink is None:
            return
        if update.finish_reason is not None:
            self._forget(update.request)
        try:
            sink(update)
        except Exception:
            self._forget(update.request)
            if update.finish_reason is None:
                self._lose(update.request, "its sink raised")

    def tell_all(self, reason: str, error: str) -> None:
        """Tell everybody that their request is over."""
        for request in sorted(self._sinks):
            self.tell(Update(request, (), reason, error=error))

    def _forget(self, request: int) -> None:
        self._sinks.pop(request, None)
        self._texts.pop(request, None)

    def _lose(self, request: int, why: str) -> None:
        log.exception("request given up", request=request, why=why)
        self.lost.append(RequestCancelled(request, ERROR))
