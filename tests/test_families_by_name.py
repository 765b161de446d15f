"""Architectures that had incidents of their own, by name: what must hold of each, one by one."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from msgspec import structs

from kernel.families import Family, family_of
from server.families_command import architectures as told
from server.policy import Policy
from statemachine.events import Appended, PrefixAdopted
from statemachine.records import StepPlanned

from . import families  # first: it loads the BLAS before MLX
from .families import TOLERANCE, Drawn, Outcome
from .paged import random_tokens
from .tiny_architectures import architecture_model

NAMED = {
    "Llama": "llama",
    "Qwen3": "qwen3",
    "ExaOne 4": "exaone4",
    "GPT-OSS": "gpt_oss",
    "Ministral 3": "ministral3",
    "Step 3.5": "step3p5",
    "Mellum": "mellum",
    "Laguna": "laguna",
    "NemotronNAS": "nemotron-nas",
    "LongCat-Flash": "longcat_flash",
    "LongCat-Flash n-gram": "longcat_flash_ngram",
    "Granite 4 hybrid": "granitemoehybrid",
    "LFM2": "lfm2",
    "Gemma 3": "gemma3_text",
    "Mamba 2": "mamba2",
    "Jamba": "jamba",
    "Nemotron-H": "nemotron_h",
    "Kimi Linear": "kimi_linear",
    "RWKV 7": "rwkv7",
    "DeepSeek V3": "deepseek_v3",
}
ROWLESS = ("Mamba 2", "RWKV 7")
"""They have no K and V."""
PROMPT = random_tokens(3, 19, families.VOCAB)
UNLIKE = [random_tokens(seed, rows, families.VOCAB) for seed, rows in ((4, 7), (5, 14), (6, 1))]
PLAIN = Policy(
    max_batch_tokens=64, max_running=4, prefill_chunk=64, watermark_blocks=0, context_tokens=64,
    prefix_cache=False,
)  # fmt: skip
ROOM = 64
"""Blocks of 4 rows in which all of it fits."""

every = pytest.mark.parametrize("name", NAMED)


@functools.cache
def served(name: str) -> tuple[Any, Family]:
    model = architecture_model(NAMED[name])
    return model, family_of(model)


def answers(name: str, *turns: list[list[int]], **policy: Any) -> Outcome:
    """Prompts of a turn at once, after those of the turn before it."""
    return families.run(*served(name), list(turns), structs.replace(PLAIN, **policy), ROOM)


@functools.cache
def alone(name: str) -> Outcome:
    """PROMPT at once, with nobody else there."""
    return answers(name, [PROMPT])


def drawn(outcome: Outcome, number: int = 0) -> list[tuple[int, int, float]]:
    """Position, token and score of all that a request drew."""
    mine: list[Drawn] = [it for it in outcome.drawn if it.seq == number]
    return [(it.position, it.token, it.logit) for it in mine]


def same(outcome: Outcome, number: int, right: list[tuple[int, int, float]]) -> bool:
    """Whether a request drew the same tokens at the same places, with scores that are near."""
    found = drawn(outcome, number)
    bound = TOLERANCE * max(1.0, *(abs(score) for _, _, score in right))
    near = all(abs(a[2] - b[2]) <= bound for a, b in zip(found, right, strict=False))
    return [it[:2] for it in found] == [it[:2] for it in right] and near


def pieces(outcome: Outcome) -> list[int]:
    """Rows of each prompt piece, in order."""
    plans = [record for record in outcome.records if isinstance(record, StepPlanned)]
    events = [event for plan in plans for event in plan.events if isinstance(event, Appended)]
    return [event.rows for event in events if event.purpose == "prompt"]


@every
def test_it_is_paged_or_in_slots_and_batched(name: str) -> None:
    line = next(line for line in told() if line.name == NAMED[name])
    assert line.way in ("packed", "split", "gathered")
    assert "batch" in line.able
    assert ("full" in line.groups) == (name not in ROWLESS)


@every
def test_incremental_is_full(name: str) -> None:
    outcome = alone(name)
    assert len(drawn(outcome)) == families.ANSWER
    assert families.wrong(served(name)[0], outcome) == ""


@every
def test_chunked_is_whole(name: str) -> None:
    outcome = answers(name, [PROMPT], prefill_chunk=5)
    assert len(pieces(outcome)) > len(pieces(alone(name)))
    assert same(outcome, 0, drawn(alone(name)))


@every
def test_batched_with_unlike_neighbours_is_alone(name: str) -> None:
    outcome = answers(name, [*UNLIKE, PROMPT], prefill_chunk=5)
    assert same(outcome, len(UNLIKE), drawn(alone(name)))
    one_by_one = answers(name, *([prompt] for prompt in UNLIKE))
    for number, prompt in enumerate(UNLIKE):
        assert same(outcome, number, drawn(one_by_one, number)), prompt


@every
def test_two_runs_in_a_row_are_two_fresh_ones(name: str) -> None:
    again = answers(name, [PROMPT], [UNLIKE[0]], [PROMPT])
    assert drawn(again, 0) == drawn(again, 2) == drawn(alone(name))


@every
def test_a_prefix_hit_is_a_miss(name: str) -> None:
    longer = [*PROMPT[:13], *UNLIKE[1]]
    outcome = answers(name, [PROMPT], [PROMPT, longer], prefix_cache=True, prefill_chunk=5)
    events = [event for record in outcome.records for event in getattr(record, "events", ())]
    adopted = {it.seq: len(it.tokens) for it in events if isinstance(it, PrefixAdopted)}
    assert (adopted[1] >= 12, adopted[2] >= 8) == (True, True)
    assert same(outcome, 1, drawn(alone(name)))
    assert same(outcome, 2, drawn(answers(name, [longer])))
