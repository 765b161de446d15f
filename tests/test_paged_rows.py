"""Rows of a step through tables: where they are read, in which code they stand, when they start."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kernel import attention, fastmath, paged_attention, paged_check
from kernel.forward import Forward
from kernel.layout import look
from kernel.paged_attention import Layer, StepTables, put_blocks
from kernel.paged_choice import choose, suited
from kernel.quantised import Code, quantised
from kernel.tiny import tiny_llama
from statemachine.geometry import Group

from .emulated import EmulatedCuda, EmulatedMetal
from .paged import Runner, random_tokens
from .test_paged_kernel import CODED, PLAIN, TENSOR


@pytest.fixture(autouse=True)
def _dispatch() -> None:
    attention.install()
    fastmath.install()


@pytest.mark.parametrize("shape", [PLAIN, TENSOR, CODED], ids=["f32", "bf16", "8 bits"])
def test_no_row_is_read_from_pages_in_the_step_that_writes_it(shape: Any, monkeypatch: Any) -> None:
    """The same step over pages that hold NaN where it writes, and over those that it has written:
    single rows, drafts and fetched pieces come out the same, to the last bit.
    """
    monkeypatch.setattr(paged_attention.OnGpu, "row_keys_max", paged_check.FETCHED_KEYS)
    case = paged_check._case(shape, Group(), paged_check.PIECES, 7)
    pages = [paged_check._poisoned(it, case.filled) for it in (case.key_pages, case.value_pages)]
    layer = Layer(0, *pages, case.keys, case.values, case.sinks, case.codes)
    outs = []
    for _ in range(2):
        tables = StepTables(EmulatedCuda(), case.metadata)
        assert not tables.fixed  # some pieces are fetched
        outs.append(np.array(tables.attend(0, case.queries, layer, shape.scale).astype(mx.float32)))
    assert np.isfinite(outs[0]).all()
    np.testing.assert_array_equal(*outs)
    filled = case.filled.copy()
    filled[case.metadata.slots[0]] = True
    assert filled.sum() > case.filled.sum()
    assert all(paged_check._same(it, paged_check._poisoned(it, filled)) for it in pages)


def wide_model() -> Any:
    """With heads of 32, as groups of numbers are at the least."""
    return tiny_llama(3, heads=2, kv_heads=1, hidden=64)


@pytest.mark.parametrize("emulated", [EmulatedCuda, EmulatedMetal])
def test_rows_of_8_bits_through_tables_give_what_the_gather_gives(
    emulated: Any, monkeypatch: Any
) -> None:
    model = wide_model()
    layout = quantised(look(model), 8)
    dialect = emulated()
    assert suited(model, layout, 4, dialect) == (dialect, "")
    monkeypatch.setattr(
        paged_attention.OnGpu, "row_keys_max", 60
    )  # so that some pieces are fetched
    found = []
    for kernels in (None, dialect):
        runner = Runner(model, num_blocks=64, layout=layout)
        runner.forward = Forward(model, layout, dialect=kernels)
        prompts = [random_tokens(seed, 40) for seed in range(2)]
        rows, done = [], [0, 0]
        for counts in ((3, 21), (20, 1), (1, 1), (1, 4)):
            pieces = []
            for seq, count in enumerate(counts):
                tokens = prompts[seq][done[seq] : done[seq] + count]
                pieces.append(runner.book.append(seq, tokens))
                done[seq] += count
            rows.append(runner.run(*pieces))
        found.append(np.concatenate(rows))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-4)


def test_rows_of_4_bits_are_gathered_and_a_sentence_says_so(monkeypatch: Any) -> None:
    monkeypatch.setattr("kernel.paged_choice.of_device", lambda: (EmulatedCuda(), ""))
    model = wide_model()
    reason = "no kernel reads rows of 4 bits through block tables here"
    assert choose(model, quantised(look(model), 4), 16) == (None, reason)


def test_blocks_of_words_of_any_width_are_put_in_place() -> None:
    code = Code(32, 8, 32, mx.float32)
    assert code.words % 4  # no row of them can be moved by fours
    pages = [mx.zeros((4, 4, 1, code.words), mx.uint32) for _ in range(2)]
    rows = [code.encode(mx.full((2, 4, 1, 32), value)) for value in (2.0, 3.0)]
    mx.eval(pages, rows)
    put_blocks(EmulatedCuda(), Layer(0, *pages, *rows), mx.array([3, 1]))
    for held, put in zip(pages, rows, strict=True):
        assert not np.array(held[0]).any()
        assert not np.array(held[2]).any()
        np.testing.assert_array_equal(np.array(held[3]), np.array(put[0]))
        np.testing.assert_array_equal(np.array(held[1]), np.array(put[1]))


def test_layers_of_a_long_piece_are_started_as_they_are_built(monkeypatch: Any) -> None:
    started = []
    monkeypatch.setattr(mx, "async_eval", lambda array: started.append(array.shape))
    case = paged_check._case(PLAIN, Group(), ((0, 1), (5, 20)), 3)
    layer = Layer(0, case.key_pages, case.value_pages, case.keys, case.values)
    for most, wanted in ((10_000, []), (60, [(21, 4, 1, 64)])):
        tables = StepTables(EmulatedCuda(), case.metadata, most)
        tables.attend(0, case.queries, layer, PLAIN.scale)
        assert started == wanted
