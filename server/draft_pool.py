"""Draft pool: what the scheduler knows of a draft model's cache, as one frozen value. Data only.

A second state machine beside that of the model that is served: blocks, sequences and steps of its
own, so that the length of a sequence in the draft model's cache is its state's and nobody else's.
Its sequences have the ids of their requests.
"""

from __future__ import annotations

from msgspec import Struct

from statemachine.events import Event
from statemachine.records import DraftModel, DraftSnapshot
from statemachine.snapshot import decode_state, encode_state
from statemachine.state import State, new_state

FAILURES_MAX = 3
"""Failed steps in a row after which nothing is guessed any more."""


class DraftPiece(Struct, frozen=True, gc=False):
    """One sequence's rows in a draft step. samples: 1 where its last row yields a guess, with
    `place` guesses of its round before it and at most `more` behind it.
    """

    seq: int
    rows: int
    purpose: str
    samples: int = 0
    place: int = 0
    more: int = 0
    pads: int = 0


class DraftStep(Struct, frozen=True):
    """A step of the draft model: events, the batch they make, the state after them.

    asked: requests that this round was planned for, whether or not they get guesses.
    """

    step: int
    events: tuple[Event, ...]
    pieces: tuple[DraftPiece, ...]
    state: State
    asked: tuple[int, ...] = ()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.events and not self.asked


class DraftPool(Struct, frozen=True):
    """vocab_size: both models know the ids below it; 0: all. flights: steps that were begun and not
    settled, oldest first. step: the next one's. failures: steps that failed in a row.
    """

    state: State
    vocab_size: int = 0
    step: int = 1
    flights: tuple[DraftStep, ...] = ()
    failures: int = 0

    @property
    def guesses(self) -> bool:
        """Whether it still guesses."""
        return self.failures < FAILURES_MAX


def pool_in(pool: DraftPool | None) -> DraftPool:
    """The view's, which must have one."""
    assert pool is not None, "there is no draft model"
    return pool


def pool_of(model: DraftModel) -> DraftPool:
    """An empty pool. Raises ValueError where the geometry makes no sense."""
    return DraftPool(new_state(model.geometry), model.vocab_size)


Guesses = tuple[tuple[int, tuple[int, ...]], ...]
"""What was guessed since its last token, by request."""


def snapshot_of(pool: DraftPool, guesses: Guesses) -> DraftSnapshot:
    """A pool between two rounds, for a checkpoint."""
    state = encode_state(pool.state)
    return DraftSnapshot(pool.step - 1, state, guesses, pool.failures, pool.vocab_size)


def restored(record: DraftSnapshot) -> DraftPool:
    """The pool that a snapshot was made of. Raises CodecError where its state cannot be read."""
    state = decode_state(record.state)
    return DraftPool(state, record.vocab_size, record.step + 1, failures=record.failures)
