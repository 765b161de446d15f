"""HTTP over a scripted engine: paths, bodies and logs that are not as they should be."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from contextlib import suppress
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from server.http import guard
from server.logs import configure_logs

from ..fake_engine import WAIT_S, FakeEngine
from ..http_server import LiveServer
from .raw_client import connection
from .scripted_http import Connect, chat, error_of, post


def test_unknown_routes_and_methods_are_refused_in_the_same_shape(server: LiveServer) -> None:
    assert error_of(post(server, {}, "/v1/nothing"))["message"] == "There is no /v1/nothing here."
    response = httpx.get(server.url + "/v1/chat/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert "does not take GET" in error_of(response)["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [], "x": ' + b"[" * 900 + b"]" * 900 + b"}",
    ],
)
def test_a_body_that_is_no_json_is_a_400_and_the_server_lives(
    server: LiveServer, body: bytes
) -> None:
    response = post(server, body)
    assert (response.status_code, error_of(response)["type"]) == (400, "invalid_request_error")
    assert httpx.get(server.url + "/health").status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/nothing"])
@pytest.mark.parametrize("declared", [True, False])
def test_a_large_body_is_refused_and_its_client_gets_to_read_that(
    server: LiveServer, engine: FakeEngine, path: str, declared: bool
) -> None:
    body = b"x" * (4 * 2**20)
    content = body if declared else iter([body[: 2**20]] * 4)
    response = httpx.post(server.url + path, content=content, timeout=WAIT_S)
    assert response.status_code == (413 if path == "/v1/chat/completions" else 404)
    assert error_of(response)["type"] == "invalid_request_error"
    server.stop()
    assert engine.requests == {}


def test_a_connection_serves_on_after_a_body_that_nobody_wanted(
    connect: Connect, engine: FakeEngine
) -> None:
    client = connect({})
    client.read_until(b"}}")
    client.send(b"x" * (4 * 2**20), "/v1/nothing")
    assert client.read_until(b"}}").startswith(b"HTTP/1.1 404")
    client.send(json.dumps(chat()).encode())
    engine.next_request().end()
    assert client.read_until(b"}}").startswith(b"HTTP/1.1 200")


def test_a_body_without_an_end_is_not_read_for_ever(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "LINGER_BYTES_MAX", 0)
    client = connect({})
    client.read_until(b"}}")
    # The server closes while bytes are on their way, which the client may see as a reset.
    with suppress(ConnectionError):
        client.send(b"x" * (16 * 2**20), "/v1/nothing")
    with suppress(ConnectionError):
        client.read_to_end()


def test_the_end_of_a_response_never_waits_for_a_body_that_nobody_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "LINGER_BYTES_MAX", -1)

    async def scenario() -> None:
        # As in Hypercorn: what was received waits in a bounded queue, where the end goes, too.
        received: asyncio.Queue[Any] = asyncio.Queue(1)
        received.put_nowait({"type": "http.request", "body": b"x", "more_body": True})

        async def send(message: Any) -> None:
            if not message.get("more_body", True):
                await received.put({"type": "http.disconnect"})

        app = guard.Guard(Response("answer"))
        await asyncio.wait_for(app({"type": "http", "path": "/"}, received.get, send), WAIT_S)

    asyncio.run(scenario())


def test_a_body_that_is_said_to_be_too_large_is_refused_before_it_is_sent(
    server: LiveServer,
) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2001\r\n\r\n"
    with connection(server) as client:
        client.sendall(head)
        assert client.recv(65536).startswith(b"HTTP/1.1 413")


def test_a_failure_of_our_own_is_a_500_without_a_traceback(
    server: LiveServer, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.refusal = ZeroDivisionError("secret")  # type: ignore[assignment]
    response = post(server, chat())
    assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
    assert "secret" not in response.text
    engine.refusal = None
    assert httpx.get(server.url + "/health").status_code == 200
    server.stop()
    captured = capsys.readouterr()
    assert "ZeroDivisionError" in captured.out + captured.err


def test_a_log_that_cannot_be_written_costs_no_request(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    configure_logs()
    monkeypatch.setattr(sys, "stderr", closed)
    assert error_of(post(server, {}))["param"] == "messages"


def test_a_path_cannot_write_a_log_line_of_its_own(
    server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs()
    post(server, {}, "/v1/%0Aevent=forged%0D%1B[31m")
    server.stop()
    (line,) = capsys.readouterr().err.splitlines()
    assert "event=forged" in line
    assert line.isprintable()
