"""Headers: how large all headers of a request may be together.

Owns the exact limit. Hypercorn's own (listen.py) bounds what it buffers of headers that are not
whole yet, and lets pass what came at once.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from .error_shape import refusal
from .wire import ApiError

FRAMING_BYTES = 4
"""Of a header, beside its name and value, as HTTP/1.1 writes it."""


class HeaderLimit:
    """ASGI application around another: 431 above the limit."""

    def __init__(self, app: ASGIApp, bytes_max: int) -> None:
        self._app = app
        self._bytes_max = bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            size = sum(len(name) + len(value) + FRAMING_BYTES for name, value in scope["headers"])
            size += len(scope["raw_path"]) + len(scope["query_string"])
            if size > self._bytes_max:
                await refusal(_too_large(self._bytes_max), scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _too_large(bytes_max: int) -> ApiError:
    message = f"The headers are larger than {bytes_max} bytes, the most that this server takes."
    return ApiError(message, status=431, code="headers_too_large")
