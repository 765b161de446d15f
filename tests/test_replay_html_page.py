"""The page of `replay html` in headless Chromium: what a person sees, hears and can reach.

Chromium is needed (browser.py says how it is provided); without it these tests fail and say so.
"""

from __future__ import annotations

import json
import socket
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from replay.fold import Counts
from replay.history import COLUMNS, History
from replay.html import main, page_of
from replay.run import CLEAN, FOLD, Options, Outcome, replay
from statemachine.events import BlockEvicted
from statemachine.records import Header, RequestArrived, RequestCancelled, StepFailed, StepPlanned

from .browser import Browser
from .html_pages import history_of
from .sim import POLICY, SMALL, header
from .tampering import changed, first_step, write
from .tapes import golden

HOSTILE = "</script><script>window.hit = 1</script><img src=x onerror='window.hit = 1'>"
READOUT = "document.getElementById('readout').textContent"
VIEW = "[page.view.from, page.view.to]"
STEPS_MANY = 100_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    opened = Browser()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of a clean tape and one of a tape that diverged."""
    folder = tmp_path_factory.mktemp("pages")
    made = {"clean": folder / "clean.html", "diverged": folder / "diverged.html"}
    main([str(golden.FLIGHTS), "-o", str(made["clean"])])
    main([str(golden.DIVERGED), "-o", str(made["diverged"])])
    return made


@pytest.fixture(scope="module")
def long_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100,000 steps of 8 decode rows and 40 held blocks, one of them with 57 rows and 61 blocks."""
    history = History()
    history.feed(header(SMALL, POLICY))
    for name in (*COLUMNS, "held_0", "cached_0"):
        history.columns[name] = array("q", [0]) * STEPS_MANY
    history.columns["step"] = array("q", range(1, STEPS_MANY + 1))
    history.columns["decode"] = array("q", [8]) * STEPS_MANY
    history.columns["held_0"] = array("q", [40]) * STEPS_MANY
    history.columns["decode"][61_803], history.columns["held_0"][61_803] = 57, 61
    history.finish()
    outcome = Outcome("long.log", FOLD, CLEAN, Counts(steps=STEPS_MANY), history.header)
    page = tmp_path_factory.mktemp("long") / "long.html"
    page.write_text(page_of(outcome, history), encoding="utf-8")
    return page


def shown(browser: Browser, page: Path, **how: Any) -> None:
    """Load a page and require that its script is done, without an error."""
    browser.show(page, **how)
    assert browser.ask("document.documentElement.dataset.ready") == "yes"
    assert browser.errors == []


def colour(browser: Browser, canvas: str, x: float, y: float) -> list[int]:
    """A pixel of a canvas, from fractions of its size."""
    found: list[int] = browser.ask(
        f"(() => {{ const it = document.getElementById('{canvas}');"
        f"return [...it.getContext('2d').getImageData(Math.round({x} * (it.width - 1)),"
        f"Math.round({y} * (it.height - 1)), 1, 1).data]; }})()"
    )
    return found


def rgb(browser: Browser, name: str) -> list[int]:
    """A colour of the page's style, as a pixel."""
    text: str = browser.ask(f"page.colours[{json.dumps(name)}]")
    return [*bytes.fromhex(text[1:]), 255]


@contextmanager
def listening() -> Iterator[tuple[str, list[int]]]:
    """A URL of this machine, and the ports that called it; each is hung up on."""
    calls: list[int] = []
    last: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                caller, (_, port) = server.accept()
                caller.close()
                if port in last:
                    return
                calls.append(port)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/", calls
        with socket.socket() as own:
            own.bind(("127.0.0.1", 0))
            last.append(own.getsockname()[1])
            own.connect(server.getsockname())
            thread.join()


def test_the_page_asks_for_nothing_but_itself_and_may_not(
    browser: Browser, pages: dict[str, Path]
) -> None:
    for page in pages.values():
        shown(browser, page)
        browser.key("d")
        assert browser.requests == [page.as_uri()]
    with listening() as (url, calls):
        browser.ask(f"fetch('{url}').catch(() => 0)")
        browser.ask(
            "new Promise((done) => { const it = new Image(); it.onload = it.onerror = () => done();"
            f"it.src = '{url}'; }})"
        )
    assert calls == []
    assert sum("Content Security Policy" in it for it in browser.errors) >= 2


