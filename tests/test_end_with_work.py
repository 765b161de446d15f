"""The end of a server's process while a prompt is still being made, which nobody can stop."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

START_S = 120.0
ENDLESS = """
import sys, threading
from server.cli import main
from server.http import route_completions
from tests.waiting_server import build

def endless(*_):
    print("begun", flush=True)
    threading.Event().wait()

route_completions.ask_of_completion = endless
sys.exit(main(build=build))
"""


@pytest.fixture
def endless() -> Iterator[subprocess.Popen[str]]:
    """A server that makes a prompt for ever, once it has begun to."""
    argv = [sys.executable, "-c", ENDLESS, "serve", "--port", "0", "--grace-s", "100"]
    pipe, root = subprocess.PIPE, Path(__file__).parent.parent
    with (
        ThreadPoolExecutor(1) as pool,
        subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, cwd=root) as process,
    ):
        try:
            assert process.stdout is not None
            address = process.stdout.readline().rsplit(" ", 1)[-1].strip()
            pool.submit(_ask, address)
            assert process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()


def _ask(address: str) -> None:
    # Where a grammar is asked for, the prompt is made aside however short it is.
    body = {"prompt": "a", "guided_regex": "a"}
    with suppress(httpx.HTTPError):
        httpx.post(f"{address}/v1/completions", json=body, timeout=START_S)


@pytest.mark.parametrize("signals", [1, 2])
def test_the_process_ends_whether_it_is_told_once_or_twice(
    endless: subprocess.Popen[str], signals: int
) -> None:
    for _ in range(signals):
        endless.send_signal(signal.SIGTERM)
    _, err = endless.communicate(timeout=START_S)
    assert endless.returncode == 0
    assert "Traceback" not in err
