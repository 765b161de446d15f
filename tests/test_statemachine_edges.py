"""Edges of the state machine that were wrong once: each test failed before its fix."""

from __future__ import annotations

from typing import Any

import pytest

from statemachine import commands, invariants
from statemachine import events as ev
from statemachine.errors import IllegalCommand, InvariantBroken, PoolExhausted
from statemachine.events import Event, Namespace
from statemachine.geometry import Geometry, Group
from statemachine.state import State, new_state
from statemachine.transitions import apply, apply_all

B4 = Geometry(4, (Group("full", 8),))


def run(state: State, *steps: tuple[Any, ...]) -> State:
    """Carry commands out one after another; each is (command, arguments...)."""
    for command, *arguments in steps:
        state = apply_all(state, command(state, *arguments))
        invariants.check_all(state)
    return state


def prefilled(geometry: Geometry, rows: int = 12, step: int = 1) -> State:
    """Sequence 0 with tokens 0, 1, ..., written in `step`."""
    return run(
        new_state(geometry),
        (commands.open_sequence, 0),
        (commands.append, 0, step, tuple(range(rows))),
        (commands.step_written, step),
    )


def published(geometry: Geometry, rows: int = 12) -> State:
    return run(prefilled(geometry, rows), (commands.publish, 0))


def refuse(state: State, event: Event, words: str) -> None:
    with pytest.raises(InvariantBroken, match=words):
        apply(state, event)


def test_a_block_is_not_adopted_under_another_parent() -> None:
    """Place 0 with the block of place 1: its tokens agree, what came before them does not."""
    state = run(published(B4), (commands.open_sequence, 1))
    refuse(state, ev.PrefixAdopted(1, (4, 5, 6, 7), 9, ((1,),)), "holds these rows")


def test_a_block_after_a_hole_is_not_adopted_under_another_prefix() -> None:
    """A window's table may begin with a hole; the tokens of the hole are part of the identity."""
    geometry = Geometry(4, (Group("window", 8, window=4),))
    state = run(published(geometry, 8), (commands.open_sequence, 1))
    event = ev.PrefixAdopted(1, (9, 9, 9, 9, 4, 5, 6, 7), 9, ((-1, 1),))
    refuse(state, event, "holds these rows")
    assert commands.adopt(state, 1, (*range(8), 3)) == (
        ev.PrefixAdopted(1, tuple(range(8)), 9, ((-1, 1),)),
    )


def test_an_adoption_names_no_block_that_its_window_does_not_read() -> None:
    geometry = Geometry(4, (Group("window", 8, window=4),))
    state = run(published(geometry, 12), (commands.open_sequence, 1))
    refuse(state, ev.PrefixAdopted(1, tuple(range(12)), 13, ((0, 1, 2),)), "other places")
    refuse(state, ev.PrefixAdopted(1, tuple(range(12)), 13, ((-1, 1, 2),)), "other places")
    apply(state, ev.PrefixAdopted(1, tuple(range(12)), 13, ((-1, -1, 2),)))


def test_a_step_that_is_written_lets_go_of_the_pins_of_steps_before_it() -> None:
    """Two steps in flight, and only the later one is reported: both are written, no pin stays."""
    state = run(
        prefilled(B4, 6),
        (commands.fork, 0, 1),
        (commands.append, 1, 2, (7,)),
        (commands.append, 0, 3, (8,)),
        (commands.close, 0),
        (commands.step_written, 3),
    )
    assert not state.pins
    assert (state.held_blocks(), state.free_blocks()) == (2, 6)


def forked_in_its_step() -> State:
    """Sequences 0 and 1 share three rows of a block; these were issued in step 1."""
    return run(
        new_state(B4),
        (commands.open_sequence, 0),
        (commands.append, 0, 1, (1, 2, 3)),
        (commands.fork, 0, 1),
    )


def test_rows_are_not_copied_in_the_step_that_issues_them() -> None:
    """Copies run before the writes of their step: the copy would hold what stood there before."""
    state = forked_in_its_step()
    with pytest.raises(IllegalCommand, match="copies run before"):
        commands.append(state, 1, 1, (4,))
    assert commands.append(state, 1, 2, (4,))[0] == ev.BlockCopied(1, 2, 0, 0, 0, 1, 3)


def test_a_copy_issues_its_step() -> None:
    """Else rows of an earlier step could be appended behind it, and read what is not copied yet."""
    state = run(prefilled(B4, 3), (commands.fork, 0, 1))
    state = apply(state, ev.BlockCopied(1, 5, 0, 0, 0, 1, 3))
    assert state.issued_step == 5
    refuse(state, ev.Appended(1, 4, 1, (9,), ((),), "decode"), "step 4 cannot append")


