"""Request ids and log lines: who names a request, and what is written of it."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import httpx
import pytest
import structlog

from server.http.app import create_app
from server.logs import configure_logs, note
from server.submission import ERROR

from ..fake_engine import WAIT_S, FakeEngine, scripted
from ..http_server import LiveServer, live_server
from .scripted_http import CHAT, MODEL, SETTINGS

Captured = pytest.CaptureFixture[str]


def lines_of(server: LiveServer, capsys: Captured) -> list[dict[str, Any]]:
    """The JSON lines of a server, once it has stopped, but for the one that says so: it depends on
    whether the client was faster than the end of its own response.
    """
    server.stop()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    return [line for line in lines if line["event"] != "stopping"]


# Request ids


@pytest.mark.parametrize("given", ["a", "!~", "r" * 128, "550e8400-e29b-41d4-a716-446655440000"])
def test_a_clients_sound_id_names_its_request_everywhere(
    engine: FakeEngine, server: LiveServer, capsys: Captured, given: str
) -> None:
    configure_logs(form="json")
    engine.script = lambda _: b"yes"
    body = CHAT | {"max_tokens": 3}
    response = httpx.post(
        server.url + "/v1/chat/completions", json=body, headers={"x-request-id": given}
    )
    assert response.headers.get_list("x-request-id") == [given]
    assert response.json()["id"] == f"chatcmpl-{given}"
    assert engine.next_request().submission.external_id == f"chatcmpl-{given}"
    (line,) = lines_of(server, capsys)
    assert line["request_id"] == given


@pytest.mark.parametrize("given", [None, "", "r" * 129, "a b", "é".encode(), "a\tb"])
def test_any_other_id_is_replaced_by_a_new_one(server: LiveServer, given: Any) -> None:
    headers = {} if given is None else {"x-request-id": given}
    named = [
        httpx.get(server.url + "/ready", headers=headers).headers["x-request-id"] for _ in range(2)
    ]
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in named)
    assert named[0] != named[1]


def test_refusals_and_failures_have_an_id_too(
    server: LiveServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, named = server.url + "/v1/chat/completions", {"x-request-id": "r-1"}
    found = [
        httpx.get(server.url + "/nothing", headers=named),
        httpx.get(url, headers=named),
        httpx.post(url, content=b"{", headers=named),
        httpx.post(url, content=b"x" * 3000, headers=named),
    ]
    monkeypatch.setattr(engine, "submit", None)
    found.append(httpx.post(url, json=CHAT, headers=named))
    assert [response.status_code for response in found] == [404, 405, 400, 413, 500]
    assert {response.headers["x-request-id"] for response in found} == {"r-1"}


# Lines


def test_a_request_is_one_line_of_json_with_its_tokens(
    server: LiveServer, engine: FakeEngine, capsys: Captured
) -> None:
    configure_logs(form="json")
    engine.script = lambda _: b"yes"
    body = CHAT | {"max_tokens": 3, "stream": True}
    path = "/v1/chat/completions"
    httpx.post(server.url + path + "?secret=1", json=body, headers={"x-request-id": "r-1"})
    (line,) = lines_of(server, capsys)
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:.]+Z", line.pop("timestamp"))
    assert 0 <= line.pop("ms") < 1000 * WAIT_S
    assert line == {
        "level": "info",
        "event": "request",
        "request_id": "r-1",
        "method": "POST",
        "path": path,
        "status": 200,
        "id": "chatcmpl-r-1",
        "request": 0,
        "answers": 1,
        "prompt": 20,
        "cached": 3,
        "tokens": 3,
        "finish": "length",
    }


def test_a_refused_request_is_one_line_with_its_reason(
    server: LiveServer, capsys: Captured
) -> None:
    configure_logs(form="json")
    httpx.get(server.url + "/no%0D%0Athing")
    (line,) = lines_of(server, capsys)
    assert (line["status"], line["level"], line["path"]) == (404, "info", "/no\r\nthing")
    assert line["reason"] == "There is no /nothing here."


def test_a_failed_request_is_a_warning(
    server: LiveServer, engine: FakeEngine, capsys: Captured
) -> None:
    configure_logs(form="json")
    engine.script = lambda _: []
    httpx.post(server.url + "/v1/chat/completions", json=CHAT)
    (line,) = lines_of(server, capsys)
    found = [line[name] for name in ("status", "level", "finish", "reason")]
    assert found == [500, "warning", ERROR, "the script ended"]


def test_a_failure_of_our_own_is_logged_with_the_requests_id(
    server: LiveServer, engine: FakeEngine, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure_logs(form="json")
    monkeypatch.setattr(engine, "submit", None)
    httpx.post(server.url + "/v1/chat/completions", json=CHAT, headers={"x-request-id": "r-1"})
    failure, line = lines_of(server, capsys)
    assert (failure["level"], failure["request_id"]) == ("error", "r-1")
    assert "TypeError: 'NoneType' object is not callable" in failure["exception"]
    assert (line["status"], line["request_id"]) == (500, "r-1")


def test_a_client_that_left_before_its_response_is_a_499_in_the_log(
    server: LiveServer, engine: FakeEngine, capsys: Captured
) -> None:
    configure_logs(form="json")
    with httpx.Client(timeout=0.5) as client, pytest.raises(httpx.ReadTimeout):
        client.post(server.url + "/v1/chat/completions", json=CHAT)
    engine.cancelled.get(timeout=WAIT_S)
    (line,) = lines_of(server, capsys)
    assert (line["status"], line["finish"]) == (499, "disconnected")


@pytest.mark.parametrize(("level", "lines"), [("info", 0), ("debug", 2)])
def test_what_machines_ask_every_few_seconds_is_for_debugging_only(
    server: LiveServer, capsys: Captured, level: str, lines: int
) -> None:
    configure_logs(level, "json")
    for path in ("/health", "/ready"):
        assert httpx.get(server.url + path).status_code == 200
    assert len(lines_of(server, capsys)) == lines


def test_the_health_of_a_dead_engine_is_logged(
    server: LiveServer, engine: FakeEngine, capsys: Captured
) -> None:
    configure_logs(form="json")
    engine.healthy = False
    httpx.get(server.url + "/health")
    (line,) = lines_of(server, capsys)
    assert (line["path"], line["status"], line["level"]) == ("/health", 503, "warning")


def test_two_requests_at_once_keep_their_notes_apart(capsys: Captured) -> None:
    configure_logs(form="json")
    with (
        scripted("yes") as engine,
        live_server(create_app(engine, engine.tokenizer, MODEL, SETTINGS), SETTINGS) as server,
        httpx.Client() as client,
    ):
        for name in ("r-1", "r-2"):
            body, named = CHAT | {"max_tokens": 2}, {"x-request-id": name}
            assert client.post(server.url + "/v1/chat/completions", json=body, headers=named)
            assert client.get(server.url + "/nothing", headers=named).status_code == 404
        lines = lines_of(server, capsys)
    assert [(line["request_id"], line.get("tokens")) for line in lines] == [
        ("r-1", 2),
        ("r-1", None),
        ("r-2", 2),
        ("r-2", None),
    ]


def test_a_note_without_a_request_is_for_nobody(capsys: Captured) -> None:
    configure_logs(form="json")
    note(tokens=1)
    structlog.get_logger().info("after")
    assert "tokens" not in json.loads(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("level", "shown"), [(25, None), (30, "warning"), (35, "warning"), (50, "error")]
)
def test_what_libraries_log_is_a_line_like_ours(
    capsys: Captured, level: int, shown: str | None
) -> None:
    configure_logs("debug", "json")
    logging.getLogger("hypercorn.error").log(level, "%s is odd\n", "it")
    errors = capsys.readouterr().err
    assert errors.count("\n") == (shown is not None)
    if shown:
        line = json.loads(errors)
        found = [line[name] for name in ("level", "event", "logger")]
        assert found == [shown, "it is odd\n", "hypercorn.error"]


def test_asyncio_is_heard_of_its_errors_only(capsys: Captured) -> None:
    configure_logs("debug", "json")
    logging.getLogger("asyncio").warning("socket.send() raised exception.")
    logging.getLogger("asyncio").error("a task failed")
    assert json.loads(capsys.readouterr().err)["event"] == "a task failed"


def test_text_that_would_end_a_line_or_colour_a_terminal_is_escaped(capsys: Captured) -> None:
    configure_logs()
    structlog.get_logger().info("odd", path="/a\r\nlevel=error\x1b[31m")
    errors = capsys.readouterr().err
    assert errors.endswith(r'path="/a\\x0d\\x0alevel=error\\x1b[31m"' + "\n")
    assert errors.count("\n") == 1
