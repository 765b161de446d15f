"""Random loads: everything that a load can be, out of one seed.

Four in five are light: many short requests, so that a minute holds many. The others are heavy: a
few requests with long prompts and answers, in pools that hold two of them.
"""

from __future__ import annotations

import random
from typing import Any

from msgspec import structs

from kernel.fake import Failure
from server.admission import check_pool
from server.policy import FCFS, PRIORITY, Policy
from statemachine.events import Namespace
from statemachine.geometry import Geometry, Group, has_state
from statemachine.records import Parameters

from .simulation_disk import HALF, NONE, STUCK
from .simulation_load import PLAIN, POISON, VOCAB, Load, Request, tokens

NAMESPACES = (
    Namespace(),
    Namespace(),
    Namespace(salt="a"),
    Namespace(adapter="a", version=1),
    Namespace(adapter="a", version=2),
)
RUNNING = [1, 2, 8, 8, 32, 32, 32, 32, 32, 32]
FLUSHES = [0] * 9 + [1, 3]
STOPS = (("ab",), ("c", "dd"), ("a" * 9,), ("\u00e9",), ("aba", "b"))


def random_load(seed: int) -> Load:
    """The load of a seed: the same in every process and version of Python."""
    chance = random.Random(seed)
    heavy = chance.random() < 0.2
    policy = _policy(chance, heavy)
    geometry = _with_states(random.Random(f"states {seed}"), _geometry(chance, heavy), heavy)
    if has_state(geometry):
        policy = structs.replace(policy, **WITH_STATES)
    geometry = roomy(geometry, policy)
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
        flush_at=tuple(
            sorted({chance.randint(1, last + 9) for _ in range(chance.choice(FLUSHES))})
        ),
        vocab=chance.choice([VOCAB, VOCAB, 2, 5]),
        period=chance.choice([0, 1, 3]),
        poison=any(POISON in request.tokens for request in requests),
        segment_bytes=segments,
        sanitize=chance.choice(["full", "full", "edges"]),
        **_draft(random.Random(f"draft {seed}"), geometry),
    )


def _draft(chance: random.Random, geometry: Geometry) -> dict[str, Any]:
    """A draft model in three runs of ten, in a pool that holds more or fewer rows than the other.
    Out of a chance of its own: loads are what they were before there were any.
    """
    if chance.random() > 0.3:
        return {}
    most = max(group.num_blocks for group in geometry.groups)
    steps = chance.sample(range(1, 60), chance.choice([0, 0, 0, 1, 2]))
    fail = {step: Failure(chance.choice(["build", "eval"])) for step in steps}
    if chance.random() < 0.03:
        first = chance.randint(1, 30)
        fail = {first + at: Failure("eval") for at in range(9)}
    return {
        "draft": chance.choice([1, 2, 3, 5, 99]),
        "draft_blocks": max(1, round(most * chance.choice([0.3, 0.6, 1, 1, 1, 2]))),
        "draft_fail": fail,
    }


WITH_STATES: dict[str, Any] = {
    "lookahead": False,
    "prefill_tile": 1,
    "prefill_cohort": False,
}
"""What a state allows: rows that are taken back one by one are not for it."""


