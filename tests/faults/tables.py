"""Faults of what kernels that read block tables are told, or do: on the CPU, by those of native/.

Those of the gather that stands in for them are in layers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve

from . import loads
from .fault import DONE, Catalogue, Make, Witness
from .layers import ODD_LAYER

FAULTS = Catalogue()
PLAN_ROWS = "kernel.paged_attention:plan_rows"


def _of_the_plan(name: str, sentence: str, late_steps: int = 0) -> Callable[[Make], Make]:
    """Decorates a fault of what the kernel is told."""
    return FAULTS.add(
        name, sentence, PLAN_ROWS, loads.TINY_TABLES, "forward", "token", "logit",
        late_steps=late_steps,
    )  # fmt: skip


def _planned(original: Any, witness: Witness, change: Any) -> Any:
    """plan_rows, whose items [items, ints] are changed."""
    from kernel.paged_plan import ITEM_INTS

    def plan_rows(*arguments: Any, **named: Any) -> Any:
        plan = original(*arguments, **named)
        if not witness.on:
            return plan
        ints = plan.ints.copy()
        items = ints[: plan.items * ITEM_INTS].reshape(plan.items, ITEM_INTS)
        before = items.copy()
        change(items)
        if (items != before).any():
            witness.note(-1, DONE)
        return evolve(plan, ints=ints)

    return plan_rows


@_of_the_plan(
    "plan-row-too-few",
    "the kernel's plan ends each row's keys one before its own, so that no row sees itself",
)
def plan_row_too_few(original: Any, witness: Witness) -> Any:
    def change(items: Any) -> None:
        later = items[:, 1] > 1
        items[later, 1] -= 1
        items[later, 5] += 1  # so that it stays the same row

    return _planned(original, witness, change)


@_of_the_plan(
    "plan-table-of-the-first", "all rows of a step are read through the first one's table"
)
def plan_table_of_the_first(original: Any, witness: Witness) -> Any:
    def change(items: Any) -> None:
        # Of rows that read pages, and no further than that table goes.
        same = (items[:, 4] > 0) & (items[:, 1] > 0) & (items[:, 1] <= items[0, 1])
        items[same, 0] = items[0, 0]

    return _planned(original, witness, change)


@_of_the_plan(
    "plan-write-misplaced", "the kernel writes a row into the block's next place", late_steps=1
)
def plan_write_misplaced(original: Any, witness: Witness) -> Any:
    def change(items: Any) -> None:
        written = (items[:, 1] > 0) & (items[:, 6] >= 0)
        items[written, 6] = items[written, 6] // 4 * 4 + (items[written, 6] + 1) % 4

    return _planned(original, witness, change)


@_of_the_plan(
    "plan-row-not-written",
    "the kernel attends over a step's rows and never writes them",
    late_steps=1,
)
def plan_row_not_written(original: Any, witness: Witness) -> Any:
    def change(items: Any) -> None:
        items[items[:, 1] > 0, 6] = -1

    return _planned(original, witness, change)


@FAULTS.add(
    "kernel-scale-rounded",
    "the kernel of one layer scales its scores a millionth too much",
    "kernel.attention_cpu:CpuDialect.decode",
    loads.TINY_TABLES,
    "forward",
    "token",
    "logit",
)
def kernel_scale_rounded(original: Any, witness: Witness) -> Any:
    def decode(dialect: Any, shape: Any, plan: Any, counts: Any, queries: Any, layer: Any) -> Any:
        if witness.on and layer.number == ODD_LAYER:
            witness.note(-1, DONE)
            shape = evolve(shape, scale=shape.scale * (1 + 1e-6))
        return original(dialect, shape, plan, counts, queries, layer)

    return decode


@FAULTS.add(
    "narrow-weights-of-another",
    "a layer multiplies by the narrow numbers of the layer before it",
    "kernel.products_cpu:CpuProducts.added",
    loads.SMOL_TABLES,
    "forward",
    "token",
    "logit",
)
def narrow_weights_of_another(original: Any, witness: Witness) -> Any:
    before: dict[tuple[int, int], Any] = {}

    def added(products: Any, x: Any, weights: Any, base: Any) -> Any:
        size = (weights.features, weights.width)
        held, before[size] = before.get(size, weights), weights
        if not witness.on:
            return original(products, x, weights, base)
        witness.note(-1, DONE)
        return original(products, x, held, base)

    return added


def _in_the_code(name: str, make: Make, late_steps: int = 0) -> None:
    """The same bug where nobody knows of it: forward repeats it, the reference does not."""
    sentence = f"{name}, in the code that replays too: only mlx-lm's own caches are without it"
    add = FAULTS.add(
        f"{name}-in-code", sentence, PLAN_ROWS, loads.TINY_TABLES,
        "reference", "token", late_steps=late_steps, stays=True,
    )  # fmt: skip
    add(make)


_in_the_code("plan-row-too-few", plan_row_too_few)
_in_the_code("plan-write-misplaced", plan_write_misplaced, late_steps=1)
