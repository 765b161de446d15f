"""Makes golden.tape: `python -m tests.tapes.golden` writes it anew, with `-` to standard output.

A run of the fake kernel in a tight pool: padded prompts in pieces, shared prefixes, decode rows in
columns, sampled and greedy requests, a cancel, a preemption, and a step that fails at build and one
at eval. A change of these bytes is a change of the tape's format or of the scheduler's decisions.
"""

from __future__ import annotations

import sys
from pathlib import Path

from msgspec import structs

from kernel.fake import Failure
from server.logs import configure_logs
from statemachine.codec import TapeEncoder
from statemachine.records import Record

from ..sim import POLICY, TIGHT, Sim, prompts

PATH = Path(__file__).with_name("golden.tape")


def records() -> list[Record]:
    """The run's records, in tape order."""
    failures = {12: Failure("build", 3), 20: Failure("eval")}
    sim = Sim(TIGHT, structs.replace(POLICY, prefill_tile=8), end_token=7, fail=failures)
    actions = {
        1 + 2 * number: [
            lambda prompt=prompt, number=number: sim.submit(
                prompt, 12, temperature=float(number % 2), seed=number
            )
        ]
        for number, prompt in enumerate(prompts(10, seed=3))
    }
    actions[9].append(lambda: sim.engine.cancel(2))
    sim.run(actions)
    sim.engine.stop()
    return sim.capture.records


def tape() -> bytes:
    """The tape's bytes."""
    return TapeEncoder().encode(records())


if __name__ == "__main__":
    configure_logs("critical")
    if sys.argv[1:] == ["-"]:
        sys.stdout.buffer.write(tape())
    else:
        PATH.write_bytes(tape())
