"""Paged check: kernels that read block tables against the gather, on random data, before use.

Owns the data and the comparison. Pages are full of NaN wherever no row was written, blocks lie in
a random order, and sequences of many lengths stand in one step: first rows, block edges, splits,
drafts, and pieces that are fetched.
"""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx
import numpy as np
from attrs import frozen

from statemachine.events import NO_BLOCK, Namespace
from statemachine.geometry import WINDOW, Geometry, Group
from statemachine.sequence import Sequence

from .attention import attend
from .batch import Batch, Piece
from .context import StepContext
from .errors import describe
from .metadata import StepMetadata, build
from .paged_attention import ROW_KEYS_MAX, Dialect, Layer, Shape, StepTables
from .pages import Codes, PageStep
from .quantised import Code

Pieces = tuple[tuple[int, int], ...]

PIECES: Pieces = ((0, 1), (15, 1), (16, 1), (33, 3), (1400, 1), (50, 12), (0, 20), (1, 1), (300, 2))
"""Rows before the step, and in it, of each sequence."""
SHORT = ((0, 1), (33, 3), (300, 2), (15, 1))
"""Pieces of which no row is split: kernels for such steps are others."""
LONGER = ((0, 75), (210, 40))
"""More of these, for a dialect that attends to all rows of a piece itself, in tiles."""
WINDOW_MAX = 37
FETCHED_KEYS = 256
"""Pieces of more than that many keys are fetched, where the dialect fetches."""
TOLERANCES = {mx.bfloat16: 2e-2, mx.float16: 3e-3, mx.float32: 3e-3}
"""Of a row's length. MLX's dense attention, which long pieces take, rounds weights to the pages'
dtype; and float32 products on CUDA keep 10 bits.
"""


def disagreement(dialect: Dialect, asked: Iterable[tuple[Shape, Group]]) -> str:
    """Why these kernels must not be used; empty where they give what the gather gives."""
    for number, (shape, group) in enumerate(asked):
        try:
            reasons = (_compared(dialect, shape, group, number, *it) for it in _steps(dialect))
            reason = next(filter(None, reasons), "")
        except Exception as error:  # a kernel that does not compile, say
            reason = describe(error)
        dialect.reset()
        if reason:
            return f"the kernel {shape.name} is left alone: {reason}"
    return ""


@frozen(eq=False)
class _Case:
    """A step of random rows. filled: [slots], the rows of the pages that hold something."""

    metadata: StepMetadata
    queries: mx.array
    keys: mx.array
    values: mx.array
    key_pages: mx.array
    value_pages: mx.array
    sinks: mx.array | None
    codes: Codes | None
    filled: np.ndarray


def _steps(dialect: Dialect) -> tuple[tuple[Pieces, int | None], ...]:
    """Pieces, and what they may have of keys and still be attended row by row: few, so that some
    are fetched; and any number, of pieces without splits or where a dialect takes more than a GPU.
    """
    few = FETCHED_KEYS if dialect.in_place else None
    if dialect.row_keys_max == ROW_KEYS_MAX:
        return ((PIECES, few), (SHORT, None)) if dialect.in_place else ((PIECES, few),)
    return (((*PIECES, *LONGER), few), ((*PIECES, *LONGER), None))


def _compared(
    dialect: Dialect,
    shape: Shape,
    group: Group,
    seed: int,
    pieces: Pieces,
    row_keys_max: int | None,
) -> str:
    case = _case(shape, group, pieces, seed)
    context = StepContext(case.metadata)
    plain = PageStep([case.key_pages], [case.value_pages], (case.codes,))
    plain.write(0, context.write_index(0), case.keys, case.values)
    wanted_pages = (plain.keys[0], plain.values[0])
    wanted = attend(context, 0, case.queries, *wanted_pages, shape.scale, case.sinks, case.codes)
    before = (case.key_pages, case.value_pages) if dialect.in_place else wanted_pages
    filled = case.filled.copy()
    if not dialect.in_place:
        filled[case.metadata.slots[0]] = True
    pages = (_poisoned(before[0], filled), _poisoned(before[1], filled))
    tables = StepTables(dialect, case.metadata, row_keys_max)
    layer = Layer(0, *pages, case.keys, case.values, case.sinks, case.codes)
    got = tables.attend(0, case.queries, layer, shape.scale)
    mx.eval(got, wanted)
    apart = _apart(got, wanted)
    if not apart <= TOLERANCES[shape.dtype]:
        return f"attention differs from the gather's by {apart:.2g} of a row"
    filled[case.metadata.slots[0]] = True
    for held, right in zip(pages, wanted_pages, strict=True):
        if not _same(held, _poisoned(right, filled)):
            return "the pages do not hold the rows that were to be written"
    return ""


