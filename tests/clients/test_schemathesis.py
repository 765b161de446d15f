"""schemathesis, as pip installs it, against our own OpenAPI document.

All its checks but one: a body that a schema allows may still make no sense together (an empty
prompt, a range), and is refused then.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

from server.app import create_app
from server.settings import Settings
from server.values import Texts
from tests.fake_engine import FakeEngine, byte_tokenizer
from tests.http_server import live_server
from tests.real_server import SMOLLM2, serving

from .environments import bin_of, run_client

NOT_CHECKED = "positive_data_acceptance"
ENDLESS = "/events"
KEY = "sk-one"


def schemathesis(url: str, examples: int, home: Path, *options: str) -> str:
    """What it says of a server where nothing failed."""
    command = [str(bin_of("schemathesis") / "st"), "run", url + "/openapi.json"]
    given = [
        "--max-examples",
        str(examples),
        "--seed",
        "1",
        "--no-color",
        "--exclude-path",
        ENDLESS,
    ]
    given += ["--exclude-checks", NOT_CHECKED, "--request-timeout", "100", *options]
    return run_client([*command, *given], 900.0, home, HOME=str(home))


def test_nothing_that_schemathesis_sends_to_a_scripted_engine_fails_or_is_undescribed(
    tmp_path: Path,
) -> None:
    tokenizer = byte_tokenizer()
    text = tokenizer.encode("yes")

    def script(_: object) -> Iterator[int]:
        for tokens in repeat(text, 10_000):
            yield from tokens

    settings = Settings(grace_s=0.0, api_key=Texts((KEY,)))
    with FakeEngine(tokenizer, script, context_tokens=500) as engine:
        app = create_app(engine, tokenizer, "models/tiny", settings)
        with live_server(app, settings) as server:
            said = schemathesis(server.url, 30, tmp_path, "-H", f"Authorization: Bearer {KEY}")
    assert " passed" in said


def test_nothing_that_schemathesis_sends_to_a_real_model_fails_or_is_undescribed(
    tmp_path: Path,
) -> None:
    # So small that answers end soon, whatever is asked for.
    with serving(SMOLLM2, num_blocks=16) as served:
        said = schemathesis(served.server.url, 5, tmp_path)
        served.idle()
    assert " passed" in said
