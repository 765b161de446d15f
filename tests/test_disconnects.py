"""Clients that go away, against the real engine stepped by hand: what the tape says of it.

Wherever a client leaves, its requests' blocks are free within two steps and each of its requests is
cancelled exactly once.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from attrs import define, field
from msgspec import structs

from server.engine import Engine
from server.http.app import create_app
from server.settings import Settings
from server.submission import Sink, Submission
from statemachine.events import Closed, Opened
from statemachine.records import Record, RequestCancelled, StepDone, StepPlanned

from .fake_engine import WAIT_S, byte_tokenizer
from .http_server import LiveServer, live_server
from .sim import POLICY, SMALL, Sim, idle

PROMPT = list(range(40))
"""Three pieces of a prefill, ten blocks."""
ANSWER = 20
AHEAD = structs.replace(POLICY, lookahead=True)
BEHIND = structs.replace(POLICY, lookahead=False)
STEPS_MAX = 2


@define
class Watched:
    """The engine, and what HTTP asked of it."""

    engine: Engine
    submitted: queue.SimpleQueue[int] = field(factory=queue.SimpleQueue)
    cancelled: queue.SimpleQueue[int] = field(factory=queue.SimpleQueue)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit(self, submission: Submission, sink: Sink) -> int:
        request = self.engine.submit(submission, sink)
        self.submitted.put(request)
        return request

    def cancel(self, request: int) -> None:
        self.engine.cancel(request)
        self.cancelled.put(request)


@define
class Stage:
    """A server over an engine that moves only when a test says so."""

    sim: Sim
    engine: Watched
    server: LiveServer

    def client(self, **fields: Any) -> socket.socket:
        """A client that has sent a request."""
        body = json.dumps({"prompt": PROMPT, "max_tokens": ANSWER} | fields).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection = socket.create_connection((self.server.host, self.server.port), WAIT_S)
        connection.sendall(head.encode() + body)
        return connection

    def taken(self, count: int) -> list[int]:
        """The next requests that HTTP submitted."""
        return [self.engine.submitted.get(timeout=WAIT_S) for _ in range(count)]

    def given_up(self, count: int) -> list[int]:
        """The next requests that HTTP cancelled."""
        return sorted(self.engine.cancelled.get(timeout=WAIT_S) for _ in range(count))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.sim.step()


@contextmanager
def stage(policy: Any) -> Iterator[Stage]:
    """The tape is whole, and nobody was cancelled twice, once the block was left."""
    sim = Sim(SMALL, policy)
    engine, settings = Watched(sim.engine), Settings(grace_s=0.0)
    app = create_app(engine, byte_tokenizer(), "tiny", settings)
    with live_server(app, settings) as server:
        yield Stage(sim, engine, server)
    assert engine.cancelled.empty()
    sim.run()
    assert sim.idle_counts() == idle(SMALL)


def steps_to_free(records: list[Record], request: int) -> int:
    """Steps from a request's one cancel to the end of its sequence; 0 where it never had one."""
    step, cancelled, opened, closed = 0, [], False, None
    for record in records:
        if isinstance(record, RequestCancelled) and record.request == request:
            cancelled.append(step)
        if isinstance(record, StepPlanned | StepDone):
            step = record.step
        for event in getattr(record, "events", ()):
            if getattr(event, "seq", None) == request:
                opened = opened or isinstance(event, Opened)
                if isinstance(event, Closed):
                    assert closed is None
                    closed = step
    (at,) = cancelled
    if not opened:
        return 0
    assert closed is not None
    return closed - at


MOMENTS = {
    "before the first step": 0,
    "in a chunked prefill": 1,
    "at the hand-over to decode": 3,
    "in decode": 7,
}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("policy", [BEHIND, AHEAD], ids=["behind", "ahead"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_blocks_are_free_within_two_steps_of_a_clients_leaving(
    moment: str, policy: Any, stream: bool, n: int
) -> None:
    with stage(policy) as it:
        client = it.client(stream=stream, n=n)
        requests = it.taken(n)
        it.steps(MOMENTS[moment])
        assert (it.sim.engine.status()["held"] > 0) == (MOMENTS[moment] > 0)
        client.close()
        assert it.given_up(n) == requests
        it.steps(STEPS_MAX)
        assert it.sim.idle_counts() == idle(SMALL)
    records = it.sim.capture.records
    assert all(0 <= steps_to_free(records, request) <= STEPS_MAX for request in requests)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("policy", [BEHIND, AHEAD], ids=["behind", "ahead"])
def test_a_client_that_leaves_in_the_queue_never_gets_a_block(
    policy: Any, stream: bool, n: int
) -> None:
    with stage(structs.replace(policy, max_running=1)) as it:
        other = it.sim.submit(range(20), 30)
        it.steps(2)
        client = it.client(stream=stream, n=n)
        requests = it.taken(n)
        it.steps(2)
        assert it.sim.engine.status()["waiting"] == n
        held = it.sim.engine.status()["held"]
        client.close()
        assert it.given_up(n) == requests
        it.steps(1)
        status = it.sim.engine.status()
        assert (status["waiting"], status["running"], status["held"]) == (0, 1, held)
    assert other.reason == "length"
    records = it.sim.capture.records
    assert [steps_to_free(records, request) for request in requests] == [0] * n


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_of_two_answers_only_the_one_that_is_not_over_is_given_up(stream: bool) -> None:
    with stage(AHEAD) as it:
        client = it.client(stream=stream, n=2)
        first, second = it.taken(2)
        while not it.sim.engine.view.requests.get(second) or first in it.sim.engine.view.requests:
            it.steps(1)
        client.close()
        assert it.given_up(1) == [second]
        it.steps(STEPS_MAX)
        assert it.sim.idle_counts() == idle(SMALL)
    cancels = it.sim.records(RequestCancelled)
    assert [cancel.request for cancel in cancels] == [second]


def test_a_client_that_leaves_while_its_prompt_is_read_is_given_up_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, gone = threading.Event(), threading.Event()
    tokenizer_of = type(byte_tokenizer())
    encode = tokenizer_of.encode

    def slowly(self: Any, text: str, **options: Any) -> list[int]:
        reading.set()
        assert gone.wait(WAIT_S)
        return encode(self, text[:8], **options)

    monkeypatch.setattr(tokenizer_of, "encode", slowly)
    with stage(AHEAD) as it:
        # Large enough that it is read on another thread.
        client = it.client(prompt="x" * 100_000)
        assert reading.wait(WAIT_S)
        client.close()
        gone.set()
        (request,) = it.taken(1)
        assert it.given_up(1) == [request]
        it.steps(STEPS_MAX)
        assert it.sim.idle_counts() == idle(SMALL)
    assert steps_to_free(it.sim.capture.records, request) == 0
