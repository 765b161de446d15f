"""A real Hypercorn on a real socket, on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from starlette.applications import Starlette

from server.http.listen import bind, listen, serve_app
from server.settings import Settings

WAIT_S = 20.0


class LiveServer:
    """A running server: its address, its port, and `stop`, which waits for an orderly end."""

    def __init__(self, app: Starlette, settings: Settings) -> None:
        self._listener = bind("127.0.0.1", 0)
        self.host, self.port = listen(self._listener)
        self.url = f"http://{self.host}:{self.port}"
        self._app, self._settings = app, settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-server", daemon=True)
        self._thread.start()
        assert self._ready.wait(WAIT_S)

    def _run(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self._ready.set()
            await serve_app(self._app, self._listener, self._settings, self._stop)

        asyncio.run(main())

    def begin_stop(self) -> None:
        """What a signal does."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop.set)

    def stop(self) -> None:
        """Stop, and wait until the loop is closed, as it may be by now."""
        with suppress(RuntimeError):
            self.begin_stop()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


@contextmanager
def live_server(app: Starlette, settings: Settings | None = None) -> Iterator[LiveServer]:
    """Serve `app` (of `create_app`) while the block runs."""
    server = LiveServer(app, settings or Settings(grace_s=0.0))
    try:
        yield server
    finally:
        server.stop()
