"""Stat text: what `replay stat` found, for a person."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from statemachine.geometry import RECURRENT

from .spread import Percentiles
from .stat import PrefixCounts, StatReport, rate
from .tally import WHOLE
from .words import plural

LINE_CHARS = 110


def as_text(report: StatReport) -> str:
    """The report for a person."""
    lines = [report.verdict]
    for name, text in _lines(report):
        lines += textwrap.wrap(
            text, LINE_CHARS, initial_indent=f"  {name:<10} ", subsequent_indent=" " * 15
        )
    lines += [f"  note: {note}" for note in report.notes]
    if report.stopped:
        lines.append(f"  STOPPED COUNTING: {report.stopped} (`replay {report.path}` says more)")
    return "\n".join(lines)


def _lines(report: StatReport) -> Iterator[tuple[str, str]]:
    requests, rows = report.requests, report.rows
    ended = ", ".join(f"{count} {reason}" for reason, count in requests.ended.items())
    carried = f", {requests.carried} live before it" if requests.carried else ""
    live = f", {requests.live} still live at its end" if requests.live else ""
    yield "requests", f"{requests.arrived} arrived{carried}; ended: {ended or 'none'}{live}"
    yield "", f"at once: {requests.running_most} running, {requests.waiting_most} waiting at most"
    yield "tokens", f"{report.prompt_tokens} in, {report.answer_tokens} out"
    yield from _prefix_lines(report.prefix)
    for use in report.pool:
        share = f"{use.held_most / use.num_blocks:.0%}"
        what = "slots" if use.kind == RECURRENT else "blocks"
        yield (
            "pool" if use.group == 0 else "",
            f"group {use.group}: {use.held_most} of {use.num_blocks} {what} ({share}) held at "
            f"most, in step {use.step}; {use.used_most} with what is kept for later prompts",
        )
    yield "", f"{plural(requests.preemptions, 'preemption')}, {rows.again} rows computed again"
    yield from _row_lines(report)
    yield from _step_lines(report)
    for place, slow in enumerate(requests.slowest):
        name = f" ({slow.external_id})" if slow.external_id else ""
        yield (
            "slowest" if place == 0 else "",
            f"request {slow.request}{name}: {plural(slow.steps, 'step')}, {slow.waited} of them "
            f"waiting, {slow.prompt_tokens} tokens in, {slow.answer_tokens} out, preempted "
            f"{plural(slow.preempted, 'time')}, ended by {slow.reason}",
        )


def _prefix_lines(prefix: PrefixCounts) -> Iterator[tuple[str, str]]:
    yield (
        "prefix",
        f"hit rate {_share(prefix.hit_rate)}: {prefix.adopted_rows} of {prefix.prompt_rows} prompt "
        f"rows were computed before, for {prefix.hits} of {plural(prefix.admitted, 'request')}",
    )
    flushed = f", {plural(prefix.flushes, 'flush', 'flushes')}" if prefix.flushes else ""
    yield (
        "",
        f"{plural(prefix.published, 'block')} published, {prefix.evicted} evicted, "
        f"{prefix.copied} copied before a write{flushed}",
    )
    if prefix.forked:
        yield "", f"{plural(prefix.forked, 'copy', 'copies')} began with {prefix.forked_rows} rows"


def _row_lines(report: StatReport) -> Iterator[tuple[str, str]]:
    rows = report.rows
    padding = rate(rows.padding, rows.issued)
    yield (
        "rows",
        f"{rows.prompt} prompt, {rows.decode} decode, {rows.lookahead} ahead of their token, "
        f"{rows.draft} with guesses, {rows.padding} padding ({_share(padding)} wasted); "
        f"{rows.most} in one step at most",
    )
    if rows.lookahead:
        yield "", f"{rows.lookahead_rewound} rows ahead of their token were taken back"
    if rows.guessed:
        yield (
            "",
            f"{rows.accepted} of {plural(rows.guessed, 'guess', 'guesses')} accepted "
            f"({_share(report.acceptance_rate)}), {rows.rejected} rejected",
        )
    if report.longest_rewind is not None:
        it = report.longest_rewind
        yield (
            "",
            f"longest rewind: {plural(it.rows, 'row')}, step {it.step}, sequence {it.sequence}",
        )


def _step_lines(report: StatReport) -> Iterator[tuple[str, str]]:
    steps = report.steps
    failed = ", ".join(f"{count} at {stage}" for stage, count in steps.failed.items()) or "none"
    lost = f", the pages were lost {plural(steps.pool_resets, 'time')}" if steps.pool_resets else ""
    open_end = f", {steps.unanswered} never answered" if steps.unanswered else ""
    yield "steps", f"{steps.answered} done{open_end}; failed: {failed}{lost}"
    if report.gaps:
        yield "", f"{plural(report.gaps, 'gap')}: {plural(report.records_lost, 'record')} missing"
    yield from _spread_lines("waiting", "steps", {"first row": report.waiting_steps})
    yield from _spread_lines("", "steps", {"whole": report.request_steps})
    whole_last = sorted(report.step_us, key=lambda part: part == WHOLE)
    yield from _spread_lines("times", "us", {part: report.step_us[part] for part in whole_last})


def _spread_lines(
    name: str, unit: str, spreads: Mapping[str, Percentiles | None]
) -> Iterator[tuple[str, str]]:
    for place, (part, it) in enumerate(spreads.items()):
        if it is not None:
            yield (
                name if place == 0 else "",
                f"{part:<9} {unit}: median {it.median}, 90 % {it.p90}, 99 % {it.p99}, most "
                f"{it.most}, mean {it.mean:g}",
            )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