def test_a_block_is_not_copied_in_a_table_that_is_empty() -> None:
    state = run(new_state(B4), (commands.open_sequence, 0))
    refuse(state, ev.BlockCopied(0, 1, 0, -1, 3, 2, 0), "not the last")
    opaque = run(new_state(Geometry(4, (Group("opaque"),))), (commands.open_sequence, 0))
    refuse(opaque, ev.BlockCopied(0, 1, 0, -1, 3, 2, 0), "not the last")


@pytest.mark.parametrize("purpose", ["decode", "draft", "lookahead", "pad"])
def test_a_preempted_sequence_starts_again_with_its_prompt(purpose: str) -> None:
    state = run(prefilled(B4), (commands.preempt, 0))
    tokens, rows = (None, 1) if purpose in ("lookahead", "pad") else ((1,), None)
    with pytest.raises(IllegalCommand, match="is preempted"):
        commands.append(state, 0, 2, tokens, rows, purpose)
    with pytest.raises(IllegalCommand, match="is preempted"):
        commands.append_each(state, 2, [0], tokens, purpose)
    assert run(state, (commands.append, 0, 2, (1,))).sequences[0].committed == 1


def test_a_preempted_sequence_does_not_fork() -> None:
    state = run(prefilled(B4), (commands.preempt, 0))
    with pytest.raises(IllegalCommand, match="cannot fork"):
        commands.fork(state, 0, 1)


@pytest.mark.parametrize("token", [-1, -5, 2**64])
def test_a_draft_token_is_an_unsigned_64_bit_integer(token: int) -> None:
    """-1 would pass for a lookahead row."""
    state = prefilled(B4, 5)
    with pytest.raises(IllegalCommand, match="unsigned 64-bit"):
        commands.append(state, 0, 2, (token,), purpose="draft")
    with pytest.raises(IllegalCommand, match="unsigned 64-bit"):
        commands.append_each(state, 2, [0], (token,), "draft")


def test_the_greatest_content_id_can_be_a_draft() -> None:
    state = run(prefilled(B4, 5), (commands.append, 0, 2, (2**64 - 1,), None, "draft"))
    assert run(state, (commands.commit, 0, (2**64 - 1,))).sequences[0].tokens[-1] == 2**64 - 1


def test_any_number_of_steps_may_be_in_flight() -> None:
    state = run(new_state(Geometry(4, (Group("full", 99),))), (commands.open_sequence, 0))
    for step in range(1, 100):
        state = run(state, (commands.append, 0, step, (step,)))
    assert run(state, (commands.step_written, 99)).sequences[0].committed == 99


@pytest.mark.parametrize(
    "event",
    [
        ev.Opened(2**64),
        ev.Opened(1, Namespace(version=-1)),
        ev.Opened(1, Namespace(version=2**64)),
        ev.Opened(1, Namespace(salt="\ud800")),
        ev.Appended(0, 2**64, 1, (1,), ((),), "decode"),
        ev.AppendedEach(2**64, (0,), (1,), "decode"),
        ev.AppendedEach(2**64, (0,), (1,), "draft"),
        ev.CommittedEach((0,), (2**64,)),
        ev.CommittedEach((2**64,), (0,)),
        ev.BlockEvicted(7, 0, 0),
        ev.Forked(0, 2**64),
    ],
    ids=str,
)
def test_a_number_out_of_range_is_an_invariant_broken(event: Event) -> None:
    state = prefilled(B4, 5)
    digest = state.digest
    with pytest.raises(InvariantBroken):
        apply(state, event)
    assert state.digest == digest


def test_group_minus_one_is_no_group() -> None:
    """It would name the last group, and leave another digest behind."""
    state = run(published(B4, 4), (commands.close, 0))
    (evicted,) = commands.evict(state, 1)
    assert isinstance(evicted, ev.BlockEvicted)
    refuse(state, ev.BlockEvicted(-1, evicted.block, evicted.key), "no group -1")


def test_lookahead_rows_are_bounded_where_no_block_bounds_them() -> None:
    state = run(new_state(Geometry(4, (Group("opaque"),))), (commands.open_sequence, 0))
    with pytest.raises(IllegalCommand, match="at most 65536"):
        commands.append(state, 0, 1, None, 2**40, "lookahead")


