"""API keys: who is let in, what the others hear, and where keys come from."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.http.app import ROUTES, create_app
from server.http.auth import Keys
from server.logs import configure_logs
from server.settings import Settings, SettingsError

from ..fake_engine import FakeEngine, byte_tokenizer, scripted
from ..http_server import LiveServer
from .scripted_http import CHAT, MODEL, Serve


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """Answers `yes`."""
    with scripted("yes") as engine:
        yield engine


def chat(server: LiveServer, path: str = "/v1/chat/completions", **headers: Any) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(server.url + path, json=CHAT, headers=named, timeout=20)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer sk-two"},
        {"authorization": "bearer  sk-two"},
        {"x_api_key": "sk-one"},
        {"authorization": "Bearer wrong", "x_api_key": "sk-one"},
    ],
)
def test_a_known_key_is_let_in(serve: Serve, headers: dict[str, str]) -> None:
    response = chat(serve(api_key=("sk-one", "sk-two")), **headers)
    assert response.json()["choices"][0]["message"]["content"] == "yes"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer sk-on"},
        {"authorization": "Bearer sk-one2"},
        {"authorization": "Digest sk-one"},
        {"authorization": "sk-one"},
        {"authorization": b"Bearer \xff\xfe"},
        {"x_api_key": ""},
        {"x_api_key": "Bearer sk-one"},
    ],
)
def test_a_missing_key_and_a_wrong_one_hear_the_same(serve: Serve, headers: dict[str, Any]) -> None:
    response = chat(serve(api_key=("sk-one",)), **headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json() == {
        "error": {
            "message": "This server needs an API key; send one that it knows as "
            "'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_api_key",
        }
    }


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_under_messages_the_refusal_has_anthropics_shape(serve: Serve, path: str) -> None:
    response = chat(serve(api_key=("sk-one",)), path, x_request_id="r-1")
    assert response.status_code == 401
    body = response.json()
    assert body.pop("error")["type"] == "authentication_error"
    assert body == {"type": "error", "request_id": "r-1"}


def test_all_paths_are_guarded_but_those_that_tell_nothing(serve: Serve) -> None:
    server = serve(api_key=("sk-one",))
    served = {route.path.replace("{name:path}", "tiny") for route in ROUTES}
    open_ = {"/health", "/ready", "/", "/page.css", "/page.js"}
    for path in sorted(served - open_ | {"/nothing", "/health/", "//health", "/page.css/x"}):
        assert (path, httpx.get(server.url + path).status_code) == (path, 401)
    for path in sorted(open_):
        assert (path, httpx.get(server.url + path).status_code) == (path, 200)


def test_metrics_are_open_where_a_setting_says_so(serve: Serve) -> None:
    server = serve(api_key=("sk-one",), public_metrics=True)
    assert httpx.get(server.url + "/metrics").status_code != 401
    assert httpx.get(server.url + "/v1/models").status_code == 401


def test_without_keys_nobody_is_asked_for_one(serve: Serve) -> None:
    assert chat(serve(), authorization="Bearer anything").status_code == 200


def test_a_key_is_never_logged_nor_shown(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("debug")
    server = serve(api_key=("sk-one",))
    chat(server, authorization="Bearer sk-wrong")
    chat(server, authorization="Bearer sk-one")
    server.stop()
    errors = capsys.readouterr().err
    assert errors.count("event=request") == 2
    assert "sk-" not in errors


def test_every_key_is_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def counting(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", counting)
    keys = Keys(["a", "bb", "ccc"])
    assert [keys.accept(key) for key in (b"a", b"zz", b"")] == [True, False, False]
    assert compared == [(32, 32)] * 9


# The file


def write(path: Path, text: str) -> str:
    """In place, and with a stamp of its own even within one tick of the file system's clock."""
    path.write_text(text)
    times = path.stat().st_mtime_ns + len(text)
    os.utime(path, ns=(times, times))
    return str(path)


def test_a_file_of_keys_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    keys = Keys(["fixed"], write(file, "# of the team\n\n one \ntwo\n"))
    assert [keys.accept(key) for key in (b"one", b"two", b"fixed")] == [True] * 3
    assert not keys.accept(b"# of the team")
    write(file, "two\nthree\n")
    accepted = [keys.accept(key) for key in (b"one", b"two", b"three", b"fixed")]
    assert accepted == [False, True, True, True]


@pytest.mark.parametrize("text", [None, "# none\n", "a b\n"])
def test_a_file_that_broke_keeps_its_keys_and_says_so_once(
    tmp_path: Path, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs()
    file = tmp_path / "keys"
    keys = Keys([], write(file, "one\n"))
    if text is None:
        file.unlink()
    else:
        write(file, text)
    assert keys.accept(b"one")
    assert keys.accept(b"one")
    assert capsys.readouterr().err.count("api keys not read again") == 1
    write(file, "two\n")
    assert [keys.accept(key) for key in (b"one", b"two")] == [False, True]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, r"api_key_file .*keys cannot be read: No such file or directory"),
        (b"\xff", r"api_key_file .*keys cannot be read: it is not UTF-8"),
        (b"# x\n", r"api_key_file .*keys holds no key: put one on a line"),
        (b"ok\na b\n", r"api_key_file .*keys, line 2: a key must be printable ASCII"),
    ],
)
def test_a_wrong_file_stops_the_start_and_is_never_an_open_server(
    tmp_path: Path, content: bytes | None, sentence: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with FakeEngine(byte_tokenizer()) as engine, pytest.raises(SettingsError, match=sentence):
        create_app(engine, engine.tokenizer, MODEL, Settings(api_key_file=str(file)))


def test_a_body_that_nobody_was_let_in_with_does_not_block_the_answer(serve: Serve) -> None:
    server = serve(api_key=("sk-one",))
    body = json.dumps(CHAT | {"x": "y" * 2**22}).encode()
    response = httpx.post(server.url + "/v1/chat/completions", content=body, timeout=20)
    assert response.status_code == 401
