"""What lies between two attentions in one launch: on the emulator, its blocks running at once."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kernel import attention, chain, few_rows
from kernel.chain import Apart, Chain, LayerWeights
from kernel.few_rows import FewRows
from kernel.forward import Forward
from kernel.layout import look
from kernel.products import Norm, Rope

from .emulated import Change, EmulatedCuda, EmulatedProducts
from .paged import Runner, random_tokens
from .test_few_rows import model

LAYERS, ROWS = 2, 6
UNLEFT = ("*counter(i) = 0;", "*counter(i) = *counter(i);")


@pytest.fixture(autouse=True)
def _few_comparisons(monkeypatch: Any) -> None:
    attention.install()
    monkeypatch.setattr(chain, "CHECKED_TIMES", 2)
    monkeypatch.setattr(few_rows, "CHECKED_ROWS", (1,))


def layer(seed: int) -> LayerWeights:
    """A layer of width 64, whose attention leaves so much that warps go round their rings, and a
    part more for some.
    """
    rng = np.random.default_rng(seed)

    def random(*dims: int) -> mx.array:
        made = rng.standard_normal(dims, np.float32) * dims[-1] ** -0.5
        return mx.array(made).astype(mx.bfloat16)

    norms = [Norm(random(64) + 1, eps) for eps in (1e-5, 1e-6)]
    return LayerWeights(
        before=norms[0],
        projections=(random(64, 64), random(32, 64), random(32, 64)),
        rope=Rope(32, mx.array(rng.random(16, np.float32)), False),
        out=random(64, 32 * (2 * 8 * 3 + 5)),
        between=norms[1],
        gates=random(2 * 96, 64),
        down=random(64, 96),
    )


@pytest.mark.parametrize("together", [1, 3, 5])
def test_one_launch_makes_the_same_numbers_as_four(together: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(chain, "TOLERANCE", 0.0)
    products = EmulatedProducts(together=together)
    chained = Chain(products)
    assert chain.disagreement(chained, Apart(products), [layer(1), layer(2)]) == ""
    assert not np.array(chained._counters).any()


BROKEN: dict[str, Change] = {
    "a phase begins before the one before it ended": (
        "if (phase != ready) wait_for(phase - 1);",
        "if (phase < 0) wait_for(phase - 1);",
    ),
    "tiles are told of before all threads are done with them": (
        "        __syncthreads();\n        tell(now, done);",
        "        tell(now, done);",
    ),
    "the next tile's weights are not asked for": ("if (!late) ask();", ""),
    "weights are asked for twice": ("first + RUNS * WARPS * PARTS", "first + WARPS * PARTS"),
    "weights are taken before they came": ("copies_wait<RUNS - 1>", "copies_wait<RUNS>"),
    "a ring is not gone round": ("run = (run + 1) % RUNS;", ""),
    "all sums are taken for the first tile's": (
        "finish(layer, here, 0, count)",
        "finish(layer, 0, 0, count)",
    ),
    "counters are left as they are": UNLEFT,
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_chain_is_noticed(kind: str) -> None:
    products = EmulatedProducts((BROKEN[kind],))
    reason = chain.disagreement(Chain(products), Apart(products), [layer(1), layer(2)])
    assert "in one launch differ from those of one after the other by" in reason


def test_a_chain_that_disagrees_is_left_alone_and_its_products_serve() -> None:
    emulated = EmulatedProducts((UNLEFT,))
    body, reason = few_rows.few_rows(model(), emulated)
    assert body is not None
    assert reason.startswith("products of 1 rows in one launch differ from those of one after")
    assert _launches(body, emulated, (1,)) == [1 + 4 * LAYERS - 1]


def test_steps_of_up_to_eight_rows_take_two_launches_a_layer(monkeypatch: Any) -> None:
    emulated = EmulatedProducts()
    body = FewRows(model(), emulated)
    assert _launches(body, emulated, (1, 4, 5)) == [1 + LAYERS, 1 + LAYERS, 4 * LAYERS]
    monkeypatch.setattr(chain, "ROWS_MAX", 0)
    assert _launches(body, emulated, (1,)) == [4 * LAYERS]


def test_a_step_by_the_chain_has_the_logits_of_one_without(monkeypatch: Any) -> None:
    made, found = model(), []
    for rows_max in (chain.ROWS_MAX, 0):
        monkeypatch.setattr(chain, "ROWS_MAX", rows_max)
        body = FewRows(made, EmulatedProducts())
        runner = Runner(made, num_blocks=64)
        runner.forward = Forward(made, look(made), dialect=EmulatedCuda(), few_rows=body)
        tokens = random_tokens(1, ROWS)
        found.append([runner.run(runner.book.append(0, tokens[:3])) for _ in range(3)])
    np.testing.assert_array_equal(*found)


def _launches(body: FewRows, emulated: EmulatedProducts, cuts: tuple[int, ...]) -> list[int]:
    """Of steps of that many rows of each of two sequences; after two, of which the second shows
    that the emulator's graphs cannot be kept.
    """
    made = model()
    runner = Runner(made, num_blocks=64)
    runner.forward = Forward(made, look(made), dialect=EmulatedCuda(), few_rows=body)
    counts = []
    for rows in (1, 1, *cuts):
        before = emulated.calls
        runner.run(*[runner.book.append(seq, random_tokens(seq, rows)) for seq in (0, 1)])
        counts.append(emulated.calls - before)
    return counts[2:]
