"""Report: an outcome as text for a person, and as JSON with the same content. Prints nothing."""

from __future__ import annotations

import textwrap

import msgspec
from msgspec import Struct, structs

from .advice import MEANING, NextStep, next_steps
from .divergence import Divergence, Happened, Neighbour, Value, Values
from .fold import Counts
from .run import DIVERGED, Outcome
from .words import plural, span, text_words

LINE_CHARS_MAX = 4000
PIECES_SHOWN = 24
CELL_CHARS = 32


class DivergenceReport(Struct, frozen=True, rename={"kind": "class"}):
    """The first divergence. -1 stands for what has no number here.

    class: fold, observation, content, plan, token or crash. step: the step it is in; record: the
    record of that step (StepPlanned, StepDone, StepFailed, Checkpoint); event_index and event: the
    event in that record, which is JSON as the tape writes it. values: quantities as recorded (the
    engine wrote it), derived (it follows from the events) and observed (the caches used it).
    last_events: of the sequence, oldest first; of the record, where no one sequence is at fault.
    neighbours: the batch. draft_step: the draft model's own step, of what is wrong in its pool, in
    the round that stands before `step`. meaning, try_next: for people.
    """

    kind: str
    step: int
    summary: str
    record: str
    event_index: int
    event: str
    sequence: int
    group: int
    block: int
    layer: str
    position: int
    values: tuple[Values, ...]
    last_events: tuple[Happened, ...]
    neighbours: tuple[Neighbour, ...]
    draft_step: int
    meaning: str
    try_next: tuple[NextStep, ...]


class TapeHeader(Struct, frozen=True):
    """What wrote the tape; `format` is the tape's."""

    format: int
    software: str
    model: str
    device: str
    blas: str


class ReplayReport(Struct, frozen=True):
    """What `replay TAPE --json` prints.

    format: of this report. verdict: the first line of the text. exit_code: 0 no divergence, 1
    diverged, 3 clean but torn. torn: the tape stops without its end. started_after: the step of the
    checkpoint it was begun at, with --from. stopped_at: of --until, where that came before the
    tape's end. only: of --seq. bytes: read, uncompressed, of the last file. figures: what the depth
    compared.
    """

    format: int
    verdict: str
    exit_code: int
    diverged: bool
    torn: bool
    depth: str
    path: str
    started_after: int | None
    stopped_at: int | None
    only: int | None
    bytes: int
    counts: Counts
    figures: dict[str, int | float | str | None]
    notes: tuple[str, ...]
    header: TapeHeader | None
    divergence: DivergenceReport | None


def verdict(outcome: Outcome) -> str:
    """One line that says it all."""
    counts, found = outcome.counts, outcome.divergence
    went = f"{plural(counts.steps, 'step')}, {plural(counts.rows, 'row')}"
    missing, gaps = plural(counts.lost_records, "record"), plural(counts.gaps, "gap")
    lost = f", {missing} missing in {gaps}" if counts.gaps else ""
    if found is not None:
        who = f", sequence {found.sequence}" if found.sequence >= 0 else ""
        what = found.summary.removeprefix(f"sequence {found.sequence}: ") + _events_apart(found)
        return f"DIVERGED at step {found.step}{who} ({found.kind}): {what}"
    if outcome.torn:
        return f"CLEAN BUT TORN at depth {outcome.depth}: {went} agree{lost}, then the tape stops"
    part = ""
    if outcome.started_after:
        part += f" from step {outcome.started_after + 1}"
    if outcome.stopped_at is not None:
        part += f" up to step {outcome.stopped_at}"
    if outcome.only is not None:
        part += f", sequence {outcome.only} only"
    return f"CLEAN at depth {outcome.depth}{part}: {went} agree{lost}"


def _events_apart(found: Divergence) -> str:
    """Two events that should be one, in words."""
    for it in found.values:
        if it.name == "event":
            recorded, derived = (
                text_words(str(it.recorded), True),
                text_words(str(it.derived), True),
            )
            return f" (on tape: {recorded}; now: {derived})"
    return ""


def as_text(outcome: Outcome) -> str:
    """The whole report."""
    lines = [verdict(outcome), ""]
    header = outcome.header
    if header is not None:
        lines.append(f"tape      {outcome.path}: {header.software}, model {header.model}")
        lines.append(f"          {header.device or 'device unknown'}, {header.blas or 'no BLAS'}")
    counts = outcome.counts
    failed = f" ({counts.failed_steps} failed)" if counts.failed_steps else ""
    lines.append(
        f"replayed  {plural(counts.records, 'record')}, {plural(counts.events, 'event')}, "
        f"{plural(counts.steps, 'step')}{failed}, {plural(counts.rows, 'row')}; "
        f"{outcome.position:,} bytes"
    )
    lines += [f"compared  {name}: {value}" for name, value in outcome.figures.items()]
    lines += [f"note      {note}" for note in outcome.notes]
    if outcome.divergence is not None:
        lines += ["", *_divergence_lines(outcome.divergence, outcome)]
    return "\n".join(map(_shortened, lines))


def _shortened(line: str) -> str:
    """A line that a terminal can take; the JSON report has all of it."""
    if len(line) <= LINE_CHARS_MAX:
        return line
    return f"{line[:LINE_CHARS_MAX]} ... ({len(line)} characters; --json has all of them)"


