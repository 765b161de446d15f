"""Scripted HTTP: bodies, answers and clients of a server whose engine the test answers for."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx

from server.settings import Settings

from ..fake_engine import WAIT_S
from ..http_server import LiveServer
from .raw_client import posted, read_to_end, read_until

MODEL = "models/tiny"
SETTINGS = Settings(grace_s=0.0, max_body_bytes=2000)
CONTEXT_TOKENS = 400
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}

Serve = Callable[..., LiveServer]


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """A body of one user's message."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def post(server: LiveServer, body: Any, path: str = "/v1/chat/completions") -> httpx.Response:
    """POST a body: as JSON, or these bytes."""
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    return httpx.post(server.url + path, timeout=WAIT_S, **content)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, in OpenAI's shape."""
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    error: dict[str, Any] = body["error"]
    return error


class RawClient:
    """A client that sends bytes and goes away when the test says so."""

    def __init__(self, host: str, port: int, body: dict[str, Any]) -> None:
        self.socket = socket.create_connection((host, port), timeout=WAIT_S)
        self.send(body)

    def send(self, body: Any, path: str = "/v1/chat/completions") -> None:
        self.socket.sendall(posted(body, path))

    def read_until(self, mark: bytes) -> bytes:
        return read_until(self.socket, mark)

    def read_to_end(self) -> bytes:
        return read_to_end(self.socket)


Connect = Callable[[dict[str, Any]], RawClient]


@contextmanager
def clients_of(server: LiveServer) -> Iterator[Connect]:
    """Clients that are closed after the block, if not before."""
    with ExitStack() as stack:

        def opened(body: dict[str, Any]) -> RawClient:
            client = RawClient(server.host, server.port, body)
            stack.callback(client.socket.close)
            return client

        yield opened
