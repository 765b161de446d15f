"""The page at `/` without a browser: its files, and the events that it draws."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.http import events as events_module
from server.http.events import WATCHERS_MAX, Feed
from server.http.pool_snapshot import snapshot
from server.http.route_page import POLICY as PAGE_POLICY
from server.http.wire import ApiError

from .fake_engine import FakeEngine, byte_tokenizer, scripted
from .page_server import KEY, served
from .sim import Sim

PAGE = Path(events_module.__file__).parent / "page"
PROMPT = tuple(range(1, 19))


async def _first(feed: Feed, count: int) -> list[bytes]:
    found = []
    async with aclosing(feed.watch()) as events:
        async for event in events:
            found.append(event)
            if len(found) == count:
                break
    return found


def test_all_who_watch_get_one_snapshot_and_a_closing_server_ends_their_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def counted(*given: Any) -> bytes:
        made.append(1)
        return snapshot(*given)

    monkeypatch.setattr(events_module, "snapshot", counted)
    closing = threading.Event()

    async def main() -> list[bytes]:
        with FakeEngine(byte_tokenizer()) as engine:
            feed = Feed(engine, closing.is_set)
            first = await asyncio.gather(*(_first(feed, 1) for _ in range(5)))
            closing.set()
            ended = await _first(feed, 1)
            assert ended == []
            return [events[0] for events in first]

    events = asyncio.run(main())
    assert (len(made), len(set(events)), len(events)) == (1, 1, 5)
    assert (events[0][:7], events[0][-3:]) == (b"data: {", b"}\n\n")


def test_a_watcher_hears_of_changes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "EVERY_S", 0.0)
    monkeypatch.setattr(events_module, "SHARE", 0)
    monkeypatch.setattr(events_module, "ALIVE_S", 0.0)
    sim = Sim()

    async def main() -> list[bytes]:
        feed = Feed(sim.engine, lambda: False)
        found = []
        async with aclosing(feed.watch()) as events:
            async for event in events:
                found.append(event)
                if len(found) == 3:
                    sim.submit(PROMPT, 2)
                    sim.step()
                if len(found) == 5:
                    return found
        return found

    events = asyncio.run(main())
    assert [event.partition(b":")[0] for event in events] == [b"data", b"", b"", b"data", b""]
    assert json.loads(events[3][6:])["step"] == 1


def test_more_watchers_than_the_server_takes_are_refused_until_one_leaves() -> None:
    with FakeEngine(byte_tokenizer()) as engine:

        async def main() -> None:
            feed = Feed(engine, lambda: False)
            for _ in range(WATCHERS_MAX):
                feed.admit()
            with pytest.raises(ApiError, match="32 pages watch this server already"):
                feed.admit()
            feed.watchers -= 1
            feed.admit()

        asyncio.run(main())


def until_left(app: Any) -> None:
    """Wait until nobody watches."""
    done = threading.Event()
    for _ in range(2000):
        if app.state.feed.watchers == 0:
            return
        done.wait(0.01)
    pytest.fail("a watcher was never let go")


def test_a_watcher_that_leaves_is_let_go_and_one_that_stays_does_not_hold_up_a_stop() -> None:
    with scripted("x") as engine, served(engine) as (server, app):
        with httpx.stream("GET", server.url + "/events") as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            assert app.state.feed.watchers == 1
        until_left(app)
        head = httpx.head(server.url + "/events")
        assert (head.status_code, app.state.feed.watchers) == (200, 0)
        with httpx.stream("GET", server.url + "/events") as answer:
            lines = answer.iter_lines()
            next(lines)
            server.stop()
            assert list(lines) == [""]


def test_the_page_is_small_asks_nobody_else_and_its_policy_allows_nothing_else() -> None:
    files = sorted(PAGE.iterdir())
    assert [it.name for it in files] == ["page.css", "page.html", "page.js"]
    assert sum(len(it.read_bytes()) for it in files) <= 30 * 1024
    with scripted("x") as engine, served(engine) as (server, _):
        found = [httpx.get(server.url + path) for path in ("/", "/page.css", "/page.js")]
    assert [answer.status_code for answer in found] == [200] * 3
    types = [answer.headers["content-type"].partition(";")[0] for answer in found]
    assert types == ["text/html", "text/css", "text/javascript"]
    for answer in found:
        assert answer.headers["content-security-policy"] == PAGE_POLICY
        assert "http://" not in answer.text
        assert "https://" not in answer.text
    assert "'unsafe" not in PAGE_POLICY
    assert "default-src 'none'" in PAGE_POLICY


def test_with_keys_the_page_is_open_and_the_events_are_not() -> None:
    with scripted("x") as engine, served(engine, api_key=(KEY,)) as (server, _):
        paths = ("/", "/page.css", "/page.js", "/events", "/metrics")
        statuses = [httpx.get(server.url + path).status_code for path in paths]
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.stream("GET", server.url + "/events", headers=headers) as answer:
            status = answer.status_code
    assert (statuses, status) == ([200, 200, 200, 401, 401], 200)
