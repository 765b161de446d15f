"""A step that is issued before the one before it was read, and drafts that are verified in one:
the same tokens as one after the other, and every row tagged with what was fed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from msgspec import structs

from kernel.batch import Batch, BuildFailed, EvalFailed, Piece, StepResult
from kernel.fake import Failure, FakeKernel
from kernel.families import groups_for
from kernel.metadata import build, last_tokens
from kernel.model_kernel import ModelKernel
from kernel.shadow import EDGES, FULL
from kernel.tiny import tiny_llama
from kernel.weights import load_model
from statemachine import commands
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters
from statemachine.sequence import Sequence
from statemachine.tags import sequence_tags

from .turns import (
    DRAWN,
    GEOMETRY,
    GREEDY,
    WINDOWS,
    Turns,
    guessing,
    looking_ahead,
    one_by_one,
    opened,
    seen,
)

BOTH = pytest.mark.parametrize("parameters", [GREEDY, DRAWN], ids=["greedy", "drawn"])


def fake(geometry: Geometry = GEOMETRY, **options: Any) -> FakeKernel:
    return FakeKernel(geometry, vocab_size=1 << 20, **options)


def tiny_kernel(seed: int = 2, **options: Any) -> ModelKernel:
    model = tiny_llama(seed, **options)
    geometry = structs.replace(GEOMETRY, groups=groups_for(model, 64))
    return ModelKernel(model, geometry, sanitize=FULL, check=False)


@pytest.mark.parametrize("sanitize", [EDGES, FULL])
@pytest.mark.parametrize("geometry", [GEOMETRY, WINDOWS])
@BOTH
def test_lookahead_changes_no_token_of_the_fake_and_finds_nothing_wrong(
    parameters: Parameters, geometry: Geometry, sanitize: str
) -> None:
    plain = one_by_one(opened(fake(geometry, sanitize=sanitize), parameters), 20)
    ahead = looking_ahead(opened(fake(geometry, sanitize=sanitize), parameters), 20)
    assert ahead.streams == plain.streams
    assert [seen(it) for it in ahead.results] == [seen(it) for it in plain.results]
    assert [it.shadow.found for it in ahead.results] == [0] * 20
    assert all(it.shadow.checked for it in ahead.results)


@pytest.mark.parametrize("sanitize", [EDGES, FULL])
def test_a_commit_of_another_token_than_was_fed_is_found(sanitize: str) -> None:
    turns = Turns(fake(sanitize=sanitize))
    turns.open(0, (1, 2, 3))
    first = turns.issue(turns.prompt(0))
    second = turns.issue(turns.ahead(0))
    (token,) = turns.kernel.collect(first).tokens
    turns.do(*commands.step_written(turns.state, 1))
    turns.do(*commands.commit(turns.state, 0, (token + 1,)))
    third = turns.issue(turns.ahead(0))
    assert turns.kernel.collect(second).shadow.found == 0
    (finding,) = turns.kernel.collect(third).shadow.findings
    assert (finding.seq, finding.position) == (0, 3)


def test_a_lookahead_row_has_the_tag_of_its_token_once_the_step_before_is_collected() -> None:
    turns = opened(tiny_kernel(), GREEDY)
    first = turns.issue(*[turns.prompt(seq) for seq in turns.streams])
    turns.issue(*[turns.ahead(seq) for seq in turns.streams])
    waiting = {seq: turns.sequence(seq) for seq in turns.streams}
    assert held(turns, waiting) == {seq: tag(turns, it) for seq, it in waiting.items()}
    turns.close(first, 1)
    known = {seq: turns.sequence(seq) for seq in turns.streams}
    assert held(turns, known) == {seq: tag(turns, it) for seq, it in known.items()}
    assert not set(held(turns, known).values()) & {tag(turns, it) for it in waiting.values()}


def tag(turns: Turns, sequence: Sequence) -> int:
    """What the last row of a sequence should carry."""
    end = sequence.offset
    return sequence_tags(turns.kernel.geometry, sequence, end - 1, end)[0]


def held(turns: Turns, sequences: dict[int, Sequence]) -> dict[int, int]:
    """What the last rows' places carry."""
    kernel: Any = turns.kernel
    tags = kernel._shadow.tags[0].reshape(-1, 4)
    return {seq: int(tags[it.tables[0][-1], (it.offset - 1) % 4]) for seq, it in sequences.items()}


