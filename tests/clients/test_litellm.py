"""litellm, as pip installs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.real_server import Served

from .environments import bin_of, run_client

SCRIPT = """
import json, sys
import litellm
url, model = sys.argv[1:]
asked = dict(
    model="openai/" + model, api_base=url, api_key="x", temperature=0, max_tokens=12,
    messages=[{"role": "user", "content": "Name the capital of France."}],
)
whole = litellm.completion(**asked)
pieces = [
    chunk.choices[0].delta.content or ""
    for chunk in litellm.completion(**asked, stream=True)
    if chunk.choices
]
print(json.dumps({
    "whole": whole.choices[0].message.content,
    "streamed": "".join(pieces),
    "chunks": len(pieces),
    "tokens": whole.usage.completion_tokens,
}))
"""


@pytest.fixture(scope="module")
def said(served: Served, url: str, folder: Path) -> dict[str, Any]:
    python = str(bin_of("litellm") / "python")
    out = run_client(
        [python, "-c", SCRIPT, url, served.model], folder, LITELLM_LOCAL_MODEL_COST_MAP="True"
    )
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    return answer


def test_litellm_gets_the_answer_that_openais_client_gets(
    served: Served, said: dict[str, Any]
) -> None:
    ours = served.ask("Name the capital of France.", max_tokens=12)
    assert said["whole"] == ours.choices[0].message.content
    assert said["tokens"] == ours.usage.completion_tokens


def test_litellm_streams_the_same_text_in_pieces(said: dict[str, Any]) -> None:
    assert said["streamed"] == said["whole"]
    assert said["chunks"] > 3
