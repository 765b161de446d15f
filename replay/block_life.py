"""Block life: who held a block, when, what was written into it; `replay show --block` prints it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from statemachine import events as ev
from statemachine.events import Event
from statemachine.geometry import RECURRENT
from statemachine.records import Checkpoint, Record, StepDone, StepFailed, StepPlanned
from statemachine.state import NO_ENTRY

from .errors import Unusable
from .following import Following
from .moment import rows_of
from .words import plural, ranges, span

RELEASES = (ev.Closed, ev.Preempted, ev.Reset, ev.Trimmed, ev.Rewound, ev.FrontTrimmed)
HELD, CACHED, FREE = "held", "cached", "free"


class Stretch(Struct):
    """What happened to the block, from step `first` to step `last`.

    what: held (when the tape starts), taken, adopted, forked, copied, written, published, evicted,
    released. sequence: whose doing it was, -1 for nobody's. positions: of the rows written, first
    and last, in that sequence.
    """

    first: int
    last: int
    what: str
    text: str
    sequence: int = -1
    positions: tuple[int, ...] = ()


class BlockReport(Struct, frozen=True):
    """What `replay show TAPE --block ID --json` prints.

    kind: the group's; a block of a recurrent one is a slot. status: held, cached or free where the
    tape ends; holders: the sequences that hold it then.
    broken: why the tape cannot be followed to its end, "" where it can.
    """

    format: int
    path: str
    block: int
    group: int
    kind: str
    block_size: int
    status: str
    holders: tuple[int, ...]
    broken: str
    stretches: tuple[Stretch, ...]


class BlockLife:
    """One block's story, gathered while a tape is read."""

    def __init__(self, block: int, group: int) -> None:
        self.block, self.group = block, group
        self.following = Following()
        self.stretches: list[Stretch] = []
        self._places: dict[int, int] = {}
        self._record: object = None

    def feed(self, record: Record) -> None:
        """One record on. Raises Unusable where the pool has no such block."""
        following = self.following
        if following.broken:
            return
        following.feed(record)
        if isinstance(record, Checkpoint) and not self.stretches:
            self._require_block()
            self._changed()
            for seq, place in self._places.items():
                text = f"held by sequence {seq} where the tape starts, at place {place}"
                self._say(record.step, "held", text, seq)
        elif isinstance(record, StepPlanned | StepDone | StepFailed):
            before = dict(self._places)
            if self._changed():
                for event in record.events:
                    self._event(record.step, event, before)
            if isinstance(record, StepPlanned):
                self._written(record)

    def _require_block(self) -> None:
        groups = self.following.state.geometry.groups
        if self.group >= len(groups) or not groups[self.group].paged:
            paged = self.following.state.paged_groups()
            there = f"there is {ranges(paged)}" if paged else "this model keeps its own caches"
            raise Unusable(f"there is no group {self.group} with blocks: {there}")
        if self.block >= groups[self.group].num_blocks:
            last = groups[self.group].num_blocks - 1
            raise Unusable(f"group {self.group} has no block {self.block}: its last is {last}")

    def _changed(self) -> bool:
        """Whether anything happened to the block since the last call; then `_places` is new."""
        state = self.following.state
        record = state.groups[self.group].blocks.get(self.block)
        if record is self._record:
            return False
        self._record = record
        self._places = {
            seq: state.sequences[seq].tables[self.group].index(self.block)
            for seq in sorted(state.sequences)
            if self.block in state.sequences[seq].tables[self.group]
        }
        return True

    def _event(self, step: int, event: Event, held: dict[int, int]) -> None:
        """One event that may be about the block; `held`: by whom before it, and where."""
        block, group, after = self.block, self.group, self._places
        if isinstance(event, ev.Appended) and block in event.blocks[group]:
            held[event.seq] = after.get(event.seq, -1)
            self._say(step, "taken", f"taken by sequence {event.seq}{self._place(event.seq)}",
                      event.seq)  # fmt: skip
        elif isinstance(event, ev.PrefixAdopted) and block in event.blocks[group]:
            held[event.seq] = event.blocks[group].index(block)
            self._say(step, "adopted", f"adopted by sequence {event.seq}{self._place(event.seq)}: "
                      "it shares the rows", event.seq)  # fmt: skip
        elif isinstance(event, ev.Forked) and event.seq in held:
            if event.child in after:
                held[event.child] = after[event.child]
                text = f"shared with sequence {event.child}, a fork of sequence {event.seq}"
                self._say(step, "forked", text, event.child)
        elif isinstance(event, ev.BlockCopied) and event.group == group:
            self._copied(step, event, held)
        elif isinstance(event, ev.BlockPublished) and (event.block, event.group) == (block, group):
            self._say(step, "published", f"published by sequence {event.seq}: others can find it",
                      event.seq)  # fmt: skip
        elif isinstance(event, ev.BlockLoaded) and (event.block, event.group) == (block, group):
            self._say(step, "loaded", f"kept rows loaded for sequence {event.seq}: others can find "
                      "it", event.seq)  # fmt: skip
        elif isinstance(event, ev.BlockEvicted) and (event.block, event.group) == (block, group):
            self._say(step, "evicted", "evicted from the index: it is free")
        elif isinstance(event, ev.PoolReset):
            held.clear()
            self._say(step, "released", "the pages were lost: it is free, what it held is gone")
        elif isinstance(event, RELEASES) and event.seq in held and event.seq not in after:
            del held[event.seq]
            why = type(event).__name__
            self._say(step, "released", f"released by sequence {event.seq} ({why})", event.seq)

    def _copied(self, step: int, event: ev.BlockCopied, held: dict[int, int]) -> None:
        if event.source == self.block:
            rows = plural(event.rows, "row")
            text = f"{rows} copied into block {event.target} for sequence {event.seq}"
            if event.seq in held and event.seq not in self._places:
                del held[event.seq]
                text += ", which holds it no more"
            self._say(step, "copied", text, event.seq)
        elif event.target == self.block:
            held[event.seq] = event.index
            rows = plural(event.rows, "row")
            text = f"taken by sequence {event.seq}, place {event.index} of its table: {rows} copied"
            self._say(step, "taken", f"{text} from block {event.source}", event.seq)

    def _place(self, seq: int) -> str:
        place = self._places.get(seq, -1)
        return f", place {place} of its table" if place >= 0 else ""

    def _written(self, record: StepPlanned) -> None:
        pieces = self.following.flights.get(record.step)
        size = self.following.state.geometry.block_size
        for seq, place in self._places.items():
            if pieces is None or seq not in pieces.seqs:
                continue
            at = pieces.seqs.index(seq)
            end = pieces.ends[at]
            first = max(end - pieces.rows[at], place * size)
            last = min(end, (place + 1) * size) - 1
            if first <= last:
                purposes = " and ".join(rows_of(record.events, seq))
                self._write(record.step, seq, first, last, purposes)

    def _write(self, step: int, seq: int, first: int, last: int, purposes: str) -> None:
        it = self.stretches[-1] if self.stretches else None
        if (
            it is not None
            and (it.what, it.sequence, it.last) == ("written", seq, step - 1)
            and it.positions[1] + 1 == first
            and it.text.endswith(f"({purposes})")
        ):
            it.last, it.positions = step, (it.positions[0], last)
        else:
            it = Stretch(step, step, "written", "", seq, (first, last))
            self.stretches.append(it)
        at = "position" if it.positions[0] == it.positions[1] else "positions"
        it.text = f"written: {at} {span(*it.positions)} of sequence {seq} ({purposes})"

    def _say(self, step: int, what: str, text: str, seq: int = -1) -> None:
        self.stretches.append(Stretch(step, step, what, text, seq))

    def report(self, path: str) -> BlockReport:
        """The story."""
        state = self.following.state
        self._require_block()
        block = state.groups[self.group].blocks.get(self.block)
        status = FREE if block is None else HELD
        if block is not None and not block.refs and not block.pins and block.entry != NO_ENTRY:
            status = CACHED
        return BlockReport(
            format=1,
            path=path,
            block=self.block,
            group=self.group,
            kind=state.geometry.groups[self.group].kind,
            block_size=state.geometry.block_size,
            status=status,
            holders=tuple(self._places),
            broken=self.following.broken,
            stretches=tuple(self.stretches),
        )


def block_of(path: str, records: Iterable[Record], block: int, group: int) -> BlockReport:
    """A block's story. Raises Unusable where the pool has no such block."""
    life = BlockLife(block, group)
    for record in records:
        life.feed(record)
    return life.report(path)


def block_lines(report: BlockReport) -> Iterator[str]:
    """The story as text."""
    holds = plural(report.block_size, "row")
    if report.kind == RECURRENT:
        holds = "a slot of one state"
    where = f"block {report.block} of group {report.group} ({holds})"
    now = report.status
    if report.holders:
        now += f" by {'sequence' if len(report.holders) == 1 else 'sequences'} "
        now += ranges(report.holders)
    yield f"{where} of {report.path}: {now} where the tape {'stops' if report.broken else 'ends'}"
    if report.broken:
        yield f"THE TAPE CANNOT BE FOLLOWED TO ITS END: {report.broken}"
    yield ""
    steps = [span(it.first, it.last) for it in report.stretches]
    width = max([len("step"), *map(len, steps)])
    yield f"{'step':>{width}}"
    for it, step in zip(report.stretches, steps, strict=True):
        yield f"{step:>{width}}  {it.text}"
    if not report.stretches:
        yield f"{'':>{width}}  it was never used"
