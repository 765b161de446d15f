"""Ways over pages beside packed and gathered: masks that are added, rows one by one, chunks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve

from kernel import gathered, probe
from kernel.batch import Batch
from kernel.buckets import group_rows
from kernel.errors import ModelError
from kernel.families import SINGLY, family_of
from kernel.layout import ADDED, ALONE, SINGLE, Way, look
from kernel.metadata import build
from kernel.own_rows import own_logits
from replay import reference
from replay.models import Loaded
from replay.run import REFERENCE, Options, replay
from statemachine.geometry import Geometry, Group

from . import families
from .paged import Book
from .tampering import write
from .tiny_architectures import architecture_model

GEOMETRY = Geometry(block_size=4, groups=(Group(num_blocks=8),))
DIFFERS = "over pages it differs from mlx-lm's own caches by"


def refusal(name: str, way: Way, *, singly: bool = False) -> str:
    model = architecture_model(name)
    with pytest.raises(ModelError) as caught:
        probe.probe(model, look(model, way), probe.References(model, singly))
    return str(caught.value)


def test_each_row_that_stands_alone_reads_the_rows_up_to_itself() -> None:
    book = Book(GEOMETRY)
    book.append(1, [5, 6, 7, 8])
    pieces = (book.append(0, [1, 2]), book.append(1, [9]))
    found = group_rows(build(Batch(1, pieces), GEOMETRY), "rows")
    tables = [sequence.sequence.tables[0] for sequence in pieces]
    assert [bucket.rows.tolist() for bucket in found] == [[[0]], [[1]], [[2]]]
    first, second = tables[0][0] * 4, [block * 4 for block in tables[1]]
    assert [bucket.views[0].slots.tolist() for bucket in found] == [
        [[first]],
        [[first, first + 1]],
        [[*range(second[0], second[0] + 4), second[1]]],
    ]


def test_masks_that_are_added_hide_by_the_lowest_number_of_the_rows_type() -> None:
    class Word:
        """Asks a cache for a mask."""

    model = architecture_model("olmo")
    found = look(model, ADDED)
    cache = gathered.GatheredCache(0, 0, found, 8)
    metadata = build(Batch(1, (Book(GEOMETRY).append(0, [1, 2]),)), GEOMETRY)
    context: Any = Word()
    context.metadata, context.buckets = metadata, group_rows(metadata)
    cache.bind(context, Word(), 0)  # type: ignore[arg-type]
    mask = cache.make_mask(2)
    assert mask is not None
    lowest = float(np.finfo(np.float32).min)
    assert (mask.dtype, mask.tolist()) == (mx.float32, [[0.0, lowest], [0.0, 0.0]])


def test_the_masks_of_quantised_rows_have_the_type_of_what_was_quantised() -> None:
    found = look(architecture_model("olmo"), ADDED)
    code: Any = evolve(found.shapes[0], dtype=mx.bfloat16)
    assert (found.shapes[0].row_dtype, code.row_dtype) == (mx.float32, mx.bfloat16)


def test_olmo_is_refused_with_masks_of_true_and_false() -> None:
    assert refusal("olmo", ALONE).startswith(DIFFERS)


class Words:
    """A model that takes one row at a time, as some of mlx-lm's do, and counts what it holds."""

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        cache.append(tokens.shape[1])
        if tokens.shape[1] > 1:
            raise ValueError("no")
        return mx.full((1, 1, 3), len(cache))


def test_a_model_that_takes_one_row_at_a_time_is_given_them_over_fresh_caches() -> None:
    logits, caches = own_logits(Words(), [4, 5], list)
    assert logits.tolist() == [[1.0] * 3, [2.0] * 3]
    assert caches == [1, 1]


def test_a_model_that_takes_no_row_raises_what_it_raises_of_one() -> None:
    def model(tokens: mx.array, cache: Any) -> mx.array:
        raise KeyError(tokens.shape[1])

    with pytest.raises(KeyError, match="1"):
        own_logits(model, [4, 5], list)


def test_phi3small_is_served_row_by_row_because_rows_at_once_see_what_comes() -> None:
    family = family_of(architecture_model("phi3small"))
    assert family.way == "single"
    assert family.reason.endswith(SINGLY)
    assert refusal("phi3small", SINGLE).startswith(DIFFERS)


@pytest.fixture
def long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond two blocks of phi3small's sparse attention, of 32 rows each."""
    monkeypatch.setattr(probe, "STEPS", ((37, 5), (30, 33), (9, 30), (1, 1)))
    monkeypatch.setattr(probe, "LENGTHS", (77, 69))


@pytest.mark.usefixtures("long_steps")
def test_phi3small_attends_to_the_blocks_that_each_row_is_to_see() -> None:
    model = architecture_model("phi3small")
    references = probe.References(model, singly=True)
    probe.probe(model, look(model, SINGLE), references)


@pytest.mark.usefixtures("long_steps")
def test_phi3small_in_pieces_would_attend_to_other_blocks() -> None:
    added_alone = Way("added alone", alone="pieces", added=True)
    assert refusal("phi3small", added_alone, singly=True).startswith(DIFFERS)


def test_scores_that_are_hidden_on_one_side_only_are_a_difference() -> None:
    found = look(architecture_model("olmo"), ADDED)
    hidden = np.array([[1.0, -np.inf, 2.0]], np.float32)
    assert probe.difference([hidden], [hidden], found)[0] == 0.0
    shown = np.array([[1.0, 1.5, 2.0]], np.float32)
    assert probe.difference([shown], [hidden], found)[0] == np.inf
    assert probe.difference([hidden + 1], [hidden], found)[0] == 0.5


@pytest.mark.parametrize("first", [1, -1])
def test_llama4s_chunks_begin_at_the_first_row_that_is_fetched(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = architecture_model("llama4")
    assert family_of(model).way == "alone"
    monkeypatch.setattr(gathered.GatheredCache, "start_position", first)
    with pytest.raises((ModelError, ValueError)):
        probe.probe(model, look(model, ALONE))


@pytest.mark.parametrize("name", ["olmo", "phi3small"])
def test_a_tape_of_a_model_that_is_right_for_one_row_at_a_time_is_clean_at_depth_reference(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = architecture_model(name)
    family = family_of(model)
    assert family.flags["singly"] is True
    outcome = families.serve(model, family)
    held: Any = SimpleNamespace(model=model, tokenizer=None)
    monkeypatch.setattr(reference, "load", lambda *_: Loaded(held, True, 0.001, ""))
    tape = write(tmp_path, outcome.records)
    found = replay(tape, Options(depth=REFERENCE))
    assert found.divergence is None
    assert found.figures["requests run alone"] == len(outcome.texts)


def test_a_model_that_takes_rows_at_once_is_not_said_to_want_them_singly() -> None:
    assert "singly" not in family_of(architecture_model("llama")).flags
