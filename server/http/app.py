"""App: the HTTP routes over an engine, and their refusals in OpenAI's shape.

Owns the table of routes and the error handlers; each endpoint's handler is in a route_*.py. An
endpoint that answers goes the same way as all: a body's type (wire_*.py), an Ask made of it,
`desk.admit`, and a replies.Shape that writes what comes. Never decodes a token.
"""

from __future__ import annotations

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from kernel.tokenizer import Tokenizer

from ..logs import note
from ..settings import Settings
from ..submission import EngineApi
from .desk import Desk
from .error_shape import refusal
from .events import Feed
from .layers import layered
from .metrics import Counted, Metrics
from .openapi import openapi
from .replies import Unheard
from .route_adapters import load_lora_adapter, unload_lora_adapter
from .route_chat import chat_completions
from .route_completions import completions
from .route_embeddings import embeddings
from .route_messages import count_tokens, messages
from .route_metrics import metrics
from .route_page import events, page, script, style
from .route_responses import responses
from .route_status import get_model, health, list_models, ready, version
from .route_tokenize import detokenize, tokenize, tokenizer_info
from .routing import desk_of
from .wire import ApiError

log = structlog.get_logger()

ROUTES = [
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/v1/embeddings", embeddings, methods=["POST"]),
    Route("/v1/load_lora_adapter", load_lora_adapter, methods=["POST"]),
    Route("/v1/unload_lora_adapter", unload_lora_adapter, methods=["POST"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokenizer_info),
    Route("/v1/models", list_models),
    Route("/v1/models/{name:path}", get_model),
    Route("/health", health),
    Route("/ready", ready),
    Route("/version", version),
    Route("/openapi.json", openapi),
    Route("/metrics", metrics),
    Route("/", page),
    Route("/page.css", style),
    Route("/page.js", script),
    Route("/events", events),
]


def create_app(
    engine: EngineApi, tokenizer: Tokenizer, model_name: str, settings: Settings
) -> Starlette:
    """The application; `app.state.desk` is its Desk. The engine must run already.

    Raises SettingsError where API keys cannot be read.
    """
    app = Starlette(
        routes=ROUTES,
        exception_handlers={
            ApiError: _refused,
            ClientDisconnect: _unheard,
            HTTPException: _no_route,
            Exception: _internal_error,
        },
    )
    app.router.redirect_slashes = False
    app.state.desk = Desk(engine, tokenizer, model_name, settings)
    app.state.settings = settings
    desk: Desk = app.state.desk
    app.state.feed = Feed(engine, lambda: desk.closing)
    app.state.metrics = Metrics(engine, desk.model.id, ROUTES)
    layers = layered(app.build_middleware_stack(), settings)
    app.middleware_stack = Counted(layers, app.state.metrics)
    return app


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    note(reason=str(error))
    headers = {}
    if error.status == 429:
        headers["Retry-After"] = str(desk_of(request).pace.retry_after_s())
    return refusal(error, request.scope, headers)


async def _unheard(request: Request, error: Exception) -> Response:
    """Wherever a client goes before it was answered."""
    return Unheard()


async def _no_route(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    reasons = {404: f"There is no {path} here.", 405: f"{path} does not take {method}."}
    refused = ApiError(reasons.get(error.status_code, error.detail), status=error.status_code)
    response = await _refused(request, refused)
    response.headers.update(error.headers or {})
    return response


async def _internal_error(request: Request, error: Exception) -> Response:
    """500, without the reason: that is in the log (guard.py)."""
    message = "The server failed on this request; its log says why."
    failure = ApiError(message, status=500, kind="server_error", code="internal_error")
    return refusal(failure, request.scope)
