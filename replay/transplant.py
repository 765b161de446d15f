"""Transplant: a wrong decision of a tape, put into another run of this version's scheduler.

A scheduler that serves fewer requests decides otherwise, so what a tape says of a few requests is
no tape of its own. Instead the inputs of the few are run again, which gives a tape that is right,
and the first place where the scheduler comes to the same decision gets the recorded one. Owns what
the difference of two lists of events is, and where the same decision is taken. Judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import frozen
from msgspec import structs

from server import scheduler
from statemachine.errors import InvariantBroken, StateMachineError
from statemachine.events import (
    NO_BLOCK,
    Appended,
    AppendedEach,
    BlockCopied,
    BlockEvicted,
    BlockLoaded,
    BlockPublished,
    BlockStored,
    CommittedEach,
    Event,
    PrefixAdopted,
)
from statemachine.records import (
    Checkpoint,
    Header,
    Record,
    RequestArrived,
    StepDone,
    StepFailed,
    StepPlanned,
    StepTimed,
)
from statemachine.state import State, new_state
from statemachine.transitions import apply_all

from .plan import Planner
from .subset import batch_of, blocks_of

MISSING, EXTRA, OTHER = "missing", "extra", "other"
_SITES_MAX = 64
_Closed = StepPlanned | StepDone | StepFailed


@frozen
class Difference:
    """What a record has and what the scheduler says instead, from the first difference on.

    how: MISSING, the tape lacks `derived`; EXTRA, it has `recorded` beside; OTHER, it has
    `recorded` in the place of `derived`. prior: events that both have before it, later: of both
    after it. state: what the events of the record were applied to.
    """

    record: str
    how: str
    recorded: tuple[Event, ...]
    derived: tuple[Event, ...]
    prior: tuple[Event, ...]
    later: tuple[Event, ...]
    state: State

    def among(self, requests: frozenset[int]) -> Iterator[Difference]:
        """The same difference where only these requests are: all that concerns them of it, and
        what concerns the first one of them. Nothing where they have no part in that.
        """
        recorded, derived, prior, later = (
            tuple(it for it in events if _concerns(it, requests))
            for events in (self.recorded, self.derived, self.prior, self.later)
        )
        for mine, whole in ((recorded, self.recorded), (derived, self.derived)):
            if whole and (not mine or mine[0] is not whole[0]):
                return
        yield Difference(self.record, self.how, recorded, derived, prior, later, self.state)
        first = getattr((recorded or derived)[0], "seq", None)
        if first is not None:
            mine, right = (
                tuple(it for it in events if getattr(it, "seq", None) == first)
                for events in (recorded, derived)
            )
            if (mine, right) != (recorded, derived):
                yield Difference(self.record, self.how, mine, right, prior, later, self.state)


def _concerns(event: Event, requests: frozenset[int]) -> bool:
    if isinstance(event, AppendedEach | CommittedEach):
        return not requests.isdisjoint(event.seqs)
    seq = getattr(event, "seq", None)
    return seq is None or seq in requests


class Follower(Planner):
    """A planner that says what the scheduler would decide next, without deciding it."""

    def difference(self, record: _Closed) -> Difference | None:
        """Of the next record; None where the scheduler cannot say, or says the same."""
        view = self.view
        if view is None:
            return None
        try:
            derived = self._derived(record)
        except (ValueError, LookupError, StateMachineError):
            return None
        return difference(type(record).__name__, record.events, derived, view.state)

    def _derived(self, record: _Closed) -> tuple[Event, ...]:
        view = self._known()
        if isinstance(record, StepPlanned):
            return scheduler.plan_step(view, self._policy).events
        plan = self._begun[record.step]
        if isinstance(record, StepFailed):
            return scheduler.fail_step(view, plan, record.stage, record.blamed)
        found = scheduler.outcomes(view, plan, record.tokens, self._finished)
        return scheduler.close_step(view, plan, found)


def difference(
    record: str, recorded: tuple[Event, ...], derived: tuple[Event, ...], state: State
) -> Difference | None:
    """How the first difference of two lists came about; None where there is none."""
    at = 0
    while at < min(len(recorded), len(derived)) and recorded[at] == derived[at]:
        at += 1
    left, right = recorded[at:], derived[at:]
    if not left and not right:
        return None
    prior = derived[:at]
    if right and (not left or left[0] in right):
        count = right.index(left[0]) if left else len(right)
        return Difference(record, MISSING, (), right[:count], prior, left, state)
    if left and (not right or right[0] in left):
        count = left.index(right[0]) if right else len(left)
        return Difference(record, EXTRA, left[:count], (), prior, right, state)
    return Difference(record, OTHER, left[:1], right[:1], prior, (), state)


def transplanted(wrong: Difference, records: list[Record]) -> Iterator[list[Record]]:
    """Tapes that are right up to the same decision and have the recorded one there, in the order
    of these places.
    """
    header = records[0]
    assert isinstance(header, Header)
    state, sites = new_state(header.geometry), 0
    batches: dict[int, list[int]] = {}
    requests = frozenset(it.request for it in records if isinstance(it, RequestArrived))
    wrongs = list(wrong.among(requests))
    for number, record in enumerate(records):
        if not isinstance(record, StepPlanned | StepDone | StepFailed):
            continue
        if isinstance(record, StepPlanned):
            batches[record.step] = batch_of(record.events)[0]
        if type(record).__name__ == wrong.record:
            seqs = batches[record.step]
            edits = (it for mine in wrongs for it in _edits(mine, record, state))
            for events in edits:
                after = _applied(state, events)
                if after is None:
                    continue
                yield [*plain(records[:number]), _with(record, events, after, seqs)]
                sites += 1
                if sites == _SITES_MAX:
                    return
        state = apply_all(state, record.events)


def raised_again(
    wrong: StepFailed, seqs: frozenset[int], state: State, records: list[Record]
) -> Iterator[list[Record]]:
    """Tapes that are right up to the close of a step in which `seqs` have as many rows as they had
    in `state`, when the scheduler raised; and there it raises.
    """
    header = records[0]
    assert isinstance(header, Header)
    now = new_state(header.geometry)
    batches: dict[int, list[int]] = {}
    requests = {it.request for it in records if isinstance(it, RequestArrived)}
    for number, record in enumerate(records):
        if not isinstance(record, StepPlanned | StepDone | StepFailed):
            continue
        if isinstance(record, StepPlanned):
            batches[record.step] = batch_of(record.events)[0]
        mine = isinstance(record, StepDone) and seqs.issubset(batches[record.step])
        if mine and all(_rows(now, seq) == _rows(state, seq) for seq in seqs):
            blamed = tuple(seq for seq in wrong.blamed if seq in requests)
            failed = structs.replace(
                wrong, step=record.step, blamed=blamed, events=(), digest=now.digest
            )
            yield [*plain(records[:number]), failed]
        now = apply_all(now, record.events)


def _rows(state: State, seq: int) -> int:
    sequence = state.sequences.get(seq)
    return -1 if sequence is None else sequence.offset


def _with(record: _Closed, events: tuple[Event, ...], after: State, seqs: list[int]) -> Record:
    """The record with other events, and with what follows from them."""
    changed: Record = structs.replace(record, events=events, digest=after.digest)
    if isinstance(changed, StepDone):
        found = [after.sequences.get(seq) for seq in seqs]
        offsets = tuple(-1 if it is None else it.offset for it in found)
        return structs.replace(changed, offsets=offsets)
    return changed


def plain(records: list[Record]) -> list[Record]:
    """Without times, and without segments but the first."""
    return [
        it
        for at, it in enumerate(records)
        if at < 2 or not isinstance(it, Header | Checkpoint | StepTimed)
    ]


def _applied(state: State, events: tuple[Event, ...]) -> State | None:
    try:
        return apply_all(state, events)
    except InvariantBroken:
        return None


def _edits(wrong: Difference, record: _Closed, state: State) -> Iterator[tuple[Event, ...]]:
    """The record's events with the wrong decision in the place of the right one."""
    events = record.events
    count = len(wrong.derived)
    for at in _places(wrong, events):
        head = events[:at]
        here = _applied(state, head)
        if here is None:
            return
        given: list[tuple[Event, ...]] = [()]
        if wrong.how != MISSING:
            given = list(_recorded_here(wrong, record, at, here))
        for mine in given:
            for tail in (events[at + count :], ()):
                yield (*head, *mine, *tail)


