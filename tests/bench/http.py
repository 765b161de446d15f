"""A closed loop over real HTTP: each client sends its next chat when the last one ended."""

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
ROUNDS = 2
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


def closed_loop(table: Table, model: str) -> None:
    """Output tokens a second and time to the first token, by number of clients."""
    with server(model) as address:
        for clients in CLIENTS:
            rate, first_ms = asyncio.run(_load(address, model, clients))
            table.add(f"{clients} clients, output", rate, "tokens/s")
            table.add(f"{clients} clients, time to first token", first_ms, "ms")


async def _load(address: str, model: str, clients: int) -> tuple[float, float]:
    generator = random.Random(clients)
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        firsts: list[float] = []
        tokens = 0

        async def chat(text: str) -> int:
            started, count = time.perf_counter(), 0
            stream = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": text}],
                max_tokens=ANSWER_TOKENS,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content and not count:
                    firsts.append(time.perf_counter() - started)
                    count = 1
                if chunk.usage is not None:
                    return chunk.usage.completion_tokens
            return 0

        async def one() -> int:
            done = 0
            for _ in range(ROUNDS):
                done += await chat(" ".join(generator.choices(WORDS, k=PROMPT_WORDS)))
            return done

        started = time.perf_counter()
        tokens = sum(await asyncio.gather(*(one() for _ in range(clients))))
        spent = time.perf_counter() - started
        return tokens / spent, statistics.median(firsts) * 1e3
