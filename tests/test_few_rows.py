"""The body of few rows: its products, on the emulator, against the model's own modules."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve
from mlx.utils import tree_map

from kernel import attention, few_rows, kernel_text, products
from kernel.batch import Batch
from kernel.few_rows import FewRows, Unlike
from kernel.forward import Forward
from kernel.layout import look
from kernel.metadata import build
from kernel.model_kernel import ModelKernel
from kernel.product_forms import (
    HEADERS,
    WIDE_HEADERS,
    Cut,
    added_form,
    cut,
    gated_form,
    wide_source,
)
from kernel.products import CudaProducts, Norm, PlainProducts, Products, Rope
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


def model(dtype: mx.Dtype = mx.bfloat16, **named: Any) -> Any:
    """A tiny llama of 16-bit weights with heads of 32."""
    made = tiny_llama(5, layers=2, heads=2, kv_heads=1, hidden=64, **named)
    made.update(tree_map(lambda it: it.astype(dtype), made.parameters()))
    mx.eval(made.parameters())
    return made


@pytest.fixture(autouse=True)
def _dispatch() -> None:
    attention.install()


@pytest.mark.parametrize(
    ("scaling", "traditional", "dtype"),
    [
        (None, False, mx.bfloat16),
        (LLAMA3, True, mx.bfloat16),
        (LLAMA3, False, mx.bfloat16),
        (None, True, mx.float16),
    ],
)
def test_products_are_those_of_the_modules(
    scaling: Any, traditional: bool, dtype: mx.Dtype
) -> None:
    made = model(dtype, rope_scaling=scaling)
    for layer in made.layers:
        layer.self_attn.rope.traditional = traditional
    emulated = EmulatedProducts()
    body, reason = few_rows.few_rows(made, emulated)
    assert (type(body), reason) == (FewRows, "")
    assert emulated.calls == 4 * len(emulated.checked_rows)


BROKEN: dict[str, Change] = {
    "a part is left out": ("int parts = width / PART,", "int parts = width / PART - 1,"),
    "rows are counted short": ("line < count && there", "line < count - 1 && there"),
    "a pair is turned backwards": (
        "low * turn.across - high * turn.along",
        "low * turn.across + high * turn.along",
    ),
    "the gate and what it lets through are mixed up": (
        "(half ? features : 0)",
        "(half ? 0 : features)",
    ),
    "what a layer was given is forgotten": ("narrow<T>(low + given.low)", "narrow<T>(low)"),
    "the norm is left out": ("float scale = Layer::NORMED ?", "float scale = width < 0 ?"),
    "the norm's weights are left out": (
        "make_uint4(normed<T>(b.x, by.x, square),",
        "make_uint4((normed<T>(b.x, by.x, square), b.x),",
    ),
    "values are turned, too": ("if (of(tile) == VALUES) return", "if (false) return"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_products_are_left_alone(kind: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(products.ArrayProducts, "checked_rows", (8,))
    body, reason = few_rows.few_rows(model(), EmulatedProducts((BROKEN[kind],)))
    assert body is None
    assert "rows differ from the model's own by" in reason


KINDS = ("added", "gated", "heads")


def far_from_plain(
    emulated: EmulatedProducts,
    rows: int,
    width: int,
    tiles: int,
    kinds: tuple[str, ...] = KINDS,
    dtype: mx.Dtype = mx.bfloat16,
    size: float = 1.0,
) -> float:
    """The largest distance of a row of products from MLX's. size: of the numbers of x."""
    rng = np.random.default_rng(rows)

    def random(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, np.float32)).astype(dtype)

    x, weights, base = (
        random(rows, width) * size,
        random(tiles * 32, width) / 8,
        random(rows, tiles * 32),
    )
    norm = Norm(4 + random(width), 1e-5)
    rope = Rope(32, mx.array(10.0 ** -np.arange(0, 4, 0.25), mx.float32), False)
    places = mx.array(rng.integers(0, 4096, rows).astype(np.int32))
    three = tuple(mx.split(weights, [(tiles - 2) * 32, (tiles - 1) * 32]))

    def of(made: Products, kind: str) -> tuple[mx.array, ...]:
        if kind == "heads":
            return made.heads(x, norm, three, places, rope)
        return (made.added(x, weights, base) if kind == "added" else made.gated(x, norm, weights),)

    return max(
        few_rows._far(*pair)
        for kind in kinds
        for pair in zip(of(emulated, kind), of(PlainProducts(), kind), strict=True)
    )


