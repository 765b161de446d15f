"""P05, P07, P35: a real model answers by its own prompt, crowded, repeated, and in any order."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import structlog
from msgspec import structs

from kernel.fake import BUILD, Failure
from server.logs import configure_logs

from ..faults.loads import TINY, Request, tokens
from ..faults.runner import record
from ..real_server import (
    Served,
    cached_of,
    flips,
    on_tape,
    replayed,
    serving,
    text_of,
    tiny_folder,
)
from . import asking
from .fingerprints import Sample, by_request
from .serving import PLAIN, POLICY, WAIT_S, over_fake

CLIENTS = 16
LENGTHS = tuple(5 + 5 * number for number in range(CLIENTS))
"""5 to 80."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose chat template adds nothing: a prompt is its text, a token a character."""
    path = tiny_folder(tmp_path_factory.mktemp("models") / "tiny")
    (path / "chat_template.jinja").write_text(PLAIN)
    return path


@pytest.fixture(scope="module")
def tiny(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tape = tmp_path_factory.mktemp("tapes") / "tiny.log"
    with serving(folder, num_blocks=200, sanitize="full", capture=str(tape)) as served:
        yield served
        served.idle()
    assert replayed(tape) == [0, 0]


def canary(number: int) -> str:
    """A word that no other prompt has."""
    return f"q{number:x}{number:x}z"


def filler(rows: int, seed: int) -> str:
    """Printable characters, so that prompts are nothing like each other."""
    return "".join(chr(ord("!") + token) for token in tokens(rows, seed))


def said(served: Served, text: str, stream: bool, max_tokens: int = 16) -> str:
    if not stream:
        return text_of(served.ask(text, max_tokens=max_tokens))
    chunks = served.ask(text, max_tokens=max_tokens, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_p05_sixteen_at_once_answer_as_one_by_one_and_carry_nobody_elses_word(
    folder: Path, tmp_path: Path
) -> None:
    """Mixed streams and not; PROV is the sanitizer's, in full (`idle` asks for it)."""
    texts = [canary(n) + filler(rows - 4, n) for n, rows in enumerate(LENGTHS)]
    crowded, lonely = tmp_path / "crowded.log", tmp_path / "lonely.log"
    together = threading.Barrier(CLIENTS)
    with (
        serving(folder, num_blocks=200, sanitize="full", capture=str(crowded)) as served,
        ThreadPoolExecutor(CLIENTS) as clients,
    ):

        def one(number: int) -> str:
            together.wait(WAIT_S)
            return said(served, texts[number], stream=bool(number % 2))

        answers = list(clients.map(one, range(CLIENTS)))
        served.idle()
    with serving(folder, num_blocks=200, prefix_cache=False, capture=str(lonely)) as quiet:
        alone = [said(quiet, text, stream=not number % 2) for number, text in enumerate(texts)]
    wanted = {taped.prompt: taped for taped in on_tape(lonely).values()}
    assert sorted(map(len, wanted)) == sorted(LENGTHS)
    assert len(on_tape(crowded)) == CLIENTS
    flipped = sum(flips(taped, wanted[taped.prompt]) for taped in on_tape(crowded).values())
    for number, (answer, single) in enumerate(zip(answers, alone, strict=True)):
        assert answer == single or flipped
        assert not [n for n in range(CLIENTS) if n != number and canary(n) in answer]
    assert len(set(alone)) >= CLIENTS // 2, "or else equal answers would say little"
    assert replayed(crowded) == [0, 0]


@pytest.mark.parametrize("rows", [1, 20])
def test_p07_an_exact_repeat_answers_in_full_whichever_way_it_is_asked(
    tiny: Served, rows: int
) -> None:
    """Blocks of 16: the 20 tokens are found up to their first block's end."""
    text = f"{rows % 7}" + "repeat me, and again"[: rows - 1]
    first = tiny.ask(text)
    assert first.usage.prompt_tokens == rows
    assert (cached_of(first), first.usage.completion_tokens) == (0, 16)
    for _ in range(2):
        assert said(tiny, text, stream=True) == text_of(first)
        again = tiny.ask(text)
        assert text_of(again) == text_of(first)
        assert cached_of(again) == (16 if rows == 20 else 0)
        assert again.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_p07_a_forward_that_fails_is_an_error_and_never_an_empty_200(stream: bool) -> None:
    """Before the first token a status of its own; behind it an error in the stream."""
    failing = {1: Failure(BUILD, 0), 4: Failure(BUILD, 1)}
    with over_fake(policy=structs.replace(POLICY, prefix_cache=False), fail=failing) as served:
        with pytest.raises(openai.InternalServerError, match="could not run this"):
            served.streamed("hello") if stream else served.ask("hello")
        seen: list[Any] = []
        with pytest.raises(openai.APIError, match="could not run this"):
            seen.extend(served.ask("hello", stream=True) if stream else [served.ask("hello")])
        assert len([it for it in seen if it.choices[0].delta.content]) == (2 if stream else 0)
        probe = served.ask("hello")
        assert (probe.usage.completion_tokens, probe.choices[0].finish_reason) == (16, "length")
        served.idle()


class Terminal(io.StringIO):
    """An error stream that somebody looks at."""

    def isatty(self) -> bool:
        return True


def test_p07_a_kernel_that_raises_stops_with_a_status_and_a_log_without_its_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error of a kind that nobody expects, eight times; the engine's thread waits for no log."""

    def broken(seq: int, position: int) -> int:
        raise IndexError("tuple index out of range")

    monkeypatch.setattr(sys, "stderr", Terminal())
    configure_logs()
    try:
        with over_fake(script=broken) as served:
            with pytest.raises(openai.InternalServerError, match="the engine stopped: tuple"):
                served.ask("hello")
            with pytest.raises(openai.InternalServerError) as refused:
                served.ask("hello")
            assert refused.value.status_code == 503
        said = str(sys.stderr.getvalue())  # type: ignore[attr-defined]
    finally:
        structlog.reset_defaults()
    assert said.count("IndexError: tuple index out of range") == 8
    assert "RequestArrived(" not in said, "no frame's locals"


ORDER = (15, 16, 17, 33)
CLOSE = 1e-3


def scores(order: tuple[int, ...], cache: bool, folder: Path) -> dict[int, list[list[Sample]]]:
    """What is on tape of each prompt length, one entry a request, asked one after the other."""
    policy = structs.replace(asking.POLICY, prefix_cache=cache)
    text = tokens(max(ORDER), 7)
    requests = tuple(Request(text[:rows], 6, at=1 + 10 * n) for n, rows in enumerate(order))
    tape = folder / f"{cache}-{'-'.join(map(str, order))}.log"
    record(asking.load(TINY, requests, policy), tape)
    found: dict[int, list[list[Sample]]] = {}
    for request, samples in by_request(tape).items():
        found.setdefault(order[request], []).append(samples)
    return found


def test_p35_scores_do_not_depend_on_what_was_asked_before(tmp_path: Path) -> None:
    """Blocks of 16; prompts that begin alike, each twice, then in reverse order, then uncached.

    What waits for logprobs over HTTP: one value for each position of the prompt, the first one
    null, and a hit that is not taken, or is computed again, for positions that are asked for.
    What can be held now: logit and margin of every sampled position, on tape.
    """
    twice = tuple(rows for rows in ORDER for _ in range(2))
    runs = [scores(order, True, tmp_path) for order in (twice, twice[::-1])]
    cold = scores(ORDER, False, tmp_path)
    for rows in ORDER:
        (wanted,) = cold[rows]
        assert len(wanted) == 6
        for samples in (runs[0][rows][0], runs[0][rows][1], runs[1][rows][0], runs[1][rows][1]):
            assert [it.token for it in samples] == [it.token for it in wanted]
            for got, want in zip(samples, wanted, strict=True):
                assert abs(got.logit - want.logit) < CLOSE
                assert abs(got.margin - want.margin) < CLOSE
    # A cold prompt has the same shapes in every order, and so the same bits.
    assert runs[0][15][0] == runs[1][15][0] == cold[15][0]
