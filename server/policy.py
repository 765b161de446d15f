"""Policy: the scheduler's settings, recorded in the tape's header."""

from __future__ import annotations

from msgspec import Struct


class Policy(Struct, frozen=True, omit_defaults=True):
    """What plan_step may do.

    max_batch_tokens: rows a step, pads included; max_running: sequences admitted at once;
    prefill_chunk: prompt rows of one sequence a step; prefill_tile: prompt pieces are padded to a
    multiple of it (1: no padding); prefill_cohort: all prompt pieces of a step are padded to the
    longest; watermark_blocks: blocks left free by an admission while others run.
    context_tokens: prompt + answer at most.
    """

    max_batch_tokens: int = 512
    max_running: int = 32
    prefill_chunk: int = 256
    prefill_tile: int = 1
    prefill_cohort: bool = False
    prefix_cache: bool = True
    watermark_blocks: int = 2
    context_tokens: int = 8192


def check(policy: Policy) -> None:
    """Raise ValueError, with one sentence, where settings make no sense."""
    for name in ("max_batch_tokens", "max_running", "prefill_chunk", "prefill_tile"):
        if getattr(policy, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(policy, name)}")
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