@pytest.mark.parametrize(
    ("step", "seqs", "tokens", "purpose"),
    [
        (1, [0, 1], (1, 2), "decode"),
        (2, [0, 0], (1, 2), "decode"),
        (2, [0, 7], (1, 2), "decode"),
        (2, [0, 1], (1,), "decode"),
        (2, [0, 1], (1, -2), "decode"),
        (2, [0, 1], (1, "x"), "decode"),
        (2, [0, 1], None, "decode"),
        (2, [0, 1], (1, 2), "lookahead"),
        (2, [0, 1], (1, 2), "other"),
        (2, [0, 2], (1, 2), "decode"),
        (2, [0, 3], (1, 2), "decode"),
        (2, [], (), "decode"),
    ],
)
def test_append_each_refuses_what_single_appends_refuse(
    step: int, seqs: list[int], tokens: tuple[int, ...], purpose: str
) -> None:
    """Sequence 2 ends in a pad, 3 in a draft row."""
    state = prefilled(B4, 5)
    for seq in (1, 2, 3):
        state = run(state, (commands.fork, 0, seq), (commands.append, seq, 2, (9,)))
    state = run(state, (commands.append, 2, 2, None, 1, "pad"))
    state = run(state, (commands.append, 3, 2, (1,), None, "draft"))
    with pytest.raises(IllegalCommand):
        commands.append_each(state, step, seqs, tokens, purpose)


def test_the_last_of_those_that_share_a_block_writes_it_in_place() -> None:
    """n sequences fork one prompt: a step of all of them copies its tail n - 1 times, not n."""
    state = run(prefilled(B4, 6), (commands.fork, 0, 1), (commands.fork, 0, 2))
    events = commands.append_each(state, 2, [0, 1, 2], (7, 8, 9), "decode")
    assert [event for event in events if isinstance(event, ev.BlockCopied)] == [
        ev.BlockCopied(0, 2, 0, 1, 1, 2, 2),
        ev.BlockCopied(1, 2, 0, 1, 1, 3, 2),
    ]
    after = apply_all(state, events)
    invariants.check_all(after)
    assert [after.sequences[seq].tables for seq in range(3)] == [((0, 2),), ((0, 3),), ((0, 1),)]


def test_pool_exhausted_counts_copies_and_new_blocks_together() -> None:
    """An append of 5 rows behind a shared tail of 2: one copy, one new block; none is free."""
    geometry = Geometry(4, (Group("full", 2),))
    state = run(prefilled(geometry, 6), (commands.fork, 0, 1))
    assert commands.blocks_needed(state, 1, 5) == (2,)
    with pytest.raises(PoolExhausted) as refused:
        commands.append(state, 1, 2, (1, 2, 3, 4, 5))
    assert (refused.value.needed, refused.value.free, refused.value.cached) == (2, 0, 0)


def test_a_block_whose_parent_left_the_index_is_not_published() -> None:
    """A window of 1 lets a block go as soon as it is full; evicted, its child has no parent."""
    geometry = Geometry(4, (Group("window", 4, window=1),))
    state = run(published(geometry, 4), (commands.front_trims, 0), (commands.flush,))
    assert not state.entries
    state = run(state, (commands.append, 0, 2, (4, 5, 6, 7)), (commands.step_written, 2))
    assert commands.publish(state, 0) == ()


def test_a_block_behind_a_hole_is_published_below_its_parent_in_the_index() -> None:
    geometry = Geometry(4, (Group("window", 4, window=1),))
    state = run(published(geometry, 4), (commands.front_trims, 0))
    assert state.sequences[0].tables == ((-1,),)
    state = run(
        state,
        (commands.append, 0, 2, (4, 5, 6, 7)),
        (commands.step_written, 2),
        (commands.publish, 0),
    )
    assert commands.lookup(state, Namespace(), tuple(range(8))).rows == 8


def test_append_each_copies_no_rows_that_the_same_step_issues() -> None:
    state = forked_in_its_step()
    with pytest.raises(IllegalCommand, match="copies run before"):
        commands.append_each(state, 1, [0, 1], (4, 4), "decode")


def looked_ahead() -> State:
    """Sequences 0 to 4 with 5 to 9 rows; each has a lookahead row but for 4, which has a draft."""
    state = new_state(Geometry(4, (Group("full", 16), Group("window", 16, window=4))))
    for seq in range(5):
        state = run(
            state,
            (commands.open_sequence, seq),
            (commands.append, seq, 1, tuple(range(5 + seq))),
        )
    state = run(state, (commands.append_each, 2, [3, 1, 0, 2], None, "lookahead"))
    return run(state, (commands.append, 4, 2, (7, 8), None, "draft"))


def test_commit_each_does_what_single_commits_do() -> None:
    """A row that fills its block, one at a block's first row, and the first of two drafts."""
    state = looked_ahead()
    events = commands.commit_each(state, [2, 3, 4, 0], (12, 13, 7, 10))
    assert events == (ev.CommittedEach((2, 3, 4, 0), (12, 13, 7, 10)),)
    singles = [ev.Committed(2, (12,)), ev.Committed(3, (13,)), ev.Committed(4, (7,))]
    after = apply_all(state, events)
    invariants.check_all(after)
    assert after == apply_all(state, [*singles, ev.Committed(0, (10,))])
    assert [after.sequences[seq].committed for seq in range(5)] == [6, 6, 8, 9, 10]
    assert [len(after.sequences[seq].speculative) for seq in range(5)] == [0, 1, 0, 0, 1]
    assert after.sequences[2].tokens == (0, 1, 2, 3, 4, 5, 6, 12)


