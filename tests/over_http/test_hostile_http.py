"""Hostile HTTP: bytes that are no HTTP, or that mean nothing.

Each is refused on its own connection, without a traceback, and the server answers afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from ..fake_engine import WAIT_S, FakeEngine
from ..http_server import LiveServer
from .raw_client import connection, read_to_end


@pytest.fixture
def server(server: LiveServer) -> Iterator[LiveServer]:
    """It answers after the test, unless that stopped it."""
    yield server
    if server._thread.is_alive():
        assert httpx.get(server.url + "/health", timeout=WAIT_S).status_code == 200


NO_HTTP = [
    b"\r\n\r\n\r\n",
    b"GARBAGE\r\n\r\n",
    b"GET /health\r\n\r\n",
    b"G@T /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\na: \x00\r\n\r\n",
    b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
    b"\xff" * 1000 + b"\r\n\r\n",
    *(
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\n" + framing
        for framing in (
            b"Content-Length: -1\r\n\r\n",
            b"Content-Length: 1, 2\r\n\r\n",
            b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
            b"Content-Length: " + b"9" * 30 + b"\r\n\r\n",
            b"Transfer-Encoding: gzip\r\n\r\n",
            b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
            b"Transfer-Encoding: chunked\r\n\r\n-5\r\n",
            b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 30 + b"\r\n",
            b"Transfer-Encoding: chunked\r\n\r\n1\r\naXX",
        )
    ),
]


def test_what_is_no_http_is_refused_and_its_connection_closed(
    server: LiveServer, engine: FakeEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    """No 5xx but "not implemented" for a coding that nobody has, and no traceback."""
    for sent in NO_HTTP:
        with connection(server) as client:
            client.sendall(sent)
            status = read_to_end(client)[:12]
        wanted = b"HTTP/1.1 501" if b"gzip" in sent else b"HTTP/1.1 400"
        assert status == wanted, sent[:80]
    assert httpx.get(server.url + "/health", timeout=WAIT_S).status_code == 200
    server.stop()
    assert engine.requests == {}
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err


def test_paths_that_mean_nothing_are_not_found_and_lead_nowhere(server: LiveServer) -> None:
    paths = (b"*", b"health", b"//health", b"/../health", b"/page.js/../../pyproject.toml")
    paths += (b"/%2e%2e/health", b"/%ff%00%ed%a0%80", b"/v1/models/%00", b"http://[::1/health")
    for path in paths:
        with connection(server) as client:
            client.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.1 404", path


def test_http2_that_breaks_its_rules_costs_its_own_connection(server: LiveServer) -> None:
    """A preface that is none; and the beginning of a frame of 16 MiB, from a client that goes."""
    with connection(server) as client:
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n")
        assert b"HTTP/1.1" not in read_to_end(client)
    with connection(server) as client:
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100)
        assert client.recv(9)[3] == 4  # the server's settings
