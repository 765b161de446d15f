"""Sampling: a function of logits, parameters, seed and position alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kernel.sampling import is_greedy, plan_samples, row_key, sample, uniform
from statemachine.records import Parameters

KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.3, "top_p": 0.5, "top_k": 100, "min_p": 0.01},
    {"temperature": 2.0, "min_p": 0.05},
    {"temperature": 0.0},
]


def wanted(**values: Any) -> Parameters:
    return Parameters(max_tokens=1, **values)


def draws(logits: list[float], count: int, **values: Any) -> np.ndarray:
    """How often each token is drawn at `count` positions with one seed."""
    rows = mx.broadcast_to(mx.array(logits), (count, len(logits)))
    plan = plan_samples((wanted(seed=11, **values), place) for place in range(count))
    tokens = np.array(sample(rows, plan).tokens)
    return np.bincount(tokens, minlength=len(logits))


def softmax(logits: list[float], temperature: float = 1.0) -> np.ndarray:
    powers = np.exp(np.array(logits) / temperature)
    return powers / powers.sum()


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    kept = expected > 0
    assert counts[~kept].sum() == 0
    return float((((counts - expected) ** 2)[kept] / expected[kept]).sum())


@pytest.mark.parametrize("vocab", [97, 1024, 49152])
def test_greedy_is_the_argmax_with_its_logit_and_margin(vocab: int) -> None:
    logits = mx.random.normal((5, vocab), key=mx.random.key(1))
    got = sample(logits, plan_samples([(None, 3)] * 5))
    host = np.array(logits)
    ordered = np.sort(host, axis=-1)
    np.testing.assert_array_equal(np.array(got.tokens), host.argmax(axis=-1))
    np.testing.assert_array_equal(np.array(got.logits), ordered[:, -1])
    np.testing.assert_array_equal(np.array(got.margins), ordered[:, -1] - ordered[:, -2])


def test_equal_top_logits_have_no_margin_and_give_the_first_token() -> None:
    logits = mx.zeros((1, 96))
    got = sample(logits, plan_samples([(None, 0)]))
    assert (got.tokens.item(), got.margins.item()) == (0, 0.0)


@pytest.mark.parametrize("values", KINDS)
def test_a_row_gives_the_same_token_alone_and_among_any_neighbours(values: dict[str, Any]) -> None:
    logits = mx.random.normal((6, 3001), key=mx.random.key(2)) * 2
    plans = [(wanted(seed=5 + i, **KINDS[i]), 40 + i) for i in range(6)]
    for place in range(6):
        alone = sample(logits[place : place + 1], plan_samples([(wanted(seed=9, **values), 7)]))
        mixed = list(plans)
        mixed[place] = (wanted(seed=9, **values), 7)
        among = sample(logits, plan_samples(mixed))
        assert among.tokens[place].item() == alone.tokens[0].item()
        assert among.logits[place].item() == alone.logits[0].item()


def test_seed_and_position_both_change_the_draw() -> None:
    assert len({row_key(seed, place) for seed in range(20) for place in range(20)}) == 400
    assert row_key(-1, 0) == row_key(2**64 - 1, 0)
    numbers = [uniform(3, place) for place in range(4000)]
    assert 0 < min(numbers) < max(numbers) < 1
    assert abs(float(np.mean(numbers)) - 0.5) < 0.02


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = [0.0, 1.0, 2.0, -1.0, 0.5, 1.5]
    counts = draws(logits, 6000, temperature=temperature)
    # 5 degrees of freedom: 20.5 is exceeded once in a thousand
    assert chi_square(counts, 6000 * softmax(logits, temperature)) < 20.5


def test_top_k_keeps_the_k_likeliest() -> None:
    logits = [0.0, 1.0, 2.0, -1.0, 0.5, 1.5]
    expected = softmax(logits)
    expected[[0, 3, 4]] = 0
    counts = draws(logits, 4000, temperature=1.0, top_k=3)
    assert chi_square(counts, 4000 * expected / expected.sum()) < 13.8


def test_top_p_keeps_the_smallest_set_that_holds_it() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.06, 0.04]).tolist()
    assert (draws(logits, 500, temperature=1.0, top_p=0.39) > 0).tolist() == [1, 0, 0, 0, 0]
    assert (draws(logits, 500, temperature=1.0, top_p=0.41) > 0).tolist() == [1, 1, 0, 0, 0]
    assert (draws(logits, 500, temperature=1.0, top_p=0.69) > 0).tolist() == [1, 1, 0, 0, 0]
    assert (draws(logits, 500, temperature=1.0, top_p=0.89) > 0).tolist() == [1, 1, 1, 0, 0]
    counts = draws(logits, 4000, temperature=1.0, top_p=0.91)
    expected = np.array([0.4, 0.3, 0.2, 0.06, 0]) / 0.96
    assert chi_square(counts, 4000 * expected) < 16.3


def test_top_p_is_taken_of_what_top_k_left() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.06, 0.04]).tolist()
    # of 0.4 and 0.3 the first holds 0.57
    counts = draws(logits, 500, temperature=1.0, top_k=2, top_p=0.5)
    assert (counts > 0).tolist() == [1, 0, 0, 0, 0]


def test_top_p_is_right_over_a_large_flat_vocabulary() -> None:
    """Logits from 0 to 1: the upper quarter of the mass starts at log(e - (e - 1) / 4)."""
    logits = mx.linspace(0, 1, 40000)[None]
    seen = []
    for place in range(300):
        plan = plan_samples([(wanted(temperature=1.0, top_p=0.25, seed=1), place)])
        seen.append(sample(logits, plan).tokens.item())
    first = 40000 * np.log(np.e - (np.e - 1) / 4)
    assert first - 2 < min(seen) < first + 150
    assert max(seen) > 39800


def test_min_p_keeps_what_is_near_the_likeliest() -> None:
    logits = np.log([0.5, 0.3, 0.11, 0.09]).tolist()
    counts = draws(logits, 3000, temperature=1.0, min_p=0.2)
    expected = np.array([0.5, 0.3, 0.11, 0]) / 0.91
    assert chi_square(counts, 3000 * expected) < 13.8


def test_top_k_of_one_is_greedy_at_any_temperature() -> None:
    assert is_greedy(wanted(temperature=5.0, top_k=1))
    logits = mx.random.normal((4, 500), key=mx.random.key(8))
    plan = plan_samples((wanted(temperature=5.0, top_k=1, seed=i), i) for i in range(4))
    np.testing.assert_array_equal(
        np.array(sample(logits, plan).tokens), np.array(logits).argmax(axis=-1)
    )


def test_the_chosen_logit_is_reported_and_the_margin_is_the_top_twos() -> None:
    logits = mx.random.normal((64, 50), key=mx.random.key(4))
    plan = plan_samples((wanted(temperature=3.0, seed=i), 1) for i in range(64))
    got = sample(logits, plan)
    tokens, host = np.array(got.tokens), np.array(logits)
    assert (tokens != host.argmax(axis=-1)).any()
    np.testing.assert_array_equal(np.array(got.logits), host[np.arange(64), tokens])
    ordered = np.sort(host, axis=-1)
    np.testing.assert_array_equal(np.array(got.margins), ordered[:, -1] - ordered[:, -2])


NEXT = np.array([[0.0, 1.0, 0.3, -0.5], [0.8, 0.0, -0.3, 0.4], [0.2, 0.9, 0.0, 0.6], [1, 0, 1, 0]])
"""Logits of a toy model: the next of four tokens by the last one."""
LIKELIEST = NEXT.argmax(axis=1).tolist()
UNLIKELY = NEXT.argmin(axis=1).tolist()


def speculated(guesses: list[int], seeds: int, length: int, most: int) -> list[tuple[int, ...]]:
    """Texts from token 0 on, one a seed: `most` guesses are fed behind the last token, each row is
    drawn with its own position, and what was drawn after a wrong guess is dropped.
    """
    texts = [[0] for _ in range(seeds)]
    while True:
        short = [number for number, text in enumerate(texts) if len(text) <= length]
        if not short:
            return [tuple(text[1 : length + 1]) for text in texts]
        fed, asked = [], []
        for number in short:
            rows = texts[number][-1:]
            for _ in range(most):
                rows.append(guesses[rows[-1]])
            fed.append(rows)
            first = len(texts[number])
            asked += [(wanted(temperature=1.0, seed=number), first + at) for at in range(most + 1)]
        logits = mx.array(NEXT[np.array(fed).reshape(-1)].astype(np.float32))
        tokens = np.array(sample(logits, plan_samples(asked)).tokens).reshape(len(short), -1)
        for number, rows, drawn in zip(short, fed, tokens.tolist(), strict=True):
            stood = 0
            while stood < most and rows[stood + 1] == drawn[stood]:
                stood += 1
            texts[number] += drawn[: stood + 1]


@pytest.mark.parametrize("guesses", [LIKELIEST, UNLIKELY])
def test_texts_by_accepted_and_rejected_guesses_follow_the_target(guesses: list[int]) -> None:
    seeds, length = 6000, 3
    texts = speculated(guesses, seeds, length, most=3)
    places = [a * 16 + b * 4 + c for a, b, c in texts]
    rows = np.stack([softmax(row.tolist()) for row in NEXT])
    expected = rows[0][:, None, None] * rows[:, :, None] * rows[None, :, :]
    counts = np.bincount(places, minlength=64)
    # 63 degrees of freedom: 103.4 is exceeded once in a thousand
    assert chi_square(counts, seeds * expected.reshape(-1)) < 103.4
    assert texts == speculated([], seeds, length, most=0), "one row at a time"
