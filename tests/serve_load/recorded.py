"""Recorded: a server that answers as a tape has it, for the tests of `replay serve-load`.

Owns answers and the changes that tests make to them; judges nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from replay.cli import main
from replay.reader import Tape
from replay.serve_load_tape import Arrival, Ended, Load

from ..http_server import LiveServer
from ..tapes import golden
from .completions_server import CompletionsServer, Scripted

TAPE = str(golden.PATH)

Told = tuple[dict[int, Arrival], dict[int, Ended]]
Printed = Callable[..., tuple[int, Any]]


def told_by(path: str) -> Told:
    """A tape's arrivals and endings."""
    arrivals: dict[int, Arrival] = {}
    endings: dict[int, Ended] = {}
    for it in Load(path, Tape(path)):
        if isinstance(it, Arrival):
            arrivals[it.arrived.request] = it
        elif isinstance(it, Ended):
            endings[it.request] = it
    return arrivals, endings


class Recorded:
    """Answers as a tape has it; `changes` says otherwise for some requests."""

    def __init__(
        self, path: str, changes: dict[int, Callable[[Scripted], Scripted]] | None = None
    ) -> None:
        self.arrivals, self.endings = told_by(path)
        self.changes = changes or {}
        self.text: Callable[[int], str] = lambda token: f"<{token}>"
        self.tells_tokens = True

    def request_of(self, body: dict[str, Any]) -> int:
        """Prompt, seed and length name a request."""
        (found,) = (
            request
            for request, it in self.arrivals.items()
            if (list(it.arrived.tokens), it.arrived.parameters.seed)
            == (body["prompt"], body["seed"])
            and it.arrived.parameters.max_tokens == body["max_tokens"]
        )
        return found

    def __call__(self, body: dict[str, Any]) -> Scripted:
        request = self.request_of(body)
        ended = self.endings[request]
        scripted = Scripted(
            [(self.text(it), [it] if self.tells_tokens else None) for it in ended.tokens],
            ended.reason if ended.reason in ("stop", "length") else "length",
            len(self.arrivals[request].arrived.tokens),
            len(ended.tokens),
            hold=ended.reason == "cancelled",
        )
        change = self.changes.get(request)
        return scripted if change is None else change(scripted)


def say(*tokens: int) -> Callable[[Scripted], Scripted]:
    """Another answer."""

    def change(scripted: Scripted) -> Scripted:
        scripted.pieces = [(f"<{token}>", [token]) for token in tokens]
        scripted.completion_tokens = len(tokens)
        scripted.hold = False
        return scripted

    return change


def told(**fields: Any) -> Callable[[Scripted], Scripted]:
    """The same answer with other fields."""

    def change(scripted: Scripted) -> Scripted:
        for name, value in fields.items():
            setattr(scripted, name, value)
        return scripted

    return change


def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """What runs the command with --json against a server: exit code and report."""

    def command(
        server: CompletionsServer | LiveServer, *arguments: str, tape: str = TAPE
    ) -> tuple[int, Any]:
        code = main(["serve-load", tape, server.url, "--json", *arguments])
        lines = capsys.readouterr().out.splitlines()  # between lines of a server's log
        (report,) = (line for line in lines if line.startswith('{"format"'))
        return code, json.loads(report)

    return command
