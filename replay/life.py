"""Life: one sequence from arrival to end, as a timeline of spans; what `replay show --seq` prints.

Goes by what the events say, without a state, so that it works on a tape that cannot be applied.
Runs of decode steps are one span: their rows, those issued ahead of their token or guessed, and
what became of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msgspec import Struct

from statemachine import events as ev
from statemachine.events import DECODE, DRAFT, LOOKAHEAD, PAD, PROMPT, Event
from statemachine.records import (
    Checkpoint,
    Finished,
    Header,
    Parameters,
    Record,
    RequestArrived,
    RequestCancelled,
    StepDone,
    StepFailed,
    StepPlanned,
)

from .errors import Unusable
from .life_lengths import Lengths
from .words import blocks_text, event_words, plural, span, tokens_text

QUEUED = "queued"
PREFILL = "prefill"


class Span(Struct):
    """A stretch of a sequence's life, from step `first` to step `last`.

    what: arrived, queued, opened, adopted, prefill, pads, decode, trimmed, window, copied, forked,
    preempted, failed, cancelled, finished, reset, closed. text: in words. start: the position of
    the first row, -1 where there are no rows; rows: issued ones. ahead: of them before their token
    was known; drafts: guessed. committed, rewound: of those two. blocks: new ones, by group;
    published: those that others could find from then on.
    """

    first: int
    last: int
    what: str
    text: str = ""
    start: int = -1
    rows: int = 0
    ahead: int = 0
    drafts: int = 0
    committed: int = 0
    rewound: int = 0
    blocks: tuple[tuple[int, ...], ...] = ()
    published: tuple[tuple[int, ...], ...] = ()


class LifeReport(Struct, frozen=True):
    """What `replay show TAPE --seq ID --json` prints.

    arrived: whether its arrival is on tape; the next three fields come from it. answer_tokens: that
    were sampled and stood. ended: why it closed, "" where it did not. Steps are -1 where they lie
    before the tape's start.
    """

    format: int
    path: str
    sequence: int
    arrived: bool
    external_id: str
    prompt_tokens: int
    max_tokens: int
    ended: str
    spans: tuple[Span, ...]


class Life:
    """One sequence's timeline, gathered while a tape is read."""

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.spans: list[Span] = []
        self.arrival: RequestArrived | None = None
        self.ended = ""
        self.lengths = Lengths()
        self._step = 0
        self._waits = -1
        self._groups = 0

    def feed(self, record: Record) -> None:
        """One record on."""
        if isinstance(record, Header):
            self._groups = len(record.geometry.groups)
        elif isinstance(record, Checkpoint):
            self._checkpoint(record)
        elif isinstance(record, RequestArrived) and record.request == self.seq:
            self.arrival, self._waits = record, self._step
            self._say("arrived", self._step, _arrival_text(record))
        elif isinstance(record, RequestCancelled) and record.request == self.seq:
            self._say("cancelled", self._step, f"cancelled: {record.reason}")
        elif isinstance(record, Finished) and record.request == self.seq:
            kept = plural(record.tokens_kept, "answer token")
            self._say("finished", self._step, f"ends after {kept}: {record.reason}")
        elif isinstance(record, StepPlanned):
            self._step = record.step
            self._events(record.step, record.events)
        elif isinstance(record, StepDone):
            self._events(record.step, record.events)
        elif isinstance(record, StepFailed):
            if record.step in self.lengths.issued(self.seq):
                self._say("failed", record.step, f"failed at {record.stage}: {record.error}")
            self._events(record.step, record.events)

    def _checkpoint(self, record: Checkpoint) -> None:
        if self.lengths.started:
            return
        self._step = record.step
        self.lengths.start(record)
        for it in record.requests:
            if it.arrived.request == self.seq:
                self.arrival = it.arrived
                what = "running" if it.running else "waiting"
                text = f"{what} already, with {plural(len(it.output), 'answer token')}"
                self._say("arrived", record.step, text)
                self._waits = -1 if it.running else record.step

    def _events(self, step: int, events: tuple[Event, ...]) -> None:
        for event in events:
            handler = _HANDLERS.get(type(event))
            if handler is not None and self._named(event):
                handler(self, step, event)
            self.lengths.apply(step, event)

    def _named(self, event: Any) -> bool:
        if isinstance(event, ev.AppendedEach | ev.CommittedEach):
            return self.seq in event.seqs
        if isinstance(event, ev.PoolReset):
            return self.lengths.known(self.seq)
        if isinstance(event, ev.Forked):
            return self.seq in (event.seq, event.child)
        return bool(event.seq == self.seq)

    def _say(self, what: str, step: int, text: str) -> None:
        self.spans.append(Span(step, step, what, text))

    def _leave_queue(self, step: int) -> None:
        if 0 <= self._waits < step - 1:
            waited = plural(step - 1 - self._waits, "step")
            self.spans.append(Span(self._waits + 1, step - 1, QUEUED, f"waited for {waited}"))
        self._waits = -1

    def _opened(self, step: int, event: ev.Opened) -> None:
        self._leave_queue(step)
        self._say("opened", step, event_words(event))

    def _adopted(self, step: int, event: ev.PrefixAdopted) -> None:
        self._leave_queue(step)
        self._say("adopted", step, event_words(event))

    def _appended(self, step: int, event: ev.Appended) -> None:
        self._leave_queue(step)
        at = self.lengths.offset(self.seq)
        if event.purpose == PAD:
            text = f"{plural(event.rows, 'pad row')} behind the prompt"
            self.spans.append(Span(step, step, "pads", text, at, event.rows, blocks=event.blocks))
            return
        what = PREFILL if event.purpose == PROMPT else DECODE
        self._rows(what, step, at, event.rows, event.purpose, event.blocks)

    def _each(self, step: int, event: ev.AppendedEach) -> None:
        at, count = self.lengths.offset(self.seq), event.seqs.count(self.seq)
        self._rows(DECODE, step, at, count, event.purpose, ())

    def _rows(self, what: str, step: int, at: int, rows: int, purpose: str, blocks: Any) -> None:
        """Rows join the span before, if that is of their kind and they follow it."""
        it = self.spans[-1] if self.spans else None
        if it is None or it.what != what or it.last not in (step, step - 1):
            it = Span(step, step, what, start=at)
            self.spans.append(it)
        it.last = step
        it.rows += rows
        it.ahead += rows if purpose == LOOKAHEAD else 0
        it.drafts += rows if purpose == DRAFT else 0
        it.blocks = _joined(it.blocks, blocks)

    def _committed(self, step: int, event: ev.Committed | ev.CommittedEach) -> None:
        count = len(event.tokens) if isinstance(event, ev.Committed) else 1
        self._decoding(step).committed += count

    def _rewound(self, step: int, event: ev.Rewound) -> None:
        self._decoding(step).rewound += event.rows

    def _decoding(self, step: int) -> Span:
        """The decode span that speculative rows belong to."""
        for it in reversed(self.spans[-4:]):
            if it.what == DECODE:
                it.last = max(it.last, step)
                return it
        it = Span(step, step, DECODE)
        self.spans.append(it)
        return it

    def _published(self, step: int, event: ev.BlockPublished) -> None:
        groups = max(self._groups, event.group + 1)
        if self.spans:
            new = tuple((event.block,) if event.group == at else () for at in range(groups))
            self.spans[-1].published = _joined(self.spans[-1].published, new)

    def _loaded(self, step: int, event: ev.BlockLoaded) -> None:
        self._say("loaded", step, event_words(event))

    def _window(self, step: int, event: ev.FrontTrimmed) -> None:
        """The window moves in most steps: that breaks no run of rows."""
        if not self.spans or self.spans[-1].what not in (DECODE, PREFILL):
            self._say("window", step, event_words(event))

    def _trimmed(self, step: int, event: ev.Trimmed) -> None:
        at = self.lengths.offset(self.seq)
        text = f"{event_words(event)}: offset {at} -> {max(0, at - event.rows)}"
        self._say("trimmed", step, text)

    def _copied(self, step: int, event: ev.BlockCopied) -> None:
        self._say("copied", step, event_words(event))

    def _forked(self, step: int, event: ev.Forked) -> None:
        self._leave_queue(step)
        rows = plural(self.lengths.committed(event.seq), "row")
        if event.child == self.seq:
            text = f"forked from sequence {event.seq}: it shares its {rows}"
        else:
            text = f"forked: sequence {event.child} shares its {rows}"
        self._say("forked", step, text)

    def _emptied(self, step: int, event: ev.Preempted | ev.Reset | ev.PoolReset) -> None:
        rows = plural(self.lengths.offset(self.seq), "row")
        words = event_words(event)
        self._say(
            "reset" if isinstance(event, ev.Reset) else "preempted",
            step,
            f"{words} (it had {rows})",
        )
        self._waits = step

    def _closed(self, step: int, event: ev.Closed) -> None:
        rows = plural(self.lengths.offset(self.seq), "row")  # it gives their blocks back
        self.ended = event.reason or "closed"
        self._say("closed", step, f"{event_words(event)} (it had {rows})")

    def report(self, path: str) -> LifeReport:
        """The timeline. Raises Unusable where the tape knows nothing of the sequence."""
        if not self.spans:
            raise Unusable(f"{path} knows of no sequence {self.seq}")
        arrival = self.arrival or RequestArrived(self.seq, "", (), Parameters(0))
        for it in self.spans:
            it.text = it.text or _span_text(it)
        return LifeReport(
            format=1,
            path=path,
            sequence=self.seq,
            arrived=self.arrival is not None,
            external_id=arrival.external_id,
            prompt_tokens=len(arrival.tokens),
            max_tokens=arrival.parameters.max_tokens,
            ended=self.ended,
            spans=tuple(self.spans),
        )


