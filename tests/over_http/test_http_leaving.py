"""HTTP over a scripted engine: real sockets, clients that go away, and the end of the server."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from server.http.app import create_app
from server.settings import Settings

from ..fake_engine import LONG, WAIT_S, FakeEngine
from ..http_server import LiveServer, live_server
from .raw_client import connection
from .scripted_http import MODEL, Connect, RawClient, chat, error_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_byte_causes_one_cancel(
    connect: Connect, server: LiveServer, engine: FakeEngine, stream: bool
) -> None:
    client = connect(chat(stream=stream))
    request = engine.next_request()
    client.socket.close()
    assert engine.cancelled.get(timeout=WAIT_S) == request.number
    server.stop()
    assert engine.cancels_so_far() == []


def test_a_client_that_leaves_in_the_middle_of_a_stream_causes_one_cancel(
    connect: Connect, server: LiveServer, engine: FakeEngine
) -> None:
    client = connect(chat(stream=True))
    request = engine.next_request()
    request.send(b"once")
    client.read_until(b'"content":"once"')
    client.socket.close()
    assert engine.cancelled.get(timeout=WAIT_S) == request.number
    server.stop()
    assert engine.cancels_so_far() == []


def test_a_client_that_leaves_in_the_middle_of_an_answer_that_is_not_streamed_causes_one_cancel(
    connect: Connect, server: LiveServer, engine: FakeEngine
) -> None:
    client = connect(chat())
    request = engine.next_request()
    request.send(b"once")
    client.socket.close()
    assert engine.cancelled.get(timeout=WAIT_S) == request.number
    server.stop()
    assert engine.cancels_so_far() == []


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_read_to_its_end_is_never_cancelled(
    connect: Connect, server: LiveServer, engine: FakeEngine, stream: bool
) -> None:
    client = connect(chat(stream=stream))
    request = engine.next_request()
    request.send(b"all of it")
    request.end()
    client.read_until(b"[DONE]" if stream else b'"usage"')
    client.socket.close()
    server.stop()
    assert engine.cancels_so_far() == []


def test_a_client_that_leaves_while_it_uploads_submits_nothing(
    server: LiveServer, engine: FakeEngine
) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n"
    with connection(server) as client:
        client.sendall(head + b"{")
    assert httpx.get(server.url + "/health").status_code == 200
    server.stop()
    assert engine.requests == {}


def test_a_client_that_does_not_read_stalls_nobody_else(
    connect: Connect, server: LiveServer, engine: FakeEngine
) -> None:
    slow = connect(chat(stream=True))
    stalled = engine.next_request()
    # Far more than what the sockets' buffers take.
    for _ in range(400):
        stalled.send(engine.tokenizer.encode(LONG) * 16)
    quick = connect(chat(stream=True))
    request = engine.next_request()
    request.send(b"quick")
    request.end()
    assert b'"content":"quick"' in quick.read_until(b"[DONE]")
    slow.socket.close()
    assert engine.cancelled.get(timeout=WAIT_S) == stalled.number
    server.stop()
    assert engine.cancels_so_far() == []


def test_a_stop_cancels_what_runs_after_its_grace_and_says_so(
    connect: Connect, server: LiveServer, engine: FakeEngine
) -> None:
    streaming = connect(chat(stream=True))
    first = engine.next_request()
    first.send(b"once")
    streaming.read_until(b'"content":"once"')
    waiting = connect(chat())
    second = engine.next_request()
    server.stop()
    assert b"server_stopping" in streaming.read_to_end()
    assert waiting.read_to_end().startswith(b"HTTP/1.1 503")
    assert sorted(engine.cancels_so_far()) == [first.number, second.number]


def test_a_stop_lets_answers_end_within_their_grace_and_admits_no_more(engine: FakeEngine) -> None:
    settings = Settings(grace_s=WAIT_S)
    app = create_app(engine, engine.tokenizer, MODEL, settings)
    with live_server(app, settings) as server:
        client = RawClient(server.host, server.port, chat(stream=True))
        request = engine.next_request()
        request.send(b"once")
        client.read_until(b'"content":"once"')
        late = httpx.Client(base_url=server.url)
        server.begin_stop()
        while late.get("/health").status_code == 200:
            pass
        refused = late.post("/v1/chat/completions", json=chat())
        assert (refused.status_code, error_of(refused)["code"]) == (503, "server_stopping")
        request.send(b" more")
        request.end()
        assert b'"finish_reason":"stop"' in client.read_until(b"[DONE]")
        late.close()
        client.socket.close()
    assert engine.cancels_so_far() == []


def test_a_signal_ends_the_process_even_where_a_client_never_reads() -> None:
    command = [sys.executable, "-m", "tests.fake_server"]
    with ExitStack() as stack:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True
        )
        stack.enter_context(process)
        stack.callback(process.kill)
        assert process.stdout is not None
        port = int(process.stdout.readline().rsplit(":", 1)[1])
        client = stack.enter_context(RawClient("127.0.0.1", port, chat(stream=True)).socket)
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, errors
    assert "finish=cancelled" in errors
    assert "Traceback" not in errors
