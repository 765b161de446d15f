"""A client that is nothing but a socket, for what no HTTP library would send or leave unread."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from .http_server import WAIT_S, LiveServer


@contextmanager
def connection(server: LiveServer, received_bytes: int | None = None) -> Iterator[socket.socket]:
    """`received_bytes`: how much the client's side takes before anybody reads."""
    with socket.socket() as client:
        client.settimeout(WAIT_S)
        if received_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received_bytes)
        client.connect((server.host, server.port))
        yield client


def read_to_end(client: socket.socket) -> bytes:
    """All that comes until the server closes."""
    seen = b""
    while piece := client.recv(65536):
        seen += piece
    return seen
