"""The tapes that are checked in, and the loads that they are of.

    golden.tape     written by 0.1.0 and never again: format 1 keeps its meaning
    flights.tape    what this version writes; `python -m tests.tapes.golden` makes it anew, and
                    with `-` writes it to standard output
    diverged.tape   flights.tape with one event changed, made with it

golden.tape: padded prompts in pieces, shared prefixes, decode rows in columns, sampled and greedy
requests, a cancel, a preemption, a step that fails at build and one at eval. flights.tape: all that
later versions do as well (lookahead, drafts, copies of a request, priorities, a window group, a
flush). A change of its bytes is a change of the format or of the scheduler's decisions.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from kernel.fake import Failure
from server.logs import configure_logs
from server.policy import PRIORITY
from statemachine.codec import TapeEncoder
from statemachine.events import Rewound
from statemachine.geometry import Geometry, Group
from statemachine.records import Header, Record, StepDone

from ..follow import fork
from ..sim import POLICY, TIGHT, Sim, prompts

PATH = Path(__file__).with_name("golden.tape")
FLIGHTS = Path(__file__).with_name("flights.tape")
DIVERGED = Path(__file__).with_name("diverged.tape")

POOL = Geometry(4, (Group(num_blocks=14), Group("window", num_blocks=20, window=8, sink=2)))


def records() -> list[Record]:
    """The load of golden.tape, run by this version."""
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


def flights() -> list[Record]:
    """The load of flights.tape. Its header leaves out settings at their defaults, so that a setting
    that is new changes nothing.
    """
    policy = structs.replace(
        POLICY,
        prefill_tile=4,
        watermark_blocks=0,
        lookahead=True,
        draft_tokens=3,
        lookup_ngram=2,
        prefix_aware=True,
        scheduling=PRIORITY,
    )
    sim = Sim(POOL, policy, vocab_size=5, fail={14: Failure("build"), 30: Failure("eval")})

    def family(tokens: tuple[int, ...]) -> None:
        sim.submit(tokens, 10, temperature=1.0, seed=1)
        fork(sim, tokens, max(sim.inboxes), max_tokens=8, temperature=1.0, seed=2, priority=1)

    given = [tuple(token % 4 for token in tokens) for tokens in prompts(6, seed=5, high=24)]
    actions: dict[int, list[Any]] = {
        1: [lambda: family(tuple(range(6))), lambda: sim.submit(given[0], 12, priority=2)],
        3: [lambda: sim.submit(given[1], 12, end_tokens=(4,))],
        6: [lambda: sim.submit(given[2], 12, priority=-1), lambda: sim.submit(given[2], 4)],
        9: [lambda: sim.engine.cancel(3)],
        16: [lambda: sim.engine.flush()],
        18: [lambda: sim.submit(given[3], 12, seed=3, temperature=1.0), lambda: family(given[4])],
    }
    sim.run(actions)
    sim.engine.stop()
    first: Any = sim.capture.records[0]
    header: Header = structs.replace(first, policy=msgspec.to_builtins(policy))
    return [header, *sim.capture.records[1:]]


def diverged() -> tuple[list[Record], int, int]:
    """flights() with one event changed: of drafts that were not accepted one row stays. The step
    and the sequence that are wrong from then on.
    """
    changed = flights()
    for place, record in enumerate(changed):
        if not isinstance(record, StepDone):
            continue
        for at, event in enumerate(record.events):
            if isinstance(event, Rewound) and event.rows > 1:
                short = Rewound(event.seq, event.rows - 1)
                events = (*record.events[:at], short, *record.events[at + 1 :])
                changed[place] = structs.replace(record, events=events)
                return changed, record.step, event.seq
    raise AssertionError("no draft of several tokens was taken back")


def tape() -> bytes:
    """The bytes of flights.tape."""
    return TapeEncoder().encode(flights())


if __name__ == "__main__":
    configure_logs("critical")
    if sys.argv[1:] == ["-"]:
        sys.stdout.buffer.write(tape())
    else:
        FLIGHTS.write_bytes(tape())
        DIVERGED.write_bytes(TapeEncoder().encode(diverged()[0]))
