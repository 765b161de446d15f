"""Diff: `replay diff GOOD BAD`, the first place where two runs answer otherwise.

Aligned by request (endings.py says how one is known again), not by step: two builds, backends or
settings make other batches, and should still say the same. Owns the comparison of one request with
itself in the other run, and the report. Memory grows with the requests that ended in one run and
not yet in the other.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from .arguments import TAPE_HELP
from .endings import LIVE, Ending, Endings, Name, asked_for, external_ids
from .errors import Unusable
from .progress import progress
from .reader import STDIN, Tape, keep_stdin
from .run import CLEAN, DIVERGED
from .schedules import ScheduleDifference, first_schedule_difference

CONTEXT_TOKENS = 8
OTHERS_MAX = 8

CANCELLED = "cancelled"
"""The reason of a request whose client went away."""

TOKEN = "token"
LENGTH = "length"
REASON = "reason"
PROMPT = "prompt"
PARAMETERS = "parameters"


class Side(Struct, frozen=True):
    """One run's view of a request that differs; -1 and None where it has none.

    step, token, logit, margin: of the sample at the differing place. before, after: the tokens
    around it, prompt included. cached_tokens: prompt rows found computed. answer_tokens and reason:
    of the whole request.
    """

    request: int
    step: int
    token: int | None
    logit: float | None
    margin: float | None
    before: tuple[int, ...]
    after: tuple[int, ...]
    cached_tokens: int
    answer_tokens: int
    reason: str


class Difference(Struct, frozen=True):
    """A request that differs. kind: token (the same place, another token), length (one answer goes
    on), reason (same tokens, another end), prompt, parameters (where external ids are the same).
    place: of the token in the answer, from 0; position: in the sequence.
    """

    kind: str
    external_id: str
    place: int
    position: int
    good: Side
    bad: Side


class DiffReport(Struct, frozen=True, kw_only=True):
    """What `replay diff --json` prints.

    same: whether nothing differs, requests that only one run has included. matched: requests that
    were compared, matched_by_id of them by their external ids. tokens: that were compared.
    differing: by kind. first: the one that differs at the earliest step of the good run; others:
    the next ones. cached_differ: requests that found another number of prompt rows computed, and
    logit_most: how far the logits of equal tokens lie apart at most; neither makes runs differ.
    schedule: with --schedule, the first step with another batch; schedule_same: None without it.
    """

    format: int = 1
    verdict: str
    exit_code: int
    same: bool
    good: str
    bad: str
    matched: int
    matched_by_id: int
    tokens: int
    differing: dict[str, int]
    only_good: int
    only_bad: int
    first: Difference | None
    others: tuple[Difference, ...]
    cached_differ: int
    logit_most: float
    schedule_same: bool | None
    schedule: ScheduleDifference | None
    notes: tuple[str, ...]


class _Comparison:
    """Takes requests from both runs as they end, and compares each with its other."""

    def __init__(self) -> None:
        self.waiting: tuple[dict[Name, Ending], dict[Name, Ending]] = ({}, {})
        self.matched = self.by_id = self.tokens = self.cached_differ = 0
        self.logit_most = 0.0
        self.differing = Counter[str]()
        self.found: list[Difference] = []

    def add(self, side: int, ending: Ending) -> None:
        """A request of one run."""
        other = self.waiting[1 - side].pop(ending.name, None)
        if other is None:
            self.waiting[side][ending.name] = ending
        elif side == 0:
            self._match(ending, other)
        else:
            self._match(other, ending)

    def _match(self, good: Ending, bad: Ending) -> None:
        self.matched += 1
        self.by_id += good.name[0] == "id"
        self.cached_differ += good.cached_tokens != bad.cached_tokens
        if good.arrived.tokens != bad.arrived.tokens:
            found: Difference | None = _at(PROMPT, good, bad, -1)
        else:
            found = self._tokens(good, bad)
            if found is None and asked_for(good.arrived) != asked_for(bad.arrived):
                found = _at(PARAMETERS, good, bad, -1)
        if found is not None:
            self.differing[found.kind] += 1
            self.found = sorted([*self.found, found], key=_order)[: OTHERS_MAX + 1]

    def _tokens(self, good: Ending, bad: Ending) -> Difference | None:
        """The first token that is another one. What a checkpoint told has no fingerprint."""
        first = max(len(good.before), len(bad.before))
        mine, other = _answer(good), _answer(bad)
        for place, (left, right) in enumerate(zip(mine, other, strict=False)):
            self.tokens += 1
            if left != right:
                return _at(TOKEN, good, bad, place)
            if place >= first:
                logits = (
                    good.samples[place - len(good.before)].logit,
                    bad.samples[place - len(bad.before)].logit,
                )
                self.logit_most = max(self.logit_most, abs(logits[0] - logits[1]))
        if LIVE in (good.reason, bad.reason):
            return None  # the tape ends before the answer does
        if good.reason == bad.reason == CANCELLED:
            return None  # when a client went is no matter of the answer
        place = min(len(mine), len(other))
        if good.answer_tokens != bad.answer_tokens:
            return _at(LENGTH, good, bad, place)
        return None if good.reason == bad.reason else _at(REASON, good, bad, place)


def _answer(ending: Ending) -> tuple[int, ...]:
    return (*ending.before, *[sample.token for sample in ending.samples])


def _order(found: Difference) -> tuple[int, int]:
    return found.good.step, found.good.request


def _at(kind: str, good: Ending, bad: Ending, place: int) -> Difference:
    position = len(good.arrived.tokens) + place if place >= 0 else -1
    return Difference(
        kind, good.arrived.external_id, place, position, _side(good, place), _side(bad, place)
    )


def _side(ending: Ending, place: int) -> Side:
    stream = (*ending.arrived.tokens, *_answer(ending))
    at = len(ending.arrived.tokens) + place
    number = place - len(ending.before)
    sample = ending.samples[number] if 0 <= number < len(ending.samples) else None
    return Side(
        request=ending.arrived.request,
        step=ending.step if sample is None else sample.step,
        token=stream[at] if place >= 0 and at < len(stream) else None,
        logit=None if sample is None else sample.logit,
        margin=None if sample is None else sample.margin,
        before=stream[max(0, at - CONTEXT_TOKENS) : at] if place >= 0 else (),
        after=stream[at + 1 : at + 1 + CONTEXT_TOKENS] if place >= 0 else (),
        cached_tokens=ending.cached_tokens,
        answer_tokens=ending.answer_tokens,
        reason=ending.reason,
    )


def diff(good: str, bad: str, schedule: bool = False) -> DiffReport:
    """Compare two tapes. Raises Unusable."""
    if STDIN in (good, bad):
        if good == bad:
            raise Unusable("only one of the two tapes can come from standard input")
        keep_stdin()
    shared = external_ids(Tape(good)) & external_ids(Tape(bad))
    comparison, notes = _Comparison(), list[str]()
    tapes = Tape(good), Tape(bad)
    with progress(tapes[0], "replay diff") as records:
        runs = Endings(records, shared), Endings(tapes[1], shared)
        _compare(comparison, runs)
    for tape, run in zip(tapes, runs, strict=True):
        notes += [f"{tape.path}: {note}" for note in tape.notes]
        if run.stopped:
            notes.append(f"{tape.path}: {run.stopped}; nothing behind that was compared")
    other = first_schedule_difference(good, bad, shared) if schedule else None
    return _report(comparison, (good, bad), notes, schedule, other)


def _compare(comparison: _Comparison, runs: tuple[Endings, Endings]) -> None:
    """Take requests from the run that gave fewer, so that few wait for their other."""
    left: list[Iterator[Ending] | None] = [iter(run) for run in runs]
    taken = [0, 0]
    while any(it is not None for it in left):
        side = 0 if left[1] is None or (left[0] is not None and taken[0] <= taken[1]) else 1
        run = left[side]
        ending = None if run is None else next(run, None)
        if ending is None:
            left[side] = None
            continue
        taken[side] += 1
        comparison.add(side, ending)


def _report(
    comparison: _Comparison,
    paths: tuple[str, str],
    notes: list[str],
    asked: bool,
    schedule: ScheduleDifference | None,
) -> DiffReport:
    only = [len(waiting) for waiting in comparison.waiting]
    same = not comparison.found and not any(only) and schedule is None
    first = comparison.found[0] if comparison.found else None
    if not comparison.matched:
        raise Unusable(
            f"no request of {paths[0]} is also on {paths[1]} (by external id, or by prompt and "
            "parameters): these are runs of different loads, and cannot be compared"
        )
    from .diff_text import verdict

    return DiffReport(
        verdict=verdict(comparison.matched, comparison.tokens, first, only, schedule),
        exit_code=CLEAN if same else DIVERGED,
        same=same,
        good=paths[0],
        bad=paths[1],
        matched=comparison.matched,
        matched_by_id=comparison.by_id,
        tokens=comparison.tokens,
        differing=dict(sorted(comparison.differing.items())),
        only_good=only[0],
        only_bad=only[1],
        first=first,
        others=tuple(comparison.found[1:]),
        cached_differ=comparison.cached_differ,
        logit_most=comparison.logit_most,
        schedule_same=schedule is None if asked else None,
        schedule=schedule,
        notes=tuple(notes),
    )


def main(arguments: list[str]) -> int:
    """`replay diff`."""
    parser = argparse.ArgumentParser(
        prog="replay diff",
        description="The first place where two runs answer otherwise, aligned by request.",
        epilog="exit codes: 0 the same, 1 different, 2 unusable",
    )
    parser.add_argument("good", metavar="GOOD", help=TAPE_HELP)
    parser.add_argument("bad", metavar="BAD", help="the other run, in any of these forms")
    parser.add_argument(
        "--schedule", action="store_true", help="also name the first step with another batch"
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    given = parser.parse_args(arguments)
    report = diff(given.good, given.bad, given.schedule)
    from .diff_text import as_text

    text = msgspec.json.encode(report).decode() if given.json else as_text(report)
    sys.stdout.write(text + "\n")
    return report.exit_code
