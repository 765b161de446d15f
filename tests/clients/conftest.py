"""A real server on the bundled model, one for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real_server import SMOLLM2, Served, serving


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """SmolLM2 over HTTP, with a tape."""
    tape = Path(tmp_path_factory.mktemp("tape")) / "clients.tape"
    with serving(SMOLLM2, capture=str(tape), num_blocks=512) as server:
        yield server


@pytest.fixture(scope="module")
def url(served: Served) -> str:
    """The address with /v1."""
    return served.server.url + "/v1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a client runs."""
    return tmp_path_factory.mktemp("client")
