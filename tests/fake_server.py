"""A server of its own process over the scripted engine: its answers never end.

Prints its address once it listens; SIGTERM stops it.
"""

from __future__ import annotations

from itertools import repeat

from server.http.app import create_app
from server.http.listen import bind, listen, run
from server.logs import configure_logs
from server.settings import Settings

from .fake_engine import LONG, FakeEngine, byte_tokenizer

MANY = 20_000
"""Times LONG: far more than what the buffers of a socket take."""


def main() -> None:
    configure_logs()
    tokenizer = byte_tokenizer()
    (token,) = tokenizer.encode(LONG)
    settings = Settings(grace_s=0.0)
    with FakeEngine(tokenizer, lambda _: repeat(token, MANY), context_tokens=MANY) as engine:
        listener = bind("127.0.0.1", 0)
        app = create_app(engine, tokenizer, "models/tiny", settings)
        host, port = listen(listener)
        print(f"serving fake on http://{host}:{port}", flush=True)
        run(app, listener, settings)


if __name__ == "__main__":
    main()
