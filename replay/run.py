"""Run: one pass over a tape at one depth, up to the first divergence.

Every depth folds; `plan`, `forward` and `reference` add to it. Where several find something in one
record, the earliest event wins, and the fold before the others.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Protocol

from attrs import define, evolve, field, frozen
from msgspec.structs import astuple

from statemachine.records import Header, Record, StepDone, StepFailed, StepPlanned

from .divergence import CRASH, Diverged, Divergence
from .drafted import of_draft
from .errors import Unusable
from .fold import EACH_STEP, REASONS_KEPT, Counts, Fold
from .hints import with_hint
from .progress import progress
from .reader import HEAD_RECORDS, Tape
from .words import plural

FOLD = "fold"
PLAN = "plan"
FORWARD = "forward"
REFERENCE = "reference"
DEPTHS = (FOLD, PLAN, FORWARD, REFERENCE)

CLEAN, DIVERGED, UNUSABLE, TORN = 0, 1, 2, 3
"""Exit codes."""


def _say_nothing(_what: str) -> None:
    """A function with a name, so that options can be handed to another process."""


@frozen
class Options:
    """How a tape is replayed. adapters: name and path of those that are not where the tape's header
    says, or not on it. margin None: a default that fits the device (models.py). draft_model: where
    the model that guessed is, as `model` says of the other.

    start: a step; begin at the last checkpoint before it. until: the last step to look at. only: a
    sequence; others are not compared. strict: a last step that was never answered is a crash.
    progress: show a bar, where there is a terminal.
    """

    depth: str = FOLD
    model: str | None = None
    adapters: tuple[tuple[str, str], ...] = ()
    margin: float | None = None
    start: int | None = None
    until: int | None = None
    only: int | None = None
    invariants: str = EACH_STEP
    strict: bool = False
    progress: bool = False
    tell: Callable[[str], None] = _say_nothing
    draft_model: str | None = None

    def for_draft(self) -> Options:
        """For the draft model's steps."""
        return evolve(self, model=self.draft_model, draft_model=None, adapters=())


@define
class Outcome:
    """What a replay came to; `figures` are the depth's own counts, in words."""

    path: str
    depth: str
    exit_code: int
    counts: Counts
    header: Header | None
    divergence: Divergence | None = None
    torn: bool = False
    stopped_at: int | None = None
    position: int = 0
    notes: list[str] = field(factory=list)
    figures: dict[str, int | float | str] = field(factory=dict)
    only: int | None = None
    started_after: int | None = None


@frozen
class Pass:
    """What one pass over a tape, or over a part of it, came to; see Outcome, and Fold.

    stopped: before the end, by `until`. cut: the tape stops inside of a frame; no_end: it stops
    without saying so; inside: it stops inside a step.
    """

    counts: Counts
    header: Header | None
    divergence: Divergence | None
    stopped: bool
    cut: bool
    no_end: bool
    inside: bool
    position: int
    notes: list[str]
    figures: dict[str, int | float | str]
    first_failed: StepFailed | None
    gap_reasons: list[str]
    started_after: int | None


class Checker(Protocol):
    """A depth: sees every record after the fold did. needs_fold: but none that did not fold."""

    @property
    def needs_fold(self) -> bool: ...

    def feed(self, record: Record) -> None:
        """One record on. Raises Diverged."""

    def finish(self) -> None:
        """The tape is at its end, or diverged. Raises Diverged."""

    def figures(self) -> dict[str, int | float | str]:
        """What was compared, for the report."""


def checker_for(options: Options, fold: Fold) -> Checker | None:
    """The depth's own checker; deeper ones load the kernel only here."""
    if options.depth == PLAN:
        from .plan import PlanChecker

        return PlanChecker(fold)
    if options.depth == FORWARD:
        from .forward import ForwardChecker

        return ForwardChecker(options, fold)
    if options.depth == REFERENCE:
        from .reference import ReferenceChecker

        return ReferenceChecker(options, fold)
    return None


