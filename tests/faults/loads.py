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
