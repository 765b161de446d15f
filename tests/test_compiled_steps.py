"""Steps of decode rows share a graph: fed the step's arrays, it gives what building anew gives."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from attrs import asdict
from msgspec import structs

from kernel import attention, model_kernel
from kernel.adapters import Serving
from kernel.batch import Batch
from kernel.compiled import CompiledCalls
from kernel.context import StepContext
from kernel.drawing import Sampler
from kernel.forward import Forward, PackedCall
from kernel.layout import look
from kernel.metadata import build
from kernel.model_kernel import ModelKernel
from kernel.paged_attention import Layer, OnGpu, Shape
from kernel.paged_plan import ITEM_INTS, RowsPlan
from kernel.pages import Pages
from kernel.sampling import Samples
from kernel.split import body_and_head
from kernel.tiny import tiny_llama
from server.engine import Engine
from server.parts import Parts
from server.policy import Policy
from server.submission import Submission, Update
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters

from .emulated import EmulatedCuda
from .paged import Book

LAYERS = 3


class InGraph(OnGpu):
    """A dialect of MLX's own operations: no attention, but all that a kernel is given matters."""

    in_place = True
    blocks = 24
    products = None

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.calls = 0
        self.sampler = sampler

    def decode(
        self, shape: Shape, plan: mx.array, counts: RowsPlan, queries: mx.array, layer: Layer
    ) -> mx.array:
        self.calls += 1
        items = plan[: counts.items * ITEM_INTS].reshape(counts.items, ITEM_INTS)
        read = layer.key_pages[plan[items[0, 0]]].sum() + layer.value_pages[plan[-1]].sum()
        own = mx.repeat(layer.keys + layer.values, shape.shared, axis=1)
        return queries * items[:, 1].sum() * 1e-2 + own + read

    def fetch(
        self, shape: Shape, plan: mx.array, rows: int, layer: Layer
    ) -> tuple[mx.array, mx.array]:
        count = (shape.kv_heads, rows)
        return mx.zeros((*count, shape.key_dim)), mx.zeros((*count, shape.value_dim))

    def reset(self) -> None:
        """Nothing is held."""


class Steps:
    """Two sequences that decode, each step both by a graph and built anew."""

    def __init__(self, dialect: Any) -> None:
        attention.install()
        self.model = tiny_llama(2, layers=LAYERS)
        layout = look(self.model)
        self.body, _ = body_and_head(self.model)
        self.dialect = dialect
        self.plain = PackedCall(layout)
        self.compiled = CompiledCalls(PackedCall(layout).run)
        self.geometry = Geometry(block_size=4, groups=(Group(num_blocks=400),))
        self.book = Book(self.geometry)
        self.pages = Pages(self.geometry, layout.shapes, dialect)
        self.serving: Any = None

    def step(self, *rows: int) -> int:
        """Feed some rows of each sequence; returns in how many layers a graph was built."""
        pieces = [self.book.append(seq, [7 + seq] * count) for seq, count in enumerate(rows)]
        metadata = build(Batch(1, tuple(pieces)), self.geometry)
        contexts = [StepContext(metadata, dialect=self.dialect) for _ in range(2)]
        before = self.dialect.calls
        (hidden,), uses = self.compiled.run(self.body, contexts[0], self.pages.begin())
        built = self.dialect.calls - before
        wanted, counted = self.plain.run(self.body, contexts[1], self.pages.begin())
        np.testing.assert_array_equal(np.array(hidden), np.array(wanted))
        assert list(map(asdict, uses)) == list(map(asdict, counted))
        return int(built)


def test_steps_of_as_many_rows_share_a_graph() -> None:
    steps = Steps(InGraph())
    # The first is run as it is, to see which plans are asked for; the second is traced.
    assert [steps.step(1, 1) for _ in range(6)] == [LAYERS, LAYERS, 0, 0, 0, 0]
    assert steps.compiled.failure == ""


def test_another_number_of_rows_has_a_graph_of_its_own() -> None:
    steps = Steps(InGraph())
    built = [steps.step(*rows) for rows in ((1, 1), (1, 1), (1,), (1, 1), (1,), (3, 1), (3, 1))]
    assert built == [LAYERS, LAYERS, LAYERS, 0, 0, LAYERS, 0]


