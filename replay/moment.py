"""Moment: pool, batch, queue and flights of a tape while one step's forward runs, and its records.

Owns what `replay show --at` finds out; moment_text.py has it as text. Compares nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from msgspec import Struct

from statemachine.events import Appended, AppendedEach, Event
from statemachine.records import (
    BlocksOffered,
    Finished,
    FlushRequested,
    Record,
    RequestArrived,
    RequestCancelled,
    StepDone,
    StepFailed,
    StepPlanned,
    StepTimed,
)
from statemachine.sequence import Sequence, visible

from .divergence import Happened, event_text
from .errors import Unusable
from .following import UNKNOWN, Following
from .observed import Pieces
from .pool_map import PoolNow, pools
from .reader import Tape
from .words import called, plural, tokens_text


class Standing(Struct, frozen=True):
    """A sequence that holds rows. piece: its place in the batch, -1 where it has no rows in it.

    rows: those that this step issues, by purpose. visible: of its last row, by group. tables: block
    ids by group, -1 where released at the front of a window.
    """

    sequence: int
    external_id: str
    piece: int
    rows: dict[str, int]
    offset: int
    committed: int
    speculative: int
    pads: int
    adopted: int
    visible: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]


class Waits(Struct, frozen=True):
    """A request in the queue. since: the step that was planned last when it came, -1: before the
    tape's start. answered: answer tokens that it has already.
    """

    request: int
    external_id: str
    prompt_tokens: int
    answered: int
    preempted: int
    since: int


class Flight(Struct, frozen=True):
    """A step that was issued before and is not answered yet."""

    step: int
    sequences: int
    rows: int


class Seen(Struct, frozen=True):
    """What the caches saw of a piece: first position, rows, and visible rows by group."""

    piece: int
    sequence: int
    start: int
    rows: int
    visible: tuple[int, ...]


class Drawn(Struct, frozen=True):
    """A sampled token, its logit, and how far it stood above the next one."""

    piece: int
    sequence: int
    token: int
    logit: float
    margin: float


class MomentReport(Struct, frozen=True):
    """What `replay show TAPE --at STEP --json` prints: the moment at which a step's forward runs.

    pools: blocks by group. standing: sequences with rows, the batch first, in its order. waiting:
    the queue. flights: other steps in flight. inputs: that came between the last step's plan and
    this one's, in words. ends: of answers that only the engine saw (stop strings). events: the
    step's, each as JSON. seen, drawn: of its StepDone. outcome: done, failed, or unanswered; error:
    of a failed one. wrong_rows: found by the sanitizer. times_us: wall times. broken: why the tape
    cannot be followed to here, "" where it can.
    """

    format: int
    path: str
    step: int
    outcome: str
    error: str
    broken: str
    pools: tuple[PoolNow, ...]
    standing: tuple[Standing, ...]
    waiting: tuple[Waits, ...]
    flights: tuple[Flight, ...]
    inputs: tuple[str, ...]
    ends: tuple[str, ...]
    events: tuple[Happened, ...]
    seen: tuple[Seen, ...]
    drawn: tuple[Drawn, ...]
    wrong_rows: int
    times_us: dict[str, int]


class Moment:
    """A step's moment, gathered while its tape is read."""

    def __init__(self, path: str, step: int, following: Following) -> None:
        self.following = following
        self.report = dict[str, object](path=path, step=step, outcome="unanswered", error="")
        self.report.update(seen=(), drawn=(), wrong_rows=0, times_us={}, broken="")
        self.report.update(pools=(), standing=(), waiting=(), flights=())
        self.records: list[Record] = []
        self.events: list[Happened] = []
        self._seqs: list[int] = []

    def planned(self, record: StepPlanned) -> None:
        """Its opening events were applied."""
        following = self.following
        self._keep(record, record.events)
        self.report["broken"] = following.broken
        pieces = following.flights.get(record.step)
        if pieces is None:
            pieces = Pieces([], [], [], {}, ())  # it cannot be followed
        self._seqs = pieces.seqs
        self.report["standing"] = tuple(_standing(following, pieces))
        if following.header is not None:
            self.report["pools"] = pools(following.state)
        self.report["waiting"] = tuple(_waiting(following))
        self.report["flights"] = tuple(
            Flight(step, len(it.seqs), sum(it.rows))
            for step, it in following.flights.items()
            if step != record.step
        )

    def answered(self, record: StepDone | StepFailed) -> None:
        """Its result came."""
        self._keep(record, record.events)
        if isinstance(record, StepFailed):
            self.report.update(outcome="failed", error=f"at {record.stage}: {record.error}")
            return
        seen = record.observation
        columns = zip(seen.starts, seen.rows, seen.visible, strict=False)
        self.report.update(
            outcome="done",
            wrong_rows=record.shadow.found,
            seen=tuple(Seen(at, self._seq(at), *column) for at, column in enumerate(columns)),
            drawn=tuple(
                Drawn(piece, self._seq(piece), token, logit, margin)
                for piece, token, logit, margin in zip(
                    record.sampled, record.tokens, record.logits, record.margins, strict=False
                )
            ),
        )

    def timed(self, record: StepTimed) -> None:
        """Its wall times."""
        self.records.append(record)
        self.report["times_us"] = record.parts_us

    def finish(self, inputs: Iterable[str], ends: Iterable[str]) -> MomentReport:
        """All of it."""
        report = {**self.report, "events": tuple(self.events)}
        report.update(inputs=tuple(inputs), ends=tuple(ends))
        return MomentReport(format=1, **report)  # type: ignore[arg-type]

    def _seq(self, piece: int) -> int:
        return self._seqs[piece] if 0 <= piece < len(self._seqs) else -1

    def _keep(self, record: StepPlanned | StepDone | StepFailed, events: tuple[Event, ...]) -> None:
        self.records.append(record)
        kind = type(record).__name__
        for index, event in enumerate(events):
            self.events.append(Happened(record.step, kind, index, event_text(event)))


