"""Logs: structlog on the error stream; what the standard library's logging gets goes there, too.

Text is coloured on a terminal and `key=value` lines elsewhere; JSON is one object a line. Owns how
a line looks, and the notes that the layers below leave for a request's one line.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import structlog
from structlog.typing import EventDict, Processor


@contextmanager
def no_logs() -> Iterator[None]:
    """Nothing is logged inside of the block: for an engine that runs again what was logged once."""
    with structlog.testing.capture_logs():
        yield


_notes: ContextVar[dict[str, Any]] = ContextVar("notes")


@contextmanager
def noted() -> Iterator[dict[str, Any]]:
    """What `note` is told inside of the block, by any task that was begun in it."""
    notes: dict[str, Any] = {}
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def note(**fields: Any) -> None:
    """Add to the log line that is written when the request now served is over."""
    _notes.get({}).update(fields)


def configure_logs(level: str = "info", form: str = "text") -> None:
    """Set up logging for the process. `level`: debug, info, warning or error; `form`: text, json.

    Whatever is not ours (Hypercorn, asyncio, warnings of libraries) logs from warning on.
    """
    if form == "json":
        processors = _json_lines()
    else:
        processors = _terminal() if sys.stderr.isatty() else _plain_lines()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.StackInfoRenderer(),
            *processors,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=_ErrorStream,
        cache_logger_on_first_use=False,
    )
    logging.getLogger().addHandler(BRIDGE)
    # It warns of each write to a client that has gone, and the rest of an answer may be many.
    logging.getLogger("asyncio").setLevel(logging.ERROR)


def _json_lines() -> list[Processor]:
    return [
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    ]


def _plain_lines() -> list[Processor]:
    order = ["timestamp", "level", "event", "request_id"]
    return [
        _escape_controls,
        structlog.processors.TimeStamper(fmt="iso", utc=False),
        structlog.processors.format_exc_info,
        structlog.processors.LogfmtRenderer(key_order=order, drop_missing=True, bool_as_flag=False),
    ]


def _terminal() -> list[Processor]:
    # The default shows the locals of every frame: all of a pool, for tens of seconds, and prompts
    # in a log.
    renderer = structlog.dev.ConsoleRenderer(
        colors=True, sort_keys=False, exception_formatter=structlog.dev.plain_traceback
    )
    return [
        _escape_controls,
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
        renderer,
    ]


class _Bridge(logging.Handler):
    """The standard library's records, written as ours are."""

    def emit(self, record: logging.LogRecord) -> None:
        line = structlog.get_logger().bind(logger=record.name)
        write = line.error if record.levelno >= logging.ERROR else line.warning
        write(record.getMessage(), exc_info=record.exc_info)


BRIDGE = _Bridge(logging.WARNING)


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}


def _escape_controls(_: Any, __: str, event: EventDict) -> EventDict:
    """What a client sent may stand in a line; it must not end it, nor colour the terminal."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = value.translate(_CONTROLS)
    return event


class _ErrorStream:
    """Where lines go. A stream that broke (its reader has gone) loses lines, never a request."""

    def __init__(self, *_: Any) -> None:
        pass

    def msg(self, message: str) -> None:
        with suppress(OSError, ValueError):
            print(message, file=sys.stderr, flush=True)

    debug = info = warning = error = critical = exception = msg
