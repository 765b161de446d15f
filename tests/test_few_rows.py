"""The body of few rows: its products, on the emulator, against the model's own modules."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from kernel import attention, few_rows, products
from kernel.batch import Batch
from kernel.few_rows import FewRows, Unlike
from kernel.forward import Forward
from kernel.layout import look
from kernel.metadata import build
from kernel.model_kernel import ModelKernel
from kernel.products import CudaProducts
from kernel.tiny import tiny_llama
from statemachine.geometry import Geometry, Group

from .emulated import Change, EmulatedCuda, EmulatedProducts, EmulatedSampler
from .paged import Runner, dense_logits, random_tokens

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def model(**named: Any) -> Any:
    """A tiny llama of 16-bit weights with heads of 32."""
    made = tiny_llama(5, layers=2, heads=2, kv_heads=1, hidden=64, **named)
    made.update(tree_map(lambda it: it.astype(mx.bfloat16), made.parameters()))
    mx.eval(made.parameters())
    return made


@pytest.fixture(autouse=True)
def _dispatch() -> None:
    attention.install()


@pytest.mark.parametrize(
    ("scaling", "traditional"), [(None, False), (LLAMA3, True), (LLAMA3, False)]
)
def test_products_are_those_of_the_modules(scaling: Any, traditional: bool) -> None:
    made = model(rope_scaling=scaling)
    for layer in made.layers:
        layer.self_attn.rope.traditional = traditional
    emulated = EmulatedProducts()
    body, reason = few_rows.few_rows(made, emulated)
    assert (type(body), reason) == (FewRows, "")
    assert emulated.calls == 4 * len(few_rows.CHECKED_ROWS)


BROKEN: dict[str, Change] = {
    "a part is left out": ("int parts = width / PART,", "int parts = width / PART - 1,"),
    "rows are counted short": ("t * 8 + m >= count)", "t * 8 + m >= count - 1)"),
    "a pair is turned backwards": ("* across - high * along;", "* across + high * along;"),
    "the gate and what it lets through are mixed up": (
        "(half ? features : 0)",
        "(half ? 0 : features)",
    ),
    "what a layer was given is forgotten": (
        "narrow<T>(low + float(base[to]))",
        "narrow<T>(low)",
    ),
    "the norm is left out": ("float scale = Layer::NORMED ?", "float scale = width < 0 ?"),
    "the norm's weights are left out": (
        "make_uint4(normed<T>(b.x, by.x, square),",
        "make_uint4((normed<T>(b.x, by.x, square), b.x),",
    ),
    "values are turned, too": ("if (which != VALUES) {", "if (true) {"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_products_are_left_alone(kind: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(few_rows, "CHECKED_ROWS", (11,))
    body, reason = few_rows.few_rows(model(), EmulatedProducts((BROKEN[kind],)))
    assert body is None
    assert "rows differ from the model's own by" in reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda it: it.update(tree_map(lambda x: x.astype(mx.float16), it.parameters())),
            "float16",
        ),
        (lambda it: setattr(it.layers[1].mlp, "up_proj", it.model.norm), "a plain product is"),
        (lambda it: setattr(it.layers[0], "input_layernorm", it.layers[0].mlp), "an RMSNorm is"),
        (lambda it: setattr(it.layers[0].self_attn, "rope", it.model.norm), "turned by RMSNorm"),
        (lambda it: setattr(it.layers[0].self_attn.rope, "dims", 16), "of heads of 32, 16 are"),
        (lambda it: setattr(it.model, "swa_idx", 1), "windows"),
    ],
)
def test_a_model_of_another_form_keeps_its_own_body(change: Any, reason: str) -> None:
    made = model()
    change(made)
    with pytest.raises(Unlike, match=reason):
        FewRows(made, EmulatedProducts())
    assert few_rows.few_rows(made, EmulatedProducts()) == (None, "")


def test_steps_of_few_rows_are_as_near_to_the_truth_as_those_of_the_modules() -> None:
    """Pieces and single rows, over pages, by both bodies; more rows than it takes by the other."""
    made, exact = model(), model()
    exact.update(tree_map(lambda it: it.astype(mx.float32), exact.parameters()))
    emulated = EmulatedProducts()
    cuts = (3, 1, 40, 1, 1)
    tokens = [random_tokens(seed, sum(cuts)) for seed in (1, 2)]
    wanted = np.stack(
        [dense_logits(exact, it, cuts[0])[np.cumsum(cuts) - cuts[0]] for it in tokens]
    )
    apart = []
    for body in (None, FewRows(made, emulated)):
        runner = Runner(made, num_blocks=64)
        runner.forward = Forward(made, look(made), dialect=EmulatedCuda(), few_rows=body)
        place, found, used = 0, [], []
        for rows in cuts:
            before = emulated.calls
            pieces = [runner.book.append(seq, tokens[seq][place : place + rows]) for seq in (0, 1)]
            found.append(runner.run(*pieces))
            used.append(emulated.calls > before)
            assert runner.seen.attends == (1, 1)
            place += rows
        assert used == ([False] * 5 if body is None else [True, True, False, True, True])
        far = np.linalg.norm(np.stack(found, axis=1) - wanted, axis=-1)
        apart.append(far / np.linalg.norm(wanted, axis=-1))
    assert apart[1].max() < 0.1
    assert apart[1].mean() < 1.25 * apart[0].mean()


def test_of_a_long_piece_only_rows_that_are_looked_at_go_through_the_last_network(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr("kernel.paged_attention.ROW_KEYS_MAX", 60)
    made = model()
    found = []
    for body in (None, FewRows(made, EmulatedProducts())):
        runner = Runner(made, num_blocks=64)
        forward = Forward(made, look(made), dialect=EmulatedCuda(), few_rows=body)
        pieces = [runner.book.append(seq, random_tokens(seq, 30)) for seq in (0, 1)]
        metadata = build(Batch(1, tuple(pieces)), runner.geometry)
        hidden, seen = forward.hidden(forward.context(metadata), runner.pages.begin())
        assert seen.attends == (1, 1)
        found.append(np.array(hidden.astype(mx.float32))[:, 0])
    whole, ending = found
    assert np.flatnonzero(ending.any(axis=1)).tolist() == [29, 59]
    np.testing.assert_allclose(ending[[29, 59]], whole[[29, 59]], atol=0.02)
    assert whole.any(axis=1).all()


def test_large_products_are_left_to_mlx(monkeypatch: Any) -> None:
    monkeypatch.setattr(products, "LARGE", 0)
    monkeypatch.setattr(products, "LARGE_ROWS", 0)
    made = model(rope_scaling=LLAMA3)
    assert FewRows(made, CudaProducts()).disagreement() == ""


def test_what_is_not_used_stands_among_the_capabilities() -> None:
    dialect = EmulatedCuda()
    dialect.products = EmulatedProducts((("narrow<T>(low + float(base[to]))", "narrow<T>(low)"),))
    dialect.sampler = EmulatedSampler((("top.first - top.next;", "top.first;"),))
    geometry = Geometry(block_size=4, groups=(Group(num_blocks=8),))
    used, products_off, sampler_off, anew = ModelKernel(
        model(), geometry, dialect=dialect
    ).attention.split("; ", 3)
    assert used == "tables"
    assert products_off.startswith("products of 8 rows differ from the model's own by")
    assert sampler_off == "margins of samples are not those of MLX's operations"
    # The emulator evaluates what it is given, which cannot be done while a graph is traced.
    assert anew.startswith("each step is built anew: ValueError: [eval] Attempting to eval")
