"""Moment: pool, batch, queue and flights of a tape while one step's forward runs, and its records.

Owns what `replay show --at` finds out, as a report and as text. Compares nothing.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator

from msgspec import Struct

from statemachine.events import Appended, AppendedEach, Event
from statemachine.geometry import Geometry
from statemachine.records import (
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
from .pool_map import LETTERS, PoolNow, legend, map_lines, pools
from .reader import Tape
from .words import group_text, plural, ranges, span, text_words, tokens_text

STANDING_SHOWN = 40


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
        raise Unusable(f"{path} has no step at all")
    return step


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
            if record.step > step and (moment is None or step not in following.flights):
                break
            if record.step < step:
                inputs.clear()
            seen = max(seen, record.step)
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
    if moment is None:
        last = f"the last one is {seen}" if 0 <= seen < step else "it begins later"
        raise Unusable(f"{path} has no step {step}: {last}")
    return moment.finish(inputs, ends), moment.records


def _input(record: Record) -> str:
    if isinstance(record, RequestArrived):
        return (
            f"request {record.request}{_called(record.external_id)} arrived: "
            f"{plural(len(record.tokens), 'prompt token')} ({tokens_text(record.tokens)}), "
            f"at most {plural(record.parameters.max_tokens, 'answer token')}"
        )
    if isinstance(record, RequestCancelled):
        return f"request {record.request} cancelled: {record.reason}"
    if isinstance(record, Finished):
        kept = plural(record.tokens_kept, "token")
        return f"request {record.request} ends after {kept}: {record.reason}"
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


def _called(external_id: str) -> str:
    return f' "{external_id}"' if external_id else ""


def moment_lines(report: MomentReport, geometry: Geometry) -> Iterator[str]:
    """The moment as text, without the records."""
    batch = [it for it in report.standing if it.piece >= 0]
    others = len(report.standing) - len(batch)
    rows = sum(sum(it.rows.values()) for it in batch)
    yield (
        f"step {report.step} of {report.path}, while its forward runs: "
        f"{plural(rows, 'row')} of {plural(len(batch), 'sequence')} in the batch, "
        f"{plural(others, 'other')} with rows, {len(report.waiting)} waiting"
    )
    if report.broken:
        yield f"THE TAPE CANNOT BE FOLLOWED TO HERE: {report.broken}"
        yield "What is shown is the state before that record."
    for it in report.flights:
        yield (
            f"step {it.step} ({plural(it.rows, 'row')} of {plural(it.sequences, 'sequence')}) "
            "was issued before and is not answered yet"
        )
    letters = {it.sequence: letter for it, letter in zip(report.standing, LETTERS, strict=False)}
    for pool in report.pools:
        yield ""
        yield (
            f"pool    {group_text(geometry, pool.group)}: {pool.held} held "
            f"({pool.shared} of them by several), {pool.cached} cached, {pool.free} free; "
            f"{pool.published} published"
        )
        yield from map_lines(pool, letters)
    if report.pools:
        yield from textwrap.wrap(f"({legend(report.pools[0])})", 100)
    yield ""
    yield from _standing_lines(report, letters)
    yield from _waiting_lines(report)


def _standing_lines(report: MomentReport, letters: dict[int, str]) -> Iterator[str]:
    published = [{it.block for it in pool.used if it.published} for pool in report.pools]
    groups = [pool.group for pool in report.pools]
    shown = report.standing[:STANDING_SHOWN]
    for title, inside in (("batch", True), ("other sequences with rows", False)):
        chosen = [it for it in shown if (it.piece >= 0) == inside]
        if chosen:
            yield f"{title}"
        for it in chosen:
            letter = letters.get(it.sequence, " ")
            yield f"  {letter}  sequence {it.sequence}{_called(it.external_id)}: {_stands(it)}"
            for group, names in zip(groups, published, strict=True):
                table = it.tables[group]
                found = sum(block in names for block in table)
                where = f" of group {group}" if len(report.pools) > 1 else ""
                yield (
                    f"       visible rows {it.visible[group]}, blocks{where} "
                    f"{ranges(table) or 'none'}" + (f" ({found} published)" if found else "")
                )
    if len(report.standing) > len(shown):
        yield f"  and {len(report.standing) - len(shown)} more (--json has all of them)"


def _stands(it: Standing) -> str:
    parts = [f"{it.committed} committed"]
    parts += [f"{it.speculative} speculative"] if it.speculative else []
    parts += [f"{it.pads} pads"] if it.pads else []
    parts += [f"{it.adopted} adopted"] if it.adopted else []
    here = ""
    if it.piece >= 0:
        count = sum(it.rows.values())
        rows = ", ".join(f"{number} {purpose}" for purpose, number in it.rows.items())
        at = span(it.offset - count, it.offset - 1)
        here = f"{rows} at {'position' if count == 1 else 'positions'} {at}; "
    return f"{here}offset {it.offset} ({', '.join(parts)})"


def _waiting_lines(report: MomentReport) -> Iterator[str]:
    if not report.waiting:
        return
    yield "waiting, in the order of the queue"
    for it in report.waiting[:STANDING_SHOWN]:
        since = "before the tape's start" if it.since < 0 else f"after step {it.since}"
        again = f"; preempted {plural(it.preempted, 'time')}" if it.preempted else ""
        had = f", {plural(it.answered, 'answer token')} so far" if it.answered else ""
        yield (
            f"     request {it.request}{_called(it.external_id)}: "
            f"{plural(it.prompt_tokens, 'prompt token')}{had}, came {since}{again}"
        )
    if len(report.waiting) > STANDING_SHOWN:
        yield f"     and {len(report.waiting) - STANDING_SHOWN} more (--json has all of them)"


def step_lines(report: MomentReport) -> Iterator[str]:
    """What happened in the step, in words."""
    yield ""
    if report.inputs:
        yield f"inputs before step {report.step} was planned"
        yield from (f"  {text}" for text in report.inputs)
    yield f"step {report.step} planned"
    yield from _event_lines(report, "StepPlanned")
    yield from (f"  {text}" for text in report.ends)
    if report.outcome == "unanswered":
        yield f"step {report.step} was never answered: the tape ends, or its process died in it"
    elif report.outcome == "failed":
        yield f"step {report.step} failed {report.error}"
        yield from _event_lines(report, "StepFailed")
    else:
        yield f"step {report.step} done"
        yield from _done_lines(report)
        yield from _event_lines(report, "StepDone")
    if report.times_us:
        parts = ", ".join(f"{name} {time}" for name, time in report.times_us.items())
        yield f"  took, in microseconds: {parts}"


def _done_lines(report: MomentReport) -> Iterator[str]:
    drawn = {piece: [it for it in report.drawn if it.piece == piece] for piece in
             dict.fromkeys(it.piece for it in report.drawn)}  # fmt: skip
    for it in report.seen:
        visible_rows = " and ".join(str(count) for count in it.visible)
        text = (
            f"  sequence {it.sequence}: the caches saw {plural(it.rows, 'row')} from position "
            f"{it.start}, {visible_rows} visible"
        )
        samples = drawn.get(it.piece, [])
        if samples:
            text += "; sampled " + ", ".join(
                f"{at.token} (logit {at.logit:.6g}, {at.margin:.6g} above the next)"
                for at in samples
            )
        yield text
    if report.wrong_rows:
        yield f"  {plural(report.wrong_rows, 'row')} in the pages are not their sequences'"


def _event_lines(report: MomentReport, kind: str) -> Iterator[str]:
    for it in report.events:
        if it.record == kind:
            yield f"  [{it.index}] {text_words(it.event, named=True)}"