def hostile_tape(tmp_path: Path) -> str:
    """Every text that somebody else can choose is markup; and it diverges."""
    records = golden.records()
    texts = {
        RequestArrived: {"external_id": HOSTILE},
        RequestCancelled: {"reason": HOSTILE},
        StepFailed: {"error": HOSTILE},
        Header: {"model": HOSTILE, "software": HOSTILE, "device": HOSTILE, "blas": HOSTILE},
    }
    records = [structs.replace(it, **texts.get(type(it), {})) for it in records]
    last = max(at for at, it in enumerate(records) if isinstance(it, StepPlanned))
    return write(tmp_path, changed(records, last, digest=1))


def test_texts_of_strangers_are_shown_as_text_and_never_run(
    browser: Browser, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    main([hostile_tape(tmp_path), "-o", str(page)])
    shown(browser, page)
    assert browser.ask("[...document.images].length") == 0
    assert browser.ask("document.scripts.length") == 2
    browser.ask("document.getElementById('plots').focus()")
    browser.key("Home")
    browser.key("ArrowDown")
    assert HOSTILE in browser.ask(READOUT)
    spot = browser.ask(
        "(() => { const it = document.getElementById('lanes'); it.scrollIntoView();"
        "const box = it.getBoundingClientRect(); return [box.x + 100, box.y + 8]; })()"
    )
    browser.mouse("mouseMoved", *spot)
    assert HOSTILE in browser.ask("document.getElementById('tip').textContent")
    assert HOSTILE in browser.ask("document.querySelector('.facts').textContent")
    assert browser.ask("window.hit ?? 'never'") == "never"


def test_the_browser_has_every_column_as_the_history_has_it(
    browser: Browser, pages: dict[str, Path]
) -> None:
    shown(browser, pages["clean"])
    history = history_of(golden.flights())
    for name, values in history.columns.items():
        if name != "time_us":
            assert browser.ask(f"[...page.columns['step.{name}']]") == list(values)
    drawn = sorted(zip(*(history.lanes.spans[at::4] for at in range(4)), strict=True))
    columns = [browser.ask(f"[...page.columns['span.{it}']]") for it in ("lane", "phase")]
    assert sorted(zip(*columns, strict=True)) == sorted(it[:2] for it in drawn)


def test_arrow_keys_go_from_step_to_step_and_tell_its_counts(
    browser: Browser, pages: dict[str, Path]
) -> None:
    shown(browser, pages["clean"])
    browser.ask("document.getElementById('plots').focus()")
    for _ in range(2):
        browser.key("ArrowRight")
    history = history_of(golden.flights())
    at = {name: values[1] for name, values in history.columns.items()}
    told = browser.ask("document.getElementById('plots').ariaValueText")
    assert browser.ask("document.getElementById('plots').ariaValueNow") == "1"
    free = 14 - at["held_0"] - at["cached_0"]
    assert told.startswith(
        f"step 2: blocks of group 0: {at['held_0']} held, {at['cached_0']} cached, {free} free of "
        f"14 \u00b7 rows: "
    )
    assert f"requests: {at['sequences']} in the batch, {at['waiting']} waiting" in told
    assert browser.ask(READOUT) == told
    browser.key("End")
    assert browser.ask("document.getElementById('plots').ariaValueNow") == str(history.steps - 1)
    browser.key("Escape")
    assert browser.ask("document.getElementById('plots').ariaValueText") == "no step chosen"


def test_the_divergence_is_marked_and_one_key_away(
    browser: Browser, pages: dict[str, Path]
) -> None:
    _, step, seq = golden.diverged()
    found = replay(str(golden.DIVERGED), Options()).divergence
    assert found is not None
    assert (found.step, found.sequence) == (step, seq)
    shown(browser, pages["diverged"])
    browser.ask("document.getElementById('plots').focus()")
    for key in ("+", "+", "Home", "Escape", "d"):
        browser.key(key)
    assert f"step {step}: " in browser.ask(READOUT)
    assert "DIVERGED here (fold)" in browser.ask(READOUT)
    assert browser.ask("page.lanes.lane.request[page.selected]") == seq
    first, last = browser.ask(VIEW)
    x = browser.ask(f"page.surfaces.pool.x({step - 1} + 0.5, page.view) / byId('pool').width")
    assert first <= step - 1 < last
    assert colour(browser, "pool", x, 0.5) == rgb(browser, "found")


def test_plus_and_minus_zoom_and_0_shows_all(browser: Browser, pages: dict[str, Path]) -> None:
    shown(browser, pages["clean"])
    browser.ask("document.getElementById('plots').focus()")
    all_steps = browser.ask(VIEW)
    browser.key("+")
    first, last = browser.ask(VIEW)
    assert last - first == (all_steps[1] - all_steps[0]) / 2
    browser.key("-")
    assert browser.ask(VIEW) == all_steps
    browser.key("+")
    browser.key("0")
    assert browser.ask(VIEW) == all_steps


def spot(browser: Browser, canvas: str, x: float, y: float) -> tuple[float, float]:
    """Where a place of a canvas, in fractions of its plot, is in the window."""
    box = browser.ask(
        f"(() => {{ const it = document.getElementById('{canvas}'); it.scrollIntoView();"
        "const box = it.getBoundingClientRect();"
        "return [box.x + gutter(), box.y, box.width - gutter(), box.height]; })()"
    )
    return box[0] + x * box[2], box[1] + y * box[3]


def test_a_drag_moves_the_view_and_ctrl_and_wheel_zoom_it(
    browser: Browser, long_page: Path
) -> None:
    shown(browser, long_page)
    x, y = spot(browser, "batch", 0.5, 0.5)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-240, modifiers=2)
    first, last = browser.ask(VIEW)
    assert last - first == STEPS_MANY / 4
    assert (first + last) / 2 == pytest.approx(STEPS_MANY / 2, rel=0.01)
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    browser.mouse("mouseMoved", x - 100, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x - 100, y, button="left", clickCount=1)
    moved, _ = browser.ask(VIEW)
    width = browser.ask("page.surfaces.batch.width")
    assert moved - first == pytest.approx(100 * (last - first) / width)


