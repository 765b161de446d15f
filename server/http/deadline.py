"""Deadline: how long a request may take, to arrive and in all.

Owns two clocks. A body that does not arrive in time is a 408, raised where it is read. A POST that
takes too long in all is cancelled, which gives its answers up in the engine, and gets a 504; a
stream that has begun gets an error event and ends. Other methods may take any time: a page's
events never end.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..logs import note
from .error_shape import error_event, refusal
from .wire import ApiError

LAST_WORDS_S = 1.0
"""A client that does not read gets no more time than this to take the error."""


class Deadline:
    """ASGI application around another; see the module. request_timeout_s 0: no limit."""

    def __init__(self, app: ASGIApp, request_timeout_s: float, body_timeout_s: float) -> None:
        self._app = app
        self._request_timeout_s = request_timeout_s
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = _Sent(send)
        body = _TimedBody(receive, self._body_timeout_s)
        limited = scope["method"] == "POST" and self._request_timeout_s > 0
        limit = asyncio.timeout(self._request_timeout_s if limited else None)
        try:
            async with limit:
                await self._app(scope, body.receive, sent.send)
        except TimeoutError:
            if not limit.expired():
                raise
            note(finish="timeout")
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._end(scope, receive, sent)

    async def _end(self, scope: Scope, receive: Receive, sent: _Sent) -> None:
        error = ApiError(
            f"The request took longer than {self._request_timeout_s:g} seconds, the most that "
            "this server gives one; ask for a shorter answer.",
            status=504,
            kind="timeout",
            code="timeout",
        )
        if sent.content_type is None:
            await refusal(error, scope)(scope, receive, sent.send)
        elif sent.content_type.startswith("text/event-stream") and not sent.ended:
            body = error_event(error, scope)
            await sent.send({"type": "http.response.body", "body": body, "more_body": False})


class _Sent:
    """The way out, and what went over it; content_type: None before the response began."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.content_type: str | None = None
        self.ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.content_type = Headers(raw=message["headers"]).get("content-type", "")
        elif message["type"] == "http.response.body":
            self.ended = not message.get("more_body", False)
        await self._send(message)


class _TimedBody:
    """A request's body; what comes after its end may take any time."""

    def __init__(self, receive: Receive, limit_s: float) -> None:
        self._receive = receive
        self._limit_s = limit_s
        self._until_s: float | None = asyncio.get_running_loop().time() + limit_s

    async def receive(self) -> Message:
        """Raises ApiError (408)."""
        try:
            async with asyncio.timeout_at(self._until_s):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(
                f"The body did not arrive within {self._limit_s:g} seconds; send it faster.",
                status=408,
                code="body_timeout",
            ) from None
        if message["type"] != "http.request" or not message.get("more_body", False):
            self._until_s = None
        return message
