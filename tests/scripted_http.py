"""Scripted HTTP: a server over an engine that the test answers for, and its clients."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx

from server.settings import Settings

from .fake_engine import WAIT_S
from .http_server import LiveServer

MODEL = "models/tiny"
SETTINGS = Settings(grace_s=0.0, max_body_bytes=2000)


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """A body of one user's message."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def post(server: LiveServer, body: Any, path: str = "/v1/chat/completions") -> httpx.Response:
    """POST a body: as JSON, or these bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(server.url + path, content=content, timeout=WAIT_S)


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
        self.send(json.dumps(body).encode())

    def send(self, content: bytes, path: str = "/v1/chat/completions") -> None:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        self.socket.sendall(head.encode() + content)

    def read_until(self, mark: bytes) -> bytes:
        seen = b""
        while mark not in seen:
            piece = self.socket.recv(65536)
            assert piece, f"closed after {seen!r}"
            seen += piece
        return seen

    def read_to_end(self) -> bytes:
        seen = b""
        while piece := self.socket.recv(65536):
            seen += piece
        return seen


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
