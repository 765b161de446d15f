"""Terminal: `mlxtape generate`, `chat`, `score` and `bench`, over the engine that the server runs.

What was asked for goes to standard output, as it comes, and nothing else does. Owns no defaults but
temperature 0: who asks twice on a command line expects the same answer.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from .api import Engine, Score
from .http.wire import ApiError

LEAVE = ("/exit", "/quit")
AGAIN = "/reset"
HELP = f"Ctrl-C stops an answer, {AGAIN} forgets the conversation, {LEAVE[0]} or Ctrl-D leaves."


class CommandFailed(Exception):
    """What was asked for could not be done; one sentence."""


def generate(engine: Engine, prompt: str, parameters: dict[str, Any]) -> None:
    """Print the answer to one message. Raises CommandFailed."""
    _print_pieces(engine.chat_stream(prompt, **{"temperature": 0.0} | parameters))


def chat(engine: Engine, system: str | None, parameters: dict[str, Any]) -> None:
    """Answer line after line of standard input, as one conversation. Raises CommandFailed."""
    begin = [] if system is None else [{"role": "system", "content": system}]
    messages = list(begin)
    if sys.stdin.isatty():
        print(HELP, file=sys.stderr)
    for line in _lines():
        if line in LEAVE:
            return
        if line == AGAIN:
            messages = list(begin)
            continue
        messages.append({"role": "user", "content": line})
        pieces = engine.chat_stream(messages, **{"temperature": 0.0} | parameters)
        messages.append({"role": "assistant", "content": _print_pieces(pieces, stoppable=True)})


def _lines() -> Iterator[str]:
    """What a person says, without empty lines; a prompt is shown on a terminal only."""
    shown = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(shown).strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line:
            yield line


def _print_pieces(pieces: Iterator[str], stoppable: bool = False) -> str:
    """Print an answer as it comes; returns what there was of it.

    stoppable: an interrupt ends this answer and nothing else.
    """
    said: list[str] = []
    try:
        for piece in pieces:
            said.append(piece)
            _write(piece)
    except ApiError as error:
        raise CommandFailed(str(error)) from None
    except KeyboardInterrupt:
        if not stoppable:
            raise
    finally:
        pieces.close()  # type: ignore[attr-defined]
    _write("\n")
    return "".join(said)


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandFailed(f"the answer cannot be written: {error.strerror}") from None


class ScoreReport(Struct):
    """What `mlxtape score --json` prints for a continuation; see api.Score."""

    continuation: str
    logprob: float
    greedy: bool
    tokens: int


def score(
    engine: Engine, prompt: str, continuations: list[str], as_json: bool, model: str | None = None
) -> None:
    """Print each continuation's log-likelihood after a text. Raises CommandFailed."""
    try:
        scores = engine.score(prompt, continuations, model)
    except ApiError as error:
        raise CommandFailed(str(error)) from None
    reports = [_report(*pair) for pair in zip(continuations, scores, strict=True)]
    if as_json:
        _write(msgspec.json.encode(reports).decode() + "\n")
        return
    for it in reports:
        likeliest = "greedy" if it.greedy else ""
        _write(f"{it.logprob:12.4f}  {likeliest:<6}  {it.tokens:4} tokens  {it.continuation!r}\n")


def _report(continuation: str, found: Score) -> ScoreReport:
    return ScoreReport(continuation, found.logprob, found.greedy, len(found.tokens))


class BenchReport(Struct):
    """What `mlxtape bench --json` prints. Times in seconds; first token: from asking to text."""

    requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    first_token_p50: float
    first_token_p90: float
    between_pieces_p50: float
    request_p50: float


class _Timed(Struct):
    """Moments of one answer, in seconds: asked, then one for each piece of text."""

    asked: float
    pieces: list[float]


def bench(
    engine: Engine,
    *,
    requests: int,
    concurrency: int,
    prompt_tokens: int,
    max_tokens: int,
    model: str | None = None,
) -> BenchReport:
    """Answer `requests` random prompts, `concurrency` at a time, each to its last token.

    No two prompts share a block, so nothing is found in the prefix cache. Raises CommandFailed.
    """
    try:
        return asyncio.run(_bench(engine, requests, concurrency, prompt_tokens, max_tokens, model))
    except ApiError as error:
        raise CommandFailed(str(error)) from None


async def _bench(
    engine: Engine,
    requests: int,
    concurrency: int,
    prompt_tokens: int,
    max_tokens: int,
    model: str | None,
) -> BenchReport:
    drawn = random.Random(0)
    asked = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "model": model}
    prompts = iter([_prompt(engine, drawn, prompt_tokens) for _ in range(requests)])
    timed: list[_Timed] = []

    async def client() -> None:
        for prompt in prompts:
            it = _Timed(time.perf_counter(), [])
            async for _ in engine.astream(prompt, **asked):
                it.pieces.append(time.perf_counter())
            it.pieces.append(time.perf_counter())
            timed.append(it)

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    seconds = time.perf_counter() - began
    output = requests * max_tokens
    between = [end - start for it in timed for start, end in itertools.pairwise(it.pieces)]
    first = [it.pieces[0] - it.asked for it in timed]
    return BenchReport(
        requests=requests,
        concurrency=concurrency,
        prompt_tokens=prompt_tokens,
        output_tokens=max_tokens,
        seconds=seconds,
        output_tokens_per_second=output / seconds,
        total_tokens_per_second=(output + requests * prompt_tokens) / seconds,
        first_token_p50=statistics.median(first),
        first_token_p90=_ninth(first),
        between_pieces_p50=statistics.median(between) if between else 0.0,
        request_p50=statistics.median(it.pieces[-1] - it.asked for it in timed),
    )


def _prompt(engine: Engine, drawn: random.Random, tokens: int) -> list[int]:
    ends = {*engine.tokenizer.end_tokens}
    usable = [token for token in range(engine.tokenizer.vocab_size) if token not in ends]
    return drawn.choices(usable, k=tokens)


def _ninth(values: list[float]) -> float:
    """The ninth decile."""
    return (
        statistics.quantiles(values, n=10, method="inclusive")[8] if len(values) > 1 else values[0]
    )


def print_bench(report: BenchReport, as_json: bool) -> None:
    """A line a figure, or JSON."""
    if as_json:
        _write(msgspec.json.encode(report).decode() + "\n")
        return
    asked = f"{report.requests} requests, {report.concurrency} at a time, "
    _write(f"{asked}{report.prompt_tokens} + {report.output_tokens} tokens each\n")
    rows = (
        ("output tokens/s", report.output_tokens_per_second),
        ("all tokens/s", report.total_tokens_per_second),
        ("first token, ms, median", report.first_token_p50 * 1e3),
        ("first token, ms, 90 %", report.first_token_p90 * 1e3),
        ("between pieces, ms, median", report.between_pieces_p50 * 1e3),
        ("a request, ms, median", report.request_p50 * 1e3),
    )
    for name, value in rows:
        _write(f"  {name:<28}{value:10.1f}\n")