def _places(wrong: Difference, events: tuple[Event, ...]) -> Iterator[int]:
    """Where the record comes to the decision that was taken wrongly."""
    if wrong.derived:
        count = len(wrong.derived)
        for at in range(len(events) - count + 1):
            if all(map(alike, wrong.derived, events[at : at + count])):
                yield at
        return
    before = wrong.prior[-1] if wrong.prior else None
    after = wrong.later[0] if wrong.later else None
    for at in range(len(events) + 1):
        if _fits(before, events[at - 1] if at else None) and _fits(
            after, events[at] if at < len(events) else None
        ):
            yield at


def _fits(wanted: Event | None, here: Event | None) -> bool:
    if wanted is None or here is None:
        return wanted is here
    return alike(wanted, here)


_LENIENT = {"step", "blocks", "block", "source", "target", "rows", "tokens", "prompt_rows"}


def alike(one: Event, other: Event) -> bool:
    """Whether two events are the same decision: of the same kind, about the same sequence."""
    if type(one) is not type(other):
        return False
    if isinstance(one, AppendedEach | CommittedEach) and isinstance(
        other, AppendedEach | CommittedEach
    ):
        return bool(set(one.seqs) & set(other.seqs))
    if isinstance(one, BlockEvicted) and isinstance(other, BlockEvicted):
        return one.group == other.group
    if isinstance(one, BlockPublished) and isinstance(other, BlockPublished):
        return (one.seq, one.index, one.group) == (other.seq, other.index, other.group)
    names = [name for name in one.__struct_fields__ if name not in _LENIENT]
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _recorded_here(
    wrong: Difference, record: _Closed, at: int, state: State
) -> Iterator[tuple[Event, ...]]:
    """The recorded events with the step, sequences and blocks of here, in ways to be tried."""
    derived = record.events[at : at + len(wrong.derived)]
    for names in _block_names(wrong, derived, state):
        found: list[Event] = []
        for event in wrong.recorded:
            mine = _here(event, record.step, names, state)
            if mine is None:
                break
            found.append(mine)
        else:
            yield tuple(found)


