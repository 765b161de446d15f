"""schemathesis with all its checks but one, over a scripted engine that asks for a key.

The one: a body that a schema allows may still make no sense together (an empty prompt, a number out
of its range), and is refused then.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from server.http.app import create_app
from server.settings import Settings
from server.values import Texts
from tests.fake_engine import FakeEngine, byte_tokenizer
from tests.http_server import live_server

from .environments import bin_of, run_client

NOT_CHECKED = "positive_data_acceptance"
ENDLESS = "/events"
KEY = "sk-one"


def test_whatever_schemathesis_sends_is_answered_as_described(tmp_path: Path) -> None:
    def script(_: object) -> Iterator[int]:
        while True:
            yield from b"yes "

    settings = Settings(grace_s=0.0, api_key=Texts((KEY,)))
    with FakeEngine(byte_tokenizer(), script, context_tokens=500) as engine:
        app = create_app(engine, engine.tokenizer, "models/tiny", settings)
        with live_server(app, settings) as server:
            command = [str(bin_of("schemathesis") / "st"), "run", server.url + "/openapi.json"]
            options = ["--max-examples", "10", "--seed", "1", "--no-color"]
            options += ["--exclude-path", ENDLESS, "--exclude-checks", NOT_CHECKED]
            options += ["-H", f"Authorization: Bearer {KEY}", "--request-timeout", "60"]
            said = run_client([*command, *options], tmp_path, 600.0)
    assert " passed" in said
