"""The end of a server's process: nobody new, answers in their grace, a whole tape, exit code 0."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from replay.cli import main as replay_command
from replay.reader import Tape
from server.http import route_completions
from server.http.app import create_app
from server.http.listen import bind, listen, run
from server.settings import Settings
from statemachine.records import TapeEnded

from .fake_engine import WAIT_S, scripted
from .real_server import serving as serving_here
from .real_server import tiny_folder
from .test_cli import command, outcome, serving

START_S = 120.0
CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


@contextmanager
def waiting_server(*flags: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """tests/waiting_server.py, once it listens."""
    pipe = subprocess.PIPE
    argv = [sys.executable, "-m", "tests.waiting_server", "serve", "--port", "0", *flags]
    root = Path(__file__).parent.parent
    kept = {name: text for name, text in os.environ.items() if not name.startswith("MLXTAPE_")}
    with subprocess.Popen(
        argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=root, env=kept
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().rsplit(" ", 1)[-1].strip()
            with httpx.Client(base_url=address, timeout=START_S) as client:
                yield process, client
        finally:
            process.kill()


def stop_while_answering(
    process: subprocess.Popen[str], client: httpx.Client, lines: Iterator[str]
) -> None:
    """Signal it once the answer has begun; returns once it knows."""
    assert any('"content":"a"' in line for line in lines)
    process.send_signal(signal.SIGTERM)
    while client.get("/ready").status_code == 200:
        pass


def test_a_signal_lets_an_answer_end_in_its_grace_and_admits_nobody() -> None:
    with (
        waiting_server("--grace-s", "100", "--log-format", "json") as (process, client),
        client.stream("POST", "/v1/chat/completions", json=CHAT) as response,
    ):
        lines = response.iter_lines()
        stop_while_answering(process, client, lines)
        assert client.get("/health").json()["status"] == "stopping"
        late = client.post("/v1/chat/completions", json=CHAT)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "server_stopping")
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        rest = [line for line in lines if line]
        assert '"content":"b"' in rest[0]
        assert rest[-1] == "data: [DONE]"
        out, err = process.communicate(timeout=START_S)
    assert (process.returncode, out) == (0, "")
    ends = [json.loads(line) for line in err.splitlines()]
    posts = [(end["status"], end.get("finish")) for end in ends if end.get("method") == "POST"]
    assert posts == [(503, None), (200, "stop")]


def test_a_second_signal_ends_the_process_without_waiting_for_the_grace() -> None:
    with (
        waiting_server("--grace-s", "100") as (process, client),
        client.stream("POST", "/v1/chat/completions", json=CHAT) as response,
    ):
        lines = response.iter_lines()
        stop_while_answering(process, client, lines)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        # The engine waits for its line yet: the answer was given up, it did not end.
        assert any("finish=disconnected" in line for line in process.stderr)
        _, err = process.communicate(timeout=START_S)
    assert (process.returncode, err) == (0, "")


@pytest.mark.slow
def test_a_stop_does_not_wait_for_a_prompt_that_is_still_being_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def endless(*_: object) -> None:
        begun.set()
        may_end.wait(WAIT_S)
        ended.set()

    def ask() -> None:
        with suppress(httpx.HTTPError):
            body = {"prompt": "a", "guided_regex": "a"}
            httpx.post(f"http://{host}:{port}/v1/completions", json=body, timeout=WAIT_S)

    def stop() -> None:
        begun.wait(WAIT_S)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(route_completions, "ask_of_completion", endless)
    settings, listener = Settings(grace_s=0.0), bind("127.0.0.1", 0)
    with scripted("a") as engine, ThreadPoolExecutor(2) as pool:
        app = create_app(engine, engine.tokenizer, "scripted", settings)
        host, port = listen(listener)
        others = [pool.submit(ask), pool.submit(stop)]
        run(app, listener, settings)
        waited = ended.is_set()
        may_end.set()
        for other in others:
            other.result()
    assert not waited


def test_a_real_server_that_is_told_to_stop_finishes_its_answer_and_its_tape(
    tmp_path: Path,
) -> None:
    tape = tmp_path / "capture.log"
    flags = ("--capture", tape, "--grace-s", "100", "--model", tiny_folder(tmp_path / "tiny"))
    with (
        serving(*flags) as (process, address),
        httpx.stream(
            "POST",
            f"{address}/v1/chat/completions",
            json=CHAT | {"max_tokens": 600, "ignore_eos": True},
            timeout=START_S,
        ) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
        code, out, err = outcome(process)
    assert (code, out) == (0, "")
    assert "event=stopping answers=1 grace_s=100.0\n" in err
    assert " tokens=600 finish=length\n" in err
    assert isinstance(list(Tape(str(tape)))[-1], TapeEnded)
    assert [replay_command([str(tape), "--depth", depth]) for depth in ("fold", "plan")] == [0, 0]


@pytest.mark.slow
def test_the_settings_bound_the_queue_of_a_real_server(tmp_path: Path) -> None:
    with serving_here(tiny_folder(tmp_path / "tiny"), max_running=1, max_waiting=1) as served:
        body = CHAT | {"ignore_eos": True}
        url = f"{served.server.url}/v1/chat/completions"
        with (
            httpx.stream("POST", url, json=body, timeout=START_S) as running,
            ThreadPoolExecutor() as pool,
        ):
            assert running.status_code == 200
            waits = pool.submit(httpx.post, url, json=body | {"max_tokens": 1}, timeout=START_S)
            served.until(lambda now: now["waiting"] == 1)
            refused = httpx.post(url, json=body, timeout=START_S)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            running.close()
            assert waits.result(START_S).status_code == 200


def test_keys_and_certificates_are_looked_at_before_a_model_is_loaded(tmp_path: Path) -> None:
    for flag in ("--api-key-file", "--tls-cert"):
        more = ("--tls-key", "none.pem") if flag == "--tls-cert" else ()
        code, out, err = outcome(command("serve", "--model", "nowhere", flag, "none.pem", *more))
        assert out == ""
        assert code in (1, 2)
        name = flag[2:].replace("-", "_")
        assert err == f"mlxtape: {name} none.pem cannot be read: No such file or directory\n"
