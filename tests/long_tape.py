"""Long tapes: many short requests, one after the other, as a busy server writes them.

`python -m tests.long_tape PATH ROWS [blocks]` writes one, to measure what a replay of it takes.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from msgspec import structs

from kernel.fake import FakeClock, FakeKernel
from server.capture import CaptureWriter
from server.engine import Engine
from server.loop import Parts
from server.policy import Policy
from server.submission import Submission, Update
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters

from .sim import header

RUNNING = 32
PROMPT_ROWS = (4, 12)
ANSWER_ROWS = (4, 24)
POLICY = Policy(
    max_batch_tokens=256, max_running=RUNNING, prefill_chunk=64, context_tokens=256, lookahead=True
)


def make(path: Path, rows: int, blocks: int = 128, running: int = RUNNING) -> int:
    """A tape of about `rows` rows, so many requests at once, half of which share a beginning.
    Returns its steps.
    """
    policy = structs.replace(POLICY, max_running=running)
    geometry = Geometry(block_size=16, groups=(Group(num_blocks=blocks),))
    capture = CaptureWriter(path)
    said = structs.replace(header(geometry, policy), sanitize="off")
    parts = Parts(FakeKernel(geometry, sanitize="off"), policy, capture, said)
    engine = Engine(lambda: parts, clock=FakeClock(), waiting_max=4 * running)
    engine.open()
    generator, live, issued = random.Random(1), set[int](), 0
    stem = tuple(generator.randrange(64) for _ in range(16))

    def hear(update: Update) -> None:
        if update.finish_reason is not None:
            live.discard(update.request)

    while issued < rows or live:
        while issued < rows and len(live) < running + 4:
            count = generator.randint(*PROMPT_ROWS)
            prompt = tuple(generator.randrange(64) for _ in range(count))
            prompt = stem + prompt if generator.random() < 0.5 else prompt
            answer = generator.randint(*ANSWER_ROWS)
            issued += len(prompt) + answer
            live.add(engine.submit(Submission(prompt, Parameters(answer)), hear))
        engine.step()
    steps = engine.next_step - 1
    engine.stop()
    return steps


if __name__ == "__main__":
    blocks = int(sys.argv[3]) if len(sys.argv) > 3 else 128
    print(make(Path(sys.argv[1]), int(sys.argv[2]), blocks), "steps")
