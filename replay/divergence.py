"""Divergence: the first place where a tape and what follows from it disagree. Data only.

Classes: `fold` an event that cannot be applied, or a state that is not the recorded one;
`observation` the caches saw other lengths or tables than the state has; `content` a row in the
pages is not the row that its sequence should read there; `plan` the scheduler decides otherwise;
`token` the model says otherwise; `crash` a step was issued and never answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec
from msgspec import Struct

from statemachine.events import (
    Appended,
    AppendedEach,
    BlockEvicted,
    BlockStored,
    CommittedEach,
    Event,
    Forked,
    PoolReset,
    PrefixAdopted,
    StepWritten,
)

FOLD = "fold"
OBSERVATION = "observation"
CONTENT = "content"
PLAN = "plan"
TOKEN = "token"
CRASH = "crash"
CLASSES = (FOLD, OBSERVATION, CONTENT, PLAN, TOKEN, CRASH)

LAST_EVENTS = 8
_HISTORY_RECORDS = 256
HISTORY_TOKENS = 1 << 19
"""Some 20 MB."""

Value = int | float | str | tuple[int, ...] | None


class Values(Struct, frozen=True):
    """One quantity three times: as the tape says, as follows from the events, as the caches saw."""

    name: str
    recorded: Value = None
    derived: Value = None
    observed: Value = None


class Neighbour(Struct, frozen=True):
    """A piece of the same batch."""

    piece: int
    sequence: int
    start: int
    rows: int


class Happened(Struct, frozen=True):
    """An event, as text, and where it stood on tape."""

    step: int
    record: str
    index: int
    event: str


class Divergence(Struct, frozen=True):
    """See the module. -1 stands for what has no number here.

    record, event_index, event: the event at fault and where it stands; for an observation, the one
    that issued the rows. block: whose content is wrong, for content. summary: one sentence, which
    names what is wrong with both values. draft_step: of what is wrong in the draft model's pool,
    its own step, in the round that stands before `step`.
    """

    kind: str
    step: int
    summary: str
    record: str = ""
    event_index: int = -1
    event: str = ""
    sequence: int = -1
    group: int = -1
    block: int = -1
    layer: str = ""
    position: int = -1
    values: tuple[Values, ...] = ()
    last_events: tuple[Happened, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    draft_step: int = -1


class Diverged(Exception):
    """Carries the first divergence out of a depth."""

    def __init__(self, divergence: Divergence) -> None:
        self.divergence = divergence
        super().__init__(divergence.summary)


def event_text(event: Event) -> str:
    """An event as the tape's JSON."""
    return msgspec.json.encode(event).decode()


def concerns(event: Event, seq: int) -> bool:
    """Whether an event names a sequence, or all of them."""
    if isinstance(event, AppendedEach | CommittedEach):
        return seq in event.seqs
    if isinstance(event, Forked):
        return seq in (event.seq, event.child)
    if isinstance(event, PoolReset):
        return True
    if isinstance(event, StepWritten | BlockEvicted | BlockStored):
        return False
    return event.seq == seq


def text_for(event: Event, seq: int) -> str:
    """An event as text, with only the named sequence's column of a columnar one."""
    if isinstance(event, AppendedEach) and seq in event.seqs:
        place = event.seqs.index(seq)
        tokens = None if event.tokens is None else event.tokens[place : place + 1]
        return event_text(AppendedEach(event.step, (seq,), tokens, event.purpose))
    if isinstance(event, CommittedEach) and seq in event.seqs:
        place = event.seqs.index(seq)
        return event_text(CommittedEach((seq,), event.tokens[place : place + 1]))
    return event_text(event)


class History:
    """The records of the last steps, for a sequence's last events; costs nothing per row.

    Prompts are long: so many records are kept that their prompts have HISTORY_TOKENS at most, but
    for the newest. tokens: how many they have.
    """

    def __init__(self) -> None:
        self._records: deque[tuple[int, str, tuple[Event, ...], int]] = deque()
        self.tokens = 0

    def add(self, step: int, record: str, events: tuple[Event, ...]) -> None:
        tokens = 0
        for event in events:
            if type(event) is Appended or type(event) is PrefixAdopted:
                tokens += len(event.tokens or ())
        self._records.append((step, record, events, tokens))
        self.tokens += tokens
        if len(self._records) > _HISTORY_RECORDS:
            self.tokens -= self._records.popleft()[3]
        while self.tokens > HISTORY_TOKENS and len(self._records) > 1:
            self.tokens -= self._records.popleft()[3]

    def of(self, seq: int) -> tuple[Happened, ...]:
        """The sequence's last events, oldest first."""
        found: list[Happened] = []
        for step, record, events, _ in reversed(self._records):
            for index in range(len(events) - 1, -1, -1):
                if concerns(events[index], seq):
                    text = text_for(events[index], seq)
                    found.append(Happened(step, record, index, text))
                    if len(found) == LAST_EVENTS:
                        return tuple(reversed(found))
        return tuple(reversed(found))

    def newest(self, step: int, record: str) -> tuple[Happened, ...]:
        """The first events of the newest record, if it is this one."""
        if not self._records or self._records[-1][:2] != (step, record):
            return ()
        events = self._records[-1][2][: 2 * LAST_EVENTS]
        return tuple(Happened(step, record, at, event_text(it)) for at, it in enumerate(events))


def neighbours(
    seqs: Iterable[int], starts: Iterable[int], rows: Iterable[int]
) -> tuple[Neighbour, ...]:
    """A batch's pieces for a report."""
    columns = zip(seqs, starts, rows, strict=False)
    return tuple(Neighbour(piece, *values) for piece, values in enumerate(columns))