def last_step(path: str) -> int:
    """The number of the last step that was planned. Raises Unusable where there is none."""
    step = max((it.step for it in Tape(path) if isinstance(it, StepPlanned)), default=-1)
    if step < 0:
        raise _no_step(path)
    return step


def _no_step(path: str) -> Unusable:
    return Unusable(f"{path} has no step at all")


def moment_of(
    path: str, records: Iterable[Record], step: int, following: Following
) -> tuple[MomentReport, list[Record]]:
    """The moment of a step, and its records. `following` has nothing of the tape yet, and ends at
    the step's answer. Raises Unusable where the tape has no such step.
    """
    inputs, ends, seen = list[str](), list[str](), -1
    moment: Moment | None = None
    for record in records:
        if isinstance(record, StepPlanned):
            seen = max(seen, record.step)
            if record.step > step and (moment is None or step not in following.flights):
                break
            if record.step < step:
                inputs.clear()
        following.feed(record)
        if isinstance(record, Finished):
            ends.append(_input(record))
        elif moment is None and (text := _input(record)):
            inputs.append(text)
        elif isinstance(record, StepDone | StepFailed) and record.step < step:
            ends.clear()
        if getattr(record, "step", None) != step:
            continue
        if isinstance(record, StepPlanned):
            moment = Moment(path, step, following)
            moment.planned(record)
        elif moment is not None and isinstance(record, StepDone | StepFailed):
            moment.answered(record)
        elif moment is not None and isinstance(record, StepTimed):
            moment.timed(record)
    if moment is None and seen < 0:
        raise _no_step(path)
    if moment is None:
        last = f"the last one is {seen}" if 0 <= seen < step else "it begins later"
        raise Unusable(f"{path} has no step {step}: {last}")
    return moment.finish(inputs, ends), moment.records


def _input(record: Record) -> str:
    if isinstance(record, RequestArrived):
        return (
            f"request {record.request}{called(record.external_id)} arrived: "
            f"{plural(len(record.tokens), 'prompt token')} ({tokens_text(record.tokens)}), "
            f"at most {plural(record.parameters.max_tokens, 'answer token')}"
        )
    if isinstance(record, RequestCancelled):
        return f"request {record.request} cancelled: {record.reason}"
    if isinstance(record, Finished):
        kept = plural(record.tokens_kept, "token")
        return f"request {record.request} ends after {kept}: {record.reason}"
    if isinstance(record, BlocksOffered):
        blocks = plural(record.end - record.first, "block")
        return f"{blocks} of request {record.request}'s prompt were read from the prefix store"
    if isinstance(record, FlushRequested):
        return "the prefix index is to be emptied" + (f": {record.reason}" if record.reason else "")
    return ""


def _standing(following: Following, pieces: Pieces) -> Iterator[Standing]:
    state = following.state
    others = sorted(seq for seq in state.sequences if seq not in pieces.seqs)
    for place, seq in enumerate([*pieces.seqs, *others]):
        sequence: Sequence = state.sequences[seq]
        if not sequence.offset and place >= len(pieces.seqs):
            continue
        answer = following.answers.live.get(seq)
        yield Standing(
            sequence=seq,
            external_id="" if answer is None else answer.arrived.external_id,
            piece=place if place < len(pieces.seqs) else -1,
            rows=rows_of(pieces.events, seq) if place < len(pieces.seqs) else {},
            offset=sequence.offset,
            committed=sequence.committed,
            speculative=len(sequence.speculative),
            pads=sequence.pads,
            adopted=sequence.adopted,
            visible=tuple(
                visible(state.geometry, sequence, group) for group in range(len(sequence.tables))
            ),
            tables=sequence.tables,
        )


def rows_of(events: tuple[Event, ...], seq: int) -> dict[str, int]:
    """Rows that a plan's events issue to a sequence, by purpose."""
    rows: Counter[str] = Counter()
    for event in events:
        if isinstance(event, Appended) and event.seq == seq:
            rows[event.purpose] += event.rows
        elif isinstance(event, AppendedEach):
            rows[event.purpose] += event.seqs.count(seq)
    return {purpose: count for purpose, count in rows.items() if count}


def _waiting(following: Following) -> Iterator[Waits]:
    """Requests without rows, as the scheduler's queue has them: by priority, then by id."""
    header = following.header
    ranked = header is not None and header.policy.get("scheduling") == "priority"
    live = following.answers.live
    for request in sorted(
        live, key=lambda it: (live[it].arrived.parameters.priority if ranked else 0, it)
    ):
        sequence = following.state.sequences.get(request)
        if sequence is not None and sequence.offset:
            continue
        answer, visit = live[request], following.visits.get(request)
        yield Waits(
            request,
            answer.arrived.external_id,
            len(answer.arrived.tokens),
            len(answer.before) + len(answer.samples),
            visit.preempted if visit else 0,
            visit.arrived if visit else UNKNOWN,
        )