def _case(shape: Shape, group: Group, lengths: Pieces, seed: int) -> _Case:
    size = shape.block_size
    covers = [-(-(start + rows) // size) for start, rows in lengths]
    blocks = sum(covers) + 3
    window = min(group.window, WINDOW_MAX)
    group = Group(group.kind, blocks, window, min(group.sink, size))
    geometry = Geometry(block_size=size, groups=(group,))
    rng = np.random.default_rng(seed)
    order = rng.permutation(blocks).tolist()
    filled = np.zeros(blocks * size, bool)
    pieces = []
    for seq, ((start, rows), cover) in enumerate(zip(lengths, covers, strict=True)):
        table = [order.pop() for _ in range(cover)]
        first = max(0, start - window + 1) if group.kind == WINDOW else 0
        gone = range(geometry.blocks_for(group.sink), first // size)
        table = [NO_BLOCK if index in gone else block for index, block in enumerate(table)]
        for position in [*range(min(group.sink, start)), *range(first, start)]:
            filled[table[position // size] * size + position % size] = True
        sequence = Sequence(
            seq, Namespace(), 0, start + rows, tables=(tuple(table),), starts=(first,)
        )
        pieces.append(Piece(sequence, (0,) * rows))
    metadata = build(Batch(0, tuple(pieces)), geometry)
    total, heads = metadata.total_rows, shape.kv_heads * shape.shared

    def random(*dims: int) -> mx.array:
        return mx.array(rng.standard_normal(dims, np.float32)).astype(shape.dtype)

    dims = (shape.key_dim, shape.value_dim)
    pages = [random(blocks, size, shape.kv_heads, dim) for dim in dims]
    codes = None
    if shape.group:
        codes = (
            Code(dims[0], 8, shape.group, shape.dtype),
            Code(dims[1], 8, shape.group, shape.dtype),
        )
        pages = [code.encode(it) for code, it in zip(codes, pages, strict=True)]
    return _Case(
        metadata=metadata,
        queries=random(total, heads, 1, shape.key_dim) * (1.5 / shape.key_dim**0.5 / shape.scale),
        keys=random(total, shape.kv_heads, shape.key_dim),
        values=random(total, shape.kv_heads, shape.value_dim),
        key_pages=pages[0],
        value_pages=pages[1],
        sinks=random(heads) if shape.sinks else None,
        codes=codes,
        filled=filled,
    )


def _poisoned(pages: mx.array, filled: np.ndarray) -> mx.array:
    """A copy with NaN in every row that holds nothing; evaluated, so that it is its own memory.

    Of words, whose scales are float32: the bits of NaN.
    """
    mask = mx.array(filled.reshape(pages.shape[0], pages.shape[1], 1, 1))
    nothing = 2**32 - 1 if pages.dtype == mx.uint32 else float("nan")
    poisoned = mx.where(mask, pages, mx.array(nothing, pages.dtype))
    mx.eval(poisoned)
    return poisoned


def _apart(got: mx.array, wanted: mx.array) -> float:
    """The largest distance of a row and head from what is wanted, relative to its length."""
    a, b = (np.array(array.astype(mx.float32)) for array in (got, wanted))
    far = np.linalg.norm(a - b, axis=-1) / np.maximum(np.linalg.norm(b, axis=-1), 1e-6)
    return float(far.max())


def _same(one: mx.array, other: mx.array) -> bool:
    """Bit by bit, but that any NaN is any NaN."""
    if one.dtype == mx.uint32:
        return np.array_equal(np.array(one), np.array(other))
    a, b = (np.array(array.astype(mx.float32)) for array in (one, other))
    return np.array_equal(a, b, equal_nan=True)
