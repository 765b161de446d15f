"""Figures: what a phase's answers add up to. Pure: from times and counts to rates."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

from msgspec import Struct

from .asking import Answer

P95 = 0.95


class Figures(Struct, frozen=True):
    """Of one phase of a load on one server.

    answered: whole answers, of asked. output_rate: their tokens a second, from the first request to
    the last piece, prompt work included. decode_rate: while every client has its first piece
    and none its last; 0 where there is no such time. prompt_rate: prompt tokens a second of the
    time in which at least one client waits for its first piece. first_ms: median and p95 time to
    the first piece. between_ms: of the times between two pieces of an answer. pieces: that came;
    output_tokens: that usage counts.
    """

    asked: int
    answered: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    pieces: int
    seconds: float
    output_rate: float
    decode_rate: float
    prompt_rate: float
    first_ms: float
    first_p95_ms: float
    between_ms: float
    between_p95_ms: float
    between_most_ms: float


def figures(answers: list[Answer]) -> Figures | None:
    """Those of the answers that got at least one piece; None where none did."""
    begun = [answer for answer in answers if answer.pieces_s]
    if not begun:
        return None
    started = min(answer.sent_s for answer in begun)
    seconds = max(answer.pieces_s[-1] for answer in begun) - started
    tokens = sum(answer.tokens for answer in begun)
    prompts = sum(answer.prompt_tokens for answer in begun)
    firsts = [(answer.pieces_s[0] - answer.sent_s) * 1e3 for answer in begun]
    gaps = [(b - a) * 1e3 for answer in begun for a, b in pairwise(answer.pieces_s)] or [0.0]
    return Figures(
        asked=len(answers),
        answered=sum(not answer.failure and answer.ended_s > 0 for answer in answers),
        prompt_tokens=prompts,
        cached_tokens=sum(answer.cached_tokens for answer in begun),
        output_tokens=tokens,
        pieces=sum(len(answer.pieces_s) for answer in begun),
        seconds=seconds,
        output_rate=_rate(tokens, seconds),
        decode_rate=_decode_rate(begun),
        prompt_rate=_rate(prompts, _waiting_s(begun)),
        first_ms=statistics.median(firsts),
        first_p95_ms=quantile(firsts, P95),
        between_ms=statistics.median(gaps),
        between_p95_ms=quantile(gaps, P95),
        between_most_ms=max(gaps),
    )


def median(runs: list[Figures]) -> Figures:
    """Each figure's median over repetitions; counts too, which are alike."""
    middle = {
        name: statistics.median(getattr(run, name) for run in runs)
        for name in Figures.__struct_fields__
    }
    return Figures(**middle)


def quantile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    return sorted(values)[math.ceil(len(values) * share) - 1]


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _decode_rate(answers: list[Answer]) -> float:
    begin = max(answer.pieces_s[0] for answer in answers)
    end = min(answer.pieces_s[-1] for answer in answers)
    if end <= begin:
        return 0.0
    inside = [
        sum(begin < at <= end for at in answer.pieces_s) * answer.tokens / len(answer.pieces_s)
        for answer in answers
    ]
    return sum(inside) / (end - begin)


def _waiting_s(answers: list[Answer]) -> float:
    """How long at least one of them waited for its first piece."""
    total, until = 0.0, float("-inf")
    for sent_s, first_s in sorted((answer.sent_s, answer.pieces_s[0]) for answer in answers):
        total += max(0.0, first_s - max(sent_s, until))
        until = max(until, first_s)
    return total
