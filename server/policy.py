"""Policy: the scheduler's settings, recorded in the tape's header."""

from __future__ import annotations

from msgspec import Struct

DRAFT_TOKENS_MAX = 64
FCFS = "fcfs"
PRIORITY = "priority"
OPENS_MAX = 256
"""What servers set opens_max to: some 2 ms of one plan."""
ADOPTS_MAX = 16_384
"""What servers set adopts_max to: some 40 ms of one plan."""


class Policy(Struct, frozen=True, omit_defaults=True):
    """What plan_step may do.

    max_batch_tokens: rows a step, pads included; max_running: sequences admitted at once;
    prefill_chunk: prompt rows of one sequence a step; prefill_tile: prompt pieces are padded to a
    multiple of it (1: no padding); prefill_cohort: all prompt pieces of a step are padded to the
    longest; watermark_blocks: blocks left free by an admission while others run.
    context_tokens: prompt + answer at most. lookahead: a step is issued before the tokens of the
    one before it are read. draft_tokens: rows guessed ahead for a sequence at most, by looking the
    last `lookup_ngram` tokens up in its own text; 0 guesses nothing. prefix_aware: a request waits
    while a running one computes more of its prompt than can be found yet. scheduling: FCFS serves
    in order of arrival; PRIORITY by the requests' `priority` first, lower ones before others.
    store_evicted: blocks that make room for others are read for the prefix store first. opens_max:
    sequences that one plan opens at most, on the way to one that may start; 0: however many.
    adopts_max: a plan whose requests adopted so many rows admits nobody else; 0: however many.
    """

    max_batch_tokens: int = 512
    max_running: int = 32
    prefill_chunk: int = 256
    prefill_tile: int = 1
    prefill_cohort: bool = False
    prefix_cache: bool = True
    watermark_blocks: int = 2
    context_tokens: int = 8192
    lookahead: bool = False
    draft_tokens: int = 0
    lookup_ngram: int = 3
    prefix_aware: bool = False
    scheduling: str = FCFS
    store_evicted: bool = False
    opens_max: int = 0
    adopts_max: int = 0


DEFAULT = Policy()


def check(policy: Policy) -> None:
    """Raise ValueError, with one sentence, where settings make no sense."""
    for name in (
        "max_batch_tokens", "max_running", "prefill_chunk", "prefill_tile", "lookup_ngram",
    ):  # fmt: skip
        if getattr(policy, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(policy, name)}")
    if not 0 <= policy.draft_tokens <= DRAFT_TOKENS_MAX:
        raise ValueError(
            f"draft_tokens must be between 0 and {DRAFT_TOKENS_MAX}, not {policy.draft_tokens}"
        )
    for name in ("opens_max", "adopts_max"):
        if getattr(policy, name) < 0:
            raise ValueError(f"{name} must be at least 0, not {getattr(policy, name)}")
    if policy.scheduling not in (FCFS, PRIORITY):
        raise ValueError(f"scheduling must be {FCFS} or {PRIORITY}, not {policy.scheduling!r}")
    if policy.prefill_tile > policy.max_batch_tokens:
        raise ValueError(
            f"prefill_tile ({policy.prefill_tile}) must not exceed "
            f"max_batch_tokens ({policy.max_batch_tokens})"
        )
    if policy.max_running > policy.max_batch_tokens:
        raise ValueError(
            f"max_running ({policy.max_running}) must not exceed "
            f"max_batch_tokens ({policy.max_batch_tokens}), for each running row takes one"
        )
