"""The page at `/` in a browser: load, map, chats, and what goes wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec import structs

from kernel.batch import Batch
from kernel.fake import FakeKernel
from server.engine import Engine
from server.http.pool_snapshot import NOBODY, snapshot
from server.loop import Parts
from server.submission import Submission
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters

from .browser import Browser
from .fake_engine import FakeEngine, byte_tokenizer, scripted
from .http_server import WAIT_S, LiveServer
from .page_server import KEY, cells_of, served
from .sim import POLICY, SMALL, Inbox, MemoryCapture, header

HOSTILE = "<img src=x onerror='window.hit = 1'><script>window.hit = 1</script> & \u00e9\U0001f600"
PROMPT = tuple(range(1, 19))


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
