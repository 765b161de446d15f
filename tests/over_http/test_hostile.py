"""Hostile clients: what they send slowly, never read, half close, or send too much of.

Each is held to a bound of bytes, counts or statuses, on real sockets. What is no HTTP is in
test_hostile_http.py, what is hostile inside of a body in test_hostile_bodies.py; clients that go
away are in test_http_leaving.py and test_disconnects.py.
"""

from __future__ import annotations

import asyncio
import resource
import select
import socket
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send

from server.http.app import create_app
from server.settings import Settings
from server.values import Size

from ..fake_engine import END, LONG, WAIT_S, FakeEngine
from ..http_server import LiveServer, live_server
from .raw_client import connection, posted, read_to_end, read_until
from .scripted_http import CHAT, MODEL, Serve

MIB = 2**20
DRIBBLE_S = 0.02
DRIBBLED_MAX = 500
"""Bytes, one at a time: ten seconds of them, where a limit of half a second is to end it."""


def app_of(engine: FakeEngine, settings: Settings) -> Starlette:
    return create_app(engine, engine.tokenizer, MODEL, settings)


def is_well(server: LiveServer) -> bool:
    return httpx.get(server.url + "/health", timeout=WAIT_S).status_code == 200


def tasks_of(server: LiveServer) -> int:
    """How many tasks the server's loop has, beside the one that counts them."""

    async def count() -> int:
        return len(asyncio.all_tasks()) - 1

    assert server._loop is not None
    return asyncio.run_coroutine_threadsafe(count(), server._loop).result(WAIT_S)


@contextmanager
def nothing_left(server: LiveServer) -> Iterator[int]:
    """Hold that of connections that come and end in the block no task is left.

    Yields how many there were before. One connection stays open, so that the server has begun.
    """
    with connection(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        read_until(client, b"}")
        before = tasks_of(server)
        yield before
        end_s = time.monotonic() + WAIT_S
        while (left := tasks_of(server)) > before:
            assert time.monotonic() < end_s, f"{left} tasks are left of {before}"
            time.sleep(0.01)


# Slow readers


class Counting:
    """ASGI application around another: bytes of bodies that it got rid of, by request."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.sent: list[int] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        number = len(self.sent)
        self.sent.append(0)

        async def counted(message: Message) -> None:
            await send(message)
            self.sent[number] += len(message.get("body", b""))

        await self._app(scope, receive, counted)


def test_a_stream_that_nobody_reads_is_written_to_a_bound_while_another_is_read_out(
    engine: FakeEngine,
) -> None:
    """Both are as long. What the sockets take is the machine's to say: a few MiB at most."""
    settings = Settings(grace_s=0.0)
    app = app_of(engine, settings)
    counting = Counting(app.middleware_stack)
    app.middleware_stack = counting
    with live_server(app, settings) as server, connection(server, 4096) as stalled:
        stalled.sendall(posted(CHAT | {"stream": True}))
        requests = [engine.next_request()]
        with connection(server) as quick:
            quick.sendall(posted(CHAT | {"stream": True}))
            requests.append(engine.next_request())
            for _ in range(400):
                for request in requests:
                    request.send(engine.tokenizer.encode(LONG) * 16)
            requests[1].end()
            assert len(read_until(quick, b"[DONE]")) > 25 * MIB
        assert is_well(server)
        assert 0 < counting.sent[0] < 10 * MIB
        assert engine.cancels_so_far() == []


# Slow writers


def dribble(client: socket.socket, piece: bytes) -> bytes:
    """Send a byte at a time until the server says something or closes; what it said first."""
    for _ in range(DRIBBLED_MAX):
        client.sendall(piece)
        if select.select([client], [], [], DRIBBLE_S)[0]:
            return client.recv(65536)
    pytest.fail(f"{DRIBBLED_MAX} bytes were taken one by one")


def test_a_body_that_comes_byte_by_byte_has_no_more_time_than_one_that_does_not_come(
    serve: Serve, engine: FakeEngine
) -> None:
    server = serve(body_timeout_s=0.5)
    with connection(server) as client:
        client.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 10000\r\n\r\n")
        assert dribble(client, b" ").startswith(b"HTTP/1.1 408")
    with connection(server) as client:
        client.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert dribble(client, b"1\r\n \r\n").startswith(b"HTTP/1.1 408")
    assert engine.requests == {}


def test_headers_that_come_byte_by_byte_close_the_connection(serve: Serve) -> None:
    with connection(serve(keep_alive_s=0.5)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        assert dribble(client, b"y") == b""


# Many connections


@pytest.fixture
def many_files() -> Iterator[None]:
    """Both ends of a thousand connections are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, 4096) if hard == resource.RLIM_INFINITY else min(max(soft, 4096), hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize(
    "sent", [b"", b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"]
)
def test_a_thousand_idle_connections_keep_no_request_from_its_answer(
    serve: Serve, engine: FakeEngine, sent: bytes
) -> None:
    """Idle before a request, or in the middle of its body; nothing is left of them afterwards."""
    engine.script = lambda _: engine.tokenizer.encode("ok" + END)
    server = serve()
    with nothing_left(server) as before, ExitStack() as stack:
        idle = [stack.enter_context(connection(server)) for _ in range(1000)]
        for client in idle:
            client.sendall(sent)
        for _ in range(20):
            answer = httpx.post(server.url + "/v1/chat/completions", json=CHAT, timeout=WAIT_S)
            assert answer.json()["choices"][0]["message"]["content"] == "ok"
        assert tasks_of(server) >= before + 1000
        for client in idle:
            client.setblocking(False)
            with pytest.raises(BlockingIOError):  # still open, and nothing to read
                client.recv(1)
    assert len(engine.requests) == 20


# Connections that are closed on one side


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_will_send_no_more_counts_as_gone(
    serve: Serve, engine: FakeEngine, stream: bool
) -> None:
    """A request whose client's side is closed is cancelled once, and its connection closed."""
    server = serve()
    with connection(server) as client:
        client.sendall(posted(CHAT | {"stream": stream}))
        request = engine.next_request()
        client.shutdown(socket.SHUT_WR)
        assert engine.cancelled.get(timeout=WAIT_S) == request.number
        assert b"HTTP/1.1 5" not in read_to_end(client)
    server.stop()
    assert engine.cancels_so_far() == []


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /hea",
        b"GET /health HTTP/1.1\r\nHost: x\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
    ],
)
def test_half_a_request_before_a_half_close_ends_the_connection_and_asks_for_nothing(
    serve: Serve, engine: FakeEngine, sent: bytes
) -> None:
    server = serve()
    with connection(server) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert read_to_end(client)[:12] in (b"", b"HTTP/1.1 400")
    assert is_well(server)
    assert engine.requests == {}


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /hea",
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
        posted({}),
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 20,
    ],
)
def test_nothing_is_left_of_a_connection_that_its_client_closed(serve: Serve, sent: bytes) -> None:
    """However long a connection may be idle, which is ten times what this test waits for."""
    server = serve(keep_alive_s=10 * WAIT_S)
    for half in (True, False):
        with nothing_left(server), ExitStack() as stack:
            for _ in range(10):
                client = stack.enter_context(connection(server))
                client.sendall(sent)
                if half:
                    client.shutdown(socket.SHUT_WR)
                    read_to_end(client)


