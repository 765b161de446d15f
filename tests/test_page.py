"""The page at `/` and what it draws: its files, the events, the packing of a pool, a browser."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from msgspec import structs

from kernel.batch import Batch
from kernel.fake import FakeKernel
from server.engine import Engine
from server.http import events as events_module
from server.http.app import create_app
from server.http.events import WATCHERS_MAX, Feed
from server.http.pool_snapshot import (
    CACHED,
    CELLS_MAX,
    FREE,
    NOBODY,
    OWN,
    PUBLISHED,
    RUNS_MAX,
    SEQUENCES_MAX,
    SHARED,
    STATE_SHIFT,
    shared_runs,
    snapshot,
)
from server.http.route_page import POLICY as PAGE_POLICY
from server.http.wire import ApiError
from server.loop import Parts
from server.settings import Settings
from server.submission import Submission
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters

from .browser import Browser
from .fake_engine import FakeEngine, byte_tokenizer, scripted
from .http_server import WAIT_S, LiveServer, live_server
from .sim import POLICY, SMALL, Inbox, MemoryCapture, Sim, header

PAGE = Path(events_module.__file__).parent / "page"
HOSTILE = "<img src=x onerror='window.hit = 1'><script>window.hit = 1</script> & \u00e9\U0001f600"
PROMPT = tuple(range(1, 19))
WHOLE = structs.replace(POLICY, prefill_chunk=64)
"""Prompts in one piece."""
KEY = "a-key-of-this-test"


def taken(sim: Sim) -> dict[str, Any]:
    """A snapshot of a simulation's engine."""
    engine = sim.engine
    data = snapshot(engine.view, engine.counters, engine.healthy, 7)
    found: dict[str, Any] = json.loads(data)
    return found


def cells_of(pool: dict[str, Any]) -> list[tuple[int, int]]:
    """State and lower bits of each cell."""
    cells = np.frombuffer(base64.b64decode(pool["cells"]), "<u2")
    return [(int(cell) >> STATE_SHIFT, int(cell) & NOBODY) for cell in cells]


def sharing() -> Sim:
    """Two sequences that share 4 blocks of 4, one of its own, and a cached rest of another."""
    sim = Sim(policy=WHOLE)
    sim.submit(range(50, 60), 1)
    sim.run()
    sim.submit(PROMPT, 30)
    sim.step()
    sim.submit((*PROMPT[:16], 60, 61, 62, 63, 1), 30)
    sim.step()
    return sim


def test_a_snapshot_says_who_holds_which_block_and_how() -> None:
    sim = sharing()
    state = sim.engine.view.state
    (first,), (second,) = (state.sequences[seq].tables for seq in (1, 2))
    (pool,) = taken(sim)["pools"]
    cells = cells_of(pool)
    assert [cells[block] for block in first] == [(SHARED, 0)] * 4 + [(OWN, 0)]
    assert [cells[block] for block in second] == [(SHARED, 0)] * 4 + [(PUBLISHED, 1), (OWN, 1)]
    assert pool["also"] == [[], [first[0], 4]]
    rest = [cell for number, cell in enumerate(cells) if number not in {*first, *second}]
    assert sorted(set(rest)) == [(FREE, NOBODY), (CACHED, NOBODY)]
    assert rest.count((CACHED, NOBODY)) == pool["cached"] == state.cached_blocks() == 2
    assert (pool["num_blocks"], pool["each"], pool["held"], pool["free"]) == (64, 1, 7, 55)


