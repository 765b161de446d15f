"""History: a whole tape as columns, one value a step, and its requests as lanes; for drawing.

Memory grows with the steps (60 bytes each, more with many groups) and with what happens to
requests, not with rows. The pool is counted as it stands while a step's forward runs. Compares
nothing.
"""

from __future__ import annotations

from array import array
from collections import Counter

from msgspec import Struct

from statemachine.events import (
    DECODE,
    DRAFT,
    LOOKAHEAD,
    PAD,
    PROMPT,
    Appended,
    AppendedEach,
    Closed,
    PoolReset,
)
from statemachine.records import (
    Checkpoint,
    Finished,
    Gap,
    Header,
    Record,
    RequestArrived,
    RequestCancelled,
    StepDone,
    StepFailed,
    StepPlanned,
    StepTimed,
)

from .answers import Answer
from .errors import Unusable
from .following import Following
from .lanes import WAITING, Lanes

STEPS_MAX = 1_000_000
ROWS = (PROMPT, DECODE, DRAFT, LOOKAHEAD, PAD)
"""Purposes, in the order in which they are stacked."""
COLUMNS = ("step", *ROWS, "sequences", "waiting", "flags", "time_us")
FAILED, LOST, UNANSWERED, AFTER_GAP = 1, 2, 4, 8
"""Flags of a step: it failed; the pages were lost with it; it has no answer on tape; records are
missing before it.
"""
UNKNOWN = -1


class Failure(Struct, frozen=True):
    """A step that failed, by its place."""

    place: int
    stage: str
    error: str


class History:
    """Feed it a tape's records in order, then `finish`.

    columns: by name, and held_G and cached_G for the blocks of each group G that has some; UNKNOWN
    from where the tape cannot be followed, whose place is `broken_at`, and `broken` says why. done:
    the end that was asked for was reached.
    """

    def __init__(self, until: int | None = None) -> None:
        """`until`: what stands behind the answer of this step is not taken in."""
        self.done = False
        self._until = until
        self.columns: dict[str, array[int]] = {name: array("q") for name in COLUMNS}
        self.lanes = Lanes()
        self.failures: list[Failure] = []
        self.header: Header | None = None
        self.groups: list[int] = []
        self.broken = ""
        self.broken_at = UNKNOWN
        self._following = Following()
        self._places: dict[int, int] = {}
        self._gap = False
        self._start = True

    @property
    def steps(self) -> int:
        """Planned steps so far; the place of the next one."""
        return len(self.columns["step"])

    def place_of(self, step: int) -> int:
        """The place of a step: of the last one planned under that number; UNKNOWN if none was."""
        numbers = self.columns["step"]
        return next((at for at in range(len(numbers) - 1, -1, -1) if numbers[at] == step), UNKNOWN)

    def feed(self, record: Record) -> None:
        """One record on. Raises Unusable where the tape makes no sense, or has too many steps."""
        if self._until is not None and self._ends(record, self._until):
            return
        ending = self._ending(record)
        self._following.feed(record)
        for request, answer in ending:
            lane = self.lanes.lane_of(request)
            if lane is not None and not self._following.broken:
                lane.answer_tokens = len(answer.before) + len(answer.samples)
        if isinstance(record, Header):
            self._begin(record)
        elif isinstance(record, Checkpoint):
            if self._start:
                self.lanes.checkpoint(record, self.steps)
            self._start = False
        elif isinstance(record, Gap):
            self._gap = self._start = True
        elif isinstance(record, RequestArrived):
            self.lanes.arrived(record, self.steps)
        elif isinstance(record, RequestCancelled):
            self.lanes.cancelled(record, self.steps)
        elif isinstance(record, Finished):
            self.lanes.finished(record)
        elif isinstance(record, StepPlanned):
            self._planned(record)
        elif isinstance(record, StepDone | StepFailed):
            self._answered(record)
        elif isinstance(record, StepTimed):
            self._timed(record)

    def _ends(self, record: Record, until: int) -> bool:
        """Whether a record is beyond the end; that of the last step may stand behind the plan of
        the next one.
        """
        if self.done:
            return True
        if isinstance(record, StepPlanned) and record.step > until:
            self.done = not any(it <= until for it in self._places)
            return self.done
        self.done = isinstance(record, StepDone | StepFailed) and record.step >= until
        return False

    def finish(self) -> None:
        """No record follows: those of the tape are at their end, so that no answer comes, or at
        `until`.
        """
        self.lanes.finish(self.steps)
        if self._until is None:
            for place in self._places.values():
                self.columns["flags"][place] |= UNANSWERED

    def _ending(self, record: Record) -> list[tuple[int, Answer]]:
        """Answers of the requests that a record ends: Following forgets them with it."""
        live = self._following.answers.live
        gone = [it.seq for it in getattr(record, "events", ()) if isinstance(it, Closed)]
        if isinstance(record, RequestCancelled):
            gone.append(record.request)
        return [(seq, live[seq]) for seq in gone if seq in live]

    def _begin(self, record: Header) -> None:
        if self.header is None:
            self.header = record
            self.groups = list(self._following.state.paged_groups())
            for group in self.groups:
                self.columns[f"held_{group}"] = array("q")
                self.columns[f"cached_{group}"] = array("q")

    def _planned(self, record: StepPlanned) -> None:
        place, columns = self.steps, self.columns
        if place >= STEPS_MAX:
            raise Unusable(
                f"the tape has more than {STEPS_MAX:,} steps, too many for one page: choose a part "
                "with --from STEP and --until STEP"
            )
        for event in record.events:
            self.lanes.apply(event, place, place)
        rows: Counter[str] = Counter()
        for event in record.events:
            if isinstance(event, AppendedEach):
                rows[event.purpose] += len(event.seqs)
            elif isinstance(event, Appended):
                rows[event.purpose] += event.rows
        for purpose in ROWS:
            columns[purpose].append(rows[purpose])
        columns["step"].append(record.step)
        pieces = self._following.flights.get(record.step)
        columns["sequences"].append(UNKNOWN if pieces is None else len(pieces.seqs))
        columns["waiting"].append(sum(self.lanes.phases[phase] for phase in WAITING))
        columns["flags"].append(AFTER_GAP if self._gap else 0)
        columns["time_us"].append(UNKNOWN)
        self._gap = self._start = False
        self._places[record.step] = place
        self._pool(place)

    def _pool(self, place: int) -> None:
        following = self._following
        known = not following.broken
        if not known and self.broken_at == UNKNOWN:
            self.broken, self.broken_at = following.broken, place
        for group in self.groups:
            held = following.state.held_blocks(group) if known else UNKNOWN
            cached = following.state.cached_blocks(group) if known else UNKNOWN
            self.columns[f"held_{group}"].append(held)
            self.columns[f"cached_{group}"].append(cached)

    def _answered(self, record: StepDone | StepFailed) -> None:
        place = self._places.pop(record.step, None)
        if place is None:
            return
        if isinstance(record, StepFailed):
            self.columns["flags"][place] |= FAILED
            if PoolReset() in record.events:
                self.columns["flags"][place] |= LOST
            self.failures.append(Failure(place, record.stage, record.error))
            self.lanes.failed(record.blamed, place)
        for event in record.events:
            self.lanes.apply(event, place, place + 1)

    def _timed(self, record: StepTimed) -> None:
        """It follows its step's answer closely, but for the plans between."""
        numbers = self.columns["step"]
        for place in range(self.steps - 1, max(-1, self.steps - 4), -1):
            if numbers[place] == record.step:
                self.columns["time_us"][place] = sum(record.parts_us.values())
                return
