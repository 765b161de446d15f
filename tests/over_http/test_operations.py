"""What an operator relies on: limits, deadlines, other origins, a full queue, a dead engine."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import httpx
from msgspec import structs

from kernel.fake import FakeKernel
from server.engine import Engine
from server.http.app import create_app
from server.http.pace import Pace
from server.loop import Parts
from server.policy import Policy
from server.settings import Settings
from server.submission import RequestRefused
from server.values import Size, Texts

from ..fake_engine import WAIT_S, FakeEngine, byte_tokenizer
from ..http_server import LiveServer, live_server
from ..sim import POLICY, SMALL, MemoryCapture, header
from .raw_client import connection, posted, read_to_end, read_until
from .scripted_http import CHAT, MODEL, Serve, post

ORIGIN = "https://chat.example"


# How long a request may take


def test_an_answer_that_takes_too_long_is_cancelled_in_the_engine_and_is_a_504(
    serve: Serve, engine: FakeEngine
) -> None:
    server = serve(request_timeout_s=0.2)
    response = post(server, CHAT)
    assert response.status_code == 504
    assert response.json() == {
        "error": {
            "message": "The request took longer than 0.2 seconds, the most that this server gives "
            "one; ask for a shorter answer.",
            "type": "timeout",
            "param": None,
            "code": "timeout",
        }
    }
    assert engine.cancelled.get(timeout=WAIT_S) == engine.next_request().number
    server.stop()
    assert engine.cancels_so_far() == []


def test_a_stream_that_takes_too_long_ends_with_an_error_event(
    serve: Serve, engine: FakeEngine
) -> None:
    server = serve(request_timeout_s=2.0)
    with connection(server) as client:
        client.sendall(posted(CHAT | {"stream": True}))
        request = engine.next_request()
        request.send(b"once")
        # A chunk of no bytes ends a chunked response.
        seen = read_until(client, b"\r\n0\r\n\r\n")
    assert seen.startswith(b"HTTP/1.1 200")
    events = re.findall(rb"^data: (.*)$", seen, re.MULTILINE)
    assert json.loads(events[-1])["error"]["code"] == "timeout"
    assert b'"content":"once"' in events[-2]
    assert engine.cancelled.get(timeout=WAIT_S) == request.number
    server.stop()
    assert engine.cancels_so_far() == []


def test_an_answer_that_ends_in_time_is_not_touched(serve: Serve, engine: FakeEngine) -> None:
    engine.script = lambda _: b"ok"
    response = post(serve(request_timeout_s=WAIT_S), CHAT | {"max_tokens": 2})
    assert response.json()["choices"][0]["message"]["content"] == "ok"


def test_a_body_that_does_not_arrive_is_a_408(serve: Serve, engine: FakeEngine) -> None:
    # Less than what checked settings allow.
    with connection(serve(body_timeout_s=0.2)) as client:
        client.sendall(posted(CHAT)[:-3])
        answer = read_until(client, b"}}")
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"code":"body_timeout"' in answer
    assert engine.requests == {}


def test_the_time_for_a_body_is_not_that_for_its_answer(serve: Serve, engine: FakeEngine) -> None:
    server = serve(body_timeout_s=0.5)
    with connection(server) as client, connection(server) as slow:
        client.sendall(posted(CHAT))
        request = engine.next_request()
        slow.sendall(posted(CHAT)[:-3])
        assert slow.recv(100).startswith(b"HTTP/1.1 408")
        request.send(b"late")
        request.end()
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    assert engine.cancels_so_far() == []


def test_headers_that_do_not_arrive_close_the_connection(serve: Serve) -> None:
    with connection(serve(keep_alive_s=0.2)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        assert read_to_end(client) == b""


# How much a request may bring


def test_headers_above_the_limit_are_a_431_and_those_at_it_are_taken(serve: Serve) -> None:
    server = serve(max_header_bytes=Size(4096))
    rest = 4096 - len("/health" + "a" + "host: x  " + "x-big:   ")
    for more, status in ((0, b"200"), (1, b"431")):
        with connection(server) as client:
            value = b"y" * (rest + more)
            client.sendall(b"GET /health?a HTTP/1.1\r\nHost: x\r\nX-Big: " + value + b"\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 " + status)


def test_headers_without_an_end_are_not_read_for_ever(serve: Serve) -> None:
    with connection(serve(max_header_bytes=Size(4096))) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Big: " + b"y" * 10_000)
        assert client.recv(100).startswith(b"HTTP/1.1 431")


# The queue


def test_a_full_queue_says_when_to_come_again(serve: Serve, engine: FakeEngine) -> None:
    server = serve()
    engine.refusal = RequestRefused("9 requests wait.", "rate_limit_exceeded")
    response = post(server, CHAT)
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    engine.refusal = RequestRefused("Never.", "invalid")
    response = post(server, CHAT)
    assert (response.status_code, "retry-after" in response.headers) == (400, False)


def test_the_time_to_come_again_is_the_mean_time_between_ends() -> None:
    clock = [100.0]
    pace = Pace(lambda: clock[0])
    assert pace.retry_after_s() == 1

    def ended(*times_s: float) -> None:
        for clock[0] in times_s:
            pace.ended()

    ended(100.0, 101.0, 103.0, 112.0)
    assert pace.retry_after_s() == 3
    clock[0] = 113.0
    assert pace.retry_after_s() == 4
    ended(*range(113, 129))
    assert pace.retry_after_s() == 1
    clock[0] = 10_000.0
    assert pace.retry_after_s() == 60


def test_answers_that_ended_make_the_pace(engine: FakeEngine) -> None:
    clock = [100.0]
    engine.script = lambda _: b"ok"
    settings = Settings(grace_s=0.0)
    app = create_app(engine, engine.tokenizer, MODEL, settings)
    app.state.desk.pace = Pace(lambda: clock[0])
    with live_server(app, settings) as server:
        for clock[0] in (107.0, 121.0):
            assert post(server, CHAT | {"max_tokens": 2}).status_code == 200
        engine.refusal = RequestRefused("9 requests wait.", "rate_limit_exceeded")
        assert post(server, CHAT).headers["retry-after"] == "7"


def test_one_request_more_than_may_wait_is_refused_and_the_next_served() -> None:
    flying, go_on = threading.Event(), threading.Event()

    def delay(_: object) -> None:
        flying.set()
        assert go_on.wait(WAIT_S)

    with (
        fake_kernel(structs.replace(POLICY, max_running=1), waiting_max=1, delay=delay) as engine,
        live_server(create_app(engine, byte_tokenizer(), MODEL, Settings(grace_s=0.0))) as server,
        ThreadPoolExecutor() as pool,
    ):
        short = {"messages": [{"role": "user", "content": "h"}], "max_tokens": 1}
        first = pool.submit(post, server, short)
        assert flying.wait(WAIT_S)
        second = pool.submit(post, server, short)
        # The first is in a step that waits, so whoever is not refused waits behind it.
        third = pool.submit(post, server, short)
        done, _ = wait([second, third], WAIT_S, FIRST_COMPLETED)
        (refused,) = done
        assert refused.result().status_code == 429
        assert refused.result().headers["retry-after"] == "1"
        go_on.set()
        assert {
            first.result().status_code,
            *(it.result().status_code for it in (second, third)),
        } == {
            200,
            429,
        }
        assert post(server, short).status_code == 200


# Other origins


def preflight(server: LiveServer, origin: str) -> httpx.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    return httpx.options(server.url + "/v1/chat/completions", headers=headers)


def test_a_known_origin_may_ask_without_a_key_and_read_even_a_refusal(serve: Serve) -> None:
    server = serve(cors_origins=Texts((ORIGIN,)), api_key=Texts(("sk-one",)))
    response = preflight(server, ORIGIN)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert response.headers["access-control-allow-headers"] == "authorization,content-type"
    response = httpx.get(server.url + "/v1/models", headers={"origin": ORIGIN})
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in response.headers["access-control-expose-headers"]


def test_another_origin_is_told_nothing(serve: Serve) -> None:
    server = serve(cors_origins=Texts((ORIGIN,)))
    assert preflight(server, "https://evil.example").status_code == 400
    response = httpx.get(server.url + "/health", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in response.headers


def test_without_origins_no_preflight_is_answered(serve: Serve) -> None:
    response = preflight(serve(), ORIGIN)
    assert response.status_code == 405
    assert "access-control-allow-origin" not in response.headers


# The engine


def test_health_is_false_once_the_engines_thread_died() -> None:
    class Died(BaseException):
        """Not even an Exception."""

    def delay(_: object) -> None:
        raise Died("out of the blue")

    with (
        fake_kernel(POLICY, delay=delay) as engine,
        live_server(create_app(engine, byte_tokenizer(), MODEL, Settings(grace_s=0.0))) as server,
    ):
        assert httpx.get(server.url + "/health").json()["status"] == "ok"
        response = post(server, CHAT)
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "the engine stopped: out of the blue"
        health = httpx.get(server.url + "/health")
        assert (health.status_code, health.json()["status"]) == (503, "engine stopped")
        assert httpx.get(server.url + "/ready").status_code == 503
        late = post(server, CHAT)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_stopped")


@contextmanager
def fake_kernel(policy: Policy, waiting_max: int = 1024, **kernel: Any) -> Iterator[Engine]:
    """A real engine on its thread, over a kernel without a model, for the bytes' tokens."""
    made = FakeKernel(SMALL, vocab_size=300, **kernel)
    parts = Parts(made, policy, MemoryCapture(), header(SMALL, policy), vocab_size=300)
    engine = Engine(lambda: parts, waiting_max=waiting_max)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop(WAIT_S)
