"""The command as tests run it, and a tokenizer that it may be given."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..tiny_models import byte_tokenizer
from .recorded import Printed, printed


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Printed:
    """Runs it against a server: exit code and report."""
    return printed(capsys)


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """The folder of a tokenizer whose tokens are bytes."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
