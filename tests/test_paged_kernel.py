"""Kernels that read block tables, run on the CPU by tests/emulator: against the gather, mlx-lm's
own caches, and the engine's answers; and broken on purpose: the check at load must refuse them.
"""

from __future__ import annotations

import shutil
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kernel import attention, attention_cuda, fastmath, paged_attention, paged_choice
from kernel.attention_cuda import warps_of
from kernel.caches import PagedCache
from kernel.context import StepContext
from kernel.extension import Extension
from kernel.forward import Forward
from kernel.handles import HandleMisused
from kernel.layout import look
from kernel.metadata import build
from kernel.model_kernel import ModelKernel
from kernel.paged_attention import Dialect, Layer, Shape, put_blocks
from kernel.paged_check import disagreement
from kernel.paged_choice import asked_shapes, choose, suited
from kernel.pages import Pages
from kernel.tiny import tiny_llama
from server.engine import Engine
from server.loop import Parts
from server.policy import Policy
from server.submission import Submission, Update
from statemachine.events import BlockCopied
from statemachine.geometry import WINDOW, Geometry, Group
from statemachine.records import Parameters

from .emulated import Change, EmulatedCuda, EmulatedMetal, NoCompiler
from .paged import Runner, dense_logits, random_tokens

GROUPS = (Group(), Group(WINDOW, 0, 50, 0), Group(WINDOW, 0, 30, 4))


def shape(
    dtype: mx.Dtype,
    block_size: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    sinks: bool = False,
    group: int = 0,
) -> Shape:
    """heads: of K and V, and how many query heads share one; dims: of a key and a value."""
    return Shape(dtype, block_size, *heads, *dims, dims[0] ** -0.5, sinks, group)


SHAPES = {
    "bf16, 4 heads share": shape(mx.bfloat16, 16, (2, 4), (128, 128)),
    "f16, sinks, 3 heads share": shape(mx.float16, 16, (3, 3), (64, 64), sinks=True),
    "bf16, 7 heads share, blocks of 8": shape(mx.bfloat16, 8, (1, 7), (96, 96)),
    "bf16, 12 heads share, blocks of 32": shape(mx.bfloat16, 32, (1, 12), (80, 80)),
    "bf16, unshared, wide": shape(mx.bfloat16, 16, (2, 1), (256, 256)),
    "bf16, narrower values": shape(mx.bfloat16, 16, (1, 4), (96, 64)),
    "f32, 5 heads share, sinks": shape(mx.float32, 16, (1, 5), (80, 80), sinks=True),
    "8 bits of bf16, 4 heads share": shape(mx.bfloat16, 16, (2, 4), (128, 128), group=64),
    "8 bits of f32, sinks, odd widths": shape(
        mx.float32, 8, (1, 5), (96, 64), sinks=True, group=32
    ),
    "f32, blocks of 4": shape(mx.float32, 4, (2, 2), (64, 64)),
}
PLAIN = SHAPES["f32, blocks of 4"]
TENSOR = SHAPES["bf16, 4 heads share"]
CODED = SHAPES["8 bits of f32, sinks, odd widths"]


@pytest.fixture(autouse=True)
def _dispatch() -> None:
    attention.install()
    fastmath.install()


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("emulated", [EmulatedCuda, EmulatedMetal])
def test_kernels_give_what_the_gather_gives(emulated: Any, kind: str) -> None:
    dialect = emulated()
    assert disagreement(dialect, [(SHAPES[kind], group) for group in GROUPS]) == ""
    # A step is decoded in one call. Where rows are written in place three pieces are fetched, and
    # there is a second step, without splits.
    assert dialect.calls == (15 if dialect.in_place else 3)


def test_the_kernel_of_steps_without_splits_is_compared_too(monkeypatch: Any) -> None:
    made = attention_cuda.decode_body

    def body(shape: Shape, split: bool = True) -> str:
        text = made(shape, split)
        return text if split else text.replace(shape.scale_of_two, "0.0f")

    monkeypatch.setattr("tests.emulated.decode_body", body)
    found = disagreement(EmulatedCuda(), [(PLAIN, Group())])
    assert "attention differs from the gather's" in found


