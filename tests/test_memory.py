"""Page arrays are donated, never copied; failures leave no hold on them."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from msgspec import structs

from kernel.batch import Batch, BuildFailed, EvalFailed, Piece, StepResult
from kernel.extension import Extension
from kernel.families import groups_for, layer_shapes
from kernel.model_kernel import ModelKernel
from kernel.pages import block_bytes
from kernel.tiny import tiny_llama
from statemachine.events import BlockCopied
from statemachine.geometry import Geometry
from statemachine.sequence import Sequence

from .paged import Book, random_tokens

BLOCKS = 4096
LAYER_WORK_BYTES = 1 << 20
"""What a forward of a few rows may use beside the pages; one layer's K alone is 4 MiB."""


class Served:
    """A tiny model with pages so large that a copy of one array shows."""

    def __init__(self, **options: Any) -> None:
        gc.collect()
        self._others_bytes: int = mx.get_active_memory()
        """What tests before this one still hold: their models."""
        self.model = tiny_llama(2, **options)
        groups = groups_for(self.model, BLOCKS)
        self.geometry = Geometry(block_size=16, groups=groups, identity="memory")
        self.kernel = ModelKernel(self.model, self.geometry)
        self.book = Book(self.geometry)
        self._spare = self.book.append(99, [1]).sequence.tables[0][0]
        self._step = 0

    def issue(self, *pieces: Piece, copies: tuple[BlockCopied, ...] = ()) -> object:
        self._step += 1
        return self.kernel.issue(Batch(self._step, pieces, copies))

    def run(self, *pieces: Piece, copies: tuple[BlockCopied, ...] = ()) -> StepResult:
        return self.kernel.collect(self.issue(*pieces, copies=copies))

    def decode(self, steps: int) -> None:
        for token in random_tokens(5, steps):
            self.run(*[self.book.append(seq, [token]) for seq in range(3)])

    def look_ahead(self, steps: int, chunk: int = 0, copies: bool = False) -> list[StepResult]:
        """Steps that are issued before the one before them was read, a prompt chunk or a copy of
        a block that is being written with each, if wanted.
        """
        waiting = self.issue(*[self.book.append(seq, [1]) for seq in range(3)])
        results = []
        for number in range(steps):
            pieces = [self.book.ahead(seq, self._step + 1) for seq in range(3)]
            if chunk:
                rows = random_tokens(number, chunk)
                pieces.append(self.book.append(7, rows, sample=False))
            ticket = self.issue(*pieces, copies=self._copied() if copies else ())
            results.append(self.kernel.collect(waiting))
            for seq, token in enumerate(results[-1].tokens):
                self.book.commit(seq, token)
            waiting = ticket
        return [*results, self.kernel.collect(waiting)]

    def _copied(self) -> tuple[BlockCopied, ...]:
        """The block that the step in flight writes to, copied to one that nobody has."""
        source = self.book.sequences[0].tables[0][-1]
        return (BlockCopied(0, self._step + 1, 0, 0, source, self._spare, 1),)

    def peak_over_pages(self) -> int:
        peak: int = mx.get_peak_memory()
        return peak - self.kernel.pages_bytes - self._others_bytes


