"""Sampling in one launch: on the emulator, what sampling.py gives."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kernel import drawing
from kernel.batch import Batch
from kernel.drawing import asked_by, disagreement, sampler_for
from kernel.model_kernel import ModelKernel
from kernel.sampling import plan_samples, sample
from kernel.tiny import tiny_llama
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters

from .emulated import Change, EmulatedCuda, EmulatedSampler
from .paged import Book

VOCAB = 2500
"""More than two tokens a thread, and no multiple of the threads."""


@pytest.fixture(autouse=True)
def _fewer_rows(monkeypatch: Any) -> None:
    monkeypatch.setattr(drawing, "DIFFERENT_MAX", 0)


@pytest.fixture
def checked_by_few(monkeypatch: Any) -> None:
    """A sampler is compared over two rows of each kind, as a row takes 60 ms here."""
    monkeypatch.setattr(drawing, "disagreement", lambda *it: disagreement(*it, rows=16))


def test_every_kind_of_row_is_given_the_token_of_sampling_by_operations() -> None:
    assert disagreement(EmulatedSampler(), VOCAB, rows=48) == ""


def test_fewer_tokens_than_threads() -> None:
    assert disagreement(EmulatedSampler(), 61, rows=32) == ""


def test_what_greedy_rows_ask_for_is_made_once() -> None:
    plans = [plan_samples([(None, place)] * 3) for place in (4, 5)]
    assert asked_by(plans[0]) is asked_by(plans[1])
    assert asked_by(plans[0]).tolist() == [[0.0] * 5] * 3
    drawn = plan_samples([(Parameters(1, temperature=1.0, seed=9, top_k=7), 0), (None, 0)])
    assert [row[1] for row in asked_by(drawn).tolist()] == [7.0, 0.0]


def test_equal_logits_give_the_first_token_and_no_margin() -> None:
    logits = mx.zeros((1, 3000))
    got = EmulatedSampler().sample(logits, asked_by(plan_samples([(None, 0)])))
    assert (got.tokens.item(), got.logits.item(), got.margins.item()) == (0, 0.0, 0.0)


def test_a_top_k_beyond_the_vocabulary_cuts_nothing() -> None:
    rng = np.random.default_rng(3)
    logits = mx.array(rng.standard_normal((12, 300), np.float32))
    asked = [(Parameters(1, temperature=1.0, seed=9, top_k=300), place) for place in range(12)]
    plan = plan_samples(asked)
    got, wanted = EmulatedSampler().sample(logits, asked_by(plan)), sample(logits, plan)
    assert got.tokens.tolist() == wanted.tokens.tolist()


@pytest.mark.usefixtures("checked_by_few")
def test_the_kernel_of_a_model_draws_with_its_dialects_sampler() -> None:
    tokens = []
    for sampler in (None, EmulatedSampler()):
        dialect = EmulatedCuda()
        dialect.sampler = sampler
        geometry = Geometry(block_size=4, groups=(Group(num_blocks=32),))
        kernel = ModelKernel(tiny_llama(2), geometry, dialect=dialect)
        book = Book(geometry)
        pieces = tuple(
            book.append(seq, [seq, 5], temperature=1.5, seed=seq, top_k=30) for seq in range(4)
        )
        result = kernel.collect(kernel.issue(Batch(1, pieces)))
        tokens.append(result.tokens)
        # At load the comparison, and twice whether steps can share graphs; then this step.
        assert sampler is None or sampler.calls == 4
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) > 1


BROKEN: dict[str, tuple[Change, str]] = {
    "the last of equal tokens is taken": (("a.at < b.at", "a.at > b.at"), ""),
    "the likeliest tokens are not cut": (("most > 0 && most < vocab", "most > vocab"), "samples"),
    "the nucleus is not cut": (("x >= least_power", "x >= POWER_MIN"), "samples"),
    "rare tokens are kept": (("w >= min_p ?", "w >= 0.0f ?"), "samples"),
    "the uniform number is turned over": (
        ("if (passed + sums[t] > all * uniform) break;", "if (passed > all * uniform) break;"),
        "samples",
    ),
    "the margin is to a token before": (("top.first - top.next;", "top.first;"), "margins"),
    "the largest logit is told, not the chosen": (
        ("chosen[number] = row.logits[token];", "chosen[number] = top.first;"),
        "logits",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.usefixtures("checked_by_few")
def test_a_broken_sampler_is_left_alone(kind: str) -> None:
    change, reason = BROKEN[kind]
    sampler, found = sampler_for(EmulatedSampler((change,)), VOCAB)
    if reason:
        assert sampler is None
        assert reason in found
    else:
        logits = mx.zeros((1, 3000))
        assert sampler is not None
        assert sampler.sample(logits, asked_by(plan_samples([(None, 0)]))).tokens.item() == 2999


def test_a_sampler_that_does_not_compile_is_left_alone() -> None:
    sampler, reason = sampler_for(EmulatedSampler((("#define ASKED 5", "#define ASKED"),)), VOCAB)
    assert sampler is None
    assert "g++ does not take the kernel's source" in reason
    assert sampler_for(None, VOCAB) == (None, "")
