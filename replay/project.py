"""Project: a tape as it would be if only some of its requests had ever come in.

Owns what goes with a request (its records, its column in every event, observation and result) and
what follows anew from the events that are left (digests, counts over a batch, evictions that are
still needed, hashes of tables whose blocks were renamed). What diverges stays as wrong as it was:
where a value over the whole batch or state is at fault, its difference is carried over.
Never decides anything anew: a subset whose events do not fold is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attrs import frozen
from msgspec import structs

from statemachine.codec import decode_state, encode_state
from statemachine.digest import MASK
from statemachine.errors import InvariantBroken
from statemachine.events import (
    Appended,
    AppendedEach,
    BlockCopied,
    BlockEvicted,
    BlockLoaded,
    BlockStored,
    Closed,
    CommittedEach,
    Event,
    Forked,
    PoolReset,
    StepWritten,
)
from statemachine.observing import FULL, OFF, table_hash
from statemachine.records import (
    NO_PARENT,
    BlocksOffered,
    Checkpoint,
    Finished,
    FlushRequested,
    Header,
    Observation,
    Record,
    RequestArrived,
    RequestCancelled,
    ShadowReport,
    StepDone,
    StepFailed,
    StepPlanned,
    TapeEnded,
)
from statemachine.sequence import Sequence
from statemachine.state import State, new_state
from statemachine.transitions import apply_all

from .renaming import Names
from .subset import Kept, Refused, Wrong, batch_of, picked, rows_read


@frozen
class _Step:
    """A step that was kept: which of its pieces are left, and what they were handed."""

    places: tuple[int, ...]
    pieces: int
    rows: tuple[int, ...]
    sequences: tuple[Sequence, ...]


class Projection:
    """Feed it a tape's records, from the header on; the first record after it is a Checkpoint."""

    def __init__(self, kept: Kept, wrong: Wrong) -> None:
        self._kept = kept
        self._wrong = wrong
        self._steps: dict[int, _Step] = {}
        self._due: list[BlockEvicted] = []
        """Evictions of steps that went."""
        self._names = Names()
        self._state: State | None = None
        self._header: Header | None = None
        self._step = 0

    def records(self, records: Iterable[Record]) -> Iterator[Record]:
        """The tape without the others. Raises Refused, where what stays does not fold."""
        for number, record in enumerate(records):
            last = number == self._wrong.at
            yield from self._record(record, last)
            if last:
                return

    def _record(self, record: Record, last: bool) -> Iterator[Record]:
        if isinstance(record, Header):
            if self._header is None:
                self._header = structs.replace(record, segment=0)
                self._state = new_state(record.geometry)
                yield self._header
            elif last:
                yield TapeEnded(self._step)  # a new segment is also an end of the steps before
        elif isinstance(record, Checkpoint):
            yield from self._checkpoint(record, last)
        elif isinstance(record, RequestArrived):
            if record.request in self._kept.requests:
                known = record.parent in self._kept.requests
                yield record if known else structs.replace(record, parent=NO_PARENT)
        elif isinstance(record, RequestCancelled | Finished | BlocksOffered):
            if self._kept.has(record.request, self._step + 1):
                yield record
        elif isinstance(record, StepPlanned):
            yield from self._planned(record, last)
        elif isinstance(record, StepDone):
            yield from self._done(record, last)
        elif isinstance(record, StepFailed):
            yield from self._failed(record, last)
        elif isinstance(record, FlushRequested) or (last and isinstance(record, TapeEnded)):
            yield record

    @property
    def _now(self) -> State:
        assert self._state is not None
        return self._state

    def _checkpoint(self, record: Checkpoint, last: bool) -> Iterator[Record]:
        """The one that the tape begins with, without the others' rows; later ones follow anew."""
        if self._step or self._steps:
            if last:
                digest = (self._now.digest + self._wrong.digest) & MASK
                state = encode_state(self._now)
                yield structs.replace(record, state=state, digest=digest, requests=())
            return
        self._state = decode_state(record.state)
        gone = [Closed(seq) for seq in self._now.sequences if seq not in self._kept.requests]
        self._apply(sorted(gone, key=lambda event: event.seq))
        self._step = record.step
        yield structs.replace(
            record,
            state=encode_state(self._now),
            digest=self._now.digest,
            requests=tuple(
                it for it in record.requests if it.arrived.request in self._kept.requests
            ),
            alone=tuple(seq for seq in record.alone if seq in self._kept.requests),
            offered=tuple(it for it in record.offered if it.request in self._kept.requests),
        )

    def _planned(self, record: StepPlanned, last: bool) -> Iterator[Record]:
        self._step = record.step
        mine = [it for it in (self._mine(e, record.step) for e in record.events) if it is not None]
        whole = record.step in self._wrong.lost or record.step == self._wrong.step
        if not whole and all(isinstance(it, BlockEvicted | BlockStored | PoolReset) for it in mine):
            self._due += [it for it in mine if isinstance(it, BlockEvicted)]
            return
        events = [*self._due, *mine]
        self._due = []
        done, digest = self._follow(events, last)
        seqs, rows = batch_of(record.events)
        places = tuple(at for at, seq in enumerate(seqs) if self._kept.has(seq, record.step))
        found = self._now.sequences
        if any(seqs[at] not in found for at in places) and not last:
            raise Refused(f"step {record.step} issues rows of a sequence that is not open")
        self._steps[record.step] = _Step(
            places,
            len(seqs),
            tuple(rows),
            tuple(found[seqs[at]] for at in places if seqs[at] in found),
        )
        yield StepPlanned(record.step, done, record.digest if digest is None else digest)

    def _failed(self, record: StepFailed, last: bool) -> Iterator[Record]:
        if self._steps.pop(record.step, None) is None and not last:
            return
        done, digest = self._follow(self._closing(record, last), last)
        if PoolReset() in done:
            self._due = []
        yield structs.replace(
            record,
            events=done,
            blamed=tuple(seq for seq in record.blamed if self._kept.has(seq, record.step)),
            digest=record.digest if digest is None else digest,
        )

    def _done(self, record: StepDone, last: bool) -> Iterator[Record]:
        step = self._steps.pop(record.step, None)
        if step is None and not last:
            return
        step = step or _Step((), 0, (), ())
        done, digest = self._follow(self._closing(record, last), last)
        sampled = [
            at for at, piece in enumerate(record.sampled)
            if piece in step.places or piece >= step.pieces
        ]  # fmt: skip
        numbers = {piece: at for at, piece in enumerate(step.places)}
        fewer = step.pieces - len(step.places)
        yield StepDone(
            step=record.step,
            observation=self._observation(record, step, last),
            shadow=self._shadow(record, step, last),
            sampled=tuple(
                numbers.get(record.sampled[at], record.sampled[at] - fewer) for at in sampled
            ),
            tokens=picked(record.tokens, sampled, len(record.sampled)),
            logits=picked(record.logits, sampled, len(record.sampled)),
            margins=picked(record.margins, sampled, len(record.sampled)),
            events=done,
            offsets=picked(record.offsets, step.places, step.pieces),
            digest=record.digest if digest is None else digest,
        )

    def _closing(self, record: StepDone | StepFailed, last: bool) -> list[Event]:
        state, found = self._now, list[Event]()
        for event in record.events:
            mine = self._mine(event, record.step)
            if mine is None and isinstance(event, StepWritten):
                issued = state.written_step < event.step <= state.issued_step
                mine = event if issued or last else None
            if mine is not None:
                found.append(mine)
        return found

    def _mine(self, event: Event, step: int) -> Event | None:
        """What is left of an event; None where it concerns others only. StepWritten: _closing."""
        has = self._kept.has
        if isinstance(event, AppendedEach | CommittedEach):
            places = [at for at, seq in enumerate(event.seqs) if has(seq, step)]
            if len(places) == len(event.seqs) or not places:
                return event if places else None
            seqs = tuple(event.seqs[at] for at in places)
            tokens = event.tokens and tuple(event.tokens[at] for at in places)
            return structs.replace(event, seqs=seqs, tokens=tokens)
        if isinstance(event, BlockEvicted | BlockStored | PoolReset):
            return event
        if isinstance(event, StepWritten):
            return None
        if isinstance(event, Forked):
            if not has(event.child, step):
                return None
            if not has(event.seq, step):
                raise Refused(f"sequence {event.child} is a fork of sequence {event.seq}")
            return event
        return event if has(event.seq, step) else None

    def _follow(self, events: list[Event], last: bool) -> tuple[tuple[Event, ...], int | None]:
        """Apply events, those left out that nothing is there for any more; their digest.

        In the record that diverges they are kept as they are from the first one that does not
        fold, and the digest may be unknown.
        """
        done: list[Event] = []
        run: list[Event] = []
        try:
            for event in events:
                fresh = isinstance(
                    event, BlockEvicted | BlockStored | BlockCopied | BlockLoaded
                ) or (isinstance(event, Appended) and any(event.blocks))
                if fresh:
                    self._apply(run)
                    run = []
                named = self._names.event(event, self._now, last)
                if named is not None:
                    done.append(named)
                    run.append(named)
            self._apply(run)
        except Refused:
            if not last:
                raise
            return tuple(
                self._names.event(event, self._now, last) or event for event in events
            ), None
        difference = self._wrong.digest if last else 0
        return tuple(done), (self._now.digest + difference) & MASK

    def _apply(self, events: list[Event] | list[Closed]) -> None:
        if not events:
            return
        try:
            self._state = apply_all(self._now, events)
        except InvariantBroken as error:
            raise Refused(str(error)) from error

    def _observation(self, record: StepDone, step: _Step, last: bool) -> Observation:
        seen = record.observation
        if not step.places and not last:
            return Observation((0, 0), (0, 0), (0, 0), (0, 0), 0, (), (), (), ())
        fewer = sum(step.rows) - sum(step.rows[at] for at in step.places)
        rows_updated = seen.rows_updated
        if any(group.paged for group in self._now.geometry.groups):
            least, most = rows_updated
            rows_updated = (max(0, least - fewer), max(0, most - fewer))
        pick = [picked(it, step.places, step.pieces) for it in (seen.starts, seen.rows)]
        return structs.replace(
            seen,
            rows_updated=rows_updated,
            starts=pick[0],
            rows=pick[1],
            visible=picked(seen.visible, step.places, step.pieces),
            tables=self._tables(seen, step, last),
        )

    def _tables(self, seen: Observation, step: _Step, last: bool) -> tuple[tuple[int, ...], ...]:
        """Hashes as read; of tables with renamed blocks those of here, where they were right."""
        hashes = picked(seen.tables, step.places, step.pieces)
        if not self._names or len(seen.tables) != step.pieces:
            return hashes
        was = self._wrong.pieces.sequences if last and self._wrong.pieces else None
        return tuple(
            tuple(
                table_hash(table)
                if hashed and (was is None or hashed == table_hash(was[place].tables[group]))
                else hashed
                for group, (table, hashed) in enumerate(zip(sequence.tables, mine, strict=False))
            )
            for place, sequence, mine in zip(step.places, step.sequences, hashes, strict=True)
        )

    def _shadow(self, record: StepDone, step: _Step, last: bool) -> ShadowReport:
        findings = tuple(
            structs.replace(it, block=self._names.of(it.group, it.block))
            for it in record.shadow.findings
            if self._kept.has(it.seq, record.step)
        )
        gone = len(record.shadow.findings) - len(findings)
        found = record.shadow.found - gone
        if gone and not findings:
            found = 0  # those that were counted and not listed are the others' too, for all we know
        mode = self._header.sanitize if self._header else OFF
        rows = [step.rows[at] for at in step.places]
        due = 0
        if mode == FULL:
            due = rows_read(self._now.geometry, step.sequences, rows)
        elif mode != OFF:
            due = len(rows) * len(self._now.paged_groups())
        off = self._wrong.checked if last else 0
        return ShadowReport(max(0, due + off), found, findings)
