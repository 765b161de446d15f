"""Metrics over HTTP: responses by route, who may ask, and scrapes while an engine works."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from kernel.batch import Batch
from kernel.fake import FakeKernel
from server.engine import Engine
from server.http.app import create_app
from server.loop import Parts
from server.settings import Settings
from server.submission import Submission
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters

from .fake_engine import FakeEngine, byte_tokenizer, scripted
from .http_server import WAIT_S, live_server
from .scrapes import PROMPT, exposed, of, plain
from .sim import POLICY, SMALL, Inbox, header, prompts

KEY = "a-key-of-this-test"


@contextmanager
def served(engine: Any, **settings: Any) -> Iterator[httpx.Client]:
    chosen = Settings(grace_s=0.0, **settings)
    app = create_app(engine, byte_tokenizer(), "models/tiny", chosen)
    with live_server(app, chosen) as server, httpx.Client(base_url=server.url) as client:
        client.metrics = app.state.metrics  # type: ignore[attr-defined]
        yield client


def responses(text: str) -> dict[tuple[str, str, str], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "mlxtape_http_requests_total":
                labels = sample.labels
                found[labels["method"], labels["route"], labels["status"]] = sample.value
    return found


def test_responses_are_counted_by_route_and_nothing_that_a_client_chose_is_a_label() -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    with scripted("Hello.") as engine, served(engine) as client:
        for _ in range(2):
            client.post("/v1/chat/completions", json=body)
        client.post("/v1/chat/completions", json=body | {"stream": True})
        client.post("/v1/chat/completions", content=b"{")
        client.get("/v1/chat/completions")
        client.get("/v1/models/models/tiny")
        client.get("/v1/models/secret-name")
        client.get("/secret-path?secret-query=1")
        client.request("SECRETMETHOD", "/health")
        answer = client.get("/metrics")
    assert responses(answer.text) == {
        ("POST", "/v1/chat/completions", "200"): 3,
        ("POST", "/v1/chat/completions", "400"): 1,
        ("GET", "/v1/chat/completions", "405"): 1,
        ("GET", "/v1/models/{name}", "200"): 1,
        ("GET", "/v1/models/{name}", "404"): 1,
        ("GET", "other", "404"): 1,
        ("other", "/health", "405"): 1,
    }
    assert "secret" not in answer.text.lower()


def test_with_keys_metrics_need_one_unless_they_are_public() -> None:
    with scripted("x") as engine:
        with served(engine, api_key=(KEY,)) as client:
            closed = client.get("/metrics").status_code
            opened = client.get("/metrics", headers={"x-api-key": KEY}).status_code
        with served(engine, api_key=(KEY,), public_metrics=True) as client:
            public = client.get("/metrics")
    assert (closed, opened, public.status_code) == (401, 200, 200)
    assert responses(public.text) == {}


def test_a_scrape_waits_neither_for_a_step_nor_for_the_engines_lock() -> None:
    reached, go_on = threading.Event(), threading.Event()

    def delay(batch: Batch) -> None:
        reached.set()
        assert go_on.wait(WAIT_S)

    parts = Parts(FakeKernel(SMALL, delay=delay), POLICY, None, header(SMALL, POLICY))
    engine = Engine(lambda: parts)
    engine.start()
    try:
        with served(engine) as client:
            engine.submit(Submission(PROMPT, Parameters(5)), Inbox())
            assert reached.wait(WAIT_S)
            with engine._wake:  # whoever submits holds it
                text = client.get("/metrics").text
    finally:
        go_on.set()
        engine.stop(WAIT_S)
    assert 'mlxtape_num_requests_running{model_name="models/tiny"} 1.0' in text


def test_scrapes_under_load_see_counts_that_fit_each_other_and_never_go_back() -> None:
    geometry = Geometry(4, (Group(num_blocks=256),))
    ahead = structs.replace(POLICY, lookahead=True)
    parts = Parts(FakeKernel(geometry), ahead, None, header(geometry, ahead))
    engine = Engine(lambda: parts)
    engine.start()
    metrics, before = of(engine), dict[Any, float]()
    try:
        inboxes = [Inbox() for _ in range(40)]
        for inbox, prompt in zip(inboxes, prompts(40, seed=9), strict=True):
            engine.submit(Submission(prompt, Parameters(20)), inbox)
        while any(inbox.reason is None for inbox in inboxes):
            now = exposed(metrics)
            for key, value in before.items():
                if key[0].endswith(("_total", "_bucket", "_count", "_sum")):
                    assert now[key] >= value, key
            for name, labels in now:
                if labels == (("le", "+Inf"),):
                    count = name.removesuffix("_bucket") + "_count"
                    assert now[count, ()] == now[name, labels]
            before = now
    finally:
        engine.stop(WAIT_S)
    assert plain(metrics)["generation_tokens_total"] == 40 * 20


def test_a_stopped_engine_is_not_healthy() -> None:
    with FakeEngine(byte_tokenizer()) as engine, served(engine) as client:
        engine.healthy = False
        assert 'mlxtape_engine_healthy{model_name="models/tiny"} 0.0' in client.get("/metrics").text
