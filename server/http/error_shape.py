"""Error shape: an ApiError as bytes, in the shape that the clients of a path know.

Anthropic's under /v1/messages, OpenAI's elsewhere. Owns both shapes of an error, as a response and
as an event of a stream; never decides what is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct
from starlette.responses import Response
from starlette.types import Scope

from .wire import ApiError

ANTHROPIC = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Others are invalid_request_error below 500, api_error from there on (Anthropic, "Errors")."""


class RefusalDetails(Struct):
    """What was wrong. param: the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class Refusal(Struct):
    """A refusal in OpenAI's shape (ApiError.body)."""

    error: RefusalDetails


class AnthropicDetails(Struct):
    """What was wrong."""

    type: str
    message: str


class AnthropicRefusal(Struct):
    """A refusal in Anthropic's shape."""

    error: AnthropicDetails
    request_id: str | None
    type: str = "error"


def refusal(error: ApiError, scope: Scope, headers: Mapping[str, str] | None = None) -> Response:
    """The response; `scope` is the request's."""
    body = error_body(error, scope)
    return Response(body, error.status, headers, media_type="application/json")


def error_event(error: ApiError, scope: Scope) -> bytes:
    """One server-sent event that ends a stream; Anthropic's events have names."""
    name = b"event: error\n" if _anthropic(scope) else b""
    return name + b"data: " + error_body(error, scope) + b"\n\n"


def error_body(error: ApiError, scope: Scope) -> bytes:
    """JSON, in the shape of the path."""
    if not _anthropic(scope):
        return error.body()
    usual = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(error.status, usual)
    request_id = scope.get("state", {}).get("request_id")
    body = AnthropicRefusal(AnthropicDetails(kind, str(error)), request_id)
    return msgspec.json.encode(body)


def _anthropic(scope: Scope) -> bool:
    path: str = scope["path"]
    return path == ANTHROPIC or path.startswith(ANTHROPIC + "/")