def test_tables_that_outgrow_a_graph_get_another() -> None:
    steps = Steps(InGraph())
    steps.step(120, 1)
    assert [steps.step(1, 1) for _ in range(12)] == [LAYERS, *[0] * 7, LAYERS, 0, 0, 0]


def test_a_step_with_a_fetched_piece_is_built_anew(monkeypatch: Any) -> None:
    monkeypatch.setattr("kernel.paged_attention.OnGpu.row_keys_max", 60)
    steps = Steps(InGraph())
    steps.step(1, 1)
    assert [steps.step(1, 1), steps.step(20, 1), steps.step(20, 1)] == [LAYERS] * 3
    assert steps.step(1, 1) == 0


def test_graphs_are_forgotten_with_the_pages() -> None:
    steps = Steps(InGraph())
    assert [steps.step(1, 1) for _ in range(3)] == [LAYERS, LAYERS, 0]
    steps.compiled.reset()
    steps.pages.reset()
    assert [steps.step(1, 1) for _ in range(2)] == [LAYERS, 0]


def test_rows_of_adapters_are_built_anew() -> None:
    steps = Steps(InGraph())
    steps.step(1, 1)
    steps.step(1, 1)
    pieces = (steps.book.append(0, [5]), steps.book.append(1, [5]))
    metadata = build(Batch(1, pieces), steps.geometry)
    other = Serving(None, (), np.empty(0, np.int32))  # type: ignore[arg-type]
    context = StepContext(metadata, serving=other, dialect=steps.dialect)
    before = steps.dialect.calls
    steps.compiled.run(steps.body, context, steps.pages.begin())
    assert steps.dialect.calls - before == LAYERS


def test_a_body_that_no_graph_can_hold_is_run_as_it_is(caplog: Any) -> None:
    """The emulator evaluates what it is given, which cannot be done while a graph is traced."""
    steps = Steps(EmulatedCuda())
    assert steps.step(1, 1) == LAYERS
    assert steps.compiled.failure == ""
    steps.step(1, 1)
    assert steps.compiled.failure.startswith("ValueError: [eval] Attempting to eval an array")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert steps.compiled.failure in record.getMessage()
    assert [steps.step(1, 1) for _ in range(2)] == [LAYERS, LAYERS]


def test_a_body_that_a_graph_can_hold_has_nothing_to_tell() -> None:
    model = tiny_llama(2, layers=LAYERS)
    geometry = Geometry(block_size=4, groups=(Group(num_blocks=8),))
    assert ModelKernel(model, geometry, dialect=InGraph()).attention == "tables"


class Leaning:
    """A sampler of MLX's operations: the last of the likeliest tokens, the more the higher what it
    is told of a row. evaluates: where no graph can hold it.
    """

    def __init__(self, evaluates: bool = False) -> None:
        self.calls = 0
        self._evaluates = evaluates

    def sample(self, logits: mx.array, asked: mx.array) -> Samples:
        self.calls += 1
        leaning = logits + mx.arange(logits.shape[1]) * asked[:, -1:] * 0.05
        if self._evaluates:
            mx.eval(leaning)
        tokens = mx.argmax(leaning, axis=-1)
        chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
        return Samples(tokens, chosen, leaning.max(axis=-1) - chosen)


LENGTHS = (30, 12, 30, 21)
"""Tokens of each answer: where one ends, those behind it are fed from other places."""
PLAIN = tuple(
    Parameters(length, temperature=float(number % 2), seed=number)
    for number, length in enumerate(LENGTHS)
)


@pytest.fixture
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_kernel, "sampler_for", lambda sampler, _: (sampler, ""))


def _answers(sampler: Leaning, asked: tuple[Parameters, ...] = PLAIN) -> list[list[Update]]:
    """What is told of each of these requests, at once, with a step in flight."""
    geometry = Geometry(block_size=4, groups=(Group(num_blocks=64),))
    kernel = ModelKernel(tiny_llama(3, layers=LAYERS), geometry, dialect=InGraph(sampler))
    assert kernel.attention == "tables"
    sampler.calls = 0
    engine = Engine(lambda: Parts(kernel, Policy(lookahead=True)))
    engine.open()
    told: list[list[Update]] = [[] for _ in asked]
    for number, parameters in enumerate(asked):
        engine.submit(Submission((7, 8 + number), parameters), told[number].append)
    while engine.step():
        pass
    engine.stop()
    assert engine.status()["divergences"] == 0
    assert [len(_tokens(it)) for it in told] == [it.max_tokens for it in asked]
    return told


