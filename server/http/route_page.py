"""Routes: GET /, a page for a person, its style and script, and GET /events, which it draws.

The page is a file as it is, without anything of the server in it; it needs no key, and what it asks
for does. Its policy lets it load its own two files and ask this server, and nothing else.
"""

from __future__ import annotations

from importlib.resources import files
from typing import cast

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from .events import Feed

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
EVENTS = "text/event-stream"
EVENT_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def _read(name: str) -> bytes:
    return (files(__package__) / "page" / name).read_bytes()


PAGE, STYLE, SCRIPT = _read("page.html"), _read("page.css"), _read("page.js")


async def page(request: Request) -> Response:
    """GET /: the page."""
    return Response(PAGE, headers=HEADERS, media_type="text/html")


async def style(request: Request) -> Response:
    """GET /page.css."""
    return Response(STYLE, headers=HEADERS, media_type="text/css")


async def script(request: Request) -> Response:
    """GET /page.js."""
    return Response(SCRIPT, headers=HEADERS, media_type="text/javascript")


async def events(request: Request) -> Response:
    """GET /events: snapshots (pool_snapshot.Snapshot) as server-sent events, without an end."""
    if request.method == "HEAD":
        return Response(headers=EVENT_HEADERS, media_type=EVENTS)
    feed = cast(Feed, request.app.state.feed)
    feed.admit()
    return _Watched(feed)


class _Watched(StreamingResponse):
    """A stream that the feed knows of until it is over, in whatever way."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        super().__init__(feed.watch(), headers=EVENT_HEADERS, media_type=EVENTS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except ClientDisconnect:
            pass
        finally:
            self._feed.watchers -= 1
