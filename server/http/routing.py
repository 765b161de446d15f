"""Routing: what the handlers of all routes share: the desk, a bounded read of a body, ids, JSON."""

from __future__ import annotations

import uuid
from typing import cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .desk import Desk
from .wire import ApiError


def desk_of(request: Request) -> Desk:
    """The application's desk."""
    return cast(Desk, request.app.state.desk)


def response_id(request: Request, prefix: str) -> str:
    """A response's id, which is also the request's on tape: the prefix and the request id."""
    known = getattr(request.state, "request_id", None)
    return prefix + (known if isinstance(known, str) else uuid.uuid4().hex)


async def read_body(request: Request, bytes_max: int) -> bytes:
    """The body, of `bytes_max` at most. Raises ApiError (413), ClientDisconnect."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > bytes_max:
        raise _too_large(bytes_max)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > bytes_max:
            raise _too_large(bytes_max)
    return bytes(body)


def _too_large(bytes_max: int) -> ApiError:
    message = f"The body is larger than {bytes_max} bytes, the most that this server takes."
    return ApiError(message, status=413, code="request_too_large")


def json_response(body: object, status: int = 200) -> Response:
    """A struct, or what is made of plain values, as JSON."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")
