"""Diff text: what `replay diff` found, for a person."""

from __future__ import annotations

from collections.abc import Iterator

from .diff import LENGTH, PARAMETERS, PROMPT, REASON, TOKEN, Difference, DiffReport, Side
from .schedules import ScheduleDifference
from .words import plural

NEAR = 0.05
"""Margins below it may flip by rounding alone; the default of --margin on a CPU."""


def verdict(
    matched: int,
    tokens: int,
    first: Difference | None,
    only: list[int],
    schedule: ScheduleDifference | None,
) -> str:
    """One line that says it all."""
    compared = f"{plural(matched, 'request')}, {plural(tokens, 'token')} compared"
    if first is not None:
        return f"DIFFERENT: {_name(first)} {_what(first)} ({compared})"
    if any(only):
        return (
            f"DIFFERENT: {compared} and the same, but {plural(only[0], 'request')} only in the "
            f"good run and {plural(only[1], 'request')} only in the bad one"
        )
    if schedule is not None:
        return f"DIFFERENT schedules from step {schedule.step} on, the same answers ({compared})"
    return f"SAME: {compared}"


def _name(found: Difference) -> str:
    named = f" ({found.external_id})" if found.external_id else ""
    other = (
        f", {found.bad.request} in the bad run" if found.bad.request != found.good.request else ""
    )
    return f"request {found.good.request}{named}{other}"


def _what(found: Difference) -> str:
    good, bad = found.good, found.bad
    if found.kind == TOKEN:
        return (
            f"has token {good.token} at place {found.place} of its answer in the good run, and "
            f"{bad.token} in the bad one"
        )
    if found.kind == LENGTH:
        return (
            f"has {plural(good.answer_tokens, 'answer token')} in the good run and "
            f"{bad.answer_tokens} in the bad one, the same up to there"
        )
    if found.kind == REASON:
        return (
            f"ends by {good.reason} after {good.answer_tokens} tokens in the good run, by "
            f"{bad.reason} after {bad.answer_tokens} in the bad one"
        )
    return f"has other {'prompt tokens' if found.kind == PROMPT else found.kind} in the bad run"


def as_text(report: DiffReport) -> str:
    """The report for a person."""
    lines = [report.verdict]
    if report.first is not None:
        lines += [f"  {line}" for line in _first_lines(report, report.first)]
    lines += [f"  then {_name(it)} {_what(it)}" for it in report.others]
    total = sum(report.differing.values())
    if total > 1:
        kinds = ", ".join(f"{count} by {kind}" for kind, count in report.differing.items())
        lines.append(f"  {total} of {report.matched} requests differ: {kinds}")
    lines += [f"  {line}" for line in _closing_lines(report)]
    lines += [f"  note: {note}" for note in report.notes]
    return "\n".join(lines)


def _first_lines(report: DiffReport, found: Difference) -> Iterator[str]:
    for name, side in (("good", found.good), ("bad", found.bad)):
        cached = f"{side.cached_tokens} prompt rows found computed"
        if side.cached_tokens < 0:
            cached = "admitted before the tape's start, or never"
        yield (
            f"{name:<4} request {side.request}, step {side.step}: {side.answer_tokens} tokens, "
            f"ended by {side.reason}; {cached}"
        )
        if found.kind not in (PROMPT, PARAMETERS):
            yield f"     {_context(side)}"
    if found.kind == TOKEN:
        yield from _token_advice(report, found)


def _context(side: Side) -> str:
    before = " ".join(str(token) for token in side.before)
    after = " ".join(str(token) for token in side.after)
    here = "(no token)" if side.token is None else f"[{side.token}]"
    known = ""
    if side.logit is not None and side.margin is not None:
        known = f"   logit {side.logit:.6g}, {side.margin:.6g} above the next"
    return f"... {before} {here} {after}".rstrip() + known


def _token_advice(report: DiffReport, found: Difference) -> Iterator[str]:
    margins = [side.margin for side in (found.good, found.bad) if side.margin is not None]
    if margins and min(margins) < NEAR:
        yield (
            f"the two tokens were nearly equal ({min(margins):.3g} apart): rounding in another "
            "batch or on another device is enough to flip them"
        )
    elif found.good.cached_tokens != found.bad.cached_tokens:
        yield (
            "the runs found other numbers of prompt rows computed: look at where these rows came "
            "from"
        )
    yield f"try: replay {report.bad}"
    yield f"     replay show {report.bad} --at {found.bad.step}"
    yield f"     replay {report.bad} --depth reference --seq {found.bad.request}"


def _closing_lines(report: DiffReport) -> Iterator[str]:
    if report.first is not None and (report.only_good or report.only_bad):
        yield (
            f"{plural(report.only_good, 'request')} only in the good run, {report.only_bad} only "
            "in the bad one"
        )
    by_content = report.matched - report.matched_by_id
    yield (
        f"matched: {report.matched_by_id} by external id, {by_content} by prompt and parameters; "
        f"logits of equal tokens at most {report.logit_most:.3g} apart"
    )
    if report.cached_differ:
        yield (
            f"{plural(report.cached_differ, 'request')} found another number of prompt rows "
            "computed, which should change no answer"
        )
    if report.schedule is not None:
        it = report.schedule
        yield f"schedules differ from step {it.step} on, after {plural(it.place, 'equal part')}:"
        yield f"  good: {it.good}"
        yield f"  bad:  {it.bad}"
    elif report.schedule_same:
        yield "the schedules are the same, step for step"
