"""Stream: one request's way back, from the engine's thread to its HTTP response.

Owns the crossing of threads and the end of a request: `Answer` is closed on every way out, and
closing it before the engine said how it ended cancels it there, once.

completion_tokens counts the tokens that the engine delivered: an end token is none of them, the
token that completes a stop string is one. The engine delivers that token, for the text is cut here
(`TextStream`); tokens after it, if any, are neither shown nor counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect

from kernel.tokenizer import Detokenizer, Tokenizer

from .submission import CANCELLED, ERROR, LENGTH, STOP, EngineApi, Submission, Update
from .text import TextStream
from .wire import ApiError, PromptDetails, Usage

Receive = Callable[[], Awaitable[Any]]


class Answer:
    """One submitted request, as seen by the event loop that made it.

    The queue needs no bound of its own: the engine sends at most max_tokens updates and one end,
    however slowly the client reads.
    """

    def __init__(self, engine: EngineApi, tokenizer: Tokenizer, submission: Submission) -> None:
        """Submit it. Raises RequestRefused, EngineStopped."""
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[Update] = asyncio.Queue()
        self._text = TextStream(Detokenizer(tokenizer), submission.parameters.stop)
        self._open = True
        self._given_up = False
        self.prompt_tokens = len(submission.tokens)
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self.request = engine.submit(submission, self._sink)

    def _sink(self, update: Update) -> None:
        try:
            self._loop.call_soon_threadsafe(self._updates.put_nowait, update)
        except RuntimeError:  # the loop is closed: the server stopped, and nobody listens
            if not self._loop.is_closed():
                raise

    async def next_text(self) -> str:
        """Text of the next update, maybe empty; `finish_reason` is set with the last one.

        Raises ApiError (500, 503) where the engine failed or gave the request up.
        """
        update = await self._updates.get()
        text = self._take(update)
        if update.finish_reason is not None:
            text += self._end(update)
        return text

    async def whole_text(self) -> str:
        """All text, once the answer ended. Raises like `next_text`."""
        pieces = []
        while self.finish_reason is None:
            pieces.append(await self.next_text())
        return "".join(pieces)

    def _take(self, update: Update) -> str:
        if update.cached_tokens >= 0:
            self.cached_tokens = update.cached_tokens
        pieces = []
        for token in update.tokens:
            if self._text.stopped:
                break
            self.completion_tokens += 1
            pieces.append(self._text.feed(token))
        return "".join(pieces)

    def _end(self, update: Update) -> str:
        self._open = False
        if update.finish_reason not in (STOP, LENGTH):
            self.finish_reason = update.finish_reason
            raise _failure(update)
        text = self._text.finish()
        self.finish_reason = STOP if self._text.stopped else update.finish_reason
        return text

    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptDetails(self.cached_tokens),
        )

    @property
    def outcome(self) -> str:
        """How it ended, in one word: the finish reason, or who gave it up."""
        return self.finish_reason or (CANCELLED if self._given_up else "disconnected")

    def close(self) -> None:
        """Nobody listens any more: the engine is told, unless it ended the request itself."""
        if self._open:
            self._open = False
            self._engine.cancel(self.request)

    def give_up(self) -> None:
        """The server stops: cancel, and end the response without waiting for the engine."""
        if self._open:
            self._given_up = True
            self.close()
            self._updates.put_nowait(Update(self.request, finish_reason=CANCELLED))


def _failure(update: Update) -> ApiError:
    if update.finish_reason == ERROR:
        message = update.error or "The engine failed on this request."
        return ApiError(message, status=500, kind="server_error", code="engine_error")
    message = "The server gave this request up, for it is stopping; send it again later."
    return ApiError(message, status=503, kind="server_error", code="server_stopping")


async def while_connected(receive: Receive, work: Awaitable[Any]) -> Any:
    """`work`'s result; ClientDisconnect, with `work` cancelled, where the client goes first.

    Also where it goes in the same turn of the loop: a disconnect is told once, and nobody behind
    this would hear of it.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
