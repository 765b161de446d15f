"""Chats over real HTTP: so many clients that stream an answer each, at once."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from openai import AsyncOpenAI

from .table import Table

CLIENTS = (1, 4, 16, 32)
ANSWER_TOKENS = 64
PROMPT_WORDS = 100
WORDS = (
    *("river", "stone", "light", "table", "green", "seven", "walk", "paper", "cloud", "under"),
    *("minute", "garden", "silver", "bread", "window", "music", "letter", "harbour", "winter"),
)


@contextlib.contextmanager
def server(model: str, *flags: str) -> Iterator[str]:
    """A server of our own on a free port; yields its address."""
    command = [sys.executable, "-m", "server.cli", "serve", "--model", model, "--port", "0"]
    with subprocess.Popen(
        [*command, "--log-level", "error", *flags], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"serving .* on (http://\S+)", line):
                    yield found[1]
                    break
            else:
                raise RuntimeError("the server did not start")
        finally:
            process.terminate()


def over_http(table: Table, model: str, plain: dict[int, float]) -> None:
    """Rates by number of clients that chat at once; `plain` are plain loops' decode rates."""
    with server(model) as address:
        for clients in CLIENTS:
            answers = asyncio.run(_burst(address, model, clients))
            rate, decode, first_ms = _figures(answers)
            table.add(f"{clients} clients, output, prompts included", rate, "tokens/s")
            table.add(
                f"{clients} clients, decode", decode, "tokens/s", plain.get(clients), "plain loop"
            )
            table.add(f"{clients} clients, time to first token", first_ms, "ms")


def _figures(answers: list[list[float]]) -> tuple[float, float, float]:
    """Tokens/s over all, tokens/s while every client has its first token and none its last, and
    the median time to the first token in milliseconds. An answer: its start, then its tokens.
    """
    started = min(times[0] for times in answers)
    ended = max(times[-1] for times in answers)
    begin = max(times[1] for times in answers)
    end = min(times[-1] for times in answers)
    within = sum(begin < at <= end for times in answers for at in times[1:])
    total = sum(len(times) - 1 for times in answers)
    first = statistics.median(times[1] - times[0] for times in answers)
    return total / (ended - started), within / (end - begin), first * 1e3


async def _burst(address: str, model: str, clients: int) -> list[list[float]]:
    """Chats that start at once; for each when it started and when each of its tokens came."""
    generator = random.Random(clients)
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:

        async def chat(text: str) -> list[float]:
            times = [time.perf_counter()]
            stream = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": text}],
                max_tokens=ANSWER_TOKENS,
                temperature=0,
                stream=True,
            )
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    times.append(time.perf_counter())
            return times

        texts = [
            "Write a very long story with these words: "
            + " ".join(generator.choices(WORDS, k=PROMPT_WORDS))
            for _ in range(clients)
        ]
        return list(await asyncio.gather(*(chat(text) for text in texts)))