def test_a_snapshot_lists_its_sequences_and_counts_and_nothing_of_what_was_said() -> None:
    now = taken(sharing())
    assert now["sequences"] == [
        {"seq": 1, "prompt": 18, "answer": 2, "rows": 19, "adopted": 0},
        {"seq": 2, "prompt": 21, "answer": 1, "rows": 21, "adopted": 16},
    ]
    counted = {name: now[name] for name in ("at_ms", "healthy", "step", "running", "waiting")}
    assert counted == {"at_ms": 7, "healthy": True, "step": 3, "running": 2, "waiting": 0}
    assert (now["prompt_tokens"], now["generation_tokens"]) == (49, 4)
    assert (now["prefix_queries"], now["prefix_hits"]) == (49, 16)
    numbers = [*PROMPT, *range(50, 64)]
    assert set(now) & {"tokens", "text", "external_id"} == set()
    assert str(numbers)[1:-1] not in json.dumps(now)


def test_a_big_pool_is_drawn_in_cells_of_several_blocks() -> None:
    big = Geometry(4, (Group(num_blocks=3 * CELLS_MAX - 1),))
    sim = Sim(big, WHOLE)
    sim.submit(PROMPT, 30)  # blocks 0 to 4, of which 4 are published
    sim.step()
    (pool,) = taken(sim)["pools"]
    cells = cells_of(pool)
    assert (pool["each"], len(cells)) == (3, CELLS_MAX)
    assert cells[:3] == [(PUBLISHED, 100), (PUBLISHED, 66), (FREE, 0)]
    assert len(pool["cells"]) == 4 * -(-2 * CELLS_MAX // 3)
    sim.run()
    assert cells_of(taken(sim)["pools"][0])[:2] == [(CACHED, 0), (CACHED, 0)]


def test_a_snapshot_stays_small_with_many_sequences() -> None:
    sim = Sim(
        Geometry(4, (Group(num_blocks=CELLS_MAX),)),
        structs.replace(POLICY, max_running=400, max_batch_tokens=4000),
    )
    for number in range(300):
        sim.submit([number % 60, number // 60, 3, 4, 5], 30)
    for _ in range(20):  # a step admits 16
        sim.step()
    now = taken(sim)
    assert (len(now["sequences"]), now["sequences_left_out"]) == (SEQUENCES_MAX, 300 - 256)
    sequences = sim.engine.view.state.sequences
    blocks = [len(sequences[seq].tables[0]) for seq in sorted(sequences)]
    holders = [low for state, low in cells_of(now["pools"][0]) if state in (OWN, PUBLISHED)]
    assert holders.count(NOBODY) == sum(blocks[SEQUENCES_MAX:]) > 0
    assert holders.count(3) == blocks[3] > 0
    view, counters = sim.engine.view, sim.engine.counters
    assert len(snapshot(view, counters, True, 0)) < 32 * 1024


def test_blocks_beside_a_first_holder_are_runs_and_only_so_many() -> None:
    tables = [np.array(table) for table in ([0, 1, 2], [2, 0, 5], [9, 8, 0, 1, 2, 5])]
    owner = np.array([0, 0, 0, NOBODY, NOBODY, 1, NOBODY, NOBODY, 2, 2], np.uint16)
    assert shared_runs(tables, owner) == ((), (0, 1, 2, 1), (0, 3, 5, 1))
    apart = np.arange(0, 4 * RUNS_MAX, 2)
    owner = np.zeros(4 * RUNS_MAX, np.uint16)
    first, second, third = shared_runs([apart, apart, apart], owner)
    assert (first, len(second), third) == ((), 2 * RUNS_MAX, ())
    assert second[-2:] == (2 * RUNS_MAX - 2, 1)


def test_a_window_group_has_a_pool_of_its_own_and_a_model_owned_one_has_none() -> None:
    sim = Sim(Geometry(4, (Group(num_blocks=32), Group("window", 16, window=8))))
    sim.submit(PROMPT, 30)
    sim.step()
    pools = taken(sim)["pools"]
    assert [(pool["kind"], len(cells_of(pool))) for pool in pools] == [("full", 32), ("window", 16)]
    owned = Sim(Geometry(4, (Group("opaque"),)), structs.replace(POLICY, prefix_cache=False))
    owned.submit(PROMPT, 4)
    owned.step()
    assert taken(owned)["pools"] == []
    assert [it["rows"] for it in taken(owned)["sequences"]] == [16]


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


@contextmanager
def served(engine: Any, **settings: Any) -> Iterator[tuple[LiveServer, Any]]:
    chosen = Settings(grace_s=0.0, **settings)
    app = create_app(engine, byte_tokenizer(), "models/tiny", chosen)
    with live_server(app, chosen) as server:
        yield server, app


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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    opened = Browser()
    yield opened
    opened.close()


def wait_for(browser: Browser, condition: str) -> Any:
    """The value of an expression of the page, once it is true."""
    return browser.ask(
        "new Promise((done) => { const look = () => { const found = "
        f"({condition}); found ? done(found) : requestAnimationFrame(look); }}; look(); }})"
    )


def visit(browser: Browser, server: LiveServer, **how: Any) -> None:
    """Show the page, and wait until it has drawn a snapshot."""
    browser.show(server.url + "/", **how)
    wait_for(browser, "watch.drawn > 0")
    assert browser.errors == []


def text(browser: Browser, name: str) -> str:
    found: str = browser.ask(f"document.getElementById('{name}').textContent")
    return found


def send(browser: Browser, message: str) -> str:
    """Ask; the text of the log once the answer is whole."""
    browser.ask(
        f"document.getElementById('message').value = {json.dumps(message)};"
        "document.getElementById('ask').requestSubmit()"
    )
    wait_for(browser, "document.getElementById('log').getAttribute('aria-busy') === 'false'")
    return text(browser, "log")


@contextmanager
def halted(geometry: Geometry = SMALL, steps: int = 4) -> Iterator[Engine]:
    """An engine that stands still in a step, with two sequences that share blocks."""
    reached, go_on = threading.Event(), threading.Event()

    def delay(batch: Batch) -> None:
        if batch.step == steps:
            reached.set()
            assert go_on.wait(WAIT_S)

    kernel = FakeKernel(geometry, delay=delay)
    policy = structs.replace(POLICY, prefix_aware=True)
    parts = Parts(kernel, policy, MemoryCapture(), header(geometry, policy))
    engine = Engine(lambda: parts)
    engine.start()
    try:
        engine.submit(Submission(PROMPT, Parameters(40)), Inbox())
        engine.submit(Submission((*PROMPT, 60, 61), Parameters(40)), Inbox())
        assert reached.wait(WAIT_S)
        yield engine
    finally:
        go_on.set()
        engine.stop(WAIT_S)


def test_the_page_shows_load_sequences_and_the_map(browser: Browser) -> None:
    with halted() as engine, served(engine) as (server, _):
        visit(browser, server)
        wait_for(browser, "document.getElementById('model').textContent === 'models/tiny'")
        shown = {name: text(browser, name) for name in ("status", "running", "waiting", "wrong")}
        state = engine.view.state
        held = f"{round(100 * state.held_blocks() / 64)} %"
        assert shown == {"status": "serves", "running": "2", "waiting": "0", "wrong": "0"}
        assert text(browser, "kv") == held
        rows = browser.ask(
            "[...document.querySelectorAll('#sequences tr')].map((row) => row.cells[0].textContent)"
        )
        assert rows == ["sequence", "0", "1"]
        drawn = browser.ask("[...watch.pools[0].cells]")
        (pool,) = json.loads(snapshot(engine.view, engine.counters, True, 0))["pools"]
        assert [(cell >> 13, cell & NOBODY) for cell in drawn] == cells_of(pool)
        assert {url.removeprefix(server.url) for url in browser.requests} == {
            *("/", "/page.css", "/page.js", "/events", "/v1/models", "/version")
        }


def pixel(browser: Browser, cell: int) -> list[int]:
    """The colour near a cell's corner, behind any frame or dot."""
    found: list[int] = browser.ask(
        "(() => { const it = watch.pools[0], scale = devicePixelRatio;"
        f"const x = ({cell} % it.columns + 0.25) * it.size * scale;"
        f"const y = (Math.floor({cell} / it.columns) + 0.25) * it.size * scale;"
        "return [...it.canvas.getContext('2d').getImageData(x, y, 1, 1).data]; })()"
    )
    return found


def test_a_sequence_has_one_colour_and_choosing_it_fades_the_others(browser: Browser) -> None:
    with halted() as engine, served(engine) as (server, _):
        visit(browser, server)
        (first,), (second,) = (engine.view.state.sequences[seq].tables for seq in (0, 1))
        own, other, shared = first[-1], second[-1], first[0]
        assert shared == second[0]
        free = max(set(range(64)) - {*first, *second})
        colours = [pixel(browser, block) for block in (own, other, free)]
        assert len({tuple(colour) for colour in colours}) == 3
        browser.ask("document.querySelector('[data-seq=\"1\"]').click()")
        browser.drawn()
        assert browser.ask("watch.chosen") == 1
        pressed = "document.querySelector('[data-seq=\"1\"]').getAttribute('aria-pressed')"
        assert browser.ask(pressed) == "true"
        faded, kept, both = (pixel(browser, block) for block in (own, other, shared))
        assert kept == colours[1]
        assert (faded[3] < 255, both[3]) == (True, 255)


def test_the_map_can_be_read_with_the_keyboard(browser: Browser) -> None:
    with halted() as engine, served(engine) as (server, _):
        visit(browser, server)
        (table,) = engine.view.state.sequences[0].tables
        assert table[0] == 0
        browser.ask("watch.pools[0].canvas.focus()")
        browser.key("Home")
        assert text(browser, "readout") == "Block 0: held by several (sequences 0, 1)"
        browser.key("End")
        assert text(browser, "readout") == "Block 63: free"
        browser.key("ArrowLeft")
        assert text(browser, "readout") == "Block 62: free"


def test_everything_that_takes_input_has_a_name_and_can_be_reached(browser: Browser) -> None:
    with halted() as engine, served(engine) as (server, _):
        visit(browser, server)
        named = browser.ask(
            "[...document.querySelectorAll('input, textarea, button, canvas[tabindex]')]"
            ".filter((it) => !(it.labels && it.labels.length) && !it.getAttribute('aria-label')"
            " && !it.textContent.trim()).length"
        )
        assert named == 0
        assert browser.ask("document.documentElement.lang") == "en"
        assert browser.ask("document.querySelectorAll('h1').length") == 1


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_it_without_scrolling_sideways(browser: Browser, dark: bool) -> None:
    with halted() as engine, served(engine) as (server, _):
        visit(browser, server, width=375, height=740, dark=dark)
        browser.ask(f"document.getElementById('message').value = {json.dumps('x' * 200)}")
        assert browser.ask("[document.documentElement.scrollWidth, innerWidth]") == [375, 375]
        page = browser.ask("getComputedStyle(document.body).backgroundColor")
        assert page == ("rgb(20, 22, 26)" if dark else "rgb(255, 255, 255)")


def test_a_big_pool_is_shown_in_cells_that_say_which_blocks_they_are(browser: Browser) -> None:
    big = Geometry(4, (Group(num_blocks=20_000),))
    with halted(big) as engine, served(engine) as (server, _):
        visit(browser, server, width=375, height=740)
        browser.ask("watch.pools[0].canvas.focus()")
        browser.key("Home")
        said = text(browser, "readout")
        assert said.startswith("Blocks 0 to 4: 100 % held; held by ")
        browser.key("End")
        assert text(browser, "readout") == "Blocks 19995 to 19999: 0 % held; free"
        assert browser.ask("document.documentElement.scrollWidth") == 375


def test_a_chat_streams_keeps_its_turns_and_says_how_long_it_took(browser: Browser) -> None:
    with scripted("Hello there.") as engine, served(engine) as (server, _):
        visit(browser, server)
        log = send(browser, "Hi & bye")
        assert log.startswith("YouHi & byeModelHello there.first text after ")
        assert "12 tokens" in log
        assert log.endswith("ended: stop")
        send(browser, "Again")
        first, second = (engine.next_request().submission.tokens for _ in range(2))
        turns = "<user>Hi & bye\n<assistant>Hello there.\n<user>Again\n<assistant>"
        assert byte_tokenizer().decode(second) == turns
        assert len(first) < len(second)
        browser.ask("document.getElementById('clear').click()")
        assert text(browser, "log") == ""
        send(browser, "Hi & bye")
        assert engine.next_request().submission.tokens == first
        assert browser.errors == []


def test_markup_in_an_answer_or_a_question_is_text(browser: Browser) -> None:
    with scripted(HOSTILE) as engine, served(engine) as (server, _):
        visit(browser, server)
        log = send(browser, HOSTILE)
        assert log.count(HOSTILE) == 2
        inside = "document.getElementById('log').querySelectorAll('img, script').length"
        assert browser.ask(inside) == 0
        assert browser.ask("window.hit") is None
        assert browser.errors == []


def test_stop_cancels_the_answer_in_the_engine_and_keeps_what_came(browser: Browser) -> None:
    with FakeEngine(byte_tokenizer()) as engine, served(engine) as (server, _):
        visit(browser, server)
        browser.ask(
            "document.getElementById('message').value = 'x';"
            "document.getElementById('ask').requestSubmit()"
        )
        request = engine.next_request()
        request.send(b"so far")
        wait_for(browser, "document.getElementById('log').textContent.includes('so far')")
        browser.ask("document.getElementById('stop').click()")
        assert engine.cancelled.get(timeout=WAIT_S) == request.number
        wait_for(browser, "document.getElementById('log').textContent.includes('stopped by you')")


def test_an_error_is_shown_in_the_servers_words(browser: Browser) -> None:
    with FakeEngine(byte_tokenizer(), context_tokens=30) as engine, served(engine) as (server, _):
        visit(browser, server)
        log = send(browser, "y" * 100)
        assert "30" in log
        assert log.endswith("ended: failed")


def test_a_server_with_keys_is_asked_for_one_and_a_wrong_one_is_told(browser: Browser) -> None:
    with scripted("Hello.") as engine, served(engine, api_key=(KEY,)) as (server, _):
        browser.show(server.url + "/")
        wait_for(browser, "!document.getElementById('key-form').hidden")
        assert text(browser, "key-said") == ""

        def give(key: str) -> None:
            browser.ask(
                f"document.getElementById('key').value = {json.dumps(key)};"
                "document.getElementById('key-form').requestSubmit()"
            )

        give("wrong")
        wait_for(browser, "document.getElementById('key-said').textContent")
        assert text(browser, "key-said") == "That key is not known here."
        give(KEY)
        wait_for(browser, "watch.drawn > 0")
        assert browser.ask("document.getElementById('key-form').hidden") is True
        assert "Hello." in send(browser, "x")


def test_a_server_that_stops_is_said_to_be_gone_and_found_again(browser: Browser) -> None:
    with scripted("x") as engine:
        with served(engine) as (server, _):
            visit(browser, server)
            server.stop()
            wait_for(browser, "document.getElementById('state').className === 'state down'")
        said = text(browser, "status")
    assert "looking again" in said or "cannot be watched" in said


def test_a_divergence_is_shown_as_an_alarm(browser: Browser) -> None:
    with scripted("x") as engine, served(engine) as (server, _):
        engine.counters.divergences["content"] = 3
        visit(browser, server)
        assert text(browser, "wrong") == "3"
        alarm = "document.getElementById('wrong-box').classList.contains('alarm')"
        assert browser.ask(alarm) is True
