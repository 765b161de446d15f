"""Simulation: random loads on the real scheduler, engine and tape, without a model or time.

`make sim SECONDS=60` runs seeds until the time is over; each must end every request, hold nothing
at its end, and replay clean at fold and plan. A failure prints the seed; `python -m
tests.simulation --seed N` runs that one again.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from kernel.fake import Failure
from replay.run import CLEAN, PLAN, Options
from replay.run import replay as run_replay
from server.policy import Policy
from statemachine.geometry import Geometry, Group

from .faults import loads
from .faults.loads import Load, Played, Request
from .faults.runner import record


def random_load(seed: int) -> Load:
    """Requests, pool and policy out of a seed: small pools, chunks, tiles, cancels, failures."""
    generator = random.Random(seed)
    size = generator.choice([1, 4, 16])
    groups = (Group(num_blocks=generator.choice([1, 2, 4]) * max(2, 96 // size)),)
    if size == 4 and generator.random() < 0.3:
        groups += (Group(kind="window", window=8, sink=generator.choice([0, 2]), num_blocks=96),)
    stem = loads.tokens(40, seed)
    requests = []
    for number in range(generator.randint(4, 14)):
        own = loads.tokens(generator.randint(1, 40), 1000 * seed + number)
        kept = generator.choice([0, 0, size, 17, 40])
        at = 1 + generator.randint(0, 3) * number
        cancelled = generator.random() < 0.15
        requests.append(
            Request(
                (stem[:kept] + own)[:60],
                generator.randint(1, 24),
                at=at,
                cancel_at=at + generator.randint(0, 9) if cancelled else None,
                temperature=generator.choice([0.0, 1.0]),
                seed=number,
                end_tokens=tuple(range(generator.choice([0, 0, 4]))),
            )
        )
    tile = generator.choice([1, 1, 8, 32])
    policy = Policy(
        max_batch_tokens=generator.choice([32, 64, 256]),
        max_running=generator.choice([2, 8, 32]),
        prefill_chunk=generator.choice([8, 16, 64]),
        prefill_tile=tile,
        prefill_cohort=generator.random() < 0.3,
        prefix_cache=generator.random() < 0.8,
        watermark_blocks=generator.choice([0, 2]),
        context_tokens=96,
    )
    failures = generator.sample(range(2, 40), generator.choice([0, 0, 1, 3]))
    fail = {step: Failure(generator.choice(["build", "eval"])) for step in failures}
    hashing = generator.choice(["xxh3"] * 9 + ["constant"])
    geometry = Geometry(block_size=size, groups=groups, hash=hashing)
    return Load(f"seed {seed}", tuple(requests), policy, geometry, fail=fail)


def check(seed: int, folder: Path) -> Played:
    """Run one seed. Raises AssertionError that names it."""
    load = random_load(seed)
    tape = folder / f"{seed}.log"
    played = record(load, tape)
    outcome = run_replay(str(tape), Options(PLAN))
    tape.unlink()
    assert played.error == "", f"seed {seed}: {played.error}"
    assert outcome.exit_code == CLEAN, f"seed {seed}: {outcome.divergence}"
    assert None not in played.reasons, f"seed {seed}: a request never ended"
    assert played.held_blocks == 0, f"seed {seed}: {played.held_blocks} blocks are still held"
    return played


def happened(played: Played) -> list[str]:
    """What a run had in it, for the summary."""
    found = {
        "preemption": played.preemptions > 0,
        "failed step": played.failed_steps > 0,
        "cancel": "cancelled" in played.reasons,
        "adopted prefix": played.adopted_rows > 0,
    }
    return [name for name, did in found.items() if did]


def main() -> int:
    """Exit code 0 where every seed held, 1 at the first that did not."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=0, help="seed to begin with")
    parser.add_argument("--seed", type=int, help="run this one only")
    options = parser.parse_args()
    seeds = range(options.first, sys.maxsize) if options.seed is None else [options.seed]
    runs, requests, had = 0, 0, Counter[str]()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            try:
                played = check(seed, Path(folder))
            except Exception as error:
                print(f"{error}\nrun it again: python -m tests.simulation --seed {seed}")
                return 1
            runs, requests = runs + 1, requests + len(played.reasons)
            had.update(happened(played))
            if time.monotonic() - started > options.seconds:
                break
    spent = time.monotonic() - started
    shares = ", ".join(f"{name} in {count / runs:.0%}" for name, count in sorted(had.items()))
    print(f"{runs} runs, {requests} requests ({requests / spent * 60:.0f} a minute): clean")
    print(f"with {shares}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