def _geometry(chance: random.Random, heavy: bool) -> Geometry:
    size = chance.choice([1, 2, 4, 4, 8] if heavy else [1, 2, 4, 4, 8, 8, 16, 16, 16, 16, 32])
    rows = chance.choice([32, 40, 48, 96] if heavy else [64, 128, 192, 192, 400, 400])
    groups = (Group(num_blocks=min(64, max(2, rows // size))),)
    if chance.random() < (0.3 if heavy else 0.12):
        window = chance.choice([3, 8, 16])
        sink = chance.choice([0, 0, 2, 5])
        blocks = max(2, 2 * rows // size)
        groups += (Group(kind="window", window=window, sink=sink, num_blocks=blocks),)
        if chance.random() < 0.3:
            groups = groups[::-1]
    hashing = "constant" if chance.random() < 0.05 else "xxh3"
    return Geometry(block_size=size, groups=groups, hash=hashing)


def _with_states(chance: random.Random, geometry: Geometry, heavy: bool) -> Geometry:
    """Sometimes with a recurrent group, also with nothing else."""
    if chance.random() > (0.3 if heavy else 0.12):
        return geometry
    slots, groups = Group("recurrent", chance.choice([3, 4, 9, 70])), geometry.groups
    groups = chance.choice([(slots,), (*groups, slots), (*groups, slots), (slots, *groups)])
    return structs.replace(geometry, groups=groups)


def _policy(chance: random.Random, heavy: bool) -> Policy:
    most = chance.choice([8, 32, 64, 64, 256, 256, 256, 256])
    tile = chance.choice([1] * 6 + [2, 8, 32])
    return Policy(
        max_batch_tokens=most,
        max_running=min(most, chance.choice([3, 8, 32] if heavy else RUNNING)),
        prefill_chunk=chance.choice([3, 8, 16, 16, 64, 64, 64, 64, 64]),
        prefill_tile=min(tile, most),
        prefill_cohort=chance.random() < 0.2,
        prefix_cache=chance.random() < 0.8,
        watermark_blocks=chance.choice([0, 0, 2, 5]),
        lookahead=chance.random() < 0.5,
        draft_tokens=chance.choice([0, 1, 3, 8]),
        lookup_ngram=chance.choice([1, 1, 2, 3]),
        prefix_aware=chance.random() < 0.3,
        scheduling=PRIORITY if chance.random() < 0.25 else FCFS,
        context_tokens=chance.choice([32, 96, 96, 96, 96]),
    )


def roomy(geometry: Geometry, policy: Policy) -> Geometry:
    """The pool with windows that hold a piece of a prompt, without which no engine starts."""
    try:
        check_pool(geometry, policy)
    except ValueError:
        groups = tuple(
            structs.replace(group, num_blocks=2 * group.num_blocks) if group.window else group
            for group in geometry.groups
        )
        return roomy(structs.replace(geometry, groups=groups), policy)
    return geometry


def _requests(chance: random.Random, seed: int, heavy: bool) -> tuple[Request, ...]:
    """In order of arrival, which is the order of their ids."""
    count = chance.randint(5, 12) if heavy else chance.randint(32, 72)
    stems = [tokens(40, 2 * seed), tokens(40, 2 * seed + 1)]
    pace = chance.choice([0, 0.5, 2] if heavy else [0, 0.1, 0.2, 0.3, 0.6])
    longest = chance.choice([12, 24, 24]) if heavy else chance.choice([1, 2, 2, 3, 4, 8])
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
    longest = 28 if heavy else 24
    own = tokens(chance.randint(1, 16 if heavy else 12), 1000 * seed + number)
    prompt = chance.choice(stems)[: chance.choice([0, 0, 1, 8, 12, 16])] + own
    if before and chance.random() < 0.15:
        prompt = chance.choice(before).tokens + own[: chance.choice([0, 1, 4])]
    parent = None
    if before and chance.random() < 0.08:
        parent = chance.randrange(max(0, len(before) - 3), len(before))
        prompt = before[parent].tokens
    elif chance.random() < 0.1:
        prompt = own[:3] * 6
    prompt = prompt[:longest]
    if chance.random() < 0.01:
        prompt += (POISON,)
    if chance.random() < 0.01:
        prompt += tokens(100, number)  # no pool or context holds it
    space = chance.choice(NAMESPACES) if chance.random() < 0.3 else NAMESPACES[0]
    leaves = chance.random() < 0.1
    stop = chance.choice(STOPS) if chance.random() < 0.12 else ()
    sink = chance.random()
    return Request(
        prompt,
        chance.randint(longest_answer // 2 if heavy else 1, longest_answer),
        at=at,
        cancel_at=max(1, at + chance.randint(-1, 9)) if leaves else None,
        namespace=space if parent is None else before[parent].namespace,
        temperature=chance.choice([0.0, 1.0]),
        seed=chance.choice([0, number, 2**63 + number]),
        end_tokens=tuple(range(chance.choice([0, 0, 0, 1] if heavy else [0, 0, 1, 4]))),
        stop=stop,
        sink_raises=chance.randint(1, 4) if sink < 0.02 else None,
        sink_cancels=chance.randint(1, 4) if 0.02 < sink < 0.05 else None,
        slow_s=chance.choice([0.5, 90.0]) if 0.05 < sink < 0.07 else 0.0,
        text_raises=chance.randint(0, 4) if stop and chance.random() < 0.15 else None,
        priority=chance.choice([0, 0, -1, 5]),
        parent=parent,
        wishes=_wishes(random.Random(f"wishes {seed} {number}"), len(prompt)),
    )


def _wishes(chance: random.Random, prompt: int) -> Parameters:
    """Mostly none. Out of a chance of its own: loads are what they were before there were any."""
    if chance.random() > 0.15:
        return PLAIN
    return Parameters(
        max_tokens=1,
        frequency_penalty=chance.choice([0.0, 0.0, 0.5]),
        presence_penalty=chance.choice([0.0, 0.0, -0.5]),
        repetition_penalty=chance.choice([1.0, 1.0, 1.25]),
        logit_bias=chance.choice([(), (), ((1, 2.0),)]),
        grammar=chance.choice(["", "", '{"regex": ".*"}']),
        logprobs=chance.choice([-1, 0, 3]),
        score_from=chance.choice([-1, 0, prompt // 2, prompt + 1]),
        embed=chance.random() < 0.1,
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
