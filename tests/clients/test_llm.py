"""The `llm` command line, as pip installs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.real_server import Served

from .environments import bin_of, run_client

QUESTION = "Name the capital of France."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture
def home(tmp_path: Path, served: Served, url: str) -> Path:
    """A folder of settings that names our server."""
    entry = {
        "model_id": "ours", "model_name": served.model, "api_base": url, "supports_schema": True
    }  # fmt: skip
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    return tmp_path


def _ask(home: Path, *options: str) -> str:
    command = [str(bin_of("llm") / "llm"), "-m", "ours", "-o", "temperature", "0"]
    return run_client([*command, "-o", "max_tokens", "40", *options], home, LLM_USER_PATH=str(home))


@pytest.mark.parametrize("how", [(), ("--no-stream",)])
def test_llm_prints_the_answer_that_openais_client_gets(
    served: Served, home: Path, how: tuple[str, ...]
) -> None:
    ours = served.ask(QUESTION, max_tokens=40).choices[0].message.content
    assert _ask(home, *how, QUESTION).rstrip("\n") == ours.rstrip("\n")


def test_llm_gets_json_of_its_schema(home: Path) -> None:
    answer = json.loads(_ask(home, "--schema", json.dumps(SCHEMA), QUESTION))
    assert list(answer) == ["city"]
    assert isinstance(answer["city"], str)
    assert len(answer["city"]) <= 20
