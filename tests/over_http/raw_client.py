"""A client that is nothing but a socket, for what no HTTP library would send or leave unread."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..http_server import WAIT_S, LiveServer

PIECE_BYTES = 2**20


@contextmanager
def connection(server: LiveServer, received_bytes: int | None = None) -> Iterator[socket.socket]:
    """`received_bytes`: how much the client's side takes before anybody reads."""
    with socket.socket() as client:
        client.settimeout(WAIT_S)
        if received_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received_bytes)
        client.connect((server.host, server.port))
        yield client


def posted(body: Any, path: str = "/v1/chat/completions") -> bytes:
    """A POST of a body: as JSON, or these bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def read_until(client: socket.socket, mark: bytes) -> bytes:
    """All that comes up to the mark, and what came with it."""
    seen = bytearray()
    unread = 0
    while seen.find(mark, unread) < 0:
        unread = max(0, len(seen) - len(mark) + 1)
        piece = client.recv(PIECE_BYTES)
        assert piece, f"closed after {bytes(seen[-1000:])!r}"
        seen += piece
    return bytes(seen)


def read_to_end(client: socket.socket) -> bytes:
    """All that comes until the server closes."""
    seen = bytearray()
    while piece := client.recv(PIECE_BYTES):
        seen += piece
    return bytes(seen)