def test_a_spike_of_one_step_in_100000_is_seen(browser: Browser, long_page: Path) -> None:
    shown(browser, long_page)
    assert browser.ask("page.count") == STEPS_MANY
    where = "page.surfaces.batch.left + Math.floor(61803 / 100000 * page.surfaces.batch.width)"
    x = browser.ask(f"({where} + 0) / (byId('batch').width - 1)")
    spike = browser.ask("page.colours.pale('decode')")
    assert f"rgb({','.join(map(str, colour(browser, 'batch', x, 0.3)[:3]))})" == spike
    assert colour(browser, "batch", x - 0.02, 0.3)[3] == 0
    assert colour(browser, "batch", x - 0.02, 0.84) == rgb(browser, "decode")
    width = browser.ask("page.surfaces.batch.width")
    left, y = spot(browser, "batch", 0, 0.5)
    browser.mouse("mouseMoved", left + 61_803 * width // STEPS_MANY, y)
    assert "rows: 8\u201357 (8\u201357 decode)" in browser.ask(READOUT)
    assert "40\u201361 held" in browser.ask(READOUT)


def test_bins_have_the_smallest_and_largest_value_of_the_steps_under_a_pixel(
    browser: Browser, long_page: Path
) -> None:
    shown(browser, long_page)
    asked = "bins([5, 1, 9, 4, 4, 7], {from: 0, to: 6}, 3).map((it) => [...it])"
    assert browser.ask(asked) == [[1, 4, 4], [5, 9, 7]]
    asked = "bins([5, 1], {from: 0, to: 2}, 4).map((it) => [...it])"
    assert browser.ask(asked) == [[5, 5, 1, 1], [5, 5, 1, 1]]
    assert browser.ask("under({from: 0.5, to: 2.5}, 2, 1, 9)") == [1, 2]
    assert browser.ask("zoomed({from: 0, to: 100}, 25, 0.5, 100)") == {"from": 12.5, "to": 62.5}
    assert browser.ask("within({from: 90, to: 130}, 100)") == {"from": 60, "to": 100}


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_a_page_fits_its_window_light_and_dark(
    browser: Browser, pages: dict[str, Path], width: int, dark: bool
) -> None:
    for page in pages.values():
        shown(browser, page, width=width, height=844, dark=dark)
        assert browser.ask("document.documentElement.scrollWidth") == width
        ground = browser.ask("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(20, 22, 26)" if dark else "rgb(255, 255, 255)")
        x = browser.ask("(gutter() + 3) / byId('pool').width")
        assert colour(browser, "pool", x, 0.85) == rgb(browser, "held")


def luminance(channels: list[int]) -> float:
    """Of a colour, after WCAG 2."""
    parts = [it / 255 for it in channels[:3]]
    linear = [it / 12.92 if it <= 0.04045 else ((it + 0.055) / 1.055) ** 2.4 for it in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_texts_stand_out_from_their_ground_as_wcag_asks(
    browser: Browser, pages: dict[str, Path], dark: bool
) -> None:
    shown(browser, pages["diverged"], dark=dark)
    for name in ("text", "dim", "found"):
        values = sorted(luminance(rgb(browser, it)) + 0.05 for it in (name, "page"))
        assert values[1] / values[0] >= 4.5, name
    for name in ("held", "prompt", "decode", "waiting", "preempted", "queued"):
        values = sorted(luminance(rgb(browser, it)) + 0.05 for it in (name, "page"))
        assert values[1] / values[0] >= 3, name


def test_the_group_and_the_list_of_requests_can_be_chosen(
    browser: Browser, pages: dict[str, Path]
) -> None:
    shown(browser, pages["clean"])
    history = history_of(golden.flights())
    browser.ask(
        "(() => { const it = document.querySelector('#pool-legend select'); it.value = '1';"
        "it.dispatchEvent(new Event('change')); document.getElementById('plots').focus(); })()"
    )
    browser.key("ArrowRight")
    held = history.columns["held_1"][0]
    assert f"blocks of group 1: {held} held" in browser.ask(READOUT)
    chosen = "[...page.list].map((it) => page.lanes.lane.request[it])"
    for which, wanted in (
        ("preempted", [it.request for it in history.lanes.lanes if it.preemptions]),
        ("all", [it.request for it in history.lanes.lanes]),
    ):
        browser.ask(f"(() => {{ byId('which').value = '{which}'; byId('which').onchange(); }})()")
        browser.drawn()
        assert browser.ask(chosen) == wanted
    browser.ask("(() => { byId('find').value = '4'; byId('find').oninput(); })()")
    browser.drawn()
    assert browser.ask(chosen) == [4]


def test_a_step_can_be_gone_to_by_its_number(browser: Browser, long_page: Path) -> None:
    shown(browser, long_page)
    browser.ask("(() => { byId('goto').value = '61,804'; byId('goto').onchange(); })()")
    browser.drawn()
    assert browser.ask(READOUT).startswith("step 61,804: blocks: 61 held")
    browser.ask("(() => { byId('goto').value = '0'; byId('goto').onchange(); })()")
    assert browser.ask("byId('goto').ariaInvalid") == "true"


def test_where_the_tape_cannot_be_followed_the_page_says_that_the_pool_is_unknown(
    browser: Browser, tmp_path: Path
) -> None:
    records = golden.records()
    at = first_step(records, lambda it: isinstance(it, StepPlanned) and it.step == 6)
    events = (*records[at].events, BlockEvicted(0, 9999, 1))  # type: ignore[union-attr]
    page = tmp_path / "report.html"
    main([write(tmp_path, changed(records, at, events=events)), "-o", str(page)])
    shown(browser, page)
    browser.ask("document.getElementById('plots').focus()")
    browser.key("d")
    assert "unknown held, unknown cached, unknown free" in browser.ask(READOUT)
    assert "block 9999" in browser.ask(READOUT)
    browser.key("ArrowLeft")
    assert "unknown" not in browser.ask(READOUT)


def test_without_scripts_the_verdict_and_the_report_are_there(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.events.clear()
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    browser.load(pages["diverged"])
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    text = browser.ask("document.body.innerText")
    assert "DIVERGED at step" in text
    assert "This usually means:" in text
    assert "The charts need JavaScript" in text


def test_many_requests_share_rows_only_where_their_times_do_not_meet(
    browser: Browser, pages: dict[str, Path]
) -> None:
    shown(browser, pages["clean"])
    asked = (
        "(() => { const it = Object.create(Lanes.prototype); const many = [...Array(90).keys()];"
        "it.steps = 300; it.lane = {start: many.map((n) => 3 * n)};"
        "it.lane.end = many.map((n) => 3 * n + 5);"
        "const rows = it.rows(many, 1); return [rows, it.rows(many.slice(0, 60), 1).length,"
        "it.at(rows[0], 7, 0), it.at(rows[0], 5, 0) ?? null, it.at(rows[0], 5, 1)]; })()"
    )
    rows, few, inside, outside, near = browser.ask(asked)
    assert rows == [list(range(0, 90, 2)), list(range(1, 90, 2))]
    assert few == 60
    assert (inside, outside, near) == (2, None, 0)
