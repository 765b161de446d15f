"""App: the HTTP routes over an engine, and their refusals in OpenAI's shape.

Owns routes, the bounded read of a body, and error handlers. Never decodes a token.
"""

from __future__ import annotations

import time
import uuid
from typing import cast

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from kernel.tokenizer import Tokenizer

from . import wire
from .desk import Desk
from .guard import Guard
from .replies import Exchange, Unheard
from .settings import Settings
from .submission import EngineApi
from .wire import ApiError

log = structlog.get_logger()


def create_app(
    engine: EngineApi, tokenizer: Tokenizer, model_name: str, settings: Settings
) -> Starlette:
    """The application; `app.state.desk` is its Desk. The engine must run already."""
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/models", list_models),
            Route("/v1/models/{name:path}", get_model),
            Route("/health", health),
        ],
        exception_handlers={
            ApiError: _refused,
            HTTPException: _no_route,
            Exception: _internal_error,
        },
    )
    app.router.redirect_slashes = False
    app.state.desk = Desk(engine, tokenizer, model_name, settings)
    app.middleware_stack = Guard(app.build_middleware_stack())
    return app


def _desk(request: Request) -> Desk:
    return cast(Desk, request.app.state.desk)


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    desk, started_s = _desk(request), time.monotonic()
    try:
        body = await read_body(request, desk.max_body_bytes)
    except ClientDisconnect:
        return Unheard()
    external_id = f"chatcmpl-{uuid.uuid4().hex}"
    chat, answer = await desk.admit(body, external_id)
    exchange = Exchange(desk, answer, chat, external_id, started_s)
    return await exchange.respond(request.receive)


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


async def list_models(request: Request) -> Response:
    """GET /v1/models: the one model."""
    return _json(wire.ModelList([_desk(request).model]))


async def get_model(request: Request) -> Response:
    """GET /v1/models/NAME."""
    desk = _desk(request)
    desk.check_model(request.path_params["name"])
    return _json(desk.model)


async def health(request: Request) -> Response:
    """GET /health: 200 where requests are taken, else 503, with the engine's counts."""
    desk = _desk(request)
    running = "ok" if desk.engine.healthy else "engine stopped"
    state = "stopping" if desk.closing else running
    body = {"status": state, "model": desk.model.id, **desk.engine.status()}
    return _json(body, 200 if state == "ok" else 503)


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    log.info("refused", status=error.status, path=request.url.path, reason=str(error))
    return Response(error.body(), error.status, media_type="application/json")


async def _no_route(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    reasons = {404: f"There is no {path} here.", 405: f"{path} does not take {method}."}
    refusal = ApiError(reasons.get(error.status_code, error.detail), status=error.status_code)
    response = await _refused(request, refusal)
    response.headers.update(error.headers or {})
    return response


async def _internal_error(request: Request, error: Exception) -> Response:
    """500, without the reason: that is in the log (guard.py)."""
    message = "The server failed on this request; its log says why."
    failure = ApiError(message, status=500, kind="server_error", code="internal_error")
    return Response(failure.body(), failure.status, media_type="application/json")
