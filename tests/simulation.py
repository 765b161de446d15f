"""Simulation: random loads on the real scheduler, engine and tape, without a model or time.

`make sim SECONDS=60` runs seeds until the time is over. simulation_random.py says what is in a
load, simulation_check.py what must hold of every run, and where which invariants are asked. A
failure prints the seed and the smallest load that fails in the same way, as Python that a test can
hold; `python -m tests.simulation --seed N` runs that one again.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from pathlib import Path

from server.policy import PRIORITY
from statemachine.events import (
    DRAFT,
    LOOKAHEAD,
    BlockCopied,
    Forked,
    PoolReset,
    Preempted,
    PrefixAdopted,
    Rewound,
    Trimmed,
)
from statemachine.geometry import has_state

from .simulation_check import ACCEPTED, DRAFT_MODEL, Wrong, check_load, thorough
from .simulation_load import Load, literal
from .simulation_minimize import minimise
from .simulation_play import Played
from .simulation_random import random_load


def check(seed: int, folder: Path | None = None) -> Played:
    """Run one seed. Raises Wrong (an AssertionError). The tape is in memory, not in `folder`."""
    return check_load(random_load(seed), thorough(seed))


def failure_of(load: Load) -> str | None:
    """What kind of failure a load comes to, None where it is clean."""
    try:
        check_load(load)
    except Wrong as wrong:
        return wrong.kind
    except Exception as error:
        return type(error).__name__
    return None


def explain(load: Load, error: Exception) -> str:
    """What went wrong, and the smallest load in which it does."""
    said = f"{load.name}: {error}"
    if failure_of(load) is None:
        return f"{said}\n(and clean when it was run again)"
    small = minimise(load, failure_of)
    return f"{said}\nthe smallest load found that fails so:\n{literal(small)}"


def happened(played: Played) -> list[str]:
    """What a run had in it, for the summary."""
    load, reasons = played.load, played.reasons
    assert load is not None
    found = {
        "preemption": played.preemptions > 0,
        "failed step": played.failed_steps > 0,
        "cancel": "cancelled" in reasons,
        "adopted prefix": played.adopted_rows > 0,
        "full disk": played.lost_records > 0,
        "stop string": any(
            request.stop and reason == "stop" and not request.end_tokens
            for request, reason in zip(load.requests, reasons, strict=True)
        ),
        "lost client": "gone" in reasons,
        "refusal": "refused" in reasons,
        "window": any(group.kind == "window" for group in load.geometry.groups),
        "recurrent": has_state(load.geometry),
        "adopted state": has_state(load.geometry) and played.adopted_rows > 0,
        "lookahead": played.had[LOOKAHEAD] > 0,
        "drafts": played.had[DRAFT] > 0,
        "accepted drafts": played.had[ACCEPTED] > 0,
        "rewound rows": played.had[Rewound.__name__] > 0,
        "copied block": played.had[BlockCopied.__name__] > 0,
        "fork": played.had[Forked.__name__] > 0,
        "flush": bool(load.flush_at),
        "draft model": played.had[DRAFT_MODEL + LOOKAHEAD] > 0,
        "draft model trims": played.had[DRAFT_MODEL + Trimmed.__name__] > 0,
        "draft model adopts": played.had[DRAFT_MODEL + PrefixAdopted.__name__] > 0,
        "draft model preempts": played.had[DRAFT_MODEL + Preempted.__name__] > 0,
        "draft model copies": played.had[DRAFT_MODEL + BlockCopied.__name__] > 0,
        "draft model fails": played.had[DRAFT_MODEL + PoolReset.__name__] > 0,
        "priority": load.policy.scheduling == PRIORITY and played.had[Preempted.__name__] > 0,
        "read answers": any(it.parameters.reads_answer for it in load.requests),
        "scores": any(played.scores),
        "log-probabilities": any(played.told),
        "embeddings": any(played.embedded),
        "engine stopped": load.stop_at is not None or played.broken,
    }
    return [name for name, did in found.items() if did]


class Summary:
    """What many runs came to. Seconds are the processor's."""

    def __init__(self) -> None:
        self.runs = self.requests = self.steps = 0
        self.had = Counter[str]()
        self._started = time.process_time()

    def add(self, played: Played) -> None:
        """One run more."""
        self.runs += 1
        self.requests += len(played.reasons)
        self.steps += played.steps
        self.had.update(happened(played))

    def __str__(self) -> str:
        spent = time.process_time() - self._started
        shares = ", ".join(f"{name} {n / self.runs:.0%}" for name, n in sorted(self.had.items()))
        return (
            f"{self.runs} runs, {self.requests} requests, {self.steps} steps: clean "
            f"({self.requests / spent * 60:.0f} requests a minute of one core)\n"
            f"runs with {shares}"
        )


def main() -> int:
    """Exit code 0 where every seed held, 1 at the first that did not."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--runs", type=int, help="so many, however long they take")
    parser.add_argument("--first", type=int, default=0, help="seed to begin with")
    parser.add_argument("--seed", type=int, help="run this one only")
    options = parser.parse_args()
    first = options.first if options.seed is None else options.seed
    runs = 1 if options.seed is not None else options.runs
    seeds = range(first, sys.maxsize if runs is None else first + runs)
    _few_collections()
    summary, started = Summary(), time.monotonic()
    for seed in seeds:
        load = random_load(seed)
        try:
            summary.add(check_load(load, thorough(seed)))
        except Exception as error:
            print(f"{explain(load, error)}\nrun it again: python -m tests.simulation --seed {seed}")
            return 1
        if runs is None and time.monotonic() - started > options.seconds:
            break
    print(summary)
    return 0


def _few_collections() -> None:
    """What was imported is not walked again; runs leave few cycles behind."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


if __name__ == "__main__":
    sys.exit(main())