_HANDLERS: dict[type, Callable[[Life, int, Any], None]] = {
    ev.Opened: Life._opened,
    ev.PrefixAdopted: Life._adopted,
    ev.Appended: Life._appended,
    ev.AppendedEach: Life._each,
    ev.Committed: Life._committed,
    ev.CommittedEach: Life._committed,
    ev.Trimmed: Life._trimmed,
    ev.Rewound: Life._rewound,
    ev.FrontTrimmed: Life._window,
    ev.BlockCopied: Life._copied,
    ev.Forked: Life._forked,
    ev.BlockPublished: Life._published,
    ev.BlockLoaded: Life._loaded,
    ev.Reset: Life._emptied,
    ev.Preempted: Life._emptied,
    ev.PoolReset: Life._emptied,
    ev.Closed: Life._closed,
}


def life_of(path: str, records: Iterable[Record], seq: int) -> LifeReport:
    """A sequence's timeline. Raises Unusable."""
    life = Life(seq)
    for record in records:
        life.feed(record)
    return life.report(path)


def _joined(
    before: tuple[tuple[int, ...], ...], new: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    if not before or not new:
        return before or new
    return tuple(old + more for old, more in zip(before, new, strict=False))


def _arrival_text(record: RequestArrived) -> str:
    p = record.parameters
    how = "greedy" if not p.temperature else f"temperature {p.temperature:g}, seed {p.seed}"
    rank = f", priority {p.priority}" if p.priority else ""
    return (
        f"arrived: {plural(len(record.tokens), 'prompt token')} ({tokens_text(record.tokens)}), at "
        f"most {plural(p.max_tokens, 'answer token')}, {how}{rank}"
    )


def _span_text(it: Span) -> str:
    """Rows of a prefill or a run of decode steps, in words."""
    rows = f"{plural(it.rows, 'row')}"
    if it.start >= 0 and it.rows:
        places = "position" if it.rows == 1 else "from position"
        rows += f", {places} {it.start}"
    steps = it.last - it.first + 1
    parts = [rows]
    if it.what == PREFILL and steps > 1:
        parts.append(f"in {steps} steps")
    guesses = [
        (it.ahead, "issued ahead of their token"),
        (it.drafts, "guessed"),
        (it.committed, "of these stood"),
        (it.rewound, "taken back"),
    ]
    parts += [f"{count} {what}" for count, what in guesses if count]
    if new := blocks_text(it.blocks):
        parts.append(f"new {new}")
    return ", ".join(parts)


def life_lines(report: LifeReport) -> Iterator[str]:
    """The timeline as text."""
    called = f' "{report.external_id}"' if report.external_id else ""
    ended = f"ended: {report.ended}" if report.ended else "still live where the tape ends"
    yield f"sequence {report.sequence}{called} of {report.path}: {ended}"
    yield ""
    steps = [span(it.first, it.last) for it in report.spans]
    width = max(len("step"), *map(len, steps))
    yield f"{'step':>{width}}"
    for it, step in zip(report.spans, steps, strict=True):
        what = f"{it.what}: " if it.what in (QUEUED, PREFILL, DECODE) else ""
        published = blocks_text(it.published)
        found = f"; published {published.partition(' ')[2]}" if published else ""
        yield f"{step:>{width}}  {what}{it.text}{found}"
