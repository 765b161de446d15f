"""Events: snapshots of the engine for pages that watch it, as server-sent events.

Owns the pace: one snapshot is made for all who watch, at most five a second and never for more than
a twentieth of a processor's time; none while nothing changes. Reads values only, so the engine
never waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from ..submission import EngineApi
from ..view import View
from .pool_snapshot import snapshot
from .wire import ApiError

EVERY_S = 0.2
SHARE = 20
"""A snapshot that takes long is not made again before that many times its own time."""
ALIVE_S = 15.0
"""A comment is sent that often, so that no proxy takes a quiet stream for a dead one."""
WATCHERS_MAX = 32


class Feed:
    """See the module. Used on the event loop's thread only."""

    def __init__(self, engine: EngineApi, closing: Callable[[], bool]) -> None:
        """`closing`: whether the server stops, which ends every stream."""
        self._engine = engine
        self._closing = closing
        self._lock = asyncio.Lock()
        self._data = b""
        self._view: View | None = None
        self._healthy = False
        self._next_s = 0.0
        self.watchers = 0

    def admit(self) -> None:
        """One more watches, until `watch` ends. Raises ApiError (429)."""
        if self.watchers >= WATCHERS_MAX:
            raise ApiError(
                f"{WATCHERS_MAX} pages watch this server already; close one of them.",
                status=429,
                kind="rate_limit_error",
                code="too_many_watchers",
            )
        self.watchers += 1

    async def watch(self) -> AsyncIterator[bytes]:
        """Events, until the server stops; the first one at once."""
        sent, alive_s = b"", time.monotonic()
        while not self._closing():
            data = await self._newest()
            now = time.monotonic()
            if data is not sent:
                sent, alive_s = data, now
                yield b"data: " + data + b"\n\n"
            elif now - alive_s >= ALIVE_S:
                alive_s = now
                yield b": alive\n\n"
            await asyncio.sleep(EVERY_S)

    async def _newest(self) -> bytes:
        """The last snapshot, or a new one where something changed and enough time has passed."""
        async with self._lock:
            engine = self._engine
            view, healthy = engine.view, engine.healthy
            started_s = time.monotonic()
            same = view is self._view and healthy == self._healthy
            if same or started_s < self._next_s:
                return self._data
            at_ms = round(started_s * 1000)
            self._data = await asyncio.to_thread(snapshot, view, engine.counters, healthy, at_ms)
            self._view, self._healthy = view, healthy
            took_s = time.monotonic() - started_s
            self._next_s = started_s + max(EVERY_S, SHARE * took_s)
            return self._data