@pytest.fixture(params=["gather", "tables"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What attends over the pages, and writes them."""
    if request.param == "gather":
        monkeypatch.setattr("kernel.paged_choice.extension", lambda: Extension(None))


GATHER_ONLY = pytest.mark.parametrize("kernels", ["gather"], indirect=True)


@pytest.fixture
def served() -> Served:
    served = Served()
    for seq in range(3):
        served.run(served.book.append(seq, random_tokens(seq, 20)))
    mx.clear_cache()
    mx.reset_peak_memory()
    return served


def test_one_pages_array_is_larger_than_the_bound(served: Served) -> None:
    """The control: a single copy would break the tests below."""
    layers = len(layer_shapes(served.model))
    assert served.kernel.pages_bytes // (2 * layers) >= 2 * LAYER_WORK_BYTES


def test_two_hundred_decode_steps_copy_no_page_array(served: Served) -> None:
    served.decode(200)
    assert served.peak_over_pages() < LAYER_WORK_BYTES


@pytest.mark.parametrize("chunk", [0, 10])
@pytest.mark.parametrize("copies", [False, True])
def test_steps_issued_before_the_last_is_read_copy_no_page_array(
    served: Served, chunk: int, copies: bool
) -> None:
    results = served.look_ahead(30, chunk, copies)
    assert [result.shadow.found for result in results] == [0] * 31
    assert served.peak_over_pages() < LAYER_WORK_BYTES


@GATHER_ONLY
def test_a_page_array_that_somebody_holds_is_copied_under_lookahead(served: Served) -> None:
    """The control: the test above would see it."""
    held = served.kernel._pages._keys[0]
    served.look_ahead(3)
    assert served.peak_over_pages() > held.nbytes


def test_prompt_chunks_that_sample_nothing_are_written_and_copy_nothing(served: Served) -> None:
    for start in range(0, 200, 20):
        result = served.run(served.book.append(7, random_tokens(start, 20), sample=False))
        assert (result.tokens, result.sampled) == ((), ())
    assert served.peak_over_pages() < LAYER_WORK_BYTES


def test_block_copies_copy_blocks_only(served: Served) -> None:
    for target in range(100):
        copied = BlockCopied(0, 9, 0, 0, served.book.sequences[0].tables[0][0], target, 4)
        served.run(served.book.append(1, [1]), copies=(copied,))
    assert served.peak_over_pages() < LAYER_WORK_BYTES


def _raise(*_: Any, **__: Any) -> mx.array:
    raise RuntimeError("no such layer")


def _inverse(gate: mx.array, x: mx.array) -> mx.array:
    """Fails in eval, late: a matrix of zeros has no inverse."""
    broken = mx.linalg.inv(mx.zeros((4, 4)) * gate.sum(), stream=mx.cpu)
    return x + broken.sum()


@GATHER_ONLY
def test_failed_builds_leave_pages_as_they_were_and_no_hold_on_them(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = served.book.sequences[0]
    clean = served.run(_again(before))
    failures = []
    for _ in range(5):
        with monkeypatch.context() as patch:
            patch.setattr(llama, "swiglu", _raise)
            with pytest.raises(BuildFailed, match="RuntimeError: no such layer") as caught:
                served.issue(_again(before))
        failures.append(caught.value)  # the engine may keep it for as long as it likes
        assert served.run(_again(before)) == clean
    served.decode(20)
    assert served.peak_over_pages() < LAYER_WORK_BYTES


def _again(sequence: Sequence) -> Piece:
    """The sequence's last row once more."""
    return Piece(sequence, sequence.tokens[-1:], samples=1)


@GATHER_ONLY
def test_a_failed_build_still_carries_out_its_block_copies(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BlockCopied is part of the state; only the appends of a failed step are undone."""
    sequence = served.book.sequences[0]
    clean = served.run(_again(sequence))
    table = sequence.tables[0]
    target = next(block for block in range(BLOCKS) if block not in table)
    copied = BlockCopied(0, 9, 0, 0, table[0], target, 16)
    with monkeypatch.context() as patch:
        patch.setattr(llama, "swiglu", _raise)
        with pytest.raises(BuildFailed):
            served.issue(served.book.append(1, [3]), copies=(copied,))
    moved = _with_table(sequence, (target, *table[1:]))
    again = served.run(_again(moved))
    assert again.shadow.found == 0
    assert (again.tokens, again.logits) == (clean.tokens, clean.logits)


def _with_table(sequence: Any, table: tuple[int, ...]) -> Any:
    return structs.replace(sequence, tables=(table,))


def test_a_failure_in_eval_is_told_and_new_pages_serve_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llama, "swiglu", _inverse)
        with pytest.raises(EvalFailed, match=r"inv|singular|LU|factor"):
            served.run(served.book.append(0, [1]))
    served.kernel.reset_pages()
    served.book = Book(served.geometry, seed=1)
    mx.reset_peak_memory()
    for seq in range(3):
        assert served.run(served.book.append(seq, random_tokens(seq, 20))).shadow.found == 0
    served.decode(20)
    assert served.peak_over_pages() < LAYER_WORK_BYTES


def test_a_token_beyond_the_vocabulary_fails_its_sequence(served: Served) -> None:
    with pytest.raises(BuildFailed, match="token 97 is not in the vocabulary of 97") as caught:
        served.issue(served.book.append(0, [1]), served.book.append(1, [97]))
    assert caught.value.seq == 1


def test_rows_without_a_block_fail_their_sequence(served: Served) -> None:
    piece = served.book.append(0, list(range(20)))
    bare = _with_table(piece.sequence, piece.sequence.tables[0][:1])
    with pytest.raises(BuildFailed, match="has no block for position 20 of sequence 0") as caught:
        served.issue(Piece(bare, piece.tokens))
    assert caught.value.seq == 0


@pytest.mark.parametrize("options", [{}, {"sliding_window": 8, "sliding_layers": (1,)}])
def test_block_bytes_are_what_the_pages_take(options: dict[str, Any]) -> None:
    served = Served(**options)
    shapes = layer_shapes(served.model)
    groups = range(len(served.geometry.groups))
    assert served.kernel.pages_bytes == BLOCKS * sum(block_bytes(shapes, g, 16) for g in groups)
