"""The engine, the servers over it, and their clients. A file may have an engine of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from server.http.app import create_app
from server.settings import Settings

from ..fake_engine import FakeEngine, byte_tokenizer
from ..http_server import LiveServer, live_server
from .scripted_http import CONTEXT_TOKENS, MODEL, SETTINGS, Connect, Serve, clients_of


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """Left to the test: each request waits for `send` and `end`."""
    with FakeEngine(byte_tokenizer(), context_tokens=CONTEXT_TOKENS) as engine:
        yield engine


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[LiveServer]:
    """Takes bodies of up to 2,000 bytes."""
    with live_server(create_app(engine, engine.tokenizer, MODEL, SETTINGS), SETTINGS) as server:
        yield server


@pytest.fixture
def serve(engine: FakeEngine) -> Iterator[Serve]:
    """Starts servers with the settings that it is given; all stop after the test."""
    with ExitStack() as stack:

        def started(**settings: Any) -> LiveServer:
            chosen = Settings(**{"grace_s": 0.0} | settings)
            app = create_app(engine, engine.tokenizer, MODEL, chosen)
            return stack.enter_context(live_server(app, chosen))

        yield started


@pytest.fixture
def connect(server: LiveServer) -> Iterator[Connect]:
    """Opens clients, each with a chat that it has sent."""
    with clients_of(server) as connect:
        yield connect
