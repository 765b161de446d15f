"""Long tapes: many requests, one after the other, as a busy server writes them.

`python -m tests.long_tape PATH ROWS [LOAD]` writes one, to measure what a replay of it
takes. It needs no disk: `python -m tests.long_tape /dev/stdout 5e7 chats | replay -`.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import NamedTuple

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


class Load(NamedTuple):
    """What requests ask for: the least and the most rows, and what the scheduler may do."""

    prompt_rows: tuple[int, int]
    answer_rows: tuple[int, int]
    policy: Policy
    blocks: int


_TIGHT = Policy(
    max_batch_tokens=256, max_running=RUNNING, prefill_chunk=64, context_tokens=256, lookahead=True
)
_ROOMY = structs.replace(
    _TIGHT, max_batch_tokens=2048, prefill_chunk=512, context_tokens=2048, lookahead=False
)
LOADS = {
    "short": Load((4, 12), (4, 24), _TIGHT, 128),
    "chats": Load((300, 900), (50, 150), _ROOMY, 4096),
    "answers": Load((20, 60), (200, 400), _ROOMY, 4096),
}
"""Short ones come and go in every step; chats are long prompts; answers are mostly decode rows."""


def make(path: Path, rows: int, running: int = RUNNING, load: str = "short") -> int:
    """A tape of about `rows` rows, so many requests at once, half of which share a beginning.
    Returns its steps.
    """
    asked = LOADS[load]
    policy = structs.replace(asked.policy, max_running=running)
    geometry = Geometry(block_size=16, groups=(Group(num_blocks=asked.blocks),))
    capture = CaptureWriter(path)
    said = structs.replace(header(geometry, policy), sanitize="off")
    kernel = FakeKernel(geometry, sanitize="off")
    parts = Parts(kernel, policy, capture, said)
    engine = Engine(lambda: parts, clock=FakeClock(), waiting_max=4 * running)
    engine.open()
    generator, live, issued = random.Random(1), set[int](), 0
    stem = tuple(generator.choices(range(64), k=16))

    def hear(update: Update) -> None:
        if update.finish_reason is not None:
            live.discard(update.request)

    while issued < rows or live:
        while issued < rows and len(live) < running + 4:
            count = generator.randint(*asked.prompt_rows)
            prompt = tuple(generator.choices(range(64), k=count))
            prompt = stem + prompt if generator.random() < 0.5 else prompt
            answer = generator.randint(*asked.answer_rows)
            issued += len(prompt) + answer
            live.add(engine.submit(Submission(prompt, Parameters(answer)), hear))
        engine.step()
        kernel.batches.clear()  # it keeps them for tests
    steps = engine.next_step - 1
    engine.stop()
    return steps


if __name__ == "__main__":
    chosen = sys.argv[3] if len(sys.argv) > 3 else "short"
    made = make(Path(sys.argv[1]), int(float(sys.argv[2])), load=chosen)
    print(made, "steps", file=sys.stderr)
