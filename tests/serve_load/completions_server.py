"""A small OpenAI-compatible server that answers as it is told: for what `replay serve-load` sends.

It knows /v1/models and streamed /v1/completions, on real sockets, a thread a connection. Answers
come from `answer`, a function of the body; what was sent, and who left, is kept.
"""

from __future__ import annotations

import json
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from attrs import define, field

WAIT_S = 20.0


@define
class Scripted:
    """An answer: pieces of (text, token ids or None), an end, and what goes wrong with it.

    hold: ends only once the client has left. status: refuse with it. broken: stop without an end.
    """

    pieces: Sequence[tuple[str, list[int] | None]] = ()
    finish_reason: str = "length"
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    hold: bool = False
    status: int = 200
    message: str = ""
    broken: bool = False


Answer = Callable[[dict[str, Any]], Scripted]


@define
class CompletionsServer:
    """What a test may ask. arrivals: set off by each request, before it is answered."""

    url: str
    bodies: list[dict[str, Any]] = field(factory=list)
    keys: list[str | None] = field(factory=list)
    left: list[dict[str, Any]] = field(factory=list)
    in_flight: int = 0
    in_flight_most: int = 0
    lock: threading.Lock = field(factory=threading.Lock)


def _handler(
    told: CompletionsServer, answer: Answer, models: Sequence[str], key: str
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            if key and self.headers.get("Authorization") != f"Bearer {key}":
                self._json(401, {"error": {"message": "No such key."}})
            elif self.path == "/v1/models":
                self._json(200, {"object": "list", "data": [{"id": name} for name in models]})
            else:
                self._json(404, {"error": {"message": "There is nothing here."}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/completions"
            with told.lock:
                told.bodies.append(body)
                told.keys.append(self.headers.get("Authorization"))
                told.in_flight += 1
                told.in_flight_most = max(told.in_flight_most, told.in_flight)
            scripted = answer(body)
            with told.lock:
                told.in_flight -= 1
            if scripted.status != 200:
                self._json(scripted.status, {"error": {"message": scripted.message}})
            else:
                self._stream(body, scripted)

        def _json(self, status: int, value: object) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, body: dict[str, Any], scripted: Scripted) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for text, tokens in scripted.pieces:
                choice = {"index": 0, "text": text, "finish_reason": None}
                if tokens is not None and body.get("return_token_ids"):
                    choice["token_ids"] = tokens
                self._event({"choices": [choice], "usage": None})
            if scripted.hold:
                # Readable without a request being sent: the client closed.
                ready, _, _ = select.select([self.connection], [], [], WAIT_S)
                with told.lock:
                    told.left += [body] if ready else []
                self.close_connection = True
                return
            if not scripted.broken:
                last = {"index": 0, "text": "", "finish_reason": scripted.finish_reason}
                self._event({"choices": [last], "usage": None})
                if scripted.completion_tokens is not None:
                    usage = {
                        "prompt_tokens": scripted.prompt_tokens,
                        "completion_tokens": scripted.completion_tokens,
                    }
                    self._event({"choices": [], "usage": usage})
                self._chunk(b"data: [DONE]\r\n\r\n")
            self._chunk(b"")

        def _event(self, value: object) -> None:
            self._chunk(b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n")

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

    return Handler


@contextmanager
def completions_server(
    answer: Answer, *, models: Sequence[str] = ("test-model",), key: str = ""
) -> Iterator[CompletionsServer]:
    """Serve while the block runs."""
    told = CompletionsServer("")
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(told, answer, models, key)) as server:
        server.daemon_threads = True
        told.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, name="completions", daemon=True)
        thread.start()
        try:
            yield told
        finally:
            server.shutdown()
            thread.join(WAIT_S)
