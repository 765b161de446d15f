"""Loads: requests pinned to steps, over a real engine with a real tape file.

Owns what is asked and of which kernel. The fake kernel needs no model; `tiny` is a random llama in
a folder of its own, so that replay can load it; `smollm2` is the bundled model.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import structlog
from attrs import evolve, field, frozen
from msgspec import structs

from kernel.fake import Failure, FakeClock, FakeKernel, run_pinned
from server.capture import CaptureWriter
from server.engine import Engine
from server.loop import Parts
from server.policy import Policy
from server.submission import Submission, Update
from statemachine.events import Namespace
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters

from ..sim import header

FAKE = "fake"
TINY = "tiny"
SMOLLM2 = "smollm2"

VOCAB = 64

POLICY = Policy(max_batch_tokens=64, prefill_chunk=16, context_tokens=96)
POOL = Geometry(block_size=4, groups=(Group(num_blocks=64),))


@frozen
class Request:
    """A request that arrives before step `at`; `cancel_at`: the client goes away before that."""

    tokens: tuple[int, ...]
    max_tokens: int = 8
    at: int = 1
    cancel_at: int | None = None
    namespace: Namespace = Namespace()
    temperature: float = 0.0
    seed: int = 0
    end_tokens: tuple[int, ...] = ()


@frozen
class Load:
    """Requests, and what they run on. segment_bytes: the tape is a folder of such segments."""

    name: str
    requests: tuple[Request, ...]
    policy: Policy = POLICY
    geometry: Geometry = POOL
    kernel: str = FAKE
    fail: dict[int, Failure] = field(factory=dict)
    segment_bytes: int = 0
    sanitize: str = "full"


@frozen
class Played:
    """What became of a load: answers and ends by request; `error` where the engine itself died.

    adopted_rows: prompt rows that first admissions took from the prefix index. held_blocks: what
    is still held once all is over.
    """

    answers: tuple[tuple[int, ...], ...]
    reasons: tuple[str | None, ...]
    steps: int
    preemptions: int
    failed_steps: int
    adopted_rows: int
    held_blocks: int = 0
    error: str = ""


class _Inbox:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.reason: str | None = None
        self.cached_tokens = 0

    def __call__(self, update: Update) -> None:
        self.cached_tokens = max(self.cached_tokens, update.cached_tokens)
        self.tokens.extend(update.tokens)
        self.reason = update.finish_reason or self.reason


class _Stepper:
    """Tells who watches which step is being made."""

    def __init__(self, engine: Engine, begin: Callable[[int], None]) -> None:
        self._engine = engine
        self._begin = begin

    @property
    def next_step(self) -> int:
        return self._engine.next_step

    def step(self) -> bool:
        self._begin(self._engine.next_step)
        return self._engine.step()


def play(
    load: Load, path: Path, begin: Callable[[int], None], make: Callable[[CaptureWriter], Parts]
) -> Played:
    """Run a load to its end, its tape in `path`; `begin` hears each step's number."""
    with structlog.testing.capture_logs():
        capture = _capture(load, path)
        engine = Engine(lambda: make(capture), clock=FakeClock())
        engine.open()
        inboxes = [_Inbox() for _ in load.requests]
        error = ""
        try:
            run_pinned(_Stepper(engine, begin), _actions(load, engine, inboxes), 2000)
            engine.stop()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            capture.close()
        status = engine.status()
    return Played(
        answers=tuple(tuple(inbox.tokens) for inbox in inboxes),
        reasons=tuple(inbox.reason for inbox in inboxes),
        steps=status["steps"],
        preemptions=status["preemptions"],
        failed_steps=status["failed_steps"],
        adopted_rows=sum(inbox.cached_tokens for inbox in inboxes),
        held_blocks=status["held"],
        error=error,
    )


def _capture(load: Load, path: Path) -> CaptureWriter:
    if not load.segment_bytes:
        return CaptureWriter(path)
    path.mkdir()
    return CaptureWriter(path, segment_bytes=load.segment_bytes)


def _actions(
    load: Load, engine: Engine, inboxes: list[_Inbox]
) -> dict[int, list[Callable[[], object]]]:
    actions: dict[int, list[Callable[[], object]]] = {}
    for number, request in enumerate(load.requests):
        send = _send(engine, request, inboxes[number])
        actions.setdefault(request.at, []).append(send)
        if request.cancel_at is not None:
            cancel = _cancel(engine, number)
            actions.setdefault(request.cancel_at, []).append(cancel)
    return actions


def _send(engine: Engine, request: Request, inbox: _Inbox) -> Callable[[], object]:
    parameters = Parameters(
        request.max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        end_tokens=request.end_tokens,
    )
    given = Submission(request.tokens, parameters, namespace=request.namespace)
    return lambda: engine.submit(given, inbox)


def _cancel(engine: Engine, number: int) -> Callable[[], object]:
    # Loads name their requests in order of arrival, and so does the engine.
    return lambda: engine.cancel(number)


