"""`python -m tests.demo`: serve, chat, capture, replay; then the same with a known bug put in.

Everything runs as a user would run it: the server and replay are processes of their own, the chats
go over HTTP. Exit code 0 only if the clean capture is clean at every depth, the faulty one is
caught at the right step, and the capital of France is Paris.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from attrs import frozen

from replay.reader import Tape
from replay.run import DEPTHS, FOLD
from statemachine.events import PAD, Appended, AppendedEach
from statemachine.records import StepPlanned

MODEL = "smollm2-135m"
FAULT = "S1"
TEACHER = "You are a geography teacher. Answer in one short sentence."
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
CUT_AFTER = 5
"""Pieces of a stream after which its client goes away."""
START_S = 180
WAIT_S = 300
BIN = Path(sys.executable).parent


@frozen
class Chat:
    """One chat of the demo. how: `whole`, `stream`, or `cut` (the client leaves in the middle)."""

    text: str
    system: str | None = None
    how: str = "whole"
    max_tokens: int = 24


CHATS = (
    Chat(QUESTION),
    Chat("What is the capital of Japan?", TEACHER),
    Chat("Which ocean is the largest?", TEACHER),
    Chat("Name a river in Egypt.", TEACHER),
    Chat("Which continent is Brazil in?", TEACHER),
    Chat("Count from one to five.", how="stream"),
    Chat("Tell me a long story about a ship.", how="cut", max_tokens=200),
    Chat("Write one sentence about the sea."),
)


def main() -> int:
    """Run both halves; a folder with the tapes and logs stays where something failed."""
    folder = Path(tempfile.mkdtemp(prefix="mlxtape-demo-"))
    started = time.monotonic()
    try:
        wrong = _clean(folder) + _faulty(folder)
    except (httpx.HTTPError, subprocess.SubprocessError, DemoError) as error:
        wrong = [f"{type(error).__name__}: {error}"]
    print(f"\n{time.monotonic() - started:.0f} s")
    if wrong:
        for what in wrong:
            print(f"FAILED: {what}")
        print(f"tapes and logs are kept in {folder}")
        return 1
    shutil.rmtree(folder)
    print("The clean capture is clean at every depth, and the fault was caught at its first step.")
    return 0


class DemoError(Exception):
    """What kept the demo from going on; one sentence."""


def _clean(folder: Path) -> list[str]:
    tape = folder / "clean.log"
    print(f"Serving {MODEL}, with a capture ...")
    answers = _serve_and_ask([str(BIN / "mlxtape")], tape, [])
    wrong = [] if answers[0] == ANSWER else [f"the answer is {answers[0]!r}, not {ANSWER!r}"]
    print("\nReplaying the capture ...")
    for depth in DEPTHS:
        code, report = _replay(tape, depth)
        flips = report["figures"].get("excused flips")
        print(f"  {depth:<10} {report['verdict']}{f', {flips} excused flips' if flips else ''}")
        if code:
            wrong.append(f"replay --depth {depth} exits with {code}, not 0")
    return wrong


def _faulty(folder: Path) -> list[str]:
    tape = folder / "faulty.log"
    print(f"\nServing with fault {FAULT} (pad rows stay after a prefill padded to 32) ...")
    command = [sys.executable, "-m", "tests.faults.serve", FAULT, "--"]
    _serve_and_ask(command, tape, ["--prefill-tile", "32"])
    code, report = _replay(tape, FOLD)
    found = report["divergence"]
    print(f"\nReplaying the capture ...\n  {FOLD:<10} {report['verdict']}")
    if code != 1 or found is None:
        return [f"replay of the faulty capture exits with {code}, not 1"]
    for value in found["values"]:
        if value["observed"] not in (None, value["derived"]):
            name, right, saw = value["name"], value["derived"], value["observed"]
            print(f"             {name}: {right} by the tape, {saw} in the caches")
    step, sequences = first_row_after_pads(tape)
    if (found["class"], found["step"]) != ("observation", step):
        return [f"the fault begins at step {step}, not where replay found it"]
    return [] if found["sequence"] in sequences else [f"sequence {found['sequence']} had no pads"]


def first_row_after_pads(tape: Path) -> tuple[int, set[int]]:
    """The first step that issues rows of a sequence whose prefill was padded, and those sequences.

    Read from the events alone: it is where pad rows that stayed must show.
    """
    padded: set[int] = set()
    for item in Tape(str(tape)):
        if not isinstance(item, StepPlanned):
            continue
        issued = [it for it in item.events if isinstance(it, Appended)]
        columns = [it for it in item.events if isinstance(it, AppendedEach)]
        again = {it.seq for it in issued if it.purpose != PAD} & padded
        again |= {seq for it in columns for seq in it.seqs} & padded
        if again:
            return item.step, again
        padded |= {it.seq for it in issued if it.purpose == PAD}
    raise DemoError(f"no prefill on {tape.name} was padded")


def _serve_and_ask(command: list[str], tape: Path, settings: list[str]) -> list[str]:
    with _server(command, tape, settings) as url:
        print(f"{len(CHATS)} chats at once, over HTTP:")
        with ThreadPoolExecutor(len(CHATS)) as pool:
            answers = list(pool.map(lambda chat: _ask(url, chat), CHATS))
    for chat, answer in zip(CHATS, answers, strict=True):
        how = {"stream": " (streamed)", "cut": " (client left)"}.get(chat.how, "")
        print(f"  {chat.text}{how}\n    {' '.join(answer.split())}")
    return answers


@contextmanager
def _server(command: list[str], tape: Path, settings: list[str]) -> Iterator[str]:
    """A server process, ready at the URL that it gives; ended by SIGTERM."""
    log = tape.with_suffix(".stderr")
    full = [*command, "serve", "--port", "0", "--capture", str(tape), "--model", MODEL, *settings]
    with log.open("w") as errors:
        process = subprocess.Popen(full, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    try:
        yield _url(process, log)
        process.send_signal(signal.SIGTERM)
        code = process.wait(WAIT_S)
        if code:
            raise DemoError(f"the server ended with {code}:\n{log.read_text()[-2000:]}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _url(process: subprocess.Popen[str], log: Path) -> str:
    """Where the server says that it serves. Its end, or its silence, ends the wait."""
    assert process.stdout is not None
    with ThreadPoolExecutor(1) as pool:
        line = pool.submit(process.stdout.readline)
        try:
            said = line.result(START_S)
        except TimeoutError:
            process.kill()
            said = ""
    if " on http" not in said:
        raise DemoError(f"the server did not start:\n{log.read_text()[-2000:]}")
    return said.rsplit(" ", 1)[-1].strip()


def _ask(url: str, chat: Chat) -> str:
    """The answer's text, as far as it was read."""
    system = [{"role": "system", "content": chat.system}] if chat.system else []
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [*system, {"role": "user", "content": chat.text}],
        "temperature": 0,
        "max_tokens": chat.max_tokens,
        "stream": chat.how != "whole",
    }
    with httpx.Client(base_url=url, timeout=WAIT_S) as client:
        if chat.how == "whole":
            reply = client.post("/v1/chat/completions", json=body).raise_for_status()
            return str(reply.json()["choices"][0]["message"]["content"])
        with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            reply.raise_for_status()
            return _read_stream(reply, CUT_AFTER if chat.how == "cut" else None)


def _read_stream(reply: httpx.Response, pieces_max: int | None) -> str:
    """The text of a stream's pieces; leaving early closes the connection."""
    pieces: list[str] = []
    for line in reply.iter_lines():
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            continue
        for choice in json.loads(data)["choices"]:
            pieces.append(choice["delta"].get("content") or "")
        if pieces_max is not None and len(pieces) > pieces_max:
            break
    return "".join(pieces)


def _replay(tape: Path, depth: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report of `replay TAPE --depth DEPTH --json`."""
    command = [str(BIN / "replay"), str(tape), "--depth", depth, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S + WAIT_S)
    if not done.stdout:
        raise DemoError(f"replay --depth {depth} exits with {done.returncode}: {done.stderr}")
    report: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, report


if __name__ == "__main__":
    sys.exit(main())
