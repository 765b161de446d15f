"""Listen: a socket, Hypercorn on it, in TLS or not, and an orderly end.

Owns what Hypercorn is told, signals and the order of a stop: admit nobody, let answers finish for a
while, cancel the rest, close connections. Never touches the engine: who started it stops it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, cast

from hypercorn.asyncio import run as hypercorn_run
from hypercorn.asyncio import serve
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.config import Config
from hypercorn.events import Event, Updated
from starlette.applications import Starlette

from ..settings import Settings

BACKLOG = 1024
CUT_ROUNDS = 4
CLOSE_S = 1.0
"""Seconds that connections get to close once every answer is over."""


class ListenError(Exception):
    """The address cannot be listened on; one sentence that says what to do."""


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to the address, not listening yet. Raises ListenError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ListenError(f"the host {host!r} is not known: {reason}; check --host") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _refusal(host, port, error) from None
    return listener


def listen(listener: socket.socket) -> tuple[str, int]:
    """Start listening; the host and the port as they came to be. Raises ListenError."""
    host, port = listener.getsockname()[:2]
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise _refusal(host, port, error) from None
    return host, port


def _refusal(host: str, port: int, error: OSError) -> ListenError:
    if error.errno == errno.EADDRINUSE:
        return ListenError(
            f"port {port} on {host} is in use: stop what listens there, or choose another --port"
        )
    if error.errno == errno.EACCES:
        return ListenError(f"port {port} on {host} needs more rights: choose a --port above 1023")
    return ListenError(f"{host} port {port} cannot be listened on: {error.strerror}")


class _Connection(TCPServer):
    """Hypercorn's, but for this: one that its client closed ends once it is idle. It would keep its
    file until keep_alive_s is over, and clients that connect anew for each request would leave the
    process without files.
    """

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, Updated) and self.reader.at_eof():
            await self.idle_task.stop()
        else:
            await super().protocol_send(event)

    async def _read_data(self) -> None:
        await super()._read_data()
        await self.idle_task.stop()


hypercorn_run.TCPServer = _Connection  # type: ignore[attr-defined]


async def serve_app(
    app: Starlette, listener: socket.socket, settings: Settings, stop: asyncio.Event
) -> None:
    """Serve on a listening socket until `stop` is set, and the stop's order is done."""
    config = _config(settings)
    # Hypercorn takes the descriptor over, and closes it.
    config.bind = [f"fd://{listener.detach()}"]
    stopping = asyncio.Event()
    before = asyncio.all_tasks()

    async def stopped() -> None:
        await stop.wait()
        await app.state.desk.drain(settings.grace_s)
        stopping.set()

    serving = asyncio.ensure_future(serve(cast(Any, app), config, shutdown_trigger=stopped))
    until = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((serving, until), return_when=asyncio.FIRST_COMPLETED)
        done, _ = await asyncio.wait((serving,), timeout=CLOSE_S)
        if done:
            await serving
    finally:
        until.cancel()
        await _cut_off(asyncio.all_tasks() - before)


def _config(settings: Settings) -> Config:
    config = Config()
    # Its lines go where ours go (logs.py); it would write its own to the error stream.
    config.errorlog = logging.getLogger("hypercorn.error")
    config.backlog = BACKLOG
    # Until a request's headers are whole a connection is idle, so this bounds slow ones, too.
    config.keep_alive_timeout = settings.keep_alive_s
    config.h11_max_incomplete_size = settings.max_header_bytes
    config.h2_max_header_list_size = settings.max_header_bytes
    # Our own limit is below: where Hypercorn's passes, it fails with an error of its own.
    config.graceful_timeout = 3600.0
    config.include_server_header = False
    config.certfile, config.keyfile = settings.tls_cert, settings.tls_key
    return config


def check_tls(settings: Settings) -> None:
    """Raise ListenError unless the certificate and its key can be used, if there are any."""
    if settings.tls_cert is None or settings.tls_key is None:
        return
    for name, path in (("tls_cert", settings.tls_cert), ("tls_key", settings.tls_key)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise ListenError(f"{name} {path} cannot be read: {error.strerror}") from None
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(settings.tls_cert, settings.tls_key, _no_passphrase)
    except ssl.SSLError as error:
        raise ListenError(
            f"tls_cert {settings.tls_cert} and tls_key {settings.tls_key} cannot be used: "
            f"{error.reason or error}; give a certificate and its own key, both as PEM"
        ) from None


def _no_passphrase() -> NoReturn:
    """Instead of asking on a terminal that a service has not got."""
    raise ListenError("tls_key has a passphrase: give a key without one, readable by nobody else")


async def _cut_off(tasks: set[asyncio.Task[Any]]) -> None:
    """End what is left: it serves clients that do not read, whose bytes can never be flushed, or
    the server was told a second time to stop.

    Hypercorn waits for that flush even where it is cancelled, hence the rounds; and it reports its
    own cancelled tasks as errors, which says nothing to anybody.
    """
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    for _ in range(CUT_ROUNDS):
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=CLOSE_S / CUT_ROUNDS)


def run(app: Starlette, listener: socket.socket, settings: Settings) -> bool:
    """Serve until SIGINT or SIGTERM; a second signal ends it at once.

    Whether a thread still works for nobody: a process that ends in the usual way waits for it.
    """
    threads = _Threads()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_until_signal(app, listener, settings, threads))
    return bool(threads.open)


class _Threads(ThreadPoolExecutor):
    """Of the loop: its end waits for no work, which nobody can cancel. A long prompt that is still
    being tokenised would hold up the tape's end. `open` is what was begun and is not done.
    """

    def __init__(self) -> None:
        super().__init__(thread_name_prefix="aside")
        self.open: set[Future[Any]] = set()

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        future = super().submit(work, *given, **named)
        self.open.add(future)
        future.add_done_callback(self.open.discard)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


async def _until_signal(
    app: Starlette, listener: socket.socket, settings: Settings, threads: _Threads
) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.set_default_executor(threads)
    serving = asyncio.ensure_future(serve_app(app, listener, settings, stop))

    def signalled() -> None:
        if stop.is_set():
            serving.cancel()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop's loop where it is installed (it is not on Windows)."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