def fake_parts(load: Load) -> Callable[[CaptureWriter], Parts]:
    """What makes the engine's parts over the fake kernel."""

    def make(capture: CaptureWriter) -> Parts:
        kernel = FakeKernel(load.geometry, vocab_size=VOCAB, fail=load.fail, sanitize=load.sanitize)
        head = structs.replace(header(load.geometry, load.policy), sanitize=load.sanitize)
        return Parts(kernel, load.policy, capture, head)

    return make


def tokens(rows: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids, the same for equal arguments."""
    generator = random.Random(f"{rows} {seed}")
    return tuple(generator.randrange(1, VOCAB) for _ in range(rows))


def _shared() -> tuple[Request, ...]:
    """Eight requests, half of which share a beginning, in three waves."""
    stem = tokens(18, 1)
    found = []
    for number in range(8):
        own = tokens(5 + 3 * number, 10 + number)
        prompt = stem + own[:5] if number % 2 else own
        found.append(Request(prompt, 6 + number, at=1 + 3 * (number // 3)))
    return tuple(found)


B16 = Geometry(block_size=16, groups=(Group(num_blocks=32),))
WIDE = Policy(max_batch_tokens=256, prefill_chunk=128, context_tokens=256)

MIXED = Load("mixed", _shared())
PADDED = Load(
    "padded to 32",
    tuple(Request(tokens(rows, rows), 6) for rows in (32, 37, 17, 41)),
    structs.replace(WIDE, prefill_tile=32),
    B16,
)
COHORT = Load(
    "padded cohort",
    (Request(tokens(17, 1), 6), Request(tokens(50, 2), 6)),
    structs.replace(WIDE, prefill_cohort=True),
    B16,
)
REPEATS = Load(
    "repeated prompts",
    tuple(
        Request(tokens(rows, 3), 4, at=at) for at, rows in ((1, 32), (8, 32), (20, 48), (30, 48))
    ),
    WIDE,
    B16,
)
TIGHT = Load(
    "tight pool",
    tuple(Request(tokens(9 + number, number), 20, at=1 + number // 2) for number in range(6)),
    geometry=Geometry(block_size=4, groups=(Group(num_blocks=20),)),
)
BUILD_FAILS = Load("a build that fails", _shared(), fail={6: Failure("build")})
EVAL_FAILS = Load("an eval that fails", _shared(), fail={6: Failure("eval")})
CANCELS = Load(
    "clients that leave",
    tuple(
        Request(tokens(9 + number, number), 20, cancel_at=5 if number % 3 == 1 else None)
        for number in range(6)
    ),
)
WINDOWS = Load(
    "a window with sinks",
    tuple(Request(tokens(14 + 5 * number, number), 16, at=1 + number) for number in range(4)),
    geometry=Geometry(
        block_size=4,
        groups=(
            Group(num_blocks=64),
            Group(kind="window", window=8, sink=2, num_blocks=64),
        ),
    ),
)
SALTED = Load(
    "salts",
    (
        Request(tokens(20, 1), 6, namespace=Namespace(salt="a")),
        Request(tokens(20, 1), 6, at=12, namespace=Namespace(salt="b")),
        Request(tokens(20, 1), 6, at=24, namespace=Namespace(salt="a")),
    ),
)
ENDING = Load(
    "answers that end",
    tuple(Request(tokens(9, number), 20, end_tokens=tuple(range(6))) for number in range(6)),
)
EVICTS = Load(
    "prompts that push others out",
    tuple(Request(tokens(13, number), 6, at=1 + 10 * number) for number in range(6)),
    geometry=Geometry(block_size=4, groups=(Group(num_blocks=12),)),
)
COLLIDING = Load(
    "keys that all collide",
    tuple(Request(tokens(13, number), 6, at=1 + 10 * number) for number in range(3)),
    geometry=Geometry(block_size=4, groups=(Group(num_blocks=64),), hash="constant"),
)

# The same over a tiny model, whose forwards cost a few milliseconds.
TINY_MIXED = evolve(MIXED, kernel=TINY)
TINY_PADDED = evolve(PADDED, kernel=TINY)
TINY_REPEATS = evolve(REPEATS, kernel=TINY)
TINY_TIGHT = evolve(
    TIGHT,
    kernel=TINY,
    requests=tuple(
        evolve(request, temperature=1.5, seed=100 + number)
        for number, request in enumerate(TIGHT.requests)
    ),
)
UNSHARED = evolve(
    MIXED, name="no prefix cache", policy=structs.replace(MIXED.policy, prefix_cache=False)
)
SEGMENTS = evolve(TIGHT, name="a tape of segments", segment_bytes=3000)
TINY_CHUNKED = evolve(
    MIXED, name="one long prompt in chunks", kernel=TINY, requests=(Request(tokens(30, 1), 6),)
)
SMOL = Load(
    "three prompts of SmolLM2",
    tuple(Request(tuple(300 * it for it in tokens(9 + 4 * n, n)), 4) for n in range(3)),
    WIDE,
    B16,
    kernel=SMOLLM2,
)
