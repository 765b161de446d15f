"""Layers: what stands around the routes, in order.

    RequestIds( Guard( HeaderLimit( CORS( Auth( Deadline( routes ))))))

An id before all, for every response has one. Guard outside of all that may answer before a body
was read. CORS outside of Auth: a browser asks it before it sends a key, and must be able to read a
401. Auth outside of all that does work.
"""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from ..settings import Settings
from .auth import Auth, keys_of, open_paths
from .deadline import Deadline
from .guard import Guard
from .headers import HeaderLimit
from .request_id import HEADER, RequestIds

CORS_MAX_AGE_S = 600


def layered(routes: ASGIApp, settings: Settings) -> ASGIApp:
    """The application that is served. Raises SettingsError where keys cannot be read."""
    app: ASGIApp = Deadline(routes, settings.request_timeout_s, settings.body_timeout_s)
    keys, paths = keys_of(settings), open_paths(settings)
    if keys is not None and paths is not None:
        app = Auth(app, keys, paths)
    if settings.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(HEADER, "retry-after"),
            max_age=CORS_MAX_AGE_S,
        )
    return RequestIds(Guard(HeaderLimit(app, settings.max_header_bytes)))
