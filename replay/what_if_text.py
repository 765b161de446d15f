"""What-if text: two runs of a load beside each other, for a person."""

from __future__ import annotations

from collections.abc import Callable

from .spread import Percentiles
from .stat import StatReport
from .what_if import Change, WhatIfReport
from .words import plural

Cell = Callable[[StatReport], float | int | str | None]


def _spread(pick: Callable[[StatReport], Percentiles | None], which: str) -> Cell:
    def cell(report: StatReport) -> float | None:
        found = pick(report)
        return None if found is None else float(getattr(found, which))

    return cell


_LINES: tuple[tuple[str, Cell], ...] = (
    ("steps", lambda it: it.steps.planned),
    ("rows", lambda it: it.rows.issued),
    ("rows in one step at most", lambda it: it.rows.most),
    ("padding rows", lambda it: it.rows.padding),
    ("waiting steps, median", _spread(lambda it: it.waiting_steps, "median")),
    ("waiting steps, 90 %", _spread(lambda it: it.waiting_steps, "p90")),
    ("waiting steps, most", _spread(lambda it: it.waiting_steps, "most")),
    ("request's steps, median", _spread(lambda it: it.request_steps, "median")),
    ("request's steps, 99 %", _spread(lambda it: it.request_steps, "p99")),
    ("running at once at most", lambda it: it.requests.running_most),
    ("waiting at once at most", lambda it: it.requests.waiting_most),
    ("preemptions", lambda it: it.requests.preemptions),
    ("rows computed again", lambda it: it.rows.again),
    ("prefix hit rate, %", lambda it: _percent(it.prefix.hit_rate)),
    ("blocks evicted", lambda it: it.prefix.evicted),
    ("blocks held at most", lambda it: ", ".join(str(use.held_most) for use in it.pool)),
    ("rows taken back", lambda it: it.rows.lookahead_rewound + it.rows.rejected),
    ("guesses accepted, %", lambda it: _percent(it.acceptance_rate)),
    ("answer tokens", lambda it: it.answer_tokens),
)


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 1)


def verdict(changes: tuple[Change, ...], before: StatReport, after: StatReport) -> str:
    """One line that says it all."""
    tried = ", ".join(f"{it.name}={it.tried} (was {it.recorded})" for it in changes)
    steps, was = after.steps.planned, before.steps.planned
    change = f" ({(steps - was) / was:+.1%})" if was else ""
    went = f"{plural(steps, 'step')} instead of {was}{change}"
    return f"WHAT IF {tried}: {went}" if tried else f"SAME SETTINGS, run again: {went}"


def as_text(report: WhatIfReport) -> str:
    """The report for a person."""
    lines = [report.verdict, f"  {'':<26}{'recorded':>12}{'tried':>12}"]
    for name, cell in _LINES:
        was, now = cell(report.recorded), cell(report.tried)
        if was or now:
            lines.append(f"  {name:<26}{_shown(was):>12}{_shown(now):>12}")
    lines += [f"  note: {note}" for note in report.notes]
    return "\n".join(lines)


def _shown(value: float | int | str | None) -> str:
    if value is None or value == "":
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)