BROKEN: dict[str, tuple[Shape, Change, str]] = {
    "a row sees one key too few": (
        PLAIN,
        ("return position < until &&", "return position < until - 1 &&"),
        "attention differs",
    ),
    "a row sees one key too many": (
        PLAIN,
        ("return position < until &&", "return position <= until &&"),
        "attention differs",
    ),
    "a window begins one key early": (
        PLAIN,
        ("&& (position >= live_from || position < sink);", "&& true;"),
        "attention differs",
    ),
    "query heads read another head's rows": (
        TENSOR,
        ("int kv_head = column / COLUMNS,", "int kv_head = column % COLUMNS,"),
        "attention differs",
    ),
    "rows of the step are read from the pages": (
        TENSOR,
        (
            "if (position >= start) return fresh_keys +",
            "if (position > 1 << 30) return fresh_keys +",
        ),
        "attention differs",
    ),
    "a split is left out": (
        TENSOR,
        ("bool there = begin + i < splits;", "bool there = begin + i < splits - 1;"),
        "attention differs",
    ),
    "a decoded row is not written": (
        TENSOR,
        ("if (item.slot >= 0 &&", "if (item.slot > 1 << 30 &&"),
        "the pages do not hold",
    ),
    "a prompt's rows are not written": (
        TENSOR,
        ("if (position >= start) *page = loaded;", ""),
        "the pages do not hold",
    ),
    "a block is read by the wrong row of the table": (
        TENSOR,
        ("int block = table[position / BLOCK];", "int block = table[position / BLOCK + 1];"),
        "attention differs",
    ),
    "words are read without their bias": (
        CODED,
        ("* step + least;", "* step;"),
        "attention differs",
    ),
    "a prompt's words are not written": (
        CODED,
        ("if (position >= start) page[unit] = row[unit];", ""),
        "the pages do not hold",
    ),
    "the kernel does not compile": (TENSOR, ("#define TILE 16", "#define TILE 16;"), "g++"),
}


def test_the_warps_of_a_block_share_no_more_memory_than_there_is() -> None:
    found = {
        (warps_of(it), warps_of(it) * it.heads * (it.value_dim + 2) * 4 <= 48 << 10)
        for shared in range(1, 17)
        for dim in range(32, 264, 8)
        for it in [shape(mx.bfloat16, 16, (1, shared), (dim, dim))]
    }
    assert found == {(8, True), (4, True)}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_kernel_is_left_alone(kind: str) -> None:
    asked, change, reason = BROKEN[kind]
    found = disagreement(EmulatedCuda(changes=(change,)), [(asked, group) for group in GROUPS])
    assert found.startswith(f"the kernel {asked.name} is left alone: ")
    assert reason in found


def test_a_broken_merge_on_metal_is_left_alone() -> None:
    change = ("? kept_beside_sink(total, peak, sink) : 1.0f;", "? 1.0f : 1.0f;")
    asked = SHAPES["f32, 5 heads share, sinks"]
    found = disagreement(EmulatedMetal(changes=(change,)), [(asked, Group())])
    assert "attention differs from the gather's" in found


def test_counters_are_left_at_zero() -> None:
    """The last of a row's items puts its counter back: the next call counts from there."""
    dialect = EmulatedCuda()
    dialect.reset = lambda: None  # type: ignore[method-assign]
    for _ in range(2):
        assert disagreement(dialect, [(TENSOR, Group())]) == ""
        assert not dialect.counters.any()


def test_without_a_compiler_a_sentence_says_what_to_install(monkeypatch: Any) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    unseen = shape(mx.float32, 16, (1, 1), (8, 8))
    with pytest.raises(NoCompiler, match=r"need g\+\+ to run them on the CPU: install it"):
        EmulatedCuda()._compiled(unseen)


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "one K/V head": {"kv_heads": 1},
    "windows": {"sliding_window": 12, "sliding_layers": (0, 2)},
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("emulated", [EmulatedCuda, EmulatedMetal])
def test_logits_through_tables_equal_those_of_dense_caches(
    emulated: Any, kind: str, monkeypatch: Any
) -> None:
    """Prompts in pieces of all lengths, beside rows that decode, and drafts that are verified."""
    monkeypatch.setattr(
        paged_attention.OnGpu, "row_keys_max", 60
    )  # so that some pieces are fetched
    model = tiny_llama(3, **MODELS[kind])
    dialect: Dialect = emulated()
    runner = Runner(model, num_blocks=64)
    runner.forward = Forward(model, look(model), dialect=dialect)
    prompts = [random_tokens(seed, rows) for seed, rows in enumerate((52, 31, 26))]
    cuts = ((3, 20, 1, 1, 5, 1, 1), (9, 1, 1, 4, 1, 1, 1), (1, 1, 10, 1, 1, 1, 8))
    wanted = [dense_logits(model, tokens, 1) for tokens in prompts]
    done = [0, 0, 0]
    for counts in zip(*cuts, strict=True):
        pieces = []
        for seq, count in enumerate(counts):
            tokens = prompts[seq][done[seq] : done[seq] + count]
            pieces.append(runner.book.append(seq, tokens))
            done[seq] += count
        got = runner.run(*pieces)
        for seq, row in enumerate(got):
            np.testing.assert_allclose(row, wanted[seq][done[seq] - 1], rtol=0, atol=1e-4)
            runner.book.front_trim(seq)


class Tokens:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def __call__(self, update: Update) -> None:
        self.tokens += update.tokens


def answers(dialect: Dialect | None, policy: Policy) -> list[list[int]]:
    """What five requests are answered, three of which share a prefix that is no whole block."""
    model = tiny_llama(3)
    geometry = Geometry(block_size=4, groups=(Group(num_blocks=64),))
    kernel = ModelKernel(model, geometry, layout=look(model), dialect=dialect)
    engine = Engine(lambda: Parts(kernel, policy))
    engine.open()
    sinks = [Tokens() for _ in range(5)]
    for number, sink in enumerate(sinks):
        prompt = tuple(range(1, 11)) + (number, number + 1) * (number % 3)
        engine.submit(Submission(prompt, Parameters(max_tokens=10)), sink)
    while engine.step():
        pass
    engine.stop()
    return [sink.tokens for sink in sinks]


