"""States in slots: what a model is given, what it leaves, and that nothing else moves them."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from msgspec import structs

from kernel import model_kernel
from kernel.batch import Batch, BuildFailed, EvalFailed, Piece, StepResult
from kernel.buckets import group_rows
from kernel.errors import ModelError
from kernel.layout import SPLIT, Layout, look
from kernel.metadata import build
from kernel.model_kernel import ModelKernel
from kernel.recurrent import ArrayKind, StateCache, StateKind, slot_bytes
from statemachine.events import BlockCopied
from statemachine.geometry import Geometry

from .paged import Book, Runner, random_tokens
from .tiny_architectures import architecture_model

HYBRID = "granitemoehybrid"
STATES = "mamba2"
NAMES = (HYBRID, STATES)
FIRST = ArrayKind((3, 2), mx.float32)
KIND = StateKind((FIRST, None, ArrayKind((5,), mx.float16)))


class Served:
    """A tiny model over slots, moved by hand."""

    def __init__(self, name: str, slots: int = 12, layout: Layout | None = None) -> None:
        self.layout = layout or look(architecture_model(name), SPLIT)
        self.geometry = Geometry(4, self.layout.groups(32, slots), "recurrent")
        self.kernel = ModelKernel(
            architecture_model(name), self.geometry, sanitize="full", layout=self.layout
        )
        self.book = Book(self.geometry)
        self.step = 0

    def run(self, *pieces: Piece, copies: tuple[BlockCopied, ...] = ()) -> StepResult:
        self.step += 1
        result = self.kernel.collect(self.kernel.issue(Batch(self.step, pieces, copies)))
        assert result.shadow.found == 0
        return result

    def feed(self, seq: int, tokens: list[int]) -> StepResult:
        return self.run(self.book.append(seq, tokens))

    def states(self) -> list[np.ndarray]:
        return [np.array(array) for array in self.kernel._pages.states]

    @property
    def slot_group(self) -> int:
        return len(self.geometry.groups) - 1


def score(result: StepResult) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return result.tokens, result.logits


def test_prompts_and_first_rows_are_called_alone_and_other_single_rows_together() -> None:
    served = Served(HYBRID)
    book = served.book
    for seq in range(3):
        book.append(seq, [1, 2])
    pieces = [
        book.append(0, [3]),
        book.append(7, [4]),
        book.append(1, [5, 6]),
        book.append(2, [7]),
        book.append(8, [8, 9]),
    ]
    metadata = build(Batch(1, tuple(pieces)), served.geometry)
    found = sorted(bucket.pieces(metadata).tolist() for bucket in group_rows(metadata))
    assert found == [[0, 3], [1], [2], [4]]
    apart = sorted(bucket.pieces(metadata).tolist() for bucket in group_rows(metadata, alone=True))
    assert apart == [[0], [1], [2], [3], [4]]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_puts_states_into_the_slots_of_its_pieces_and_into_no_other(name: str) -> None:
    served = Served(name)
    served.feed(0, [1, 2, 3])
    before = served.states()
    served.run(served.book.append(0, [4]), served.book.append(1, [5, 6]))
    moved = {
        slot
        for old, new in zip(before, served.states(), strict=True)
        for slot in range(12)
        if (old[slot] != new[slot]).any()
    }
    tables = [served.book.sequences[seq].tables[served.slot_group] for seq in (0, 1)]
    assert moved == {tables[0][0], tables[1][0]}


@pytest.mark.parametrize("name", NAMES)
def test_every_row_of_a_piece_can_be_sampled_as_if_they_came_one_by_one(name: str) -> None:
    served, other = Served(name), Served(name)
    served.feed(0, [1])
    other.feed(0, [1])
    piece = structs.replace(served.book.append(0, [5, 6, 7]), samples=3)
    drawn = served.run(piece)
    one_by_one = [other.feed(0, [token]) for token in (5, 6, 7)]
    assert drawn.tokens == tuple(it.tokens[0] for it in one_by_one)
    logits = [it.logits[0] for it in one_by_one]
    np.testing.assert_allclose(drawn.logits, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_at_an_edge_the_state_that_was_read_stays_and_can_be_gone_on_from_twice(name: str) -> None:
    served, other = Served(name), Served(name)
    served.feed(0, [1, 2, 3, 4])
    edge = served.book.sequences[0]
    one = score(served.feed(0, [5, 6]))
    served.book.sequences[0] = edge
    assert score(served.feed(0, [5, 6])) == one
    other.feed(0, [1, 2, 3, 4])
    assert score(other.feed(0, [5, 6])) == one


@pytest.mark.parametrize("name", NAMES)
def test_a_slot_that_was_used_before_changes_nothing_for_a_new_sequence(name: str) -> None:
    served, fresh = Served(name, slots=1), Served(name, slots=1)
    served.feed(0, [1, 2, 3, 4])
    served.book = Book(served.geometry)
    assert score(served.feed(1, [5, 6, 7])) == score(fresh.feed(1, [5, 6, 7]))


@pytest.mark.parametrize("name", NAMES)
def test_a_build_that_fails_leaves_every_state_as_it_was(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, other = Served(name), Served(name)
    for it in (served, other):
        it.feed(0, [1, 2])
    before, held = served.states(), served.book.sequences[0]

    def fails(*_: Any) -> Any:
        raise RuntimeError("a failure on order")

    with monkeypatch.context() as patch:
        patch.setattr(model_kernel, "sample", fails)
        with pytest.raises(BuildFailed, match="a failure on order"):
            served.feed(0, [3])
    for old, new in zip(before, served.states(), strict=True):
        np.testing.assert_array_equal(old, new)
    served.book.sequences[0] = held
    assert score(served.feed(0, [3])) == score(other.feed(0, [3]))


@pytest.mark.parametrize("name", NAMES)
def test_a_copied_slot_is_gone_on_from_like_the_one_that_it_was_copied_from(name: str) -> None:
    served, other = Served(name), Served(name)
    for it in (served, other):
        it.feed(0, [1, 2])
    piece = served.book.append(0, [3])
    group, table = served.slot_group, piece.sequence.tables[served.slot_group]
    target = (table[0] + 5) % 12
    tables = (*piece.sequence.tables[:group], (target,))
    copied = BlockCopied(0, served.step + 1, group, 0, table[0], target, 2)
    moved = structs.replace(piece, sequence=structs.replace(piece.sequence, tables=tables))
    assert score(served.run(moved, copies=(copied,))) == score(other.feed(0, [3]))


def test_an_eval_that_fails_and_pages_that_are_made_anew_leave_no_state() -> None:
    served = Served(STATES)
    served.feed(0, [1, 2])
    assert any(states.any() for states in served.states())
    served.kernel.reset_pages()
    assert not any(states.any() for states in served.states())


def test_a_bfloat16_model_keeps_the_dtypes_of_its_states() -> None:
    model = architecture_model(STATES, seed=1)
    model.update(tree_map(lambda array: array.astype(mx.bfloat16), model.parameters()))
    kept = [kind for state in look(model, SPLIT).states for _, kind in state.kept]
    assert {kind.dtype for kind in kept} == {mx.bfloat16, mx.float32}
    layout = look(model, SPLIT)
    runner = Runner(model, layout=layout)
    runner.run(runner.book.append(0, [1, 2, 3]))
    runner.run(runner.book.append(0, [4]))
    assert [array.dtype for array in runner.pages.states] == [kind.dtype for kind in kept]


def test_what_the_state_caches_saw_is_observed_with_all_other_layers() -> None:
    served = Served(HYBRID)
    seen = served.run(served.book.append(0, [1, 2]), served.book.append(1, [3])).observation
    assert (seen.updates, seen.rows_updated, seen.strangers) == ((1, 1), (3, 3), 0)
    assert seen.offset_reads[0] >= 1
    assert seen.attends[0] >= 1
    assert seen.visible == ((2, 2), (1, 1))


def test_a_state_that_a_model_does_not_put_back_shows_as_rows_that_it_never_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(STATES)
    served.feed(0, [1, 2])
    monkeypatch.setattr(StateCache, "__setitem__", lambda *_: None)
    seen = served.feed(0, [3]).observation
    assert (seen.updates, seen.rows_updated) == ((0, 0), (0, 0))


def cache(**found: mx.array) -> StateCache:
    arrays = {(4, int(place[1:])): array for place, array in found.items()}
    return StateCache(4, KIND, arrays)


def test_a_state_cache_is_mlx_lms_own_and_counts_what_is_done_with_it() -> None:
    held = cache()
    assert (held[0], held[1], held[2]) == (None, None, None)
    assert held.make_mask(3) is None
    held[0] = mx.ones((1, 3, 2))
    assert held.used(7) is not None
    assert held.used(7).rows_updated == 0, "one of its two arrays is not there yet"
    held[2] = mx.ones((1, 5))
    use = held.used(7)
    assert use is not None
    assert (use.offset_reads, use.updates, use.rows_updated) == (3, 1, 7)
    assert StateCache(0, StateKind((None,)), {}).used(7) is None


def test_a_window_that_is_not_full_has_zeros_in_front_and_types_are_kept() -> None:
    held = cache()
    held[0], held[2] = mx.array([[[1.0, 2.0]]]), mx.ones((1, 5))
    made = held.made(1)
    assert made[4, 0].tolist() == [[[0, 0], [0, 0], [1, 2]]]
    assert (made[4, 0].dtype, made[4, 2].dtype) == (mx.float32, mx.float16)
    assert list(made) == [(4, 0), (4, 2)]


@pytest.mark.parametrize(
    ("first", "third", "message"),
    [
        (mx.ones((2, 3, 2)), mx.ones((1, 5)), "state 4 is left (2, 3, 2), not (1, 3, 2)"),
        (mx.ones((1, 4, 2)), mx.ones((1, 5)), "state 4 is left (1, 4, 2), not (1, 3, 2)"),
        (mx.ones((1, 2, 1)), mx.ones((1, 5)), "state 4 is left (1, 2, 1), not (1, 3, 2)"),
        (mx.ones((1, 6)), mx.ones((1, 5)), "state 4 is left (1, 6), not (1, 3, 2)"),
        (mx.ones((1, 3, 2)), None, "state 4 is left with other arrays than it had"),
    ],
)
def test_a_state_of_another_shape_is_refused(first: Any, third: Any, message: str) -> None:
    held = cache()
    held[0], held[2] = first, third
    with pytest.raises(ModelError) as caught:
        held.made(1)
    assert str(caught.value) == message


def test_states_that_grow_with_every_row_or_count_no_sequences_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = architecture_model(STATES)
    put = StateCache.__mro__[1].__setitem__

    def growing(held: Any, place: int, value: Any) -> None:
        old = held.cache[place]
        put(held, place, value if old is None else mx.concatenate([old, value], axis=1))

    monkeypatch.setattr(StateCache.__mro__[1], "__setitem__", growing)
    monkeypatch.setattr(StateCache.__mro__[1], "__getitem__", lambda *_: None)
    with pytest.raises(ModelError, match="it keeps states that grow with every row"):
        look(model, SPLIT)
    monkeypatch.setattr(
        StateCache.__mro__[1], "__setitem__", lambda held, place, value: put(held, place, value[0])
    )
    with pytest.raises(ModelError, match=r"it keeps a state \(3, \d+\), whose first axis counts"):
        look(model, SPLIT)


def test_the_bytes_of_a_slot_are_those_of_all_states() -> None:
    assert slot_bytes([KIND, KIND]) == 2 * (3 * 2 * 4 + 5 * 2)
    served = Served(HYBRID, slots=5)
    pages = served.kernel.pages_bytes - 5 * served.layout.slot_bytes
    assert pages == 32 * 4 * 2 * sum(it.kv_heads * it.key_dim * 4 for it in served.layout.shapes)


def test_a_hundred_steps_copy_no_array_of_slots() -> None:
    gc.collect()
    others: int = mx.get_active_memory()
    served = Served(STATES, slots=4096)
    largest = max(array.nbytes for array in served.kernel._pages.states)
    work = 4 << 20
    assert largest > 2 * work, "the control: one copy would break the bound"
    for seq in range(3):
        served.feed(seq, random_tokens(seq, 20, 200))
    mx.clear_cache()
    mx.reset_peak_memory()
    for token in random_tokens(5, 100, 200):
        served.run(*[served.book.append(seq, [token]) for seq in range(3)])
    peak: int = mx.get_peak_memory()
    assert peak - served.kernel.pages_bytes - others < work


def test_an_eval_error_is_raised_as_such_and_the_slots_are_sound_after_a_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served, fresh = Served(STATES), Served(STATES)
    served.feed(0, [1, 2])

    def fails(*_: Any) -> Any:
        raise RuntimeError("no memory is left")

    with monkeypatch.context() as patch:
        patch.setattr(mx, "async_eval", fails)
        with pytest.raises(EvalFailed, match="no memory is left"):
            served.feed(0, [3])
    served.kernel.reset_pages()
    served.book = Book(served.geometry)
    assert score(served.feed(1, [5, 6])) == score(fresh.feed(1, [5, 6]))
