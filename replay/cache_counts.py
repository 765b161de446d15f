"""Cache counts: rows by purpose and what became of them, blocks, and how full the pool was.

Counts events that were applied; `before` is the state before the record that they stand in, which
says whether rows that were taken back were guesses or rows ahead of their tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from statemachine import events as ev
from statemachine.events import DRAFT, LOOKAHEAD, PAD, PROMPT, Event
from statemachine.sequence import NO_TOKEN
from statemachine.state import State

from .observed import Pieces


class Rows(Struct):
    """Rows of a tape.

    issued: all, padding included, of them at most `most` in one step. again: prompt rows that were
    computed before, and lost when their request was preempted. lookahead: rows ahead of their
    token, of them lookahead_rewound were taken back. draft: rows of steps that verify guesses;
    guessed: the guesses among them, of which some were accepted and some rejected (the rest went
    with a request that ended).
    """

    issued: int = 0
    most: int = 0
    prompt: int = 0
    again: int = 0
    decode: int = 0
    lookahead: int = 0
    lookahead_rewound: int = 0
    draft: int = 0
    guessed: int = 0
    accepted: int = 0
    rejected: int = 0
    padding: int = 0


class Rewind(Struct, frozen=True):
    """Speculative rows that were taken back at once."""

    rows: int
    step: int
    sequence: int


class Peak(Struct):
    """The most blocks of a group that were held at once, first in `step`; used: with cached."""

    held: int = 0
    step: int = 0
    used: int = 0


class CacheCounts:
    """See the module. peaks: by group."""

    def __init__(self) -> None:
        self.rows = Rows()
        self.published = 0
        self.evicted = 0
        self.copied = 0
        self.longest: Rewind | None = None
        self.peaks: defaultdict[int, Peak] = defaultdict(Peak)

    def count(self, before: State, step: int, events: tuple[Event, ...]) -> None:
        """The events of a record."""
        for event in events:
            handler = _HANDLERS.get(type(event))
            if handler is not None:
                handler(self, before, step, event)

    def issued(self, pieces: Pieces) -> None:
        """A step's batch."""
        rows = sum(pieces.rows)
        self.rows.issued += rows
        self.rows.most = max(self.rows.most, rows)

    def look_at_pool(self, state: State, step: int) -> None:
        """How full it is while a step runs."""
        for group in range(len(state.groups)):
            peak, held = self.peaks[group], state.held_blocks(group)
            if held > peak.held:
                peak.held, peak.step = held, step
            peak.used = max(peak.used, held + state.cached_blocks(group))

    def _appended(self, before: State, step: int, event: ev.Appended) -> None:
        rows = self.rows
        if event.purpose == PROMPT:
            rows.prompt += event.rows
        elif event.purpose == PAD:
            rows.padding += event.rows
        elif event.purpose == LOOKAHEAD:
            rows.lookahead += event.rows
        elif event.purpose == DRAFT:
            rows.draft += event.rows
            rows.guessed += event.rows - 1  # the first row is the token that was sampled last
        else:
            rows.decode += event.rows

    def _each(self, before: State, step: int, event: ev.AppendedEach) -> None:
        if event.purpose == LOOKAHEAD:
            self.rows.lookahead += len(event.seqs)
        else:
            self.rows.decode += len(event.seqs)

    def _committed(self, before: State, step: int, event: ev.Committed) -> None:
        if _guessed(before, event.seq):
            self.rows.accepted += len(event.tokens) - 1

    def _rewound(self, before: State, step: int, event: ev.Rewound) -> None:
        if self.longest is None or event.rows > self.longest.rows:
            self.longest = Rewind(event.rows, step, event.seq)
        if _guessed(before, event.seq):
            self.rows.rejected += event.rows
        else:
            self.rows.lookahead_rewound += event.rows

    def _published(self, before: State, step: int, event: ev.BlockPublished) -> None:
        self.published += 1

    def _evicted(self, before: State, step: int, event: ev.BlockEvicted) -> None:
        self.evicted += 1

    def _copied(self, before: State, step: int, event: ev.BlockCopied) -> None:
        self.copied += 1


def _guessed(state: State, seq: int) -> bool:
    """Whether a sequence's speculative rows are guesses: they have tokens, lookahead rows none."""
    sequence = state.sequences.get(seq)
    return bool(sequence and sequence.speculative and sequence.speculative[0].token != NO_TOKEN)


_HANDLERS: dict[type, Callable[[CacheCounts, State, int, Any], None]] = {
    ev.Appended: CacheCounts._appended,
    ev.AppendedEach: CacheCounts._each,
    ev.Committed: CacheCounts._committed,
    ev.Rewound: CacheCounts._rewound,
    ev.BlockPublished: CacheCounts._published,
    ev.BlockEvicted: CacheCounts._evicted,
    ev.BlockCopied: CacheCounts._copied,
}
