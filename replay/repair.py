"""Repair: `replay repair TAPE -o FILE`, what of a torn or damaged tape can be kept, as a whole one.

Owns the command and what becomes of a loss: the end of the new tape, or a Gap in it. What can be
read is salvage.py's. No record that is kept is changed.
"""

from __future__ import annotations

from msgspec import Struct

from statemachine.records import Gap, Record, StepDone, StepFailed, StepPlanned, TapeEnded

from .errors import Unusable
from .report import json_text, verdict
from .rewrite import NewTape, check_output, new_tape, rewriting_parser
from .run import CLEAN, DIVERGED, Options, replay
from .salvage import Loss, Salvage
from .words import plural

WHY = "left out by replay repair"


class RepairReport(Struct, frozen=True, kw_only=True):
    """What `replay repair --json` prints.

    whole: nothing was wrong with the tape. losses: what cannot be kept, in order; the first is the
    end of the new tape, unless `resumed`. records, bytes: of the new tape. steps: the newest step
    that was planned on it; unanswered: steps that were in flight at the first loss. steps_behind:
    the newest step behind the first loss that --resume would keep, 0 where it would keep none.
    verdict: of `replay` on the new tape, diverged: whether that found a divergence.
    """

    format: int = 1
    path: str
    output: str
    whole: bool
    resumed: bool
    records: int
    bytes: int
    steps: int
    unanswered: tuple[int, ...]
    steps_behind: int
    losses: tuple[Loss, ...]
    verdict: str
    diverged: bool
    notes: tuple[str, ...]


def repair(path: str, output: str, resume: bool = False) -> RepairReport:
    """Write what can be kept of a tape. Raises Unusable; then nothing is left at `output`."""
    check_output(output, path)
    with new_tape(output) as tape:
        salvage = Salvage(path)
        copy = _Copy(tape, resume)
        for item in salvage:
            copy.take(item)
        copy.end(path, salvage.header is not None)
        tape.close()
        outcome = replay(tape.path, Options())
        if outcome.exit_code not in (CLEAN, DIVERGED):
            raise Unusable(f"what can be kept of {path} is no whole tape: {verdict(outcome)}")
    return RepairReport(
        path=path,
        output=output,
        whole=not copy.losses,
        resumed=resume,
        records=tape.records,
        bytes=tape.bytes,
        steps=copy.step,
        unanswered=copy.unanswered,
        steps_behind=salvage.step if copy.cut and salvage.step > copy.step else 0,
        losses=tuple(copy.losses),
        verdict=verdict(outcome),
        diverged=outcome.exit_code == DIVERGED,
        notes=tuple(salvage.notes),
    )


class _Copy:
    """What is kept. step: the newest that was planned. cut: nothing more is kept."""

    def __init__(self, tape: NewTape, resume: bool) -> None:
        self.losses: list[Loss] = []
        self.step = 0
        self.unanswered: tuple[int, ...] = ()
        self.cut = False
        self._tape = tape
        self._resume = resume
        self._ended = False
        self._flights: list[int] = []

    def take(self, item: Record | Loss) -> None:
        """What comes next on the tape."""
        if isinstance(item, Loss):
            self._lose(item)
        elif not self.cut:
            self._tape.put(item)
            self._ended = isinstance(item, TapeEnded)
            if isinstance(item, StepPlanned):
                self.step = item.step
                self._flights.append(item.step)
            elif isinstance(item, StepDone | StepFailed) and item.step in self._flights:
                self._flights.remove(item.step)

    def _lose(self, loss: Loss) -> None:
        if not self.losses:
            self.unanswered = tuple(self._flights)
        self.losses.append(loss)
        if self._tape.records and not self.cut:
            self._tape.put(Gap(loss.records + bool(loss.bytes), f"{WHY}: {loss.why}"))
        self._flights.clear()
        self._ended = False
        self.cut = not self._resume

    def end(self, path: str, readable: bool) -> None:
        """An end for a tape that has none. Raises Unusable where nothing is kept; `readable`: of
        what comes behind the first loss something could be.
        """
        if not self._tape.records:
            more = ": --resume keeps what is behind that" if readable else ""
            raise Unusable(f"nothing of {path} can be kept, for {self.losses[0].why}{more}")
        if not self._ended:
            self._tape.put(TapeEnded(self.step))


def as_text(report: RepairReport) -> str:
    """The report for a person."""
    kept = f"{plural(report.records, 'record')}, up to step {report.steps}"
    if report.whole:
        lines = [f"WHOLE: nothing was wrong with {report.path}; {report.output} is a copy ({kept})"]
    else:
        lines = [f"REPAIRED: {report.output} holds {kept}"]
    lines += [f"lost      {_loss_text(loss)}" for loss in report.losses]
    if report.unanswered:
        steps = ", ".join(str(step) for step in report.unanswered)
        lines.append(f"note      in flight there, so never answered: step {steps}")
    if report.steps_behind:
        lines.append(
            f"note      --resume would go on behind that, up to step {report.steps_behind}"
        )
    lines += [f"note      {note}" for note in report.notes]
    return "\n".join([*lines, f"replay    {report.verdict}"])


def _loss_text(loss: Loss) -> str:
    found = f", {plural(loss.records, 'whole record')} in them" if loss.records else ""
    size = f"{plural(loss.bytes, 'byte')}{found}, " if loss.bytes else ""
    behind = f"behind step {loss.after_step}, to the tape's end"
    if loss.until_step is not None:
        behind = f"behind step {loss.after_step}, up to the checkpoint after {loss.until_step}"
    return f"{size}{behind}: {loss.why}"


def main(arguments: list[str]) -> int:
    """`replay repair`."""
    parser = rewriting_parser(
        "replay repair",
        "Write what can be kept of a torn or damaged tape as a new, whole one. The "
        "tape itself is not changed.",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on at the next checkpoint behind damage, with a gap, instead of ending there",
    )
    given = parser.parse_args(arguments)
    report = repair(given.tape, given.output, given.resume)
    print(json_text(report) if given.json else as_text(report))
    return CLEAN
