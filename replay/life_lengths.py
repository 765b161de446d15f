"""Life lengths: offsets of a tape's sequences by what the events say, applied to no state."""

from __future__ import annotations

from msgspec import Struct

from statemachine import events as ev
from statemachine.codec import decode_state
from statemachine.errors import CodecError
from statemachine.events import COMMITTED_AT_ONCE, Event
from statemachine.records import Checkpoint

STEPS_KEPT = 4
"""Newest steps of a sequence that are remembered: more are never in flight."""


class _Length(Struct):
    offset: int = 0
    tail: int = 0
    steps: tuple[int, ...] = ()


class Lengths:
    """Follows every sequence: a fork takes its parent's rows. started: it began somewhere."""

    def __init__(self) -> None:
        self.started = False
        self._lengths: dict[int, _Length] = {}

    def start(self, record: Checkpoint) -> None:
        """From a checkpoint; one that cannot be read says nothing."""
        self.started = True
        try:
            sequences = decode_state(record.state).sequences
        except CodecError:
            return
        self._lengths = {
            seq: _Length(it.offset, it.offset - it.committed) for seq, it in sequences.items()
        }

    def known(self, seq: int) -> bool:
        """Whether it is open."""
        return seq in self._lengths

    def offset(self, seq: int) -> int:
        """Rows of all kinds."""
        return self._of(seq).offset

    def committed(self, seq: int) -> int:
        """Rows that are neither speculative nor pads."""
        it = self._of(seq)
        return it.offset - it.tail

    def issued(self, seq: int) -> tuple[int, ...]:
        """The newest steps in which it got rows."""
        return self._of(seq).steps

    def _of(self, seq: int) -> _Length:
        return self._lengths.get(seq) or _Length()

    def apply(self, step: int, event: Event) -> None:
        """One event on."""
        self.started = True
        lengths = self._lengths
        if isinstance(event, ev.AppendedEach):
            tail = event.purpose not in COMMITTED_AT_ONCE
            for seq in event.seqs:
                self._grow(seq, step, 1, tail)
        elif isinstance(event, ev.Appended):
            self._grow(event.seq, step, event.rows, event.purpose not in COMMITTED_AT_ONCE)
        elif isinstance(event, ev.CommittedEach):
            for seq in event.seqs:
                self._of(seq).tail -= 1
        elif isinstance(event, ev.Committed):
            self._of(event.seq).tail -= len(event.tokens)
        elif isinstance(event, ev.Trimmed | ev.Rewound):
            it = self._of(event.seq)
            it.offset, it.tail = max(0, it.offset - event.rows), max(0, it.tail - event.rows)
        elif isinstance(event, ev.Opened):
            lengths[event.seq] = _Length()
        elif isinstance(event, ev.PrefixAdopted):
            lengths[event.seq] = _Length(len(event.tokens))
        elif isinstance(event, ev.Forked):
            lengths[event.child] = _Length(self.committed(event.seq))
        elif isinstance(event, ev.Reset | ev.Preempted):
            lengths[event.seq] = _Length()
        elif isinstance(event, ev.PoolReset):
            self._lengths = {seq: _Length() for seq in lengths}
        elif isinstance(event, ev.Closed):
            lengths.pop(event.seq, None)

    def _grow(self, seq: int, step: int, rows: int, tail: bool) -> None:
        it = self._lengths.get(seq)
        if it is None:
            it = self._lengths[seq] = _Length()
        it.offset += rows
        it.tail += rows if tail else 0
        it.steps = (*it.steps[-STEPS_KEPT + 1 :], step)
