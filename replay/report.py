"""Report: an outcome as text for a person, and as JSON with the same content. Prints nothing."""

from __future__ import annotations

import json
from typing import Any

from msgspec import structs

from .divergence import CONTENT, CRASH, FOLD, OBSERVATION, PLAN, TOKEN, Divergence, Value
from .run import DIVERGED, Outcome

LINE_CHARS_MAX = 4000

MEANING = {
    FOLD: (
        "The events on tape do not lead to the state that is on tape: an event was lost, changed "
        "or emitted wrongly, or the tape is of another version.",
        "Look at the event and the ones before it; `replay show --seq` lists all of a sequence's. "
        "`--invariants event` finds a broken invariant at the event that broke it.",
    ),
    OBSERVATION: (
        "The kernel's caches did not see the lengths or tables that the state has: a second copy "
        "of a length went its own way (rows that were trimmed are still there, or an offset that "
        "was not moved back).",
        "Compare observed with derived: the difference is the number of rows that one side has "
        "and the other has not. Then see which event last changed the derived value.",
    ),
    CONTENT: (
        "A physical row does not hold the row that its sequence should read there: a pad row left "
        "visible, a block of another request, a freed or never written block.",
        "Find who wrote the block last: `replay show --seq` of the neighbours, or search the "
        "tape for the block's number. Run with `--sanitize full` to catch the first bad write.",
    ),
    PLAN: (
        "The scheduler of this version does not decide what is on tape: its policy was changed, "
        "it depends on something that is no input, or the tape was.",
        "If the scheduler was changed on purpose, this is that change. If not, replay with the "
        "version that wrote the tape; if that diverges too, it is not deterministic.",
    ),
    TOKEN: (
        "The model does not give what is on tape, although lengths and tables are right: wrong "
        "rows with right tags, other weights, or another arithmetic.",
        "See whether --depth forward is clean: then the batch gave this token, and what is in it "
        "(padding, a shared prefix, neighbours) is at fault; if not, the device or weights are.",
    ),
    CRASH: (
        "A step was issued and its result never came: the process died inside the forward.",
        "`replay show --at` this step prints its batch. `--depth forward` runs the steps before it "
        "again: if they agree, the batch itself, or the machine (memory), ended the process.",
    ),
}


def verdict(outcome: Outcome) -> str:
    """One line that says it all."""
    counts, found = outcome.counts, outcome.divergence
    went = f"{counts.steps} steps, {counts.rows} rows"
    lost = f", {counts.lost_records} records lost on a full disk" if counts.gaps else ""
    if found is not None:
        who = f", sequence {found.sequence}" if found.sequence >= 0 else ""
        return f"DIVERGED at step {found.step}{who} ({found.kind}): {found.summary}"
    if outcome.torn:
        return f"CLEAN BUT TORN at depth {outcome.depth}: {went} agree{lost}, then the tape stops"
    until = f" up to step {outcome.stopped_at}" if outcome.stopped_at is not None else ""
    if outcome.only is not None:
        until += f", sequence {outcome.only} only"
    return f"CLEAN at depth {outcome.depth}{until}: {went} agree{lost}"


def as_text(outcome: Outcome) -> str:
    """The whole report."""
    lines = [verdict(outcome), ""]
    header = outcome.header
    if header is not None:
        lines.append(f"tape      {outcome.path}: {header.software}, model {header.model}")
        lines.append(f"          {header.device or 'device unknown'}, {header.blas or 'no BLAS'}")
    counts = outcome.counts
    lines.append(
        f"replayed  {counts.records} records, {counts.events} events, {counts.steps} steps "
        f"({counts.failed_steps} failed), {counts.rows} rows; {outcome.position} bytes"
    )
    lines += [f"compared  {name}: {value}" for name, value in outcome.figures.items()]
    lines += [f"note      {note}" for note in outcome.notes]
    if outcome.divergence is not None:
        lines += ["", *_divergence_lines(outcome.divergence)]
    return "\n".join(map(_shortened, lines))


def _shortened(line: str) -> str:
    """A line that a terminal can take; the JSON report has all of it."""
    if len(line) <= LINE_CHARS_MAX:
        return line
    return f"{line[:LINE_CHARS_MAX]} ... ({len(line)} characters; --json has all of them)"


def _divergence_lines(found: Divergence) -> list[str]:
    lines = [f"class     {found.kind}", f"step      {found.step}"]
    if found.record:
        where = found.record if found.event_index < 0 else f"{found.record}[{found.event_index}]"
        lines.append(f"event     {where} {found.event}".rstrip())
    for name, number in (
        ("sequence", found.sequence),
        ("group", found.group),
        ("position", found.position),
    ):
        if number >= 0:
            lines.append(f"{name:<9} {number}")
    if found.layer:
        lines.append(f"layer     {found.layer}")
    if found.values:
        lines += ["", *_value_lines(found)]
    if found.last_events:
        lines += ["", f"last events of sequence {found.sequence}"]
        lines += [
            f"  step {it.step:<6} {it.record}[{it.index}]  {it.event}" for it in found.last_events
        ]
    if found.neighbours:
        lines += ["", "the batch (piece: sequence, first position, rows)"]
        lines += [
            f"  {it.piece}: sequence {it.sequence}, {it.start}, {it.rows}"
            for it in found.neighbours
        ]
    meaning, next_step = MEANING[found.kind]
    return [*lines, "", f"This usually means: {meaning}", f"Try next: {next_step}"]


def _value_lines(found: Divergence) -> list[str]:
    rows = [("", "recorded", "derived", "observed")]
    rows += [
        (it.name, _shown(it.recorded), _shown(it.derived), _shown(it.observed))
        for it in found.values
    ]
    if any(len(cell) > 32 for row in rows for cell in row[1:]):
        lines = []
        for row in rows[1:]:
            lines.append(row[0])
            lines += [
                f"  {name:<9} {cell}"
                for name, cell in zip(rows[0][1:], row[1:], strict=True)
                if cell
            ]
        return lines
    widths = [max(len(row[at]) for row in rows) for at in range(4)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _shown(value: Value) -> str:
    return "" if value is None else str(value)


def as_json(outcome: Outcome) -> str:
    """The same content for programs."""
    found, header = outcome.divergence, outcome.header
    report: dict[str, Any] = {
        "verdict": verdict(outcome),
        "exit_code": outcome.exit_code,
        "diverged": outcome.exit_code == DIVERGED,
        "torn": outcome.torn,
        "depth": outcome.depth,
        "path": outcome.path,
        "stopped_at": outcome.stopped_at,
        "bytes": outcome.position,
        "counts": structs.asdict(outcome.counts),
        "figures": outcome.figures,
        "notes": outcome.notes,
        "divergence": None if found is None else _divergence_json(found),
    }
    if header is not None:
        report["header"] = {
            name: getattr(header, name)
            for name in ("software", "model", "device", "blas", "format")
        }
    return json.dumps(report, indent=2)


def _divergence_json(found: Divergence) -> dict[str, Any]:
    data = structs.asdict(found)
    for name in ("values", "last_events", "neighbours"):
        data[name] = [structs.asdict(it) for it in data[name]]
    data["class"] = data.pop("kind")
    meaning, next_step = MEANING[found.kind]
    return {**data, "meaning": meaning, "try_next": next_step}
