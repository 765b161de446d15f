"""Request id: every request has one, on its response, in its log lines and on the tape.

Owns the choice of an id (the client's, where it is sound, else a new one), the clock of a request,
and the one log line that is written when its response is over. Never reads a body. It is the
outermost layer, so that no response goes without an id.
"""

from __future__ import annotations

import logging
import re
import time
import uuid

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..logs import noted

HEADER = "x-request-id"
QUIET = ("/health", "/ready", "/metrics")
"""Asked every few seconds by machines: their lines are for the level debug."""

DISCONNECTED = 499
"""In the log only: the client had gone before its response began (nginx's number for it)."""

_SOUND = re.compile(r"[!-~]{1,128}")

log = structlog.get_logger()


class RequestIds:
    """ASGI application around another; leaves the id in scope["state"]["request_id"]."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(Headers(scope=scope))
        scope.setdefault("state", {})["request_id"] = request_id
        started_s, status = time.monotonic(), DISCONNECTED

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id), noted() as notes:
            try:
                await self._app(scope, receive, named)
            finally:
                log.log(
                    _level(scope["path"], status),
                    "request",
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    ms=round((time.monotonic() - started_s) * 1000),
                    **notes,
                )


def request_id_of(headers: Headers) -> str:
    """The client's id where it is 1 to 128 printable ASCII characters, without a space."""
    given = headers.get(HEADER, "")
    return given if _SOUND.fullmatch(given) else uuid.uuid4().hex


def _level(path: str, status: int) -> int:
    """Debug where nobody wants to read it, warning for our own failures."""
    if status >= 500:
        return logging.WARNING
    return logging.DEBUG if path in QUIET and status == 200 else logging.INFO
