"""`replay serve-load`: servers, tapes and streams that cannot be used are one sentence each."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from replay.cli import main
from replay.reader import Tape
from replay.serve_load_client import Failed, events

from ..tampering import changed, write
from .completions_server import Scripted, completions_server
from .recorded import TAPE, Printed, Recorded, told

ROOT = Path(__file__).parents[2]


def test_refused_requests_are_counted_and_the_others_compared(run: Printed) -> None:
    refused = told(status=400, message="Too long.")
    with completions_server(Recorded(TAPE, {1: refused, 8: refused})) as server:
        code, report = run(server)
    assert code == 1
    assert report["failures"] == {"HTTP 400": 2}
    assert report["first_failure"] == "request 1: status 400: Too long."
    assert report["verdict"] == (
        "FAILED: 2 of 10 requests, request 1: status 400: Too long. "
        "(8 of 10 answers the same by tokens)"
    )


def test_a_stream_that_stops_early_is_a_failure(run: Printed) -> None:
    with completions_server(Recorded(TAPE, {1: told(broken=True)})) as server:
        code, report = run(server)
    assert (code, report["failures"]) == (1, {"stream": 1})
    assert report["first_failure"] == "request 1: the stream stopped before its end"


def test_where_all_are_refused_it_says_what_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    with completions_server(lambda _: Scripted(status=422, message="a list?")) as server:
        assert main(["serve-load", TAPE, server.url]) == 1
    assert "none was taken: --detokenize FOLDER sends text" in capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence of a run that could not be."""
    assert main(["serve-load", *arguments]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    return said.err


def test_no_server_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        said = refusal(capsys, TAPE, url)
    assert said.startswith(f"replay: no server answers at {url}/v1 (")
    assert said.endswith("): start one, or check the address\n")
    assert "is no server's address: write it as http://HOST:PORT" in refusal(capsys, TAPE, "here")


def test_a_server_that_takes_no_request_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with completions_server(lambda _: Scripted(status=404, message="No such model.")) as server:
        said = refusal(capsys, TAPE, server.url)
        assert said == (
            f"replay: {server.url}/v1/completions answers 404, so no request can be sent: No such "
            "model.\n"
        )
    with completions_server(Recorded(TAPE), key="k") as server:
        assert "the server refuses the key (401)" in refusal(capsys, TAPE, server.url)
    with completions_server(Recorded(TAPE), models=()) as server:
        assert "names no model (status 200)" in refusal(capsys, TAPE, server.url)


def test_a_redacted_tape_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tape = write(tmp_path, changed(list(Tape(TAPE)), 0, redacted=True))
    with completions_server(Recorded(TAPE)) as server:
        said = refusal(capsys, tape, server.url)
    assert "is redacted: tags stand in it where the prompts' tokens were" in said
    assert server.bodies == []


def test_a_tape_without_requests_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tape = write(tmp_path, list(Tape(TAPE))[:2])
    with completions_server(Recorded(TAPE)) as server:
        assert "holds no request that asks for an answer" in refusal(capsys, tape, server.url)


def test_without_httpx_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    said = refusal(capsys, TAPE, "http://127.0.0.1:1")
    assert said == (
        "replay: serve-load needs httpx, which is not installed: pip install 'mlxtape[load]'\n"
    )


def test_the_command_can_be_looked_up_without_httpx_and_without_mlx() -> None:
    program = (
        "import sys; sys.modules.update(httpx=None, mlx=None)\n"
        "import replay.serve_load, replay.schema; print(len(replay.schema.reports()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_events_are_the_same_wherever_the_reads_fall() -> None:
    data = (
        "data: a\u2028\x85b\r\n\r\n: comment\n\ndata: 1\ndata:2\n\nevent: x\ndata: [DONE]".encode()
    )

    async def read(size: int) -> list[bytes]:
        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(data), size):
                yield data[at : at + size]

        return [it async for it in events(pieces())]

    for size in range(1, len(data) + 1):
        assert asyncio.run(read(size)) == ["a\u2028\x85b".encode(), b"1\n2", b"[DONE]"]


def test_an_endless_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.serve_load_client.ANSWER_BYTES", 1 << 20)

    async def read() -> None:
        async def pieces() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * 4096

        async for _ in events(pieces()):
            raise AssertionError("there is no event in it")

    with pytest.raises(Failed, match="longer than 1 MiB"):
        asyncio.run(read())
