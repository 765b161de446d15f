"""Random loads: everything that a load can be, out of one seed.

Most are light (many short requests), so that a minute holds many; the others are what light ones
are not: long answers, tiles of padding, blocks of one row, pools that hold two requests.
"""

from __future__ import annotations

import random

from msgspec import structs

from kernel.fake import Failure
from server.admission import check_pool
from server.policy import Policy
from statemachine.events import Namespace
from statemachine.geometry import Geometry, Group

from .simulation_disk import HALF, NONE, STUCK
from .simulation_load import POISON, Load, Request, tokens

NAMESPACES = (
    Namespace(),
    Namespace(),
    Namespace(salt="a"),
    Namespace(adapter="a", version=1),
    Namespace(adapter="a", version=2),
)
STOPS = (("ab",), ("c", "dd"), ("a" * 9,), ("\u00e9",), ("aba", "b"))


def random_load(seed: int) -> Load:
    """The load of a seed: the same in every process and version of Python."""
    chance = random.Random(seed)
    heavy = chance.random() < 0.08
    policy = _policy(chance)
    geometry = _roomy(_geometry(chance, heavy), policy)
    requests = _requests(chance, seed, heavy)
    last = max(request.at for request in requests)
    segments = chance.choice([400, 3000]) if chance.random() < 0.02 else 0
    return Load(
        f"seed {seed}",
        requests,
        policy,
        geometry,
        fail=_failures(chance, last, len(requests)),
        full_disk={} if segments else _full_disk(chance, last),
        waiting_max=3 if chance.random() < 0.04 else 1024,
        stop_at=chance.randint(1, last + 9) if chance.random() < 0.03 else None,
        poison=any(POISON in request.tokens for request in requests),
        segment_bytes=segments,
        sanitize=chance.choice(["full", "full", "edges"]),
    )


def _geometry(chance: random.Random, heavy: bool) -> Geometry:
    size = chance.choice([1, 2, 4, 4, 8, 8, 16, 16, 16, 16, 32])
    rows = chance.choice([32, 48, 64, 96, 192, 400])
    groups = (Group(num_blocks=max(2, rows // size)),)
    if chance.random() < (0.3 if heavy else 0.12):
        window = chance.choice([3, 8, 16])
        sink = chance.choice([0, 0, 2, 5])
        blocks = max(2, 2 * rows // size)
        groups += (Group(kind="window", window=window, sink=sink, num_blocks=blocks),)
        if chance.random() < 0.3:
            groups = groups[::-1]
    hashing = "constant" if chance.random() < 0.05 else "xxh3"
    return Geometry(block_size=size, groups=groups, hash=hashing)


def _policy(chance: random.Random) -> Policy:
    most = chance.choice([8, 32, 64, 64, 256, 256, 256])
    tile = chance.choice([1] * 6 + [2, 8, 32])
    return Policy(
        max_batch_tokens=most,
        max_running=min(most, chance.choice([1, 2, 8, 8, 32, 32, 32, 32])),
        prefill_chunk=chance.choice([1, 8, 8, 16, 16, 64, 64, 64, 64, 64]),
        prefill_tile=min(tile, most),
        prefill_cohort=chance.random() < 0.2,
        prefix_cache=chance.random() < 0.8,
        watermark_blocks=chance.choice([0, 0, 2, 5]),
        context_tokens=chance.choice([32, 96, 96, 96, 96]),
    )


def _roomy(geometry: Geometry, policy: Policy) -> Geometry:
    """The pool with windows that hold a piece of a prompt, without which no engine starts."""
    try:
        check_pool(geometry, policy)
    except ValueError:
        groups = tuple(
            structs.replace(group, num_blocks=2 * group.num_blocks) if group.window else group
            for group in geometry.groups
        )
        return _roomy(structs.replace(geometry, groups=groups), policy)
    return geometry


def _requests(chance: random.Random, seed: int, heavy: bool) -> tuple[Request, ...]:
    """In order of arrival, which is the order of their ids."""
    count = chance.randint(4, 14) if heavy else chance.randint(16, 56)
    stems = [tokens(40, 2 * seed), tokens(40, 2 * seed + 1)]
    pace = chance.choice([0, 0.2, 0.5, 1, 1, 2])
    longest = 24 if heavy else chance.choice([1, 2, 4, 8, 16])
    found: list[Request] = []
    at = 1.0
    for number in range(count):
        at += chance.random() * 2 * pace
        if chance.random() < 0.02:
            at += 60  # by then all is idle
        found.append(_request(chance, seed, number, int(at), heavy, stems, found, longest))
    return tuple(found)


def _request(
    chance: random.Random,
    seed: int,
    number: int,
    at: int,
    heavy: bool,
    stems: list[tuple[int, ...]],
    before: list[Request],
    longest_answer: int,
) -> Request:
    longest = 60 if heavy else 24
    own = tokens(chance.randint(1, 40 if heavy else 12), 1000 * seed + number)
    prompt = chance.choice(stems)[: chance.choice([0, 0, 1, 8, 16, 17, 40])] + own
    if before and chance.random() < 0.15:
        prompt = chance.choice(before).tokens + own[: chance.choice([0, 1, 4])]
    prompt = prompt[:longest]
    if chance.random() < 0.01:
        prompt += (POISON,)
    if chance.random() < 0.01:
        prompt += tokens(100, number)  # no pool or context holds it
    leaves = chance.random() < 0.1
    stop = chance.choice(STOPS) if chance.random() < 0.12 else ()
    sink = chance.random()
    return Request(
        prompt,
        chance.randint(1, longest_answer),
        at=at,
        cancel_at=max(1, at + chance.randint(-1, 9)) if leaves else None,
        namespace=chance.choice(NAMESPACES) if chance.random() < 0.3 else NAMESPACES[0],
        temperature=chance.choice([0.0, 1.0]),
        seed=chance.choice([0, number, 2**63 + number]),
        end_tokens=tuple(range(chance.choice([0, 0, 1, 4]))),
        stop=stop,
        sink_raises=chance.randint(1, 4) if sink < 0.02 else None,
        sink_cancels=chance.randint(1, 4) if 0.02 < sink < 0.05 else None,
        slow_s=chance.choice([0.5, 90.0]) if 0.05 < sink < 0.07 else 0.0,
        text_raises=chance.randint(0, 4) if stop and chance.random() < 0.15 else None,
    )


def _failures(chance: random.Random, last: int, requests: int) -> dict[int, Failure]:
    """Mostly none. Rarely so many in a row that the engine gives up."""
    if chance.random() < 0.02:
        first = chance.randint(1, last + 5)
        return {first + at: Failure("eval") for at in range(9)}
    steps = chance.sample(range(1, last + 30), chance.choice([0, 0, 0, 0, 1, 1, 3]))
    return {
        step: Failure(
            chance.choice(["build", "eval"]),
            chance.randrange(requests) if chance.random() < 0.3 else None,
        )
        for step in steps
    }


def _full_disk(chance: random.Random, last: int) -> dict[int, str]:
    """Mostly none; else a few writes, some of them one after the other."""
    if chance.random() > 0.08:
        return {}
    full: dict[int, str] = {}
    for _ in range(chance.randint(1, 3)):
        first, how = chance.randint(0, last + 20), chance.choice([NONE, NONE, HALF, STUCK])
        full |= dict.fromkeys(range(first, first + chance.choice([1, 1, 2, 9])), how)
    return full
