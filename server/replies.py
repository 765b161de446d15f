"""Replies: an answer as one JSON body, or as a stream of server-sent events.

Owns the order of chunks (role, content, finish_reason, usage where asked for, [DONE]) and the one
log line of each request. On every way out the desk is told that the answer is over.

The status is sent with the first token, so that a request which fails before it gets a status of
its own; one that fails later gets an error event, and no [DONE].
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import msgspec
import structlog
from msgspec import UNSET
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from . import wire
from .desk import Desk
from .stream import Answer, while_connected
from .wire import ApiError

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"

log = structlog.get_logger()


class Unheard(Response):
    """No response at all: the client has gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return


class Exchange:
    """One admitted request and its response."""

    def __init__(
        self,
        desk: Desk,
        answer: Answer,
        request: wire.ChatRequest,
        external_id: str,
        started_s: float,
    ) -> None:
        self._desk = desk
        self._answer = answer
        self._request = request
        self._id = external_id
        self._started_s = started_s
        self._created = int(time.time())

    async def respond(self, receive: Receive) -> Response:
        """Wait for the answer, or for its beginning if it is streamed. Raises ApiError."""
        answer = self._answer
        work = answer.next_text() if self._request.stream else answer.whole_text()
        streaming = False
        try:
            text = await while_connected(receive, work)
            if self._request.stream:
                streaming = True
                return EventStream(self, text)
            return self._completion(text)
        except ClientDisconnect:
            return Unheard()
        finally:
            if not streaming:
                self.end()

    def _completion(self, text: str) -> Response:
        assert self._answer.finish_reason is not None
        body = wire.Completion(
            id=self._id,
            created=self._created,
            model=self._desk.model.id,
            choices=[wire.Choice(wire.AnswerMessage(text), self._answer.finish_reason)],
            usage=self._answer.usage(),
        )
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def events(self, text: str) -> AsyncIterator[bytes]:
        """The stream's bytes, event by event; `text` is what came with the first update."""
        yield self._delta(wire.Delta(role="assistant", content=""))
        try:
            while True:
                if text:
                    yield self._delta(wire.Delta(content=text))
                if self._answer.finish_reason is not None:
                    break
                text = await self._answer.next_text()
        except ApiError as error:
            yield _event(error.body())
            return
        except Exception:
            log.exception("stream failed", id=self._id)
            message = "The server failed in the middle of this answer; its log says why."
            yield _event(ApiError(message, kind="server_error", code="internal_error").body())
            return
        yield self._delta(wire.Delta(), self._answer.finish_reason)
        if self._request.include_usage:
            yield self._chunk([], self._answer.usage())
        yield DONE

    def _delta(self, delta: wire.Delta, finish_reason: str | None = None) -> bytes:
        usage = None if self._request.include_usage else UNSET
        return self._chunk([wire.ChunkChoice(delta, finish_reason)], usage)

    def _chunk(
        self, choices: list[wire.ChunkChoice], usage: wire.Usage | msgspec.UnsetType | None
    ) -> bytes:
        chunk = wire.Chunk(self._id, self._created, self._desk.model.id, choices, usage=usage)
        return _event(msgspec.json.encode(chunk))

    def end(self) -> None:
        """The response is over, in whatever way: tell the desk, write the log line."""
        answer = self._answer
        self._desk.leave(answer)
        log.info(
            "chat",
            id=self._id,
            request=answer.request,
            prompt=answer.prompt_tokens,
            cached=answer.cached_tokens,
            tokens=answer.completion_tokens,
            finish=answer.outcome,
            ms=round((time.monotonic() - self._started_s) * 1000),
        )


class EventStream(StreamingResponse):
    """A streamed answer: whichever way it ends (client gone, too), the exchange ends."""

    def __init__(self, exchange: Exchange, text: str) -> None:
        self._exchange = exchange
        events = exchange.events(text)
        super().__init__(events, headers=STREAM_HEADERS, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except ClientDisconnect:
            pass
        finally:
            self._exchange.end()


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
