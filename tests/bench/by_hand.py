"""A tape of any length for the fold, made by hand: a scheduler would take longer than the replay.

`python -m tests.bench.by_hand ROWS | replay -`: each step decodes a row of each running sequence,
computes one prompt, and ends the oldest sequence; blocks are published, and evicted once the pool
is full. What the caches saw is what they should have seen.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

from replay.fold import issued
from statemachine import commands
from statemachine.codec import TapeEncoder, encode_state
from statemachine.events import DECODE, PROMPT, Event
from statemachine.geometry import Geometry, Group
from statemachine.observing import OFF, Deriver, Seen
from statemachine.records import (
    FORMAT,
    Checkpoint,
    Header,
    Observation,
    Record,
    ShadowReport,
    StepDone,
    StepPlanned,
    TapeEnded,
)
from statemachine.state import State, new_state
from statemachine.transitions import apply_all

RUNNING = 32
PROMPT_ROWS = (300, 900)
GEOMETRY = Geometry(block_size=16, groups=(Group(num_blocks=4096),))


class Run:
    """A pool, and the records of what is done to it."""

    def __init__(self) -> None:
        self.state: State = new_state(GEOMETRY)
        self.events: list[Event] = []
        self.rows = self.step = 0
        self._deriver = Deriver(GEOMETRY)
        self._random = random.Random(1)

    def start(self) -> Iterator[Record]:
        yield Header(FORMAT, "by hand", 0, "none", {}, GEOMETRY, {}, {}, sanitize=OFF)
        yield Checkpoint(0, encode_state(self.state), (), self.state.digest)

    def _do(self, events: tuple[Event, ...]) -> None:
        self.state = apply_all(self.state, events)
        self.events += events

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.choices(range(64), k=count))

    def turn(self, prompts: int = 1) -> Iterator[Record]:
        """A step: those that run decode, a new one's prompt is computed, the oldest one ends."""
        self.step += 1
        live = sorted(self.state.sequences)
        if live:
            fed = self._tokens(len(live))
            self._do(commands.append_each(self.state, self.step, live, fed, DECODE))
        for seq in range(self.step, self.step + prompts):
            fed = self._tokens(self._random.randint(*PROMPT_ROWS))
            self._do(commands.open_sequence(self.state, seq))
            self._do(commands.append(self.state, seq, self.step, fed, purpose=PROMPT))
        planned, self.events = tuple(self.events), []
        yield StepPlanned(self.step, planned, self.state.digest)
        seqs, rows, _ = issued(planned)
        due = self._deriver.seen([self.state.sequences[seq] for seq in seqs], rows)
        self._do(commands.step_written(self.state, self.step))
        for seq in seqs:
            self._do(commands.publish(self.state, seq))
        if len(live) >= RUNNING or not prompts:
            self._do(commands.close(self.state, live[0], "length"))
        yield self._done(seqs, due)

    def _done(self, seqs: list[int], due: Seen) -> StepDone:
        count, rows, once = len(seqs), sum(due.rows), (1, 1)
        self.rows += rows
        events, self.events = tuple(self.events), []
        sequences = self.state.sequences
        return StepDone(
            step=self.step,
            observation=Observation(
                once, once, (rows, rows), once, 0, due.starts, due.rows, due.visible, due.tables
            ),
            shadow=ShadowReport(),
            sampled=tuple(range(count)),
            tokens=self._tokens(count),
            logits=(0.5,) * count,
            margins=(0.5,) * count,
            events=events,
            offsets=tuple([sequences[seq].offset if seq in sequences else -1 for seq in seqs]),
            digest=self.state.digest,
        )


def records(rows: int) -> Iterator[Record]:
    """A tape of at least so many rows."""
    run = Run()
    yield from run.start()
    while run.rows < rows:
        yield from run.turn()
    while run.state.sequences:
        yield from run.turn(prompts=0)
    yield TapeEnded(run.step)


if __name__ == "__main__":
    encoder = TapeEncoder()
    for record in records(int(float(sys.argv[1]))):
        sys.stdout.buffer.write(encoder.encode([record]))