@pytest.mark.parametrize(
    ("seqs", "tokens"),
    [
        ([], ()),
        ([0, 0], (1, 2)),
        ([0, 7], (1, 2)),
        ([0], (1, 2)),
        ([0, 1], (1, -2)),
        ([0, 1], (1, "x")),
        ([0, 4], (1, 8)),
        ([0, 5], (1, 2)),
    ],
)
def test_commit_each_refuses_what_single_commits_refuse(
    seqs: list[int], tokens: tuple[int, ...]
) -> None:
    """Sequence 4 ends in drafts 7 and 8; 5 has no speculative row."""
    state = run(looked_ahead(), (commands.open_sequence, 5))
    with pytest.raises(IllegalCommand):
        commands.commit_each(state, seqs, tokens)


@pytest.mark.parametrize("purpose", ["decode", "lookahead"])
@pytest.mark.parametrize(("written", "step"), [(1, 3), (1, 4), (2, 3), (2, 4), (3, 4)])
def test_a_column_leaves_the_marks_that_single_appends_leave(
    purpose: str, written: int, step: int
) -> None:
    """Of steps before, and of this one: a mark that is not needed goes, one that is stays."""
    state = run(
        prefilled(Geometry(16, (Group("full", 8),)), 3),
        (commands.append, 0, 2, (5,), None, "decode"),
        (commands.append, 0, 3, (6,), None, "decode"),
    )
    if written > 1:
        state = run(state, (commands.step_written, written))
    row = (7,) if purpose == "decode" else None
    column = apply(state, ev.AppendedEach(step, (0,), row, purpose))
    single = apply(state, ev.Appended(0, step, 1, row, ((),), purpose))
    assert column == single
    assert column.sequences[0].marks[-2:] == (step, 6)


def test_events_at_once_lead_to_the_state_that_they_lead_to_one_by_one() -> None:
    """Blocks are freed and taken, entries come and go, queue places fill and empty, in one go."""
    state = run(published(Geometry(4, (Group("full", 3),))), (commands.close, 0))
    events: list[Event] = []
    one_by_one = state
    for step in (2, 3):
        seq = step - 1
        for command, *arguments in (
            (commands.open_sequence, seq),
            (commands.append, seq, step, tuple(range(step, step + 12))),
            (commands.step_written, step),
            (commands.publish, seq),
            (commands.close, seq),
        ):
            for event in command(one_by_one, *arguments):
                one_by_one = apply(one_by_one, event)
                events.append(event)
    kinds = [type(event).__name__ for event in events]
    assert kinds.count("BlockEvicted") == kinds.count("BlockPublished") == 6
    at_once = apply_all(state, events)
    assert at_once == one_by_one
    invariants.check_all(at_once)


def test_a_block_that_is_freed_as_the_one_before_it_is_taken_is_the_next_to_be_taken() -> None:
    """All at once: the queue's head goes on to a place that did not exist before."""
    state = run(
        prefilled(B4, 4),
        (commands.open_sequence, 1),
        (commands.append, 1, 2, (9,)),
        (commands.open_sequence, 2),
        (commands.step_written, 2),
        (commands.close, 0),
    )
    events = (ev.Closed(1), ev.Appended(2, 3, 1, (5,), ((0,),), "prompt"))
    at_once = apply_all(state, events)
    assert at_once == apply(apply(state, events[0]), events[1])
    (later,) = commands.append(at_once, 2, 3, (6, 7, 8, 9))
    assert isinstance(later, ev.Appended)
    assert later.blocks == ((1,),)


def test_an_append_that_its_caller_applies_is_refused_when_it_is_applied() -> None:
    state = prefilled(B4, 4)
    with pytest.raises(IllegalCommand, match="step 1 cannot append"):
        commands.append(state, 0, 1, (5,))
    events = commands.append(state, 0, 1, (5,), applied=True)
    with pytest.raises(InvariantBroken, match="step 1 cannot append"):
        apply_all(state, events)
    assert commands.append(state, 0, 2, (5,), applied=True) == commands.append(state, 0, 2, (5,))


def test_a_sequence_that_is_not_open_is_not_closed() -> None:
    with pytest.raises(IllegalCommand, match="sequence 7 is not open"):
        commands.close(prefilled(B4), 7)
