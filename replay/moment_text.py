"""Moment text: what `replay show --at` prints for a person. Finds nothing out."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from statemachine.geometry import Geometry

from .moment import MomentReport, Standing
from .pool_map import LETTERS, legend, map_lines
from .words import called, group_text, plural, ranges, span, text_words

STANDING_SHOWN = 40


def moment_lines(report: MomentReport, geometry: Geometry) -> Iterator[str]:
    """The moment as text, without the records."""
    batch = [it for it in report.standing if it.piece >= 0]
    others = len(report.standing) - len(batch)
    rows = sum(sum(it.rows.values()) for it in batch)
    yield (
        f"step {report.step} of {report.path}, while its forward runs: "
        f"{plural(rows, 'row')} of {plural(len(batch), 'sequence')} in the batch, "
        f"{plural(others, 'other')} with rows, {len(report.waiting)} waiting"
    )
    if report.broken:
        yield f"THE TAPE CANNOT BE FOLLOWED TO HERE: {report.broken}"
        yield "What is shown is the state before that record."
    for it in report.flights:
        yield (
            f"step {it.step} ({plural(it.rows, 'row')} of {plural(it.sequences, 'sequence')}) "
            "was issued before and is not answered yet"
        )
    letters = {it.sequence: letter for it, letter in zip(report.standing, LETTERS, strict=False)}
    for pool in report.pools:
        yield ""
        yield (
            f"pool    {group_text(geometry, pool.group)}: {pool.held} held "
            f"({pool.shared} of them by several), {pool.cached} cached, {pool.free} free; "
            f"{pool.published} published"
        )
        yield from map_lines(pool, letters)
    for said in dict.fromkeys(map(legend, report.pools)):
        yield from textwrap.wrap(f"({said})", 100)
    yield ""
    yield from _standing_lines(report, letters)
    yield from _waiting_lines(report)


def _standing_lines(report: MomentReport, letters: dict[int, str]) -> Iterator[str]:
    published = [{it.block for it in pool.used if it.published} for pool in report.pools]
    groups = [pool.group for pool in report.pools]
    shown = report.standing[:STANDING_SHOWN]
    for title, inside in (("batch", True), ("other sequences with rows", False)):
        chosen = [it for it in shown if (it.piece >= 0) == inside]
        if chosen:
            yield f"{title}"
        for it in chosen:
            letter = letters.get(it.sequence, " ")
            yield f"  {letter}  sequence {it.sequence}{called(it.external_id)}: {_stands(it)}"
            for group, names in zip(groups, published, strict=True):
                table = it.tables[group]
                found = sum(block in names for block in table)
                where = f" of group {group}" if len(report.pools) > 1 else ""
                yield (
                    f"       visible rows {it.visible[group]}, blocks{where} "
                    f"{ranges(table) or 'none'}" + (f" ({found} published)" if found else "")
                )
    if len(report.standing) > len(shown):
        yield f"  and {len(report.standing) - len(shown)} more (--json has all of them)"


def _stands(it: Standing) -> str:
    parts = [f"{it.committed} committed"]
    parts += [f"{it.speculative} speculative"] if it.speculative else []
    parts += [f"{it.pads} pads"] if it.pads else []
    parts += [f"{it.adopted} adopted"] if it.adopted else []
    here = ""
    if it.piece >= 0:
        count = sum(it.rows.values())
        rows = ", ".join(f"{number} {purpose}" for purpose, number in it.rows.items())
        at = span(it.offset - count, it.offset - 1)
        here = f"{rows} at {'position' if count == 1 else 'positions'} {at}; "
    return f"{here}offset {it.offset} ({', '.join(parts)})"


def _waiting_lines(report: MomentReport) -> Iterator[str]:
    if not report.waiting:
        return
    yield "waiting, in the order of the queue"
    for it in report.waiting[:STANDING_SHOWN]:
        since = "before the tape's start" if it.since < 0 else f"after step {it.since}"
        again = f"; preempted {plural(it.preempted, 'time')}" if it.preempted else ""
        had = f", {plural(it.answered, 'answer token')} so far" if it.answered else ""
        yield (
            f"     request {it.request}{called(it.external_id)}: "
            f"{plural(it.prompt_tokens, 'prompt token')}{had}, came {since}{again}"
        )
    if len(report.waiting) > STANDING_SHOWN:
        yield f"     and {len(report.waiting) - STANDING_SHOWN} more (--json has all of them)"


def step_lines(report: MomentReport) -> Iterator[str]:
    """What happened in the step, in words."""
    yield ""
    if report.inputs:
        yield f"inputs before step {report.step} was planned"
        yield from (f"  {text}" for text in report.inputs)
    yield f"step {report.step} planned"
    yield from _event_lines(report, "StepPlanned")
    yield from (f"  {text}" for text in report.ends)
    if report.outcome == "unanswered":
        yield f"step {report.step} was never answered: the tape ends, or its process died in it"
    elif report.outcome == "failed":
        yield f"step {report.step} failed {report.error}"
        yield from _event_lines(report, "StepFailed")
    else:
        yield f"step {report.step} done"
        yield from _done_lines(report)
        yield from _event_lines(report, "StepDone")
    if report.times_us:
        parts = ", ".join(f"{name} {time}" for name, time in report.times_us.items())
        yield f"  took, in microseconds: {parts}"


def _done_lines(report: MomentReport) -> Iterator[str]:
    drawn = {piece: [it for it in report.drawn if it.piece == piece] for piece in
             dict.fromkeys(it.piece for it in report.drawn)}  # fmt: skip
    for it in report.seen:
        visible_rows = " and ".join(str(count) for count in it.visible)
        text = (
            f"  sequence {it.sequence}: the caches saw {plural(it.rows, 'row')} from position "
            f"{it.start}, {visible_rows} visible"
        )
        samples = drawn.get(it.piece, [])
        if samples:
            text += "; sampled " + ", ".join(
                f"{at.token} (logit {at.logit:.6g}, {at.margin:.6g} above the next)"
                for at in samples
            )
        yield text
    if report.wrong_rows:
        yield f"  {plural(report.wrong_rows, 'row')} in the pages are not their sequences'"


def _event_lines(report: MomentReport, kind: str) -> Iterator[str]:
    for it in report.events:
        if it.record == kind:
            yield f"  [{it.index}] {text_words(it.event, named=True)}"
