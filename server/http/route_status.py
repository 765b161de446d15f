"""Routes: GET /v1/models, /v1/models/NAME, /health, /ready and /version."""

from __future__ import annotations

from importlib import metadata

from starlette.requests import Request
from starlette.responses import Response

from .routing import desk_of, json_response
from .wire import ModelList


async def list_models(request: Request) -> Response:
    """GET /v1/models: the model and its adapters."""
    return json_response(ModelList(desk_of(request).models))


async def get_model(request: Request) -> Response:
    """GET /v1/models/NAME."""
    return json_response(desk_of(request).check_model(request.path_params["name"]))


async def health(request: Request) -> Response:
    """GET /health: 200 where requests are taken, else 503, with the engine's counts."""
    desk = desk_of(request)
    running = "ok" if desk.engine.healthy else "engine stopped"
    state = "stopping" if desk.closing else running
    body = {"status": state, "model": desk.model.id, **desk.engine.status()}
    return json_response(body, 200 if state == "ok" else 503)


async def ready(request: Request) -> Response:
    """GET /ready: 200 where a request sent now would be taken, else 503."""
    desk = desk_of(request)
    takes = desk.engine.healthy and not desk.closing
    return json_response({"ready": takes}, 200 if takes else 503)


async def version(request: Request) -> Response:
    """GET /version."""
    return json_response({"version": metadata.version("mlxtape")})