@pytest.mark.parametrize(
    ("rows", "width", "tiles", "way"),
    [
        (5, 160, 6, Cut(8, 2, 2, 3)),
        (9, 64, 4, Cut(16, 1, 1, 2)),
        (16, 544, 10, Cut(16, 4, 4, 5)),
        (23, 1056, 6, Cut(32, 2, 2, 3)),
        (43, 544, 10, Cut(64, 4, 2, 3)),
        (64, 320, 8, Cut(64, 1, 4, 8)),
    ],
)
def test_products_cut_in_any_way_are_those_of_mlx_and_leave_counters_at_zero(
    rows: int, width: int, tiles: int, way: Cut, monkeypatch: Any
) -> None:
    monkeypatch.setattr(products, "cut", lambda *_: evolve(way, norm_bytes=4096))
    monkeypatch.setattr(products, "NARROW_WEIGHTS", 0)
    emulated = EmulatedProducts()
    assert far_from_plain(emulated, rows, width, tiles) < emulated.tolerance
    assert not emulated.counters.any()


@pytest.mark.parametrize("rows", [8, 16])
def test_what_float16_cannot_hold_before_it_is_divided_is_normed_before(rows: int) -> None:
    kinds = ("heads", "gated")
    far = far_from_plain(EmulatedProducts(), rows, 64, 4, kinds, mx.float16, 12_000.0)
    assert far < 2e-3


class _Named(EmulatedProducts):
    """Only says which kernel it would have launched."""

    def launch(self, source: Any, inputs: Any, blocks: int, shapes: Any) -> list[mx.array]:
        self.kind = "wide" if source.headers == WIDE_HEADERS else "narrow"
        return [mx.zeros(shape, mx.bfloat16) for shape in shapes]


@pytest.mark.parametrize(
    ("rows", "features", "width", "on_hopper", "kind"),
    [
        (8, 4096, 4096, True, "narrow"),
        (8, 4128, 4096, True, "wide"),
        (8, 4128, 4096, False, "narrow"),
        (9, 32, 64, True, "wide"),
    ],
)
def test_up_to_eight_rows_many_weights_are_multiplied_by_hoppers_instructions(
    rows: int, features: int, width: int, on_hopper: bool, kind: str
) -> None:
    named = _Named()
    named.on_hopper = on_hopper
    weights = mx.zeros((features, width), mx.bfloat16)
    named.added(mx.zeros((rows, width), mx.bfloat16), weights, mx.zeros((rows, features)))
    assert named.kind == kind


BROKEN_WIDE: dict[str, Change] = {
    "a step is not waited for": (
        "wait_copies<STAGES - 2>();\n      if",
        "wait_copies<STAGES - 1>();\n      if",
    ),
    "a stage is filled while multiplied": ("wait_products();\n      barrier();", "barrier();"),
    "threads go on without the others": ("wait_products();\n      barrier();", "wait_products();"),
    "the last step of a part is left out": ("(split + 1) / SPLITS);", "(split + 1) / SPLITS - 1);"),
    "the last piece is left out": ("there = k + piece * 8 < width;", "there = k + 64 < width;"),
    "sums of a block are forgotten": ("int s = 1; s < SPLITS", "int s = 2; s < SPLITS"),
    "the first block finishes": ("SPLITS - 1) == SPLITS - 1", "SPLITS - 1) == 0"),
    "a row of x is left out": ("m < count ? x +", "m < count - 1 ? x +"),
    "pieces stand as they come": ("(piece ^ line % 8) * 8", "piece * 8"),
    "rows of weights are in another order": (
        "line / 8 % 2, line / 16 * 8",
        "line / 16, line / 8 % 2 * 8",
    ),
    "what is added is another row's": ("m < count ? m : count - 1)", "0)"),
}
BROKEN_NORMS: dict[str, Change] = {
    "x is not normed": ("if (Layer::NORMED) norm_rows", "if (false) norm_rows"),
    "the norm is another step's": ("(step - from) * STEP", "(until - 1 - step) * STEP"),
    "squares of a block are forgotten": (
        "int s = 0; s < SPLITS; ++s) square",
        "int s = 1; s < SPLITS; ++s) square",
    ),
}


