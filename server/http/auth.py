"""Auth: API keys, asked for at every path but the few that machines look at without one.

Owns the keys and their comparison, which takes the same time whichever key is wrong and wherever;
what is compared are digests. A missing and a wrong key get the same answer. No key is ever logged.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from ..settings import Settings, SettingsError, is_key
from .error_shape import refusal
from .wire import ApiError

OPEN_PATHS = frozenset({"/health", "/ready", "/", "/page.css", "/page.js"})
METRICS_PATH = "/metrics"
CHALLENGE = {"WWW-Authenticate": "Bearer"}

log = structlog.get_logger()


class Keys:
    """The keys that may be sent: those of the settings, and those of a file as it is now."""

    def __init__(self, keys: Iterable[str], file: str | None = None) -> None:
        """Raises SettingsError where the file cannot be read, or is wrong."""
        self._fixed = [_digest(key.encode()) for key in keys]
        self._path = file
        self._stamp = self._look()
        self._from_file = [] if file is None else _read_keys(file)

    def accept(self, key: bytes) -> bool:
        """Whether it is one of them."""
        self._reread()
        sent, found = _digest(key), False
        for digest in (*self._fixed, *self._from_file):
            found |= hmac.compare_digest(sent, digest)
        return found

    def _reread(self) -> None:
        """A file that became unreadable or wrong changes nothing, and says so once."""
        stamp = self._look()
        if self._path is None or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._from_file = _read_keys(self._path)
        except SettingsError as error:
            log.error("api keys not read again", reason=str(error))
        else:
            log.info("api keys read again", keys=len(self._from_file))

    def _look(self) -> tuple[int, ...] | None:
        """What changes with the file."""
        if self._path is None:
            return None
        try:
            seen = os.stat(self._path)
        except OSError:
            return None
        return (seen.st_ino, seen.st_size, seen.st_mtime_ns)


def keys_of(settings: Settings) -> Keys | None:
    """The keys of a server; None where it asks for none. Raises SettingsError."""
    if open_paths(settings) is None:
        return None
    return Keys(settings.api_key, settings.api_key_file)


def open_paths(settings: Settings) -> frozenset[str] | None:
    """The paths that need no key; None where none does."""
    if not settings.api_key and settings.api_key_file is None:
        return None
    return OPEN_PATHS | ({METRICS_PATH} if settings.public_metrics else set())


def _read_keys(path: str) -> list[bytes]:
    """Digests of the keys in a file: one a line, # comments. Raises SettingsError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise SettingsError(f"api_key_file {path} cannot be read: {reason}") from None
    stripped = ((number, line.strip()) for number, line in enumerate(lines, start=1))
    keys = [(number, line) for number, line in stripped if line and not line.startswith("#")]
    for number, key in keys:
        if not is_key(key):
            raise SettingsError(
                f"api_key_file {path}, line {number}: a key must be printable ASCII without spaces"
            )
    if not keys:
        raise SettingsError(f"api_key_file {path} holds no key: put one on a line")
    return [_digest(key.encode()) for _, key in keys]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Auth:
    """ASGI application around another: 401 without a key, but at the open paths."""

    def __init__(self, app: ASGIApp, keys: Keys, paths: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._open = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open:
            sent = [self._keys.accept(key) for key in _sent_keys(scope)]
            if not any(sent):
                await refusal(_unauthorised(), scope, CHALLENGE)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _sent_keys(scope: Scope) -> list[bytes]:
    """`Authorization: Bearer KEY` and `x-api-key: KEY`; one empty key where there is neither."""
    keys = []
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            keys.append(value)
        elif name == b"authorization" and value[:7].lower() == b"bearer ":
            keys.append(value[7:].strip())
    return keys or [b""]


def _unauthorised() -> ApiError:
    message = (
        "This server needs an API key; send one that it knows as "
        "'Authorization: Bearer KEY' or 'x-api-key: KEY'."
    )
    return ApiError(message, status=401, code="invalid_api_key")