@contextmanager
def few_collections() -> Iterator[None]:
    """A replay makes frozen values without cycles, which the collector would walk in vain."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def replay(path: str, options: Options) -> Outcome:
    """Replay a tape. Raises Unusable where it cannot be read, or not at this depth."""
    return replay_tape(Tape(path, options.start), options)


def replay_tape(tape: Tape, options: Options) -> Outcome:
    """As `replay`, of a tape that is open already at `options.start`."""
    with few_collections():
        return outcome_of(tape.path, options, [one_pass(tape, options)])


def one_pass(tape: Tape, options: Options, last: bool = True) -> Pass:
    """Over a tape, or over a segment of it, after which, unless it is the `last`, the tape goes on.
    Raises Unusable.
    """
    fold = Fold(options.invariants, options.only)
    checker = checker_for(options, fold)
    divergence: Divergence | None = None
    stopped, at_end = False, False
    watched = progress(tape, f"replay, {options.depth}") if options.progress else nullcontext(tape)
    try:
        with watched as records:
            stopped = _feed_all(fold, checker, records, options.until)
        at_end = not stopped
        if at_end:
            _last_step(fold, tape, options)
        fold.finish()
    except Diverged as diverged:
        divergence = diverged.divergence
    divergence = _finish(checker, divergence)
    if last and at_end and options.only is not None and options.only > fold.state.last_seq:
        raise Unusable(f"{tape.path} has no sequence {options.only}: nothing was compared")
    if at_end and not last:
        fold.counts.records -= HEAD_RECORDS  # those of the segment behind it, which counts them
    notes = list(tape.notes)
    if divergence is not None and fold.counts.records > 1:
        inner = fold.drafted if divergence.draft_step >= 0 else None
        divergence, hint = with_hint(divergence, (inner or fold).state)
        notes += [hint] if hint else []
    inside = fold.pieces or (fold.drafted is not None and fold.drafted.pieces)
    return Pass(
        counts=fold.counts,
        header=tape.header,
        divergence=divergence,
        stopped=stopped,
        cut=last and at_end and tape.torn,
        no_end=last and at_end and not tape.ended,
        inside=bool(inside),
        position=tape.position,
        notes=notes,
        figures={} if checker is None else checker.figures(),
        first_failed=fold.first_failed,
        gap_reasons=fold.gap_reasons,
        started_after=tape.started_after,
    )


def outcome_of(path: str, options: Options, passes: Sequence[Pass]) -> Outcome:
    """Of passes over a tape's parts in order, up to the first that diverges."""
    first, last = passes[0], passes[-1]
    torn = last.cut or last.no_end
    figures: dict[str, int | float | str] = dict(last.figures)
    for name, value in last.figures.items():
        if len(passes) > 1 and isinstance(value, int):
            figures[name] = sum(int(it.figures[name]) for it in passes)
    outcome = Outcome(
        path=path,
        depth=options.depth,
        exit_code=DIVERGED if last.divergence else TORN if torn else CLEAN,
        counts=Counts(*map(sum, zip(*(astuple(it.counts) for it in passes), strict=True))),
        header=first.header,
        divergence=last.divergence,
        torn=torn,
        stopped_at=options.until if last.stopped else None,
        position=last.position,
        notes=list(dict.fromkeys(note for it in passes for note in it.notes)),
        figures=figures,
        only=options.only,
        started_after=first.started_after,
    )
    _add_notes(outcome, passes)
    if options.until is not None and not last.stopped and last.divergence is None:
        outcome.notes.append(f"the tape ends before step {options.until} is answered")
    return outcome


def _feed_all(
    fold: Fold, checker: Checker | None, records: Iterable[Record], until: int | None
) -> bool:
    """Whether it stopped early, with all steps up to `until` answered; that of the last of them
    may stand behind the plan of the next one.
    """
    if until is None:
        for record in records:
            _feed(fold, checker, record)
        return False
    for record in records:
        beyond = isinstance(record, StepPlanned) and record.step > until
        if beyond and min(fold.pieces, default=until + 1) > until:
            return True
        _feed(fold, checker, record)
        if isinstance(record, StepDone | StepFailed) and record.step >= until:
            return True
    return False


def _feed(fold: Fold, checker: Checker | None, record: Record) -> None:
    if checker is None:
        fold.feed(record)
        return
    found: Divergence | None = None
    try:
        fold.feed(record)
    except Diverged as diverged:
        found = diverged.divergence
    if found is None or not checker.needs_fold:
        try:
            checker.feed(record)
        except Diverged as diverged:
            other = diverged.divergence
            if found is None or 0 <= other.event_index < found.event_index:
                found = other
    if found is not None:
        raise Diverged(found)


def _finish(checker: Checker | None, divergence: Divergence | None) -> Divergence | None:
    """A checker that looks at whole requests may still know of an earlier step."""
    if checker is None:
        return divergence
    try:
        checker.finish()
    except Diverged as diverged:
        other = diverged.divergence
        if divergence is None or other.step < divergence.step:
            return other
    return divergence


def _last_step(fold: Fold, tape: Tape, options: Options) -> None:
    """A tape that stops inside a step: its process died in it, or was killed."""
    inner = fold.drafted
    drafted = not fold.pieces and inner is not None and bool(inner.pieces)
    flights = inner.pieces if inner is not None and drafted else fold.pieces
    if not flights:
        return
    step, pieces = next(iter(flights.items()))
    if options.strict:
        what = f"step {step} was issued and never answered: the tape ends there"
        found = Divergence(CRASH, step, what, "StepPlanned", neighbours=pieces.neighbours())
        raise Diverged(of_draft(found, fold.newest_step + 1) if drafted else found)
    tape.notes.append(
        f"the tape ends inside step {step}{' of the draft model' if drafted else ''}: it was "
        "issued, and its result was never written (the process died or was killed then; --strict "
        "counts this as a crash)"
    )


def _add_notes(outcome: Outcome, passes: Sequence[Pass]) -> None:
    counts, last = outcome.counts, passes[-1]
    failed = next((it.first_failed for it in passes if it.first_failed is not None), None)
    if failed is not None:
        outcome.notes.append(
            f"{plural(counts.failed_steps, 'step')} failed when they ran; the first, step "
            f"{failed.step}, at {failed.stage}: {failed.error}"
        )
    if counts.gaps:
        missing, gaps = plural(counts.lost_records, "record"), plural(counts.gaps, "gap")
        reasons = dict.fromkeys(reason for it in passes for reason in it.gap_reasons)
        outcome.notes.append(
            f"{missing} missing in {gaps} ({'; '.join([*reasons][:REASONS_KEPT])}): nothing is "
            "known of these steps"
        )
    if not counts.steps and outcome.divergence is None:
        outcome.notes.append("no step was compared: what was looked at holds none")
    if last.no_end and not last.cut and not last.inside:
        outcome.notes.append(
            "the tape has no end: it was cut, or its process did not stop in order"
        )
