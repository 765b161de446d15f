"""Determinism: the same inputs, pinned to the same steps, make the same tape, byte for byte."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

from msgspec import structs

from kernel.fake import Failure
from statemachine.codec import TapeDecoder
from statemachine.events import Namespace, Preempted, PrefixAdopted
from statemachine.records import RequestCancelled, StepFailed, StepTimed

from .sim import POLICY, TIGHT, Sim, prompts, tape_bytes

ROOT = Path(__file__).parent.parent


def pinned(seed: int) -> Sim:
    """A run with arrivals, cancels, failures, sampling and a preempting pool, all from `seed`."""
    generator = random.Random(seed)
    failures = {5: Failure("build"), 17: Failure("eval"), 30: Failure("build", 3)}
    policy = structs.replace(POLICY, prefill_tile=4, prefill_chunk=8)
    sim = Sim(TIGHT, policy, fail=failures, end_token=63)
    actions: dict[int, list] = {}
    for number, prompt in enumerate(prompts(20, seed)):
        options = {
            "temperature": generator.choice([0.0, 1.0]),
            "seed": number,
            "end_tokens": (63,),
            "namespace": Namespace(salt=generator.choice(["", "", "other"])),
        }
        rows = generator.randint(2, 12)
        at = generator.randint(1, 25)
        actions.setdefault(at, []).append(
            lambda prompt=prompt, rows=rows, options=options: sim.submit(prompt, rows, **options)
        )
    actions.setdefault(12, []).append(lambda: sim.engine.cancel(2))
    actions.setdefault(22, []).append(lambda: sim.engine.cancel(7))
    sim.run(actions)
    sim.engine.stop()
    return sim


def digest(seed: int) -> str:
    return hashlib.sha256(tape_bytes(pinned(seed).capture.records)).hexdigest()


def elsewhere(seed: int, hash_seed: str) -> str:
    """The digest of the same run in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", f"from tests.test_determinism import digest; print(digest({seed}))"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()[-1]


def test_two_processes_with_different_hash_seeds_write_the_same_tape() -> None:
    assert elsewhere(1, "1") == elsewhere(1, "4242") == digest(1)


def test_the_pinned_run_has_all_that_could_go_astray() -> None:
    sim = pinned(1)
    assert sim.events(Preempted)
    assert sim.events(PrefixAdopted)
    assert sim.records(RequestCancelled)
    assert {record.stage for record in sim.records(StepFailed)} == {"build", "eval"}


def test_other_inputs_write_another_tape() -> None:
    assert digest(1) != digest(2)


def test_the_tape_reads_back_as_it_was_written() -> None:
    records = [r for r in pinned(3).capture.records if not isinstance(r, StepTimed)]
    assert list(TapeDecoder().feed(tape_bytes(records))) == records


def test_only_step_times_differ_with_the_clock() -> None:
    fast, slow = Sim(clock=lambda: 0.0), Sim()
    for sim in (fast, slow):
        sim.submit(range(9), 5)
        sim.run()
    assert fast.records(StepTimed) != slow.records(StepTimed)
    assert tape_bytes(fast.capture.records) == tape_bytes(slow.capture.records)