@pytest.mark.parametrize("sanitize", [EDGES, FULL])
def test_blocks_with_lookahead_rows_are_adopted_and_hold_what_they_should(sanitize: str) -> None:
    turns = looking_ahead(opened(fake(sanitize=sanitize)), 20)
    prompt = (*turns.streams[1][:22], 5)
    turns.open(9, prompt)
    turns.do(*commands.adopt(turns.state, 9, prompt))
    assert turns.sequence(9).offset >= 20
    result = turns.kernel.collect(turns.issue(turns.prompt(9)))
    assert (result.shadow.found, result.shadow.checked > 5) == (0, True)


def test_a_row_of_an_ended_sequence_is_rewound_and_its_block_serves_another() -> None:
    turns = Turns(fake(Geometry(4, (Group(num_blocks=2),)), sanitize=FULL))
    turns.open(0, (1, 2, 3))
    first = turns.issue(turns.prompt(0))
    second = turns.issue(turns.ahead(0))
    turns.kernel.collect(first)
    turns.do(*commands.step_written(turns.state, 1), *commands.rewind(turns.state, 0, 1))
    turns.do(*commands.close(turns.state, 0))
    turns.open(1, (7, 8, 9, 10, 11))
    third = turns.issue(turns.prompt(1))
    assert turns.kernel.collect(second).shadow.found == 0
    assert turns.kernel.collect(third).shadow.found == 0


def test_a_row_that_another_wrote_over_keeps_that_ones_tag() -> None:
    """Two sequences were given one block: what was written last is what stands there."""
    turns = Turns(tiny_kernel())
    turns.open(0, (1, 2, 3))
    turns.open(1, (4, 5, 6, 7))
    first = turns.issue(turns.prompt(0))
    mine, other = turns.ahead(0), turns.prompt(1)
    clash = structs.replace(other.sequence, tables=mine.sequence.tables)
    turns.issue(mine, structs.replace(other, sequence=clash))
    turns.kernel.collect(first)
    assert held(turns, {0: mine.sequence}) == {0: tag(turns, clash)}


def test_what_a_row_may_wait_for_is_the_last_of_several_samples() -> None:
    turns = Turns(fake())
    turns.open(0, (1, 2, 3))
    turns.close(turns.issue(turns.prompt(0)), 1)
    metadata = build(Batch(2, (turns.draft(0, (8, 9)),)), GEOMETRY)
    assert metadata.sample_positions == (4, 5, 6)
    assert last_tokens(metadata, (10, 11, 12)) == {0: 12}


@BOTH
def test_a_step_run_again_with_known_tokens_is_the_step_that_looked_ahead(
    parameters: Parameters,
) -> None:
    """What replay does: the sequence as it was planned, its token from the tape."""
    live = looking_ahead(opened(fake(sanitize=FULL), parameters), 12)
    again = fake(sanitize=FULL)
    for batch, result in zip(live.batches, live.results, strict=True):
        fed = [_told(live, piece) for piece in batch.pieces]
        assert again.collect(again.issue(structs.replace(batch, pieces=tuple(fed)))) == result
    live_kernel: Any = live.kernel
    assert (again._shadow.tags[0] == live_kernel._shadow.tags[0]).all()


def _told(turns: Turns, piece: Piece) -> Piece:
    if not piece.pending:
        return piece
    token = turns.streams[piece.sequence.id][piece.sequence.offset - 1]
    return structs.replace(piece, tokens=(token,), pending=0)


@BOTH
@pytest.mark.parametrize("most", [1, 3, 9])
@pytest.mark.parametrize("geometry", [GEOMETRY, WINDOWS])
def test_drafts_change_no_token_of_the_fake_and_leave_no_row_of_a_guess(
    geometry: Geometry, most: int, parameters: Parameters
) -> None:
    plain = one_by_one(opened(fake(geometry), parameters), 24)
    drafted = guessing(opened(fake(geometry, sanitize=FULL), parameters), plain.streams, most)
    assert drafted.streams == plain.streams
    assert sum(it.shadow.found for it in drafted.results) == 0
    assert len(drafted.results) < 24
    longest = max(drafted.results, key=lambda it: len(it.sampled))
    assert longest.sampled == tuple(n for n in range(3) for _ in range(most + 1))


