"""The fake kernel: its tokens come from what its rows hold, and it fails when it is told to."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from kernel.batch import Batch, BuildFailed, EvalFailed, Piece
from kernel.fake import Failure, FakeClock, FakeKernel, run_pinned
from statemachine import commands
from statemachine.events import DECODE, PAD, PROMPT
from statemachine.geometry import Geometry, Group
from statemachine.records import Observation, Parameters
from statemachine.sequence import Sequence
from statemachine.state import State, new_state
from statemachine.transitions import apply_all

GEOMETRY = Geometry(4, (Group(num_blocks=16),))
GREEDY = Parameters(8)


def prompted(state: State, seq: int, tokens: tuple[int, ...], step: int = 1) -> State:
    state = apply_all(state, commands.open_sequence(state, seq))
    return apply_all(state, commands.append(state, seq, step, tokens=tokens, purpose=PROMPT))


def piece(sequence: Sequence, tokens: tuple[int, ...], **changes: Any) -> Piece:
    given = Piece(sequence, tokens, samples=1, parameters=GREEDY)
    return structs.replace(given, **changes)


def run(kernel: FakeKernel, batch: Batch) -> tuple[int, ...]:
    return kernel.collect(kernel.issue(batch)).tokens


def test_equal_rows_give_equal_tokens_wherever_they_stand() -> None:
    state = prompted(prompted(new_state(GEOMETRY), 0, (1, 2, 3, 4, 5)), 1, (1, 2, 3, 4, 5))
    one, other = state.sequences[0], state.sequences[1]
    assert one.tables != other.tables
    kernel = FakeKernel(GEOMETRY)
    tokens = run(kernel, Batch(1, (piece(one, (1, 2, 3, 4, 5)), piece(other, (1, 2, 3, 4, 5)))))
    assert tokens[0] == tokens[1]
    assert run(FakeKernel(GEOMETRY), Batch(1, (piece(one, (1, 2, 3, 4, 5)),))) == tokens[:1]


def test_a_row_of_another_prefix_gives_another_token() -> None:
    state = prompted(prompted(new_state(GEOMETRY), 0, (1, 2, 3, 4, 5)), 1, (9, 2, 3, 4, 5))
    kernel = FakeKernel(GEOMETRY, vocab_size=1 << 30)
    batch = Batch(1, tuple(piece(state.sequences[n], (0, 2, 3, 4, 5)) for n in (0, 1)))
    tokens = run(kernel, batch)
    assert tokens[0] != tokens[1]


def test_a_row_that_two_sequences_were_given_shows_in_the_token_and_in_the_report() -> None:
    state = prompted(prompted(new_state(GEOMETRY), 0, (1, 2, 3)), 1, (7, 8, 9))
    right, other = state.sequences[0], state.sequences[1]
    clash = structs.replace(other, tables=right.tables)
    kernel = FakeKernel(GEOMETRY, vocab_size=1 << 30)
    batch = Batch(1, (piece(right, (1, 2, 3)), piece(clash, (7, 8, 9))))
    result = kernel.collect(kernel.issue(batch))
    assert result.tokens[0] == result.tokens[1], "both read what was written last"
    assert [finding.seq for finding in result.shadow.findings] == [0, 0, 0]


def test_the_token_is_drawn_from_the_last_row_that_is_no_pad() -> None:
    state = prompted(new_state(GEOMETRY), 0, (1, 2, 3))
    bare = run(FakeKernel(GEOMETRY), Batch(1, (piece(state.sequences[0], (1, 2, 3)),)))
    state = apply_all(state, commands.append(state, 0, 1, rows=5, purpose=PAD))
    padded = piece(state.sequences[0], (1, 2, 3), pads=5)
    assert run(FakeKernel(GEOMETRY), Batch(1, (padded,))) == bare


def test_the_observation_is_made_of_what_was_laid_out() -> None:
    state = prompted(new_state(GEOMETRY), 0, (1, 2, 3, 4, 5))
    kernel = FakeKernel(GEOMETRY, layers=3)
    result = kernel.collect(kernel.issue(Batch(1, (piece(state.sequences[0], (1, 2, 3, 4, 5)),))))
    seen: Observation = result.observation
    assert (seen.offset_reads, seen.updates, seen.attends) == ((1, 1), (1, 1), (1, 1))
    assert (seen.rows_updated, seen.strangers) == ((5, 5), 0)
    assert (seen.starts, seen.rows, seen.visible) == ((0,), (5,), ((5,),))


def test_greedy_ignores_the_seed_and_sampling_follows_it_and_the_position() -> None:
    equal_tags = structs.replace(GEOMETRY, hash="constant")

    def drawn(temperature: float, seed: int, rows: int = 3) -> int:
        tokens = (1, 2, 3, 4)[:rows]
        sequence = prompted(new_state(equal_tags), 0, tokens).sequences[0]
        parameters = Parameters(8, temperature=temperature, seed=seed)
        given = piece(sequence, tokens, parameters=parameters)
        return run(FakeKernel(equal_tags, vocab_size=1 << 30), Batch(1, (given,)))[0]

    assert drawn(0.0, 1) == drawn(0.0, 2) == drawn(0.0, 1, 4)
    assert drawn(1.0, 1) == drawn(1.0, 1)
    assert len({drawn(1.0, 1), drawn(1.0, 2), drawn(1.0, 1, 4)}) == 3


def test_a_failed_build_leaves_the_rows_as_they_were() -> None:
    state = prompted(new_state(GEOMETRY), 0, (1, 2, 3))
    kernel = FakeKernel(GEOMETRY, fail={2: Failure("build", 7)})
    run(kernel, Batch(1, (piece(state.sequences[0], (1, 2, 3)),)))
    before = kernel._shadow.tags[0].copy()
    state = apply_all(state, commands.step_written(state, 1))
    state = apply_all(state, commands.append(state, 0, 2, tokens=(4,), purpose=DECODE))
    with pytest.raises(BuildFailed) as failure:
        kernel.issue(Batch(2, (piece(state.sequences[0], (4,)),)))
    assert failure.value.seq == 7
    assert (kernel._shadow.tags[0] == before).all()


def test_after_a_failed_eval_nothing_runs_until_the_pages_were_reset() -> None:
    state = prompted(new_state(GEOMETRY), 0, (1, 2, 3))
    kernel = FakeKernel(GEOMETRY, fail={1: Failure("eval")})
    batch = Batch(1, (piece(state.sequences[0], (1, 2, 3)),))
    with pytest.raises(EvalFailed):
        run(kernel, batch)
    with pytest.raises(EvalFailed, match="not reset"):
        kernel.issue(structs.replace(batch, step=2))
    kernel.reset_pages()
    assert not kernel._shadow.tags[0].any()
    assert len(run(kernel, structs.replace(batch, step=2))) == 1


def test_a_batch_that_cannot_be_laid_out_fails_at_build_and_names_its_sequence() -> None:
    state = prompted(new_state(GEOMETRY), 0, (1, 2, 3))
    broken = structs.replace(state.sequences[0], tables=((-1,),))
    with pytest.raises(BuildFailed) as failure:
        FakeKernel(GEOMETRY).issue(Batch(1, (piece(broken, (1, 2, 3)),)))
    assert failure.value.seq == 0


def test_end_tokens_come_as_often_as_was_asked() -> None:
    kernel = FakeKernel(GEOMETRY, end_token=63, end_every=1)
    state = prompted(new_state(GEOMETRY), 0, (1, 2, 3))
    assert run(kernel, Batch(1, (piece(state.sequences[0], (1, 2, 3)),))) == (63,)


class Counting:
    """An engine of five steps that notes when it was acted upon."""

    def __init__(self, steps: int = 5) -> None:
        self.next_step = 1
        self.left = steps
        self.seen: list[tuple[str, int]] = []

    def step(self) -> bool:
        if not self.left:
            return False
        self.left -= 1
        self.next_step += 1
        return True

    def act(self, name: str, more: int = 0) -> None:
        self.seen.append((name, self.next_step))
        self.left += more


def test_the_driver_acts_right_before_the_step_it_was_told_or_once_idle() -> None:
    engine = Counting()
    actions = {
        3: [lambda: engine.act("a"), lambda: engine.act("b")],
        1: [lambda: engine.act("first")],
        40: [lambda: engine.act("late", more=2)],
    }
    run_pinned(engine, actions)
    assert engine.seen == [("first", 1), ("a", 3), ("b", 3), ("late", 6)]
    assert engine.next_step == 8


def test_the_driver_gives_up_on_work_that_never_ends() -> None:
    with pytest.raises(RuntimeError, match="after 20 turns"):
        run_pinned(Counting(10**6), {}, steps_max=20)


def test_the_clock_ticks_at_each_reading() -> None:
    clock = FakeClock(0.5)
    assert [clock(), clock(), clock()] == [0.5, 1.0, 1.5]