# Large bodies and headers


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_50_mb_is_refused_and_never_held(
    serve: Serve, engine: FakeEngine, chunked: bool
) -> None:
    """Its connection serves on."""
    server = serve(max_body_bytes=Size(MIB))
    coding = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {50 * MIB}"
    piece = b"x" * MIB
    if chunked:
        piece = b"%x\r\n%b\r\n" % (MIB, piece)
    with connection(server) as client:
        tracemalloc.start()
        client.sendall(f"POST /tokenize HTTP/1.1\r\nHost: x\r\n{coding}\r\n\r\n".encode())
        for _ in range(50):
            client.sendall(piece)
        client.sendall(b"0\r\n\r\n" if chunked else b"")
        assert client.recv(65536).startswith(b"HTTP/1.1 413")
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 8 * MIB
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        read_until(client, b"HTTP/1.1 200")
    assert engine.requests == {}


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 6000,
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 500_000,
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
        + b"a: b\r\n" * 20_000,
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;"
        + b"e" * 100_000,
    ],
    ids=["many", "endless", "path", "trailers", "extension"],
)
def test_headers_are_bounded_however_they_come(
    serve: Serve, engine: FakeEngine, head: bytes
) -> None:
    """Many small ones, a long path, and what stands like headers behind or between a body."""
    server = serve()
    with connection(server) as client:
        try:
            client.sendall(head + b"\r\n")
            status = client.recv(12)
        except ConnectionError:  # closed while bytes are on their way
            status = b"HTTP/1.1 431"
        assert status == b"HTTP/1.1 431"
    assert is_well(server)
    assert engine.requests == {}
