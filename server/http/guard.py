"""Guard: the outermost layer of the application, around every route.

Owns two things that no route can do for itself. A response that is sent before its request's body
was read (404, 413) keeps reading and throws away, up to a bound: otherwise the server's full queue
would block the connection for ever, and closing it at once would take the response from a client
that is still sending. And an exception that no route caught ends in the log, in one place.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LINGER_BYTES_MAX = 64 * 2**20
LINGER_S_MAX = 5.0

log = structlog.get_logger()


class Guard:
    """ASGI application around another; see the module."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive)
        try:
            await self._app(scope, body.receive, _Response(body, send).send)
        except Exception:
            # Starlette sent a 500 in our shape (`app.internal_error`) before it raised this.
            log.exception("unhandled", path=scope["path"])


async def _lifespan(receive: Receive, send: Send) -> None:
    """Nothing to start, nothing to end; and unlike Starlette's, it can be cancelled quietly."""
    while True:
        phase = (await receive())["type"]
        await send({"type": f"{phase}.complete"})
        if phase == "lifespan.shutdown":
            return


class _Body:
    """A request's body, and whether its end was seen."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.ended = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            self.ended = True
        return message

    async def discard(self, bytes_max: int) -> None:
        """Read and drop up to the end of the body, or a little over `bytes_max`."""
        discarded = 0
        while not self.ended and discarded <= bytes_max:
            discarded += len((await self.receive()).get("body", b""))

    async def discard_all(self) -> None:
        """Read and drop until cancelled."""
        while True:
            await self._receive()


class _Response:
    """The way out: holds the end of a response back until its request's body was thrown away."""

    def __init__(self, body: _Body, send: Send) -> None:
        self._body = body
        self._send = send

    async def send(self, message: Message) -> None:
        if (
            message["type"] != "http.response.body"
            or message.get("more_body", False)
            or self._body.ended
        ):
            await self._send(message)
            return
        await self._send({**message, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S_MAX):
                await self._body.discard(LINGER_BYTES_MAX)
        # Ending the response puts one more message into the queue: somebody must take it.
        taking = asyncio.ensure_future(self._body.discard_all())
        try:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