@pytest.mark.parametrize("kind", [*BROKEN_WIDE, *BROKEN_NORMS])
def test_broken_products_of_more_rows_are_far_from_those_of_mlx(
    kind: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(products, "cut", lambda *_: Cut(64, 4, 2, 3, norm_bytes=4096))
    change, tried = (BROKEN_WIDE | BROKEN_NORMS)[kind], "added" if kind in BROKEN_WIDE else "gated"
    assert not far_from_plain(EmulatedProducts((change,)), 43, 544, 10, (tried,)) < 0.1


def test_weights_are_cut_for_all_multiprocessors() -> None:
    def ways(width: int, keys: int, inner: int) -> list[tuple[int, int, int]]:
        sizes = [(width + 2 * keys, width), (width, width), (2 * inner, width), (width, inner)]
        return [(it.tiles, it.splits, it.stages) for it in (cut(64, *size) for size in sizes)]

    assert ways(4096, 1024, 14336) == [(4, 2, 8), (4, 4, 8), (4, 1, 4), (4, 4, 8)]
    assert ways(576, 192, 1536) == [(1, 1, 8), (1, 1, 8), (1, 1, 8), (1, 4, 8)]


@pytest.mark.parametrize("rows", [9, 32, 64])
def test_kernels_of_one_name_ask_for_the_same_room_and_no_more_than_there_is(rows: int) -> None:
    """MLX asks for a kernel's room once a name: with out's, down cannot be launched."""
    found: dict[str, set[int]] = {}
    for width in (64, 576, 2048, 4096, 8192, 28672):
        for form in (added_form(mx.bfloat16), gated_form(mx.bfloat16, 1e-5)):
            source = wide_source(form, cut(rows, 4096, width))
            found.setdefault(source.name, set()).add(source.room_bytes)
    assert {len(rooms) for rooms in found.values()} == {1}
    assert max(max(rooms) for rooms in found.values()) <= 226 << 10


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda it: it.update(tree_map(lambda x: x.astype(mx.float32), it.parameters())),
            "float32",
        ),
        (
            lambda it: it.layers[1].mlp.update({"up_proj": {"weight": mx.zeros((64, 64))}}),
            "float32",
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
    monkeypatch.setattr("kernel.paged_attention.OnGpu.row_keys_max", 60)
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


def test_a_kernel_is_compiled_anew_where_a_file_of_it_has_changed(
    tmp_path: Path, monkeypatch: Any
) -> None:
    copied = Path(shutil.copytree(kernel_text.SOURCE, tmp_path / "source"))
    monkeypatch.setattr(kernel_text, "SOURCE", copied)
    told = kernel_text.header.__wrapped__
    before = told(WIDE_HEADERS), told(HEADERS)
    assert before[0].endswith(f'#include "{copied}/wide.h"\n')
    with (copied / "wide.h").open("a") as file:
        file.write("// changed")
    assert told(WIDE_HEADERS) != before[0]
    assert told(HEADERS) == before[1]


def test_without_hoppers_instructions_more_rows_are_left_to_mlx(monkeypatch: Any) -> None:
    assert (CudaProducts().is_left(8), CudaProducts().is_left(9)) == (False, True)
    monkeypatch.setattr(products.ArrayProducts, "checked_rows", (9, 64))
    assert FewRows(model(rope_scaling=LLAMA3), CudaProducts()).disagreement() == ""
    monkeypatch.setattr(mx, "device_info", lambda: {"compute_capability_major": 9})
    assert not CudaProducts().is_left(64)


def test_what_is_not_used_stands_among_the_capabilities() -> None:
    dialect = EmulatedCuda()
    dialect.products = EmulatedProducts((("narrow<T>(low + given.low)", "narrow<T>(low)"),))
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
