"""Soak: mixed traffic with cancels on a real server, and what is left of it.

    python -m tests.soak --seconds 600

Prints a line of JSON: requests by end, memory of the process after warm-up and at the end, and what
replay says of the tape. Exit code 1 where blocks are held at the end or the tape diverges.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kernel.blas import load_blas

load_blas()

import openai  # noqa: E402

from replay.cli import main as replay_command  # noqa: E402
from server.logs import configure_logs  # noqa: E402

from .real_server import Served, serving, tiny_folder  # noqa: E402

CLIENTS = 16
CANCELS = 0.2
WORDS = [f"{left}{right}" for left in "abcdefgh" for right in ("at", "en", "ill", "o", "ust")]
"""All words there are: tokenizers remember 10,000 words' tokens, which would look like a leak."""
WARM_UP = 0.25
"""Of the whole time."""


async def _one(client: openai.AsyncOpenAI, served: Served, drawn: random.Random) -> str:
    """One request of any kind, given up somewhere in one of five cases; how it ended."""
    shared = " ".join(WORDS[: drawn.randint(5, 40)])
    text = f"{shared} {' '.join(drawn.choices(WORDS, k=drawn.randint(1, 15)))}"
    body: dict[str, Any] = {
        "model": served.model,
        "max_tokens": drawn.randint(1, 80),
        "temperature": drawn.choice([0, 0.8]),
        "n": drawn.choice([1, 1, 1, 2]),
        "stop": drawn.choice([None, ["q"], ["zz", "!"]]),
        "stream": drawn.random() < 0.6,
    }
    if drawn.random() < 0.2:
        body |= {"logprobs": 3}
    if drawn.random() < 0.2:
        body |= {"frequency_penalty": 1.0, "presence_penalty": 0.5}
    if drawn.random() < 0.5:
        work = client.completions.create(prompt=text, **body)
    else:
        body["logprobs"] = None
        work = client.chat.completions.create(messages=[{"role": "user", "content": text}], **body)
    left = drawn.random() < CANCELS
    try:
        async with asyncio.timeout(drawn.uniform(0.0, 0.4) if left else 120):
            answer: Any = await work
            if body["stream"]:
                async for _ in answer:
                    pass
    except TimeoutError:
        return "left" if left else "late"
    return "whole"


async def _traffic(served: Served, seconds: float) -> tuple[Counter[str], list[int]]:
    """Ends of the requests; kilobytes of the process' memory, twenty times on the way."""
    ends: Counter[str] = Counter()
    memory: list[int] = []
    end_s = time.monotonic() + seconds

    async with openai.AsyncOpenAI(
        base_url=served.server.url + "/v1", api_key="x", max_retries=0
    ) as client:

        async def ask(number: int) -> None:
            drawn = random.Random(number)
            while time.monotonic() < end_s:
                ends[await _one(client, served, drawn)] += 1

        async def look() -> None:
            while time.monotonic() < end_s:
                await asyncio.sleep(seconds / 20)
                memory.append(_resident_kb())

        await asyncio.gather(look(), *(ask(number) for number in range(CLIENTS)))
    return ends, memory


def _resident_kb() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize() // 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def soak(seconds: float, folder: Path) -> dict[str, Any]:
    """Run it; the report."""
    tape = folder / "soak.tape"
    with serving(tiny_folder(folder / "tiny"), capture=str(tape), num_blocks=256) as served:
        ends, memory = asyncio.run(_traffic(served, seconds))
        status = served.idle()
    checked = {depth: replay_command([str(tape), "--depth", depth]) for depth in ("fold", "plan")}
    begin = int(len(memory) * WARM_UP)
    return {
        "seconds": seconds,
        "ends": dict(ends),
        "memory_kb": memory[begin:],
        "grown_kb": memory[-1] - memory[begin],
        "preemptions": status["preemptions"],
        "held": status["held"],
        "steps": status["steps"],
        "replay": checked,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    arguments = parser.parse_args()
    configure_logs("warning")
    with tempfile.TemporaryDirectory() as folder:
        report = soak(arguments.seconds, Path(folder))
    print(json.dumps(report), flush=True)
    return int(report["held"] != 0 or any(report["replay"].values()))


if __name__ == "__main__":
    sys.exit(main())
