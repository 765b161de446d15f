"""The page's server: an app over any engine; and the cells of a snapshot that it sends."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from server.http.app import create_app
from server.http.pool_snapshot import NOBODY, STATE_SHIFT
from server.settings import Settings

from .fake_engine import byte_tokenizer
from .http_server import LiveServer, live_server

KEY = "a-key-of-this-test"


def cells_of(pool: dict[str, Any]) -> list[tuple[int, int]]:
    """State and lower bits of each cell."""
    cells = np.frombuffer(base64.b64decode(pool["cells"]), "<u2")
    return [(int(cell) >> STATE_SHIFT, int(cell) & NOBODY) for cell in cells]


@contextmanager
def served(engine: Any, **settings: Any) -> Iterator[tuple[LiveServer, Any]]:
    """A server over an engine, and its app."""
    chosen = Settings(grace_s=0.0, **settings)
    app = create_app(engine, byte_tokenizer(), "models/tiny", chosen)
    with live_server(app, chosen) as server:
        yield server, app