@pytest.mark.parametrize("emulated", [EmulatedCuda, EmulatedMetal])
@pytest.mark.parametrize(
    "policy",
    [Policy(), Policy(lookahead=True), Policy(lookahead=True, draft_tokens=3, lookup_ngram=1)],
    ids=["plain", "ahead", "ahead with drafts"],
)
def test_the_engine_answers_through_tables_as_by_the_gather(emulated: Any, policy: Policy) -> None:
    dialect = emulated()
    assert answers(dialect, policy) == answers(None, policy)
    assert dialect.calls > 20


def test_blocks_are_copied_in_place() -> None:
    dialect = EmulatedCuda()
    model = tiny_llama(1)
    geometry = Geometry(block_size=4, groups=(Group(num_blocks=6),))
    pages = Pages(geometry, look(model).shapes, dialect)
    held = pages.begin()
    for array in (*held.keys, *held.values):
        array[:] = array + mx.arange(6, dtype=mx.float32)[:, None, None, None]
    mx.eval(held.keys, held.values)
    # Each is read before any is written: 1 goes to 2 while 2 goes to 3.
    pages.copy_blocks([BlockCopied(0, 1, 0, 0, source, source + 1, 4) for source in (1, 2)])
    after = pages.begin()
    for array in (*after.keys, *after.values):
        assert np.array(array)[:, 0, 0, 0].tolist() == [0, 1, 1, 2, 4, 5]
    assert all(one is other for one, other in zip(held.keys, after.keys, strict=True))


def test_put_blocks_writes_nothing_but_its_blocks() -> None:
    pages = [mx.zeros((4, 4, 2, 8)) for _ in range(2)]
    rows = [mx.ones((1, 4, 2, 8)), 2 * mx.ones((1, 4, 2, 8))]
    mx.eval(pages, rows)
    put_blocks(EmulatedCuda(), Layer(0, *pages, *rows), mx.array([2]))
    assert [np.array(array)[:, 3, 1, 7].tolist() for array in pages] == [[0, 0, 1, 0], [0, 0, 2, 0]]


def test_a_model_is_served_through_tables_where_they_agree() -> None:
    model = tiny_llama(1, sliding_window=12, sliding_layers=(0,))
    dialect = EmulatedCuda()
    layout = look(model)
    assert suited(model, layout, 16, dialect) == (dialect, "")
    scale = 8**-0.5
    wanted = Shape(mx.float32, 16, 2, 2, 8, 8, scale, False)
    assert asked_shapes(model, layout, 16) == [(wanted, 0), (wanted, 1)]


def test_a_model_is_served_by_the_gather_where_a_kernel_disagrees() -> None:
    model = tiny_llama(1)
    change = ("return position < until &&", "return position < until - 1 &&")
    dialect, reason = suited(model, look(model), 16, EmulatedCuda(changes=(change,)))
    assert dialect is None
    assert "attention differs from the gather's by" in reason


def test_a_model_that_no_kernel_can_be_asked_for_is_served_by_the_gather(monkeypatch: Any) -> None:
    def asked(*_: object) -> None:
        raise HandleMisused("layer 0 has rows that nothing attends over")

    monkeypatch.setattr(paged_choice, "asked_shapes", asked)
    model = tiny_llama(1)
    reason = "HandleMisused: layer 0 has rows that nothing attends over"
    assert suited(model, look(model), 16, EmulatedCuda()) == (None, reason)


def test_heads_that_no_kernel_reads_are_served_by_the_gather() -> None:
    model = tiny_llama(1, hidden=48)
    reason = (
        "layer 0 has heads of 12 and 12 in mlx.core.float32, "
        "which no kernel reads through block tables"
    )
    assert suited(model, look(model), 16, EmulatedCuda()) == (None, reason)


def test_a_processor_without_kernels_is_served_by_the_gather(monkeypatch: Any) -> None:
    monkeypatch.setattr(paged_choice, "extension", lambda: Extension(None))
    model = tiny_llama(1)
    assert choose(model, look(model), 16) == (None, "")
    geometry = Geometry(block_size=4, groups=(Group(num_blocks=8),))
    assert ModelKernel(model, geometry).attention == "gather"


def test_rows_that_nothing_attends_over_are_not_lost_in_silence() -> None:
    model = tiny_llama(1)
    runner = Runner(model)
    metadata = build(runner_batch(runner), runner.geometry)
    cache = PagedCache(0, 0)
    cache.bind(StepContext(metadata, dialect=EmulatedCuda()), runner.pages.begin())
    cache.update_and_fetch(mx.zeros((3, 2, 1, 8)), mx.zeros((3, 2, 1, 8)))
    with pytest.raises(HandleMisused, match="layer 0 has rows that nothing attends over"):
        cache.used(metadata)


def runner_batch(runner: Runner) -> Any:
    from kernel.batch import Batch

    return Batch(1, (runner.book.append(0, [1, 2, 3]),))
