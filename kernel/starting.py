"""Starting: a thread that hands graphs to MLX while the thread that built them goes on.

Owns that thread, one for each thread that serves, and the stream that both use. On CUDA, MLX
encodes a step's launches in the thread that asks for them, in milliseconds and without the
interpreter's lock: long enough to close the step before and to plan the next.

Only one of the two evaluates at a time: the one that serves calls `settle` before it does. What it
may do without is to build graphs, and to read arrays of steps that were started, where no graph is
fed these.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from queue import SimpleQueue

import mlx.core as mx

from .errors import describe

_here = threading.local()
_Work = tuple[Future[str], list[mx.array]]


class Starter:
    """See the module; `of_thread` gives this thread's. The default stream is from then on one that
    both threads may use.
    """

    def __init__(self) -> None:
        self._stream = mx.new_thread_unsafe_stream(mx.default_device())
        mx.set_default_stream(self._stream)
        self._due: SimpleQueue[_Work] = SimpleQueue()
        self._newest: Future[str] = Future()
        self._newest.set_result("")
        # A daemon that never ends: what MLX keeps for a thread goes with it, and then takes the
        # interpreter's lock.
        threading.Thread(target=self._run, name="starting", daemon=True).start()

    @classmethod
    def of_thread(cls) -> Starter:
        found: Starter | None = getattr(_here, "starter", None)
        if found is None:
            found = _here.starter = cls()
        return found

    def start(self, arrays: list[mx.array]) -> Future[str]:
        """Have arrays computed. What comes of it: why they cannot be, or nothing."""
        self.settle()
        self._newest = Future()
        self._due.put((self._newest, arrays))
        return self._newest

    def settle(self) -> None:
        """Wait until nothing is being started."""
        self._newest.result()

    def _run(self) -> None:
        mx.set_default_stream(self._stream)
        while True:
            _start(*self._due.get())


def settle() -> None:
    """Wait until nothing is being started for this thread, before it has MLX evaluate."""
    found: Starter | None = getattr(_here, "starter", None)
    if found is not None:
        found.settle()


def _start(future: Future[str], arrays: list[mx.array]) -> None:
    failure = ""
    try:
        mx.async_eval(arrays)  # type: ignore[no-untyped-call]
    except Exception as error:
        failure = describe(error)
    # Nothing here holds on to a graph by the time that somebody hears of it.
    del arrays
    future.set_result(failure)
