"""Loads: what the faults are looked for under.

The fake kernel needs no model; `tiny` is a random llama in a folder of its own, so that replay can
load it; `smollm2` is the bundled model.
"""

from __future__ import annotations

from attrs import evolve
from msgspec import structs

from kernel.fake import Failure
from server.policy import Policy
from statemachine.events import Namespace
from statemachine.geometry import Geometry, Group

from ..simulation_load import FAKE, POLICY, POOL, VOCAB, Load, Request, tokens
from ..simulation_play import Played, fake_parts, play

__all__ = ["FAKE", "POLICY", "POOL", "SMOLLM2", "TINY", "VOCAB", "Load", "Played", "Request"]
__all__ += ["fake_parts", "play", "tokens"]

TINY = "tiny"
SMOLLM2 = "smollm2"
EXAONE4 = "exaone4"
MAMBA = "mamba"
LONGCAT = "longcat_flash"
NEMOTRON = "nemotron-nas"
LFM2 = "lfm2"
MAMBA2 = "mamba2"
PAGED = (TINY, SMOLLM2, LFM2, MAMBA2)


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
KEPT = Load(
    "prompts that push others out, which come back from the store",
    tuple(Request(tokens(17, seed), 6, at=1 + 12 * at) for at, seed in enumerate((1, 2, 1, 3, 2))),
    structs.replace(POLICY, store_evicted=True),
    Geometry(block_size=4, groups=(Group(num_blocks=8),)),
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
SEGMENTS = evolve(TIGHT, name="a tape of segments", segment_bytes=1000)
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
TINY_TABLES = evolve(MIXED, name="mixed, by tables", kernel=TINY, tables=True)
SMOL_TABLES = evolve(SMOL, name="three prompts of SmolLM2, by tables", tables=True)

# With a step in flight while the next is planned.
LOOKING = structs.replace(POLICY, lookahead=True)
AHEAD = evolve(MIXED, name="lookahead", policy=LOOKING)
AHEAD_BUILD_FAILS = evolve(BUILD_FAILS, name="a build that fails behind a step", policy=LOOKING)
AHEAD_EVAL_FAILS = evolve(EVAL_FAILS, name="an eval that fails before a step", policy=LOOKING)
AHEAD_TIGHT = evolve(TIGHT, name="lookahead in a tight pool", policy=LOOKING)
AHEAD_WINDOWS = evolve(WINDOWS, name="lookahead and a window", policy=LOOKING)
AHEAD_CANCELS = evolve(CANCELS, name="clients that leave a step in flight", policy=LOOKING)
AHEAD_SEGMENTS = evolve(SEGMENTS, name="lookahead on a tape of segments", policy=LOOKING)
AHEAD_ENDING = evolve(ENDING, name="lookahead and answers that end", policy=LOOKING)
AHEAD_STOPS = evolve(
    ENDING,
    name="lookahead and stop strings",
    requests=tuple(Request(tokens(9, number), 20, stop=("a",)) for number in range(6)),
    policy=LOOKING,
)
TINY_AHEAD = evolve(AHEAD, kernel=TINY)

# Texts that repeat themselves, so that drafts are made, and taken in part.
GUESSING = structs.replace(POLICY, draft_tokens=4, lookup_ngram=1)


def _repeating(count: int, rows: int, answers: int) -> tuple[Request, ...]:
    """Requests whose prompts say the same few tokens over and over at their ends."""
    return tuple(
        Request(tokens(rows + number, number) + (1, 2, 3) * 2, answers + number, at=1 + number // 2)
        for number in range(count)
    )


DRAFTS = Load("drafts", _repeating(4, 3, 20), GUESSING, period=3)
DRAFTS_ENDING = evolve(
    DRAFTS,
    name="drafts and answers that end",
    requests=tuple(evolve(it, end_tokens=(3,)) for it in DRAFTS.requests),
)
BOTH = evolve(
    DRAFTS,
    name="drafts and lookahead",
    policy=structs.replace(GUESSING, lookahead=True, lookup_ngram=2),
)
DRAFTS_WINDOWS = evolve(DRAFTS, name="drafts and a window", geometry=WINDOWS.geometry)
TINY_DRAFTS = evolve(DRAFTS, kernel=TINY, period=0)
TINY_DRAFTS_DRAWN = evolve(
    TINY_DRAFTS,
    name="drafts and a temperature",
    requests=tuple(
        evolve(request, temperature=0.3, seed=100 + number)
        for number, request in enumerate(DRAFTS.requests)
    ),
)

# Several answers to one prompt.
FORKS = Load(
    "three answers to a prompt",
    (
        *(Request(tokens(18, 1), 8, at=1, parent=parent) for parent in (None, 0, 0)),
        Request(tokens(9, 2), 12, at=1),
        Request(tokens(7, 3), 6, at=4),
        Request(tokens(11, 4), 6, at=4, parent=3),
    ),
    structs.replace(POLICY, prefix_cache=False),
)
AHEAD_FORKS = evolve(
    FORKS, name="forks and lookahead", policy=structs.replace(FORKS.policy, lookahead=True)
)
TINY_FORKS = evolve(
    FORKS,
    kernel=TINY,
    requests=tuple(
        evolve(request, temperature=1.5, seed=100 + number)
        for number, request in enumerate(FORKS.requests)
    ),
)

# Who waits for what.
AWARE = Load(
    "prompts that share a beginning at once",
    tuple(Request(tokens(40, 1) + tokens(3 + n, 10 + n), 6, at=1 + n // 2) for n in range(6)),
    structs.replace(POLICY, prefix_aware=True),
)
STARVING = Load(
    "a long prompt behind which short ones pass",
    (
        Request(tokens(9, 1), 40),
        Request(tokens(72, 2), 4, at=2),
        *(Request(tokens(5, 3 + n), 4, at=2 + n) for n in range(16)),
    ),
    structs.replace(POLICY, prefix_cache=False),
    Geometry(block_size=4, groups=(Group(num_blocks=20),)),
)
PRIORITIES = evolve(
    TIGHT,
    name="priorities in a tight pool",
    requests=tuple(
        evolve(request, priority=(number * 5) % 3) for number, request in enumerate(TIGHT.requests)
    ),
    policy=structs.replace(POLICY, scheduling="priority"),
)
PREEMPTS = evolve(
    TIGHT,
    name="a tight pool with a queue",
    requests=tuple(evolve(it, at=1 + 3 * number) for number, it in enumerate(TIGHT.requests)),
)
QUEUED = evolve(
    TIGHT,
    name="repeated prompts in a queue",
    requests=tuple(Request(tokens(9, number % 2), 12, at=1 + 4 * number) for number in range(8)),
    policy=structs.replace(POLICY, max_running=2),
)
FLUSHED = evolve(MIXED, name="a flushed index", flush_at=(9,))
ADAPTERS = Load(
    "an adapter that is loaded anew",
    tuple(
        Request(tokens(20, 1), 6, at=1 + 12 * at, namespace=Namespace("style", version))
        for at, version in enumerate((1, 2, 1))
    ),
)