Names = dict[tuple[int, int], int]


def _block_names(wrong: Difference, derived: tuple[Event, ...], state: State) -> Iterator[Names]:
    """What the blocks of the recorded events may be here: those at the same places of tables and
    of the right decision; for others free ones, which are not those of the right decision.
    """
    names: Names = {}
    for event, here in zip(wrong.derived, derived, strict=False):
        for place, (_, block) in zip(blocks_of(event), blocks_of(here), strict=False):
            names[place] = block
    for seq, sequence in state.sequences.items():
        old = wrong.state.sequences.get(seq)
        for group, table in enumerate(sequence.tables):
            for was, now in zip(old.tables[group] if old else (), table, strict=False):
                if NO_BLOCK not in (was, now):
                    names[group, was] = now
    by_key = {entry.key: entry for entry in state.entries.values()}
    for entry in wrong.state.entries.values():
        known = by_key.get(entry.key)
        for group, blocks in enumerate(entry.blocks):
            for was, now in zip(blocks, known.blocks[group] if known else (), strict=False):
                names.setdefault((group, was), now)
    yield names
    used = {(group, block) for event in derived for group, block in blocks_of(event)}
    other = dict(names)
    for event in wrong.recorded:
        for group, block in blocks_of(event):
            if (group, block) not in names or (group, names[group, block]) in used:
                free = _free(state, group, used | {(group, it) for it in other.values()})
                if free is None:
                    return
                other[group, block] = free
    yield other


def _free(state: State, group: int, but: set[tuple[int, int]]) -> int | None:
    record, count = state.groups[group], state.geometry.groups[group].num_blocks
    return next(
        (it for it in range(count) if it not in record.blocks and (group, it) not in but), None
    )


def _here(event: Any, step: int, names: Names, state: State) -> Event | None:
    """One recorded event; None where it concerns nobody who is here."""
    if isinstance(event, AppendedEach | CommittedEach):
        places = [at for at, seq in enumerate(event.seqs) if seq in state.sequences]
        if not places:
            return None
        seqs = tuple(event.seqs[at] for at in places)
        tokens = event.tokens and tuple(event.tokens[at] for at in places)
        event = structs.replace(event, seqs=seqs, tokens=tokens)
        return structs.replace(event, step=step) if isinstance(event, AppendedEach) else event
    changed: dict[str, Any] = {}
    if hasattr(event, "step"):
        changed["step"] = step
    if isinstance(event, Appended | PrefixAdopted):
        changed["blocks"] = tuple(
            tuple(names.get((group, block), block) for block in blocks)
            for group, blocks in enumerate(event.blocks)
        )
    elif isinstance(event, BlockCopied):
        changed["source"] = names.get((event.group, event.source), event.source)
        changed["target"] = names.get((event.group, event.target), event.target)
    elif isinstance(event, BlockPublished | BlockEvicted | BlockStored | BlockLoaded):
        changed["block"] = names.get((event.group, event.block), event.block)
        entry = state.groups[event.group].blocks.get(changed["block"])
        if isinstance(event, BlockEvicted | BlockStored) and entry is not None and entry.entry:
            changed["key"] = state.entries[entry.entry].key
    found: Event = structs.replace(event, **changed)
    return found
