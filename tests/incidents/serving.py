"""Serving: the real engine on its own thread over the fake kernel, behind real HTTP.

Owns the gate that holds a step back, so that a test decides what is there when it runs.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import openai
from attrs import frozen

from kernel.batch import Batch
from kernel.fake import FakeKernel
from kernel.tokenizer import Detokenizer
from server.engine import Engine, _is_ready
from server.http.app import create_app
from server.loop import Parts
from server.policy import Policy
from server.settings import Settings
from statemachine.geometry import Geometry, Group
from statemachine.records import Record

from ..fake_engine import byte_tokenizer
from ..http_server import LiveServer, live_server
from ..sim import MemoryCapture, Sim, header, idle
from ..tampering import outcome_of

MODEL = "fake"
WAIT_S = 60.0
"""Machines are busy: it ends a test that hangs, and measures nothing."""
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
"""A chat template that adds nothing: a prompt is the bytes of its message."""
ROOM = Geometry(block_size=4, groups=(Group(num_blocks=256),))
POLICY = Policy(max_batch_tokens=64, max_running=32, prefill_chunk=16, context_tokens=128)


def replays(records: Sequence[Record], folder: Path) -> None:
    """Hold that a tape of these records is clean at fold and at plan."""
    for depth in ("fold", "plan"):
        outcome = outcome_of(folder, list(records), depth=depth)
        assert outcome.divergence is None, f"{depth}: {outcome.divergence}"
        assert outcome.exit_code == 0, outcome.notes


def settle(sim: Sim, folder: Path) -> None:
    """Hold what is to hold of a simulation at its end: IDLE, PROV, and a tape that replays."""
    engine = sim.engine
    assert sim.idle_counts() == idle(sim.kernel.geometry)
    assert engine.status()["shadow_found"] == 0
    engine.flush()
    sim.run()
    assert engine.status()["free"] == engine.status()["num_blocks"]
    engine.stop()
    replays(sim.capture.records, folder)


class Gate:
    """Before each step that it is told to hold, the engine waits until it is opened."""

    def __init__(self, *steps: int) -> None:
        self._steps = set(steps)
        self._open = threading.Event()
        self.reached = threading.Event()

    def __call__(self, batch: Batch) -> None:
        """The kernel's `delay`."""
        if batch.step in self._steps:
            self.reached.set()
            assert self._open.wait(WAIT_S), f"nobody let step {batch.step} go"

    def open(self) -> None:
        """Let the step go, and all later ones."""
        self._open.set()


@frozen
class Served:
    """A running server over a fake kernel, and the ways into it."""

    engine: Engine
    kernel: FakeKernel
    capture: MemoryCapture
    server: LiveServer
    client: openai.OpenAI

    def ask(self, text: Any, **fields: Any) -> Any:
        """A greedy completion of one user's message; `fields` go into the body."""
        body = {"temperature": 0, "max_tokens": 16} | fields
        create: Any = self.client.chat.completions.create
        return create(model=MODEL, messages=[{"role": "user", "content": text}], **body)

    def streamed(self, text: Any, **fields: Any) -> tuple[list[str], str, Any]:
        """Pieces of text, finish reason and usage of a streamed completion."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *parts, last = list(self.ask(text, **options, **fields))
        pieces = [part.choices[0].delta.content or "" for part in parts]
        return pieces, parts[-1].choices[0].finish_reason, last.usage

    def connect(self, text: str, **fields: Any) -> socket.socket:
        """A client that sent a request and reads nothing yet."""
        message = {"role": "user", "content": text}
        body = json.dumps({"messages": [message], "temperature": 0, **fields}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
        connection = socket.create_connection((self.server.host, self.server.port), WAIT_S)
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        return connection

    def post(self, content: Any, **fields: Any) -> HTTPConnection:
        """Send a request and leave its response where it is; returns once the engine has it, and
        could begin it: its prompt is read by a thread of its own.
        """
        before = self.engine._next_request
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
        connection = HTTPConnection(self.server.host, self.server.port, timeout=WAIT_S)
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        self.until(lambda: self.engine._next_request == before + 1)
        self.until(lambda: all(map(_is_ready, list(self.engine._inbox))))
        return connection

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something is so."""
        end_s = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < end_s, f"it never came to be: {self.engine.status()}"
            time.sleep(0.001)

    def idle(self) -> None:
        """Wait until nothing runs; then no block is held, none is lost, and after a flush all are
        free.
        """
        engine = self.engine
        self.until(lambda: not any(engine.status()[it] for it in ("running", "waiting", "held")))
        assert engine.status()["shadow_found"] == 0
        engine.flush()
        self.until(lambda: engine.status()["free"] == engine.status()["num_blocks"])


@frozen
class Read:
    """An answer as its client read it: pieces of text (one, if not streamed), end, tokens."""

    pieces: list[str]
    reason: str
    tokens: int

    @property
    def text(self) -> str:
        """The pieces, joined."""
        return "".join(self.pieces)


def read(connection: HTTPConnection) -> Read:
    """The response to a request that was posted; a stream asked for its usage."""
    with closing(connection):
        response = connection.getresponse()
        body = response.read().decode()  # strictly: bytes that are no UTF-8 raise
    assert response.status == 200, body
    if not body.startswith("data: "):
        answer = json.loads(body)
        choice = answer["choices"][0]
        used = answer["usage"]["completion_tokens"]
        return Read([choice["message"]["content"]], choice["finish_reason"], used)
    *events, done, rest = body.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events]
    choices = [chunk["choices"][0] for chunk in chunks]
    pieces = [choice["delta"].get("content", "") for choice in choices]
    return Read(pieces, choices[-1]["finish_reason"], last["usage"]["completion_tokens"])


@contextmanager
def over_fake(
    geometry: Geometry = ROOM,
    policy: Policy = POLICY,
    *,
    template: str = PLAIN,
    waiting_max: int = 1024,
    **kernel: Any,
) -> Iterator[Served]:
    """Serve a fake model of ASCII characters while the block runs; its records stay readable."""
    tokenizer = byte_tokenizer(template)
    fake = FakeKernel(geometry, **({"vocab_size": 127} | kernel))
    capture = MemoryCapture()
    parts = Parts(
        fake,
        policy,
        capture,
        header(geometry, policy),
        lambda: Detokenizer(tokenizer),
        tokenizer.vocab_size,
    )
    engine = Engine(lambda: parts, waiting_max=waiting_max)
    engine.start()
    try:
        app = create_app(engine, tokenizer, MODEL, Settings(grace_s=0.0))
        with (
            live_server(app) as server,
            openai.OpenAI(
                base_url=server.url + "/v1", api_key="x", max_retries=0, timeout=WAIT_S
            ) as client,
        ):
            yield Served(engine, fake, capture, server, client)
    finally:
        engine.stop(WAIT_S)