def test_a_row_that_waits_for_a_token_that_nobody_sampled_fails_its_sequence() -> None:
    turns = Turns(fake())
    turns.open(0, (1, 2, 3))
    turns.open(1, (4, 5))
    turns.close(turns.issue(turns.prompt(0), turns.prompt(1)), 1)
    turns.close(turns.issue(turns.next_row(0)), 2)
    for kernel in (turns.kernel, tiny_kernel()):
        with pytest.raises(BuildFailed, match="a token of sequence 1, which") as caught:
            kernel.issue(Batch(3, (turns.ahead(1),)))
        assert caught.value.seq == 1


def test_more_samples_than_rows_fail_their_sequence() -> None:
    turns = Turns(fake())
    turns.open(0, (1, 2, 3))
    piece = structs.replace(turns.prompt(0), samples=4)
    with pytest.raises(BuildFailed, match="4 samples are asked of 3 rows in step 1") as caught:
        turns.issue(piece)
    assert caught.value.seq == 0


def test_a_failed_build_still_carries_out_its_copies() -> None:
    turns = Turns(fake(fail={3: Failure("build")}, sanitize=FULL))
    turns.open(0, (1, 2, 3))
    turns.close(turns.issue(turns.prompt(0)), 1)
    turns.close(turns.issue(turns.next_row(0)), 2)
    turns.do(*commands.fork(turns.state, 0, 1))
    turns.do(*commands.trim(turns.state, 1, 2))
    turns.streams[1] = turns.streams[0][:3]
    with pytest.raises(BuildFailed):
        turns.issue(turns.prompt(1))
    turns.do(*commands.step_written(turns.state, 3))
    turns.do(*commands.trim(turns.state, 1, 1))
    assert turns.kernel.collect(turns.issue(turns.prompt(1))).shadow.found == 0


def test_after_a_failed_eval_no_step_is_collected_before_the_pages_are_new() -> None:
    kernel = fake(fail={2: Failure("eval")})
    turns = opened(kernel)
    tickets = [turns.issue(*[turns.prompt(seq) for seq in turns.streams])]
    tickets += [turns.issue(*[turns.ahead(seq) for seq in turns.streams])]
    turns.close(tickets[0], 1)
    tickets += [turns.issue(*[turns.ahead(seq) for seq in turns.streams])]
    with pytest.raises(EvalFailed, match="on order"):
        kernel.collect(tickets[1])
    kernel.reset_pages()
    with pytest.raises(EvalFailed, match="lost before this step was collected"):
        kernel.collect(tickets[2])
    fresh = opened(kernel)
    assert fresh.close(fresh.issue(fresh.prompt(0)), 1).shadow.found == 0


def test_steps_are_collected_in_the_order_of_their_issue() -> None:
    turns = Turns(fake())
    turns.open(0, (1, 2, 3))
    first = turns.issue(turns.prompt(0))
    turns.kernel.collect(turns.issue(turns.ahead(0)))
    with pytest.raises(AssertionError, match="in the order of their issue"):
        turns.kernel.collect(first)


WINDOWED: dict[str, Any] = {"layers": 4, "sliding_window": 5, "sliding_layers": (1, 3)}
SHAPES = pytest.mark.parametrize("options", [{}, WINDOWED], ids=["full", "windows"])


@BOTH
@SHAPES
def test_lookahead_is_the_same_bit_for_bit_on_a_real_model(
    options: dict[str, Any], parameters: Parameters
) -> None:
    plain = one_by_one(opened(tiny_kernel(**options), parameters), 24)
    ahead = looking_ahead(opened(tiny_kernel(**options), parameters), 24)
    assert ahead.streams == plain.streams
    assert [seen(it) for it in ahead.results] == [seen(it) for it in plain.results]
    assert sum(it.shadow.found for it in ahead.results) == 0


@SHAPES
def test_a_lookahead_row_beside_a_prompt_takes_its_own_token(options: dict[str, Any]) -> None:
    """Only some of the rows wait for a token: the others have theirs from the host."""

    def mixed(turns: Turns, ahead: bool) -> list[StepResult]:
        turns.close(turns.issue(turns.prompt(0), turns.prompt(2)), 1)
        ticket = turns.issue(turns.next_row(0), turns.next_row(2))
        if not ahead:
            turns.close(ticket, 2)
        rows = [turns.ahead(2), turns.prompt(1)] if ahead else [turns.next_row(2), turns.prompt(1)]
        last = turns.issue(*rows)
        if ahead:
            turns.close(ticket, 2)
        turns.close(last, 3)
        return turns.results

    plain = mixed(opened(tiny_kernel(**options)), False)
    assert [seen(it) for it in mixed(opened(tiny_kernel(**options)), True)] == [
        seen(it) for it in plain
    ]


