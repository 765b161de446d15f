"""HTTP over a scripted engine: real sockets, real Hypercorn, refusals, and clients that go away."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from starlette.responses import Response

from server.http import guard
from server.http.app import create_app
from server.logs import configure_logs
from server.settings import Settings
from server.submission import ERROR, LENGTH, RequestRefused

from .fake_engine import END, LONG, WAIT_S, FakeEngine, byte_tokenizer
from .http_server import LiveServer, live_server

MODEL = "models/tiny"
ROOT = Path(__file__).parent.parent
SETTINGS = Settings(grace_s=0.0, max_body_bytes=2000)


@pytest.fixture(autouse=True)
def _default_logs() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """Left to the test: each request waits for `send` and `end`."""
    with FakeEngine(byte_tokenizer(), context_tokens=400) as engine:
        yield engine


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[LiveServer]:
    with live_server(create_app(engine, engine.tokenizer, MODEL, SETTINGS), SETTINGS) as server:
        yield server


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def post(server: LiveServer, body: Any, path: str = "/v1/chat/completions") -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(server.url + path, content=content, timeout=WAIT_S)


def error_of(response: httpx.Response) -> dict[str, Any]:
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


@pytest.fixture
def connect(server: LiveServer) -> Iterator[Connect]:
    """Clients that are closed after the test, if not before."""
    with ExitStack() as stack:

        def opened(body: dict[str, Any]) -> RawClient:
            client = RawClient(server.host, server.port, body)
            stack.callback(client.socket.close)
            return client

        yield opened


# Clients that go away


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
    client = socket.create_connection((server.host, server.port), timeout=WAIT_S)
    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    client.close()
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


# The end of the server


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


# Failures of the engine


def test_a_dead_engine_answers_503_everywhere(server: LiveServer, engine: FakeEngine) -> None:
    engine.healthy = False
    response = post(server, chat())
    assert (response.status_code, error_of(response)["code"]) == (503, "engine_stopped")
    assert httpx.get(server.url + "/health").status_code == 503


def test_health_tells_the_counts_of_the_engine(server: LiveServer) -> None:
    response = httpx.get(server.url + "/health")
    assert response.status_code == 200
    assert response.json() == {"status": "ok", "model": MODEL, "running": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_has_a_status_of_its_own(
    connect: Connect, engine: FakeEngine, stream: bool
) -> None:
    client = connect(chat(stream=stream))
    engine.next_request().end(ERROR, "The forward failed.")
    seen = client.read_until(b"}}")
    assert seen.startswith(b"HTTP/1.1 500")
    assert json.loads(seen.split(b"\r\n\r\n", 1)[1])["error"]["message"] == "The forward failed."


def test_an_error_in_the_middle_of_a_stream_is_an_event_and_the_end(
    connect: Connect, server: LiveServer, engine: FakeEngine
) -> None:
    client = connect(chat(stream=True))
    request = engine.next_request()
    request.send(b"once")
    request.end(ERROR, "The forward failed.")
    # A chunk of no bytes ends a chunked response.
    events = client.read_until(b"\r\n0\r\n\r\n")
    assert b'data: {"error":{"message":"The forward failed."' in events
    assert b"[DONE]" not in events
    client.socket.close()
    server.stop()
    assert engine.cancels_so_far() == []


def test_what_the_engine_refuses_is_a_400_with_its_code(
    server: LiveServer, engine: FakeEngine
) -> None:
    engine.refusal = RequestRefused("Needs 9 blocks of 8.", "context_length_exceeded", "messages")
    response = post(server, chat())
    assert response.status_code == 400
    assert error_of(response) == {
        "message": "Needs 9 blocks of 8.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


def test_a_full_queue_is_a_429_so_that_clients_send_again(
    server: LiveServer, engine: FakeEngine
) -> None:
    engine.refusal = RequestRefused("9 requests wait.", "rate_limit_exceeded")
    response = post(server, chat())
    assert (response.status_code, error_of(response)["type"]) == (429, "rate_limit_error")


def test_a_stop_string_is_a_stop_even_where_the_engine_calls_it_length(
    connect: Connect, engine: FakeEngine
) -> None:
    client = connect(chat(stop="cd"))
    request = engine.next_request()
    request.send(b"abcde")
    request.end(LENGTH)
    answer = json.loads(client.read_until(b'"chat.completion"}').split(b"\r\n\r\n", 1)[1])
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("ab", "stop")
    assert answer["usage"]["completion_tokens"] == 4


# Refusals


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(
    server: LiveServer, engine: FakeEngine
) -> None:
    overhead = len("<user>\n<assistant>")
    response = post(server, chat("x" * (400 - overhead)))
    error = error_of(response)
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "400 tokens" in error["message"]
    assert engine.requests == {}


def test_a_prompt_that_leaves_room_for_one_token_may_have_one(
    connect: Connect, engine: FakeEngine
) -> None:
    overhead = len("<user>\n<assistant>")
    connect(chat("x" * (399 - overhead), max_tokens=10))
    assert engine.next_request().submission.parameters.max_tokens == 1


def test_without_max_tokens_an_answer_may_take_the_rest_of_the_context(
    connect: Connect, engine: FakeEngine
) -> None:
    connect(chat("xyz"))
    submission = engine.next_request().submission
    assert submission.parameters.max_tokens == 400 - len("<user>xyz\n<assistant>")


def test_defaults_are_openais_and_each_seed_is_its_own(
    connect: Connect, engine: FakeEngine
) -> None:
    connect(chat())
    connect(chat())
    first = engine.next_request().submission.parameters
    second = engine.next_request().submission.parameters
    assert (first.temperature, first.top_p, first.top_k, first.min_p) == (1.0, 1.0, 0, 0.0)
    assert first.end_tokens == engine.tokenizer.end_tokens
    assert first.seed != second.seed


def test_parameters_reach_the_engine_as_they_were_sent(
    connect: Connect, engine: FakeEngine
) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": -1, "stop": "E"}
    body = chat(max_tokens=5, max_completion_tokens=3, cache_salt="tenant", unknown={"a": [1]})
    connect(body | fields)
    submission = engine.next_request().submission
    parameters = submission.parameters
    assert (parameters.temperature, parameters.top_p) == (0.5, 0.9)
    assert (parameters.top_k, parameters.min_p) == (7, 0.1)
    assert (parameters.seed, parameters.stop) == (2**64 - 1, ("E",))
    assert parameters.max_tokens == 3
    assert submission.namespace.salt == "tenant"
    assert bytes(submission.tokens) == b"<user>hi\n<assistant>"


def test_parts_of_text_are_one_text_and_developer_means_system(
    connect: Connect, engine: FakeEngine
) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b\x00"}]
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    connect({"messages": messages})
    tokens = engine.next_request().submission.tokens
    assert bytes(tokens) == b"<system>be\n<user>ab\x00\n<assistant>"


def test_a_model_without_a_chat_template_is_a_400_that_says_so(engine: FakeEngine) -> None:
    app = create_app(engine, byte_tokenizer(chat_template=None), MODEL, SETTINGS)
    with live_server(app) as server:
        response = post(server, chat())
    assert response.status_code == 400
    assert error_of(response)["message"].startswith("This model has no chat template")


def test_the_model_answers_to_its_name_and_to_the_last_part_of_it(
    server: LiveServer, engine: FakeEngine
) -> None:
    for name in (MODEL, "tiny"):
        assert httpx.get(f"{server.url}/v1/models/{name}").json()["id"] == MODEL
    assert [model["id"] for model in httpx.get(server.url + "/v1/models").json()["data"]] == [MODEL]
    response = httpx.get(server.url + "/v1/models/large")
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
    response = post(server, chat() | {"model": "large"})
    assert (response.status_code, error_of(response)["param"]) == (404, "model")
    assert engine.requests == {}


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
    client = socket.create_connection((server.host, server.port), timeout=WAIT_S)
    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2001\r\n\r\n")
    assert client.recv(65536).startswith(b"HTTP/1.1 413")
    client.close()


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


def test_sixteen_streams_at_once_keep_their_texts_apart() -> None:
    tokenizer = byte_tokenizer()

    def echo(submission: Any) -> list[int]:
        prompt = tokenizer.decode(submission.tokens)
        return tokenizer.encode(prompt.removesuffix("\n<assistant>").removeprefix("<user>") + END)

    with FakeEngine(tokenizer, echo) as engine:
        app = create_app(engine, tokenizer, MODEL, SETTINGS)
        with live_server(app) as server:
            texts = [f"canary {number} é😀 " * (number + 1) for number in range(16)]
            answers: dict[str, str] = {}

            def ask(text: str, stream: bool) -> None:
                response = post(server, chat(text, stream=stream))
                answers[text] = text_of(response) if stream else whole_text_of(response)

            threads = [
                threading.Thread(target=ask, args=(text, at % 2 == 0))
                for at, text in enumerate(texts)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
            assert answers == {text: text for text in texts}
            assert engine.cancels_so_far() == []


def whole_text_of(response: httpx.Response) -> str:
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def text_of(response: httpx.Response) -> str:
    """The joined text of a stream."""
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)
