"""Logs: structlog on the error stream, coloured on a terminal, `key=value` lines elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import structlog
from structlog.typing import EventDict


@contextmanager
def no_logs() -> Iterator[None]:
    """Nothing is logged inside of the block: for an engine that runs again what was logged once."""
    with structlog.testing.capture_logs():
        yield


def configure_logs(level: str = "info") -> None:
    """Set up logging for the process. `level`: debug, info, warning or error."""
    terminal = sys.stderr.isatty()
    renderer: structlog.typing.Processor
    if terminal:
        # The default shows the locals of every frame: all of a pool, for tens of seconds, and
        # prompts in a log.
        renderer = structlog.dev.ConsoleRenderer(
            colors=True, sort_keys=False, exception_formatter=structlog.dev.plain_traceback
        )
    else:
        order = ["timestamp", "level", "event"]
        renderer = structlog.processors.LogfmtRenderer(key_order=order, bool_as_flag=False)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            _escape_controls,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if terminal else "iso", utc=False),
            structlog.processors.StackInfoRenderer(),
            *([] if terminal else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=_ErrorStream,
        cache_logger_on_first_use=False,
    )


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
