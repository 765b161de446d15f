"""Serve-load text: what `replay serve-load` found, for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .serve_load_compare import COUNTS, REASON, Difference
from .serve_load_report import LoadCounts, ServeLoadReport, Throughput, Times
from .spread import Percentiles
from .words import called, plural

NAMES = {"first_token": "to first token", "inter_token": "between tokens", "whole": "to the end"}
REFUSALS = ("HTTP 400", "HTTP 422")
COLUMNS = ("p50", "p90", "p99", "most")


def verdict(
    counts: LoadCounts, by: Mapping[str, int], first: Difference | None, failure: str
) -> str:
    """One line that says it all."""
    compared = f"{counts.same} of {plural(counts.sent, 'answer')} the same{_by(by)}"
    failed = f"; {counts.failed} failed" if counts.failed else ""
    if first is not None:
        return f"DIFFERENT: {_what(first)} ({compared}{failed})"
    if counts.failed:
        return (
            f"FAILED: {counts.failed} of {plural(counts.sent, 'request')}, {failure} ({compared})"
        )
    if not counts.same:
        return (
            f"NOT COMPARED: {plural(counts.sent, 'request')} sent, and nothing to compare them by"
        )
    return f"SAME: {compared}"


def _by(by: Mapping[str, int]) -> str:
    names = [f"{count} by {name}" for name, count in sorted(by.items())]
    if len(names) == 1:
        return f" by {next(iter(by))}"
    return f" ({', '.join(names)})" if names else ""


def _what(it: Difference) -> str:
    who = f"request {it.request}{called(it.external_id)}"
    if it.by == COUNTS:
        return f"{who} has {it.measured}, {it.recorded} on tape"
    if it.by == REASON:
        return f"{who} ended by {it.measured}, by {it.recorded} on tape"
    place = "token" if it.by == "tokens" else "character"
    return f"{who} differs from {place} {it.place} on: {it.measured}, on tape {it.recorded}"


def as_text(report: ServeLoadReport) -> str:
    """The report for a person."""
    lines = [report.verdict]
    lines += [f"  {name:<10} {text}" for name, text in _lines(report)]
    lines += _latency(report.latency)
    lines += [f"  note: {note}" for note in report.notes]
    if report.stopped:
        lines.append(f"  STOPPED SENDING: {report.stopped} (`replay {report.path}` says more)")
    return "\n".join(lines)


def _lines(report: ServeLoadReport) -> Iterator[tuple[str, str]]:
    counts = report.requests
    pace = "at once" if report.speed is None else f"at {report.speed:g} times the recorded speed"
    yield "server", f"{report.url}, model {report.model}"
    yield (
        "requests",
        f"{counts.sent} sent {pace}, {report.in_flight_most} in flight at most; {counts.same} "
        f"same, {counts.different} different, {counts.failed} failed, {counts.uncompared} not "
        "compared",
    )
    if counts.left:
        yield "", f"{counts.left} given up where their clients left"
    if counts.unsendable:
        yield "", f"{counts.unsendable} not sent: they ask for no answer"
    if report.late:
        yield (
            "",
            f"{report.late} sent late, by {_ms(report.late_most_us)} ms at most: the server or "
            "this program was too slow, or --concurrency too low",
        )
    if report.failures:
        kinds = ", ".join(f"{count} {kind}" for kind, count in report.failures.items())
        yield "failures", f"{kinds}; the first: {report.first_failure}"
        refused = sum(count for kind, count in report.failures.items() if kind in REFUSALS)
        if refused == counts.sent:
            yield (
                "",
                "none was taken: --detokenize FOLDER sends text in place of token ids, and "
                "--openai-only leaves out what OpenAI's API does not have",
            )
    yield "recorded", _rate(report.recorded)
    yield "measured", _rate(report.measured)


def _rate(it: Throughput) -> str:
    rate = "" if it.tokens_per_s is None else f", {it.tokens_per_s:g} tokens/s"
    return f"{plural(it.tokens, 'answer token')} in {it.seconds:g} s{rate}"


def _latency(latency: Mapping[str, Times]) -> Iterator[str]:
    if not any(times.recorded or times.measured for times in latency.values()):
        return
    yield f"  {'latency, ms':<27}" + "".join(f"{name:>9}" for name in COLUMNS)
    for name, times in latency.items():
        for side, found in (("recorded", times.recorded), ("measured", times.measured)):
            label = NAMES[name] if side == "recorded" else ""
            yield f"    {label:<16}{side:<9}" + _row(found)


def _row(found: Percentiles | None) -> str:
    if found is None:
        return f"{'-':>9}" * len(COLUMNS)
    return "".join(f"{_ms(it):>9}" for it in (found.median, found.p90, found.p99, found.most))


def _ms(us: int) -> str:
    return f"{us / 1000:.1f}" if us < 100_000 else f"{us / 1000:.0f}"