def _tokens(updates: list[Update]) -> list[int]:
    return [token for update in updates for token in update.tokens]


@pytest.mark.usefixtures("_unchecked")
def test_samples_are_drawn_in_the_graph_of_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    within, apart = Leaning(), Leaning()
    found = _answers(within)
    # One of the prompts together, which is not shared; then one each for 4, 3 and 2 rows, and more
    # where tables outgrew a graph.
    assert within.calls <= 8
    monkeypatch.setattr(Forward, "draws", lambda *_: False)
    assert _answers(apart) == found
    assert apart.calls >= 30
    assert len({tuple(_tokens(it)) for it in found}) == len(LENGTHS)


OTHERS = {
    "a bias": Parameters(20, logit_bias=((3, 100.0),)),
    "a penalty": Parameters(20, frequency_penalty=2.0),
    "a memory of the prompt": Parameters(20, repetition_penalty=1.5),
    "log-probabilities": Parameters(20, logprobs=2),
}


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize("what", OTHERS)
def test_one_row_whose_logits_are_changed_or_told_takes_its_step_out_of_the_graph(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (Parameters(30), OTHERS[what], Parameters(25, temperature=1.0, seed=7))
    sampler = Leaning()
    found = _answers(sampler, asked)
    assert sampler.calls >= 20  # one for each token of the row that is not plain
    monkeypatch.setattr(Forward, "draws", lambda *_: False)
    assert _answers(Leaning(), asked) == found
    plain = _answers(Leaning(), (asked[0], Parameters(20), asked[2]))
    assert found[1] != plain[1]
    if what == "a bias":
        assert _tokens(found[1]) == [3] * 20
    if what == "log-probabilities":
        assert [len(it.logprobs[0].top) for it in found[1] if it.tokens] == [2] * 20


def test_rows_of_adapters_are_not_drawn_in_the_graph() -> None:
    geometry = Geometry(block_size=4, groups=(Group(num_blocks=8),))
    dialect = InGraph(Leaning())
    forward = Forward(tiny_llama(2, layers=LAYERS), dialect=dialect, sampler=dialect.sampler)
    metadata = build(Batch(1, (Book(geometry).append(0, [5]),)), geometry)
    other = Serving(None, (), np.empty(0, np.int32))  # type: ignore[arg-type]
    assert metadata.sampled == (0,)
    assert forward.draws(StepContext(metadata, dialect=dialect))
    assert not forward.draws(StepContext(metadata, serving=other, dialect=dialect))


@pytest.mark.usefixtures("_unchecked")
def test_a_sampler_that_no_graph_can_hold_is_told_at_load() -> None:
    geometry = Geometry(block_size=4, groups=(Group(num_blocks=8),))
    dialect = InGraph(Leaning(evaluates=True))
    found = ModelKernel(tiny_llama(2, layers=LAYERS), geometry, dialect=dialect).attention
    assert found.startswith("tables; each step is built anew: ValueError: [eval] Attempting to")


@pytest.mark.usefixtures("_unchecked")
def test_tokens_in_their_own_order_are_fed_as_they_are() -> None:
    geometry = Geometry(block_size=4, groups=(Group(num_blocks=64),))
    kernel = ModelKernel(tiny_llama(3, layers=LAYERS), geometry, dialect=InGraph(Leaning()))
    book = Book(geometry)
    pieces = tuple(book.append(seq, [5, seq]) for seq in range(3))
    kernel.collect(kernel.issue(Batch(1, pieces)))

    def fed(*seqs: int) -> mx.array | None:
        ahead = [structs.replace(book.append(seq, [0]), tokens=(), pending=1) for seq in seqs]
        return kernel._fed(build(Batch(2, tuple(ahead)), geometry))

    tokens = kernel._newest.tokens
    assert tokens is not None
    assert fed(0, 1, 2) is tokens
    mixed = fed(2, 0)
    assert mixed is not None
    assert mixed.tolist() == [tokens[2].item(), tokens[0].item()]


@pytest.fixture(autouse=True)
def _dispatch() -> None:
    attention.install()
