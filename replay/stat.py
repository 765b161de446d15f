"""Stat: `replay stat TAPE`, what a tape adds up to, as a report. Compares nothing."""

from __future__ import annotations

import argparse

import msgspec
from msgspec import Struct

from statemachine.records import Header

from .arguments import TAPE_HELP
from .cache_counts import Rewind, Rows
from .progress import progress
from .reader import Tape
from .run import CLEAN
from .spread import Percentiles
from .tally import Slow, Tally
from .words import plural


class RequestCounts(Struct, frozen=True):
    """Requests. carried: live already when the tape began. ended: by reason. live: at its end."""

    arrived: int
    carried: int
    ended: dict[str, int]
    live: int
    running_most: int
    waiting_most: int
    preemptions: int
    slowest: tuple[Slow, ...]


class PrefixCounts(Struct, frozen=True):
    """What was computed before. admitted: requests at their first admission, those by a fork left
    out; hit_rate: adopted_rows of their prompt_rows; hits: those that adopted any. forked: requests
    that began with the rows of another one. Blocks: published, evicted, copied before a write.
    """

    admitted: int
    prompt_rows: int
    adopted_rows: int
    hit_rate: float | None
    hits: int
    forked: int
    forked_rows: int
    published: int
    evicted: int
    copied: int
    flushes: int


class GroupUse(Struct, frozen=True):
    """The most blocks of a group (or slots, of a recurrent one) held at once, first in `step`;
    used_most: cached ones included.
    """

    group: int
    kind: str
    num_blocks: int
    held_most: int
    step: int
    used_most: int


class StepCounts(Struct, frozen=True):
    """Steps. failed: by the stage at which they did. unanswered: the tape ends inside of them."""

    planned: int
    answered: int
    failed: dict[str, int]
    unanswered: int
    pool_resets: int


class StatReport(Struct, frozen=True, kw_only=True):
    """What `replay stat --json` prints. Rates are 0 to 1, None where there was nothing to count.

    verdict: the first line of the text. prompt_tokens: of requests that arrived; answer_tokens: of
    those that ended. acceptance_rate: of guesses. waiting_steps: from arrival to the first row;
    request_steps: from arrival to end. step_us: microseconds of a step by part, `whole` their sum.
    records_lost: in gaps. stopped: why nothing is counted from some record on, "" if not.
    """

    format: int = 1
    verdict: str
    path: str
    torn: bool
    requests: RequestCounts
    prompt_tokens: int
    answer_tokens: int
    prefix: PrefixCounts
    pool: tuple[GroupUse, ...]
    steps: StepCounts
    rows: Rows
    acceptance_rate: float | None
    longest_rewind: Rewind | None
    waiting_steps: Percentiles | None
    request_steps: Percentiles | None
    step_us: dict[str, Percentiles]
    gaps: int
    records_lost: int
    stopped: str
    notes: tuple[str, ...]


def stat(path: str) -> StatReport:
    """Count a tape. Raises Unusable."""
    tape, tally = Tape(path), Tally()
    with progress(tape, "replay stat") as records:
        for record in records:
            tally.feed(record)
    assert tape.header is not None, "a reader yields the header or raises"
    return report_of(tally, tape.header, path, torn=not tape.ended, notes=tuple(tape.notes))


def report_of(
    tally: Tally, header: Header, path: str, *, torn: bool = False, notes: tuple[str, ...] = ()
) -> StatReport:
    """What was counted so far."""
    counts, cache = tally.counts, tally.cache
    return StatReport(
        verdict=_verdict(tally),
        path=path,
        torn=torn,
        requests=RequestCounts(
            counts.arrived,
            counts.carried,
            dict(sorted(tally.ended.items())),
            tally.live,
            counts.running_most,
            counts.waiting_most,
            counts.preemptions,
            tally.slowest,
        ),
        prompt_tokens=counts.prompt_tokens,
        answer_tokens=counts.answer_tokens,
        prefix=_prefix(tally),
        pool=tuple(
            GroupUse(group, spec.kind, spec.num_blocks, peak.held, peak.step, peak.used)
            for group, spec in enumerate(header.geometry.groups)
            for peak in (cache.peaks[group],)
            if spec.paged
        ),
        steps=StepCounts(
            counts.planned,
            counts.answered,
            dict(sorted(tally.failed.items())),
            counts.planned - counts.answered - sum(tally.failed.values()),
            counts.pool_resets,
        ),
        rows=cache.rows,
        acceptance_rate=rate(cache.rows.accepted, cache.rows.guessed),
        longest_rewind=cache.longest,
        waiting_steps=tally.waited.percentiles(),
        request_steps=tally.lasted.percentiles(),
        step_us={
            part: found
            for part, spread in tally.times.items()
            if (found := spread.percentiles()) is not None
        },
        gaps=counts.gaps,
        records_lost=counts.lost_records,
        stopped=tally.broken,
        notes=notes,
    )


def rate(part: int, whole: int) -> float | None:
    """A share of 0 to 1, to four digits."""
    return round(part / whole, 4) if whole else None


def _prefix(tally: Tally) -> PrefixCounts:
    counts, cache = tally.counts, tally.cache
    return PrefixCounts(
        counts.admitted,
        counts.prompt_rows,
        counts.adopted_rows,
        rate(counts.adopted_rows, counts.prompt_rows),
        counts.hits,
        counts.forked,
        counts.forked_rows,
        cache.published,
        cache.evicted,
        cache.copied,
        counts.flushes,
    )


def _verdict(tally: Tally) -> str:
    counts = tally.counts
    went = ", ".join(
        (
            plural(counts.arrived + counts.carried, "request"),
            plural(counts.planned, "step"),
            plural(tally.cache.rows.issued, "row"),
        )
    )
    failed = sum(tally.failed.values())
    return went + (f"; {plural(failed, 'step')} FAILED" if failed else "; no step failed")


def main(arguments: list[str]) -> int:
    """`replay stat`."""
    parser = argparse.ArgumentParser(
        prog="replay stat",
        description="What a tape adds up to: requests, tokens, hit rate, rows, pool, waiting and "
        "step times. Compares nothing: `replay TAPE` does.",
    )
    parser.add_argument("tape", metavar="TAPE", help=TAPE_HELP)
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    given = parser.parse_args(arguments)
    report = stat(given.tape)
    from .stat_text import as_text

    print(msgspec.json.encode(report).decode() if given.json else as_text(report))
    return CLEAN