def _divergence_lines(found: Divergence, outcome: Outcome) -> list[str]:
    lines = [f"class     {found.kind}", f"step      {found.step}"]
    if found.draft_step >= 0:
        lines[-1] += f", before it step {found.draft_step} of the draft model"
    if found.record:
        where = found.record if found.event_index < 0 else f"{found.record}[{found.event_index}]"
        words = f": {text_words(found.event)}" if found.event else ""
        lines.append(f"event     {where}{words}")
        if words:
            lines.append(f"          {found.event}")
    for name, number in (
        ("sequence", found.sequence),
        ("group", found.group),
        ("block", found.block),
        ("position", found.position),
    ):
        if number >= 0:
            lines.append(f"{name:<9} {number}")
    if found.layer:
        lines.append(f"layer     {found.layer}")
    if found.values:
        lines += ["", *_value_lines(found)]
    lines += _history_lines(found) + _batch_lines(found)
    lines += ["", *_wrapped(f"This usually means: {MEANING[found.kind]}"), "", "Try next:"]
    steps = next_steps(found, outcome)
    width = max(len(step.command) for step in steps)
    return [*lines, *(f"  {step.command:<{width}}   {step.tells}" for step in steps)]


def _history_lines(found: Divergence) -> list[str]:
    if not found.last_events:
        return []
    alone = found.sequence >= 0
    whose = f"last events of sequence {found.sequence}" if alone else "the events of that record"
    lines = ["", f"{whose} (step, record[event])"]
    width = max(len(f"{it.step}  {it.record}[{it.index}]") for it in found.last_events)
    for it in found.last_events:
        where = f"{it.step}  {it.record}[{it.index}]"
        lines.append(f"  {where:<{width}}  {text_words(it.event, named=not alone)}")
    return lines


def _batch_lines(found: Divergence) -> list[str]:
    """The pieces of the batch; of many those around the one at fault."""
    pieces = found.neighbours
    if not pieces:
        return []
    at = next((it.piece for it in pieces if it.sequence == found.sequence), 0)
    first = max(0, min(at - PIECES_SHOWN // 2, len(pieces) - PIECES_SHOWN))
    shown = pieces[first : first + PIECES_SHOWN]
    lines = ["", f"the batch of step {found.step}: {plural(len(pieces), 'sequence')}"]
    for it in shown:
        rows = (
            f"position {it.start}"
            if it.rows == 1
            else (f"positions {span(it.start, it.start + it.rows - 1)} ({it.rows} rows)")
        )
        mark = "   <- this one" if it.sequence == found.sequence else ""
        lines.append(f"  {it.piece:>3}  sequence {it.sequence}, {rows}{mark}")
    if len(shown) < len(pieces):
        lines.append(f"       and {len(pieces) - len(shown)} more (--json has all of them)")
    return lines


def _value_lines(found: Divergence) -> list[str]:
    rows = [("", "recorded", "derived", "observed")]
    rows += [
        (it.name, _shown(it.recorded), _shown(it.derived), _shown(it.observed))
        for it in found.values
    ]
    if any(len(cell) > CELL_CHARS for row in rows for cell in row[1:]):
        lines = []
        for row in rows[1:]:
            lines.append(row[0])
            cells = zip(rows[0][1:], row[1:], strict=True)
            lines += [f"  {name:<9} {cell}" for name, cell in cells if cell]
    else:
        widths = [max(len(row[at]) for row in rows) for at in range(4)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
    used = [
        meaning
        for at, meaning in enumerate(
            (
                "recorded: what the engine wrote on tape",
                "derived: what follows from the events",
                "observed: what the caches really used",
            ),
            start=1,
        )
        if any(row[at] for row in rows[1:])
    ]
    return [*lines, *_wrapped(f"({'; '.join(used)})")]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100)


def _shown(value: Value) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(map(str, value)) + ")"
    return "" if value is None else str(value)


def as_report(outcome: Outcome) -> ReplayReport:
    """The same content for programs."""
    found, header = outcome.divergence, outcome.header
    told: TapeHeader | None = None
    if header is not None:
        told = TapeHeader(header.format, header.software, header.model, header.device, header.blas)
    diverged: DivergenceReport | None = None
    if found is not None:
        diverged = DivergenceReport(
            **structs.asdict(found),
            meaning=MEANING[found.kind],
            try_next=next_steps(found, outcome),
        )
    return ReplayReport(
        format=1,
        verdict=verdict(outcome),
        exit_code=outcome.exit_code,
        diverged=outcome.exit_code == DIVERGED,
        torn=outcome.torn,
        depth=outcome.depth,
        path=outcome.path,
        started_after=outcome.started_after,
        stopped_at=outcome.stopped_at,
        only=outcome.only,
        bytes=outcome.position,
        counts=outcome.counts,
        figures=dict(outcome.figures),
        notes=tuple(outcome.notes),
        header=told,
        divergence=diverged,
    )


def json_text(report: Struct) -> str:
    """A report as JSON, for printing."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


def as_json(outcome: Outcome) -> str:
    """The report as JSON."""
    return json_text(as_report(outcome))
