"""`mlxtape chat`, `score` and `bench`, over a scripted engine."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from server.adapters import named_path
from server.cli import main
from server.settings import Settings
from server.submission import Submission

from .fake_engine import FakeEngine, byte_tokenizer


@pytest.fixture
def asked() -> list[Submission]:
    """What the engine was asked for."""
    return []


@pytest.fixture
def build(asked: list[Submission]) -> Iterator[Callable[..., Any]]:
    """Answers with the number of the request, and END."""
    tokenizer = byte_tokenizer()

    def script(submission: Submission) -> list[int]:
        asked.append(submission)
        return [*tokenizer.encode(f"answer {len(asked)}"), *tokenizer.end_tokens]

    with FakeEngine(tokenizer, script) as engine:
        engine.stop = lambda: None  # type: ignore[attr-defined]

        def made(settings: Settings, progress: Callable[[str], None]) -> Any:
            return engine, tokenizer

        yield made


def _prompt(submission: Submission) -> str:
    return byte_tokenizer().decode(submission.tokens)


def test_chat_answers_each_line_with_all_that_was_said_before(
    build: Any,
    asked: list[Submission],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n/reset\nthree\n/exit\nfour\n"))
    assert main(["chat", "--system", "S"], build) == 0
    assert capsys.readouterr().out == "answer 1\nanswer 2\nanswer 3\n"
    assert [_prompt(it) for it in asked] == [
        "<system>S\n<user>one\n<assistant>",
        "<system>S\n<user>one\n<assistant>answer 1\n<user>two\n<assistant>",
        "<system>S\n<user>three\n<assistant>",
    ]
    assert {it.parameters.temperature for it in asked} == {0.0}


def test_score_prints_a_line_for_each_continuation(
    build: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["score", "-p", "a cat", " sat", "S"], build) == 0
    assert capsys.readouterr().out.splitlines() == [
        "     -1.0000  greedy     4 tokens  ' sat'",
        "     -9.0000             1 tokens  'S'",
    ]


def test_score_prints_json_where_it_is_asked_for(
    build: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["score", "-p", "a cat", " sat", "--json"], build) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report == {"continuation": " sat", "logprob": -1.0, "greedy": True, "tokens": 4}


def test_bench_asks_for_the_load_that_it_reports(
    build: Any, asked: list[Submission], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "--requests", "5", "--concurrency", "2", "--prompt-tokens", "7"]
    assert main([*arguments, "--max-tokens", "3", "--json"], build) == 0
    report = json.loads(capsys.readouterr().out)
    counts = {name: report[name] for name in ("requests", "concurrency", "prompt_tokens")}
    assert counts == {"requests": 5, "concurrency": 2, "prompt_tokens": 7}
    assert [(len(it.tokens), it.parameters.max_tokens) for it in asked] == [(7, 3)] * 5
    assert {it.parameters.end_tokens for it in asked} == {()}
    assert report["output_tokens_per_second"] == pytest.approx(15 / report["seconds"])


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "-p", "Hi"],
        ["score", "-p", "a cat", " sat"],
        ["bench", "--requests", "1", "--prompt-tokens", "7", "--max-tokens", "3"],
    ],
)
def test_the_first_adapter_that_is_given_answers(
    build: Any, asked: list[Submission], command: list[str]
) -> None:
    def with_adapters(settings: Settings, progress: Callable[[str], None]) -> Any:
        engine, tokenizer = build(settings, progress)
        for text in settings.adapter:
            engine.load_adapter(*named_path(text))
        return engine, tokenizer

    assert main([*command, "--adapter", "b=B", "--adapter", "a=A"], with_adapters) == 0
    assert [it.namespace.adapter for it in asked] == ["b"]


def test_a_count_below_one_is_refused(build: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", "--requests", "0"], build)
    assert left.value.code == 2
    said = "mlxtape: argument --requests: must be at least 1, not 0 (see mlxtape bench --help)\n"
    assert capsys.readouterr().err == said
