"""Long random lives of a pool, as a scheduler leads them, against the naive model.

Hypothesis finds short programs; here pools live long enough to evict, share, copy and wrap.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from statemachine import commands
from statemachine import events as ev
from statemachine.events import Namespace
from statemachine.geometry import Geometry, Group

from .model import Driver

LAYOUTS = (
    (Group("full", 9),),
    (Group("full", 10), Group("window", 7, window=4)),
    (Group("window", 8, window=3, sink=2),),
    (Group("window", 6, window=1),),
    (Group("window", 12, window=6, sink=7), Group("full", 8)),
    (Group("full", 7), Group("full", 12)),
    (Group("full", 8), Group("opaque")),
    (Group("recurrent", 6),),
    (Group("full", 10), Group("recurrent", 7)),
    (Group("recurrent", 5), Group("window", 7, window=3)),
    (Group("recurrent", 9), Group("full", 12)),
)
NAMESPACES = (Namespace(), Namespace(), Namespace("A", salt="x"))
STORIES = [tuple(random.Random(seed).choices((0, 1), k=14)) for seed in range(3)]


class Life(Driver):
    """One pool's life, from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seen: Counter[str] = Counter()
        hashing = "constant" if seed % 4 == 0 else "xxh3"
        groups = LAYOUTS[seed % len(LAYOUTS)]
        self.to_edge = seed % 3 > 0
        self.start_from(Geometry(self.rng.randint(1, 5), groups, "m", hashing))

    def take(self, event: ev.Event) -> None:
        super().take(event)
        self.seen[type(event).__name__] += 1
        if isinstance(event, ev.PrefixAdopted):
            self.seen["partial"] += len(event.tokens) % self.state.geometry.block_size > 0
            self.seen["states adopted"] += bool(self.model.recurrent())
            self.seen["holes"] += any(-1 in table for table in event.blocks)

        if self.model.recurrent():
            self.seen["states trimmed"] += isinstance(event, ev.Trimmed)
            self.seen["states copied"] += isinstance(event, ev.BlockCopied)

    def prompt(self, namespace: Namespace) -> tuple[int, ...]:
        """Often one that is found whole, else the beginning of a story with an end of its own."""
        known = sorted({have for at, have in self.model.published.values() if at == namespace})
        if known and self.rng.random() < 0.5:
            return self.rng.choice(known)
        story = self.rng.choice(STORIES)
        return story[: self.rng.randint(1, len(story))] + tuple(self.rng.choices((0, 1), k=2))

    def admit(self, seq: int) -> None:
        """Adopt and prefill; sometimes with pads, which go when the step is written."""
        namespace = self.model.sequences[seq].namespace
        prompt = self.prompt(namespace)
        rows = self.model.findable_rows(namespace, prompt, len(prompt) - 1)
        hit = commands.lookup(self.state, namespace, prompt) if self.rng.random() < 0.5 else None
        adopted = self.carry_out(commands.adopt, seq, prompt, hit)
        assert adopted is not None
        assert self.state.sequences[seq].offset == self.state.sequences[seq].adopted == rows
        self.carry_out(commands.append, seq, self.step, prompt[rows:], None, ev.PROMPT)
        if self.rng.random() < 0.2:
            self.carry_out(commands.append, seq, self.step, None, self.rng.randint(1, 4), ev.PAD)

    def turn(self) -> None:
        """One thing that a scheduler may do."""
        roll, seqs = self.rng.random(), self.seqs()
        if (len(seqs) < 4 and roll < 0.25) or not seqs:
            seq = self.state.last_seq + 1
            self.carry_out(commands.open_sequence, seq, self.rng.choice(NAMESPACES))
            self.admit(seq)
            return
        seq = self.rng.choice(seqs)
        mine = self.model.sequences[seq]
        if roll < 0.35:
            self.settle(seq)
        elif roll < 0.60:
            self.grow(seq)
        elif roll < 0.70:
            self.decode_together()
        elif roll < 0.80:
            self.close_step()
        elif roll < 0.84 and len(seqs) < 5:
            self.carry_out(commands.fork, seq, self.state.last_seq + 1)
        elif roll < 0.88:
            self.carry_out(commands.trim, seq, self.rng.randint(1, 5))
        elif roll < 0.91:
            self.carry_out(commands.preempt, seq)
            self.admit(seq)
        elif roll < 0.95:
            self.carry_out(commands.publish, seq)
            self.carry_out(commands.close, seq)
        elif roll < 0.97:
            self.carry_out(commands.evict, 1, self.rng.choice((None, 0)))
        elif roll < 0.98:
            self.carry_out(commands.reset, seq)
        elif roll < 0.983:
            self.carry_out(commands.pool_reset)
        elif mine.offset == 0:
            self.admit(seq)

    def grow(self, seq: int) -> None:
        purpose = self.rng.choice((ev.DECODE, ev.DECODE, ev.DRAFT, ev.LOOKAHEAD))
        rows = self.rng.choice((1, 1, 1, 2, 3, 6))
        tokens = None if purpose == ev.LOOKAHEAD else tuple(self.rng.choices((0, 1), k=rows))
        self.carry_out(
            commands.append, seq, self.step, tokens, rows if tokens is None else None, purpose
        )

    def decode_together(self) -> None:
        seqs = [seq for seq in self.seqs() if not self.model.sequences[seq].speculative]
        seqs = [seq for seq in seqs if not self.model.sequences[seq].pads]
        if seqs:
            purpose = self.rng.choice((ev.DECODE, ev.LOOKAHEAD, ev.DRAFT))
            tokens = None if purpose == ev.LOOKAHEAD else (1,) * len(seqs)
            self.carry_out(commands.append_each, self.step, seqs, tokens, purpose)

    def settle(self, seq: int) -> None:
        """Take pads back; keep some speculative rows and rewind the others."""
        mine = self.model.sequences[seq]
        if mine.pads:
            self.carry_out(commands.trim, seq, mine.pads)
        if self.rng.random() < 0.3:
            self.commit_together()
        if mine.speculative:
            kept = self.rng.randint(0, len(mine.speculative))
            tokens = tuple(token or 0 for token in mine.speculative[:kept])
            if tokens:
                assert self.carry_out(commands.commit, seq, tokens) is not None
            if mine.speculative and self.model.recurrent():
                size = self.state.geometry.block_size
                back = mine.offset - len(mine.tokens) // size * size
                if self.carry_out(commands.trim, seq, back) is None:
                    self.carry_out(commands.reset, seq)
            elif mine.speculative:
                assert self.carry_out(commands.rewind, seq, len(mine.speculative)) is not None

    def commit_together(self) -> None:
        """The first speculative row of each sequence."""
        rows = {seq: self.model.sequences[seq].speculative for seq in self.seqs()}
        ready = [seq for seq in self.seqs() if rows[seq]]
        if ready:
            tokens = tuple(rows[seq][0] or 0 for seq in ready)
            assert self.carry_out(commands.commit_each, ready, tokens) is not None

    def close_step(self) -> None:
        """Up to two steps are in flight; the older is written first, then blocks are published."""
        flying = self.state.issued_step - self.state.written_step
        if flying >= 2 or (flying and self.rng.random() < 0.5):
            self.carry_out(commands.step_written, self.state.written_step + 1)
            for seq in self.seqs():
                assert self.carry_out(commands.publish, seq) is not None
                assert self.carry_out(commands.front_trims, seq, self.to_edge) is not None
        else:
            self.step = self.state.issued_step + 1


SEEN_AT_LEAST = {
    "Appended": 500,
    "AppendedEach": 80,
    "BlockCopied": 60,
    "BlockEvicted": 100,
    "BlockPublished": 300,
    "Committed": 50,
    "CommittedEach": 50,
    "Forked": 50,
    "FrontTrimmed": 50,
    "PoolReset": 5,
    "PrefixAdopted": 50,
    "Rewound": 50,
    "Trimmed": 50,
    "holes": 3,
    "partial": 10,
    "states adopted": 10,
    "states copied": 10,
    "states trimmed": 20,
}


@pytest.mark.slow
def test_long_lives_of_a_pool_agree_with_the_model() -> None:
    """Seeds are fixed; a failure names its seed. The counts say that the lives are eventful."""
    seen: Counter[str] = Counter()
    for seed in range(66):
        life = Life(seed)
        try:
            for _ in range(170):
                life.turn()
            life.wind_up()
        except Exception as error:
            error.add_note(f"seed {seed}, last events {life.last}")
            raise
        seen += life.seen
    assert {name: count for name, count in SEEN_AT_LEAST.items() if seen[name] < count} == {}, seen