@BOTH
@SHAPES
def test_drafts_are_verified_to_the_tokens_that_one_row_at_a_time_gives(
    options: dict[str, Any], parameters: Parameters
) -> None:
    plain = one_by_one(opened(tiny_kernel(**options), parameters), 24)
    drafted = guessing(opened(tiny_kernel(**options), parameters), plain.streams, 4)
    assert drafted.streams == plain.streams
    assert sum(it.shadow.found for it in drafted.results) == 0
    assert len(drafted.results) < 24
    fingerprints = [_fingerprints(it) for it in (plain, drafted)]
    for seq in plain.streams:
        for wanted, got in zip(*[it[seq] for it in fingerprints], strict=True):
            assert got == pytest.approx(wanted, abs=1e-3)


def _fingerprints(turns: Turns) -> dict[int, list[tuple[float, float]]]:
    """Logit and margin of each token of each answer, wherever it was drawn."""
    found: dict[int, list[tuple[float, float]]] = {seq: [] for seq in turns.streams}
    prompts = {0: 3, 1: 6, 2: 9}
    for batch, result in zip(turns.batches, turns.results, strict=True):
        places = [at for piece in batch.pieces for at in piece.sample_positions]
        columns = zip(result.sampled, places, result.logits, result.margins, strict=True)
        for number, place, logit, margin in columns:
            answer = found[batch.pieces[number].sequence.id]
            # A guess that did not stand is drawn over by the next step.
            del answer[place - prompts[batch.pieces[number].sequence.id] :]
            answer.append((logit, margin))
    return found


def test_a_failed_eval_lets_go_of_the_step_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tiny_kernel()
    turns = opened(kernel)
    first = turns.issue(*[turns.prompt(seq) for seq in turns.streams])
    behind: Any = turns.issue(*[turns.ahead(seq) for seq in turns.streams])
    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", _raise)
        with pytest.raises(EvalFailed, match="RuntimeError: out of memory"):
            kernel.collect(first)
    with pytest.raises(EvalFailed, match="lost before this step was collected"):
        kernel.collect(behind)
    assert behind.outputs == []
    with pytest.raises(EvalFailed, match="lost and not reset"):
        kernel.issue(turns.batches[-1])
    kernel.reset_pages()
    again = looking_ahead(opened(kernel), 8)
    assert again.streams == looking_ahead(opened(tiny_kernel()), 8).streams


def _raise(*_: Any) -> None:
    raise RuntimeError("out of memory")


def test_an_eval_that_fails_at_issue_takes_the_step_in_flight_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which of the two it was that raised, MLX does not say. Whether it says so at issue or only
    once the step is read depends on which thread is faster; here the one that issues waits.
    """
    turns = opened(tiny_kernel())
    first = turns.issue(*[turns.prompt(seq) for seq in turns.streams])
    with monkeypatch.context() as patch:
        patch.setattr(llama, "swiglu", _inverse)
        patch.setattr(mx, "async_eval", mx.eval)
        with pytest.raises(EvalFailed, match=r"inv|singular|LU|factor"):
            turns.issue(*[turns.ahead(seq) for seq in turns.streams])
    with pytest.raises(EvalFailed, match="lost before this step was collected"):
        turns.kernel.collect(first)


def _inverse(gate: mx.array, x: mx.array) -> mx.array:
    """Fails in eval, late: a matrix of zeros has no inverse."""
    broken = mx.linalg.inv(mx.zeros((4, 4)) * gate.sum(), stream=mx.cpu)
    return x + broken.sum()


@pytest.mark.model
def test_lookahead_on_smollm2_is_the_same_bit_for_bit() -> None:
    model = load_model("smollm2-135m").model
    geometry = structs.replace(GEOMETRY, block_size=16)

    def run(way: Callable[[Turns, int], Turns]) -> Turns:
        kernel = ModelKernel(model, geometry, sanitize=FULL, check=False)
        return way(opened(kernel, DRAWN), 10)

    plain, ahead = run(one_by_one), run(looking_ahead)
    assert ahead.streams == plain.streams
    assert [seen(it) for it in ahead.results] == [seen(it) for it in plain.results]
