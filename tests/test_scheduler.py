"""The scheduler as a pure function: what is refused, shared and planned; in what order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from server import admission, scheduler
from server.policy import Policy
from server.sharing import share, sharers
from server.submission import RequestRefused, Submission
from server.tokenlog import CHUNK_TOKENS, log_of
from server.view import checkpoint, initial, receive, restore
from statemachine.events import Appended, AppendedEach, Closed, Trimmed
from statemachine.geometry import Geometry, Group
from statemachine.records import (
    Finished,
    Parameters,
    RequestArrived,
    RequestCancelled,
    StepDone,
    StepPlanned,
)

from .follow import pool
from .sim import POLICY, SMALL, Sim, answer_alone, prompts
from .views import arrived, run_step, view_of


def test_a_token_log_gives_back_any_slice_of_prompt_and_answer() -> None:
    tokens = tuple(range(3 * CHUNK_TOKENS + 5))
    log = log_of(tokens[:10])
    for token in tokens[10:]:
        log = log.append(token)
    assert len(log) == len(tokens)
    assert log.last() == tokens[-1]
    assert log == log_of(tokens[:10], tokens[10:])
    for first in (0, 3, 10, 11, CHUNK_TOKENS + 9, CHUNK_TOKENS + 10, len(tokens) - 1):
        for end in (first, first + 1, CHUNK_TOKENS + 10, 2 * CHUNK_TOKENS + 11, len(tokens)):
            assert log.slice(first, max(first, end)) == tokens[first : max(first, end)]
    assert log_of((1, 2)).last() == 2
    assert log.output() == tokens[10:]


@given(
    st.integers(0, 200),
    st.lists(st.integers(1, 100), max_size=12),
    st.sampled_from([1, 8, 32]),
    st.booleans(),
    st.integers(1, 64),
)
def test_shares_never_exceed_the_budget_and_the_first_prompt_always_moves(
    budget: int, needs: list[int], tile: int, cohort: bool, chunk: int
) -> None:
    policy = Policy(256, prefill_chunk=chunk, prefill_tile=tile, prefill_cohort=cohort)
    shares = share(policy, budget, needs)
    assert sum(rows + pads for rows, pads in shares) <= budget
    assert len(shares) == min(len(needs), sharers(policy, budget))
    for (rows, pads), need in zip(shares, needs, strict=False):
        assert 1 <= rows <= min(need, chunk)
        assert (rows + pads) % tile == 0
        assert cohort or pads < tile
    if cohort:
        assert len({rows + pads for rows, pads in shares}) <= 1
    if needs and budget >= tile:
        assert shares


def test_a_budget_of_1024_rows_is_divided_evenly_among_three_long_prompts() -> None:
    policy = Policy(1024, prefill_chunk=2000)
    assert share(policy, 1024, [2000, 2000, 2000]) == [(341, 0), (341, 0), (342, 0)]
    assert share(policy, 1024, [2000, 10, 2000]) == [(341, 0), (10, 0), (673, 0)]
    assert share(policy, 1024, [100, 2000, 100]) == [(100, 0), (824, 0), (100, 0)]


def test_what_can_never_fit_is_refused_on_arrival_and_what_just_fits_is_not() -> None:
    policy = Policy(context_tokens=64)

    def refuse(rows: int, geometry: Geometry = SMALL, max_tokens: int = 1) -> None:
        given = Submission(tuple(range(rows)), Parameters(max_tokens))
        admission.refuse(geometry, policy, given, vocab_size=100)

    refuse(63)
    refuse(31, pool(8))
    for rows, geometry in ((64, pool(64)), (65, pool(64)), (32, pool(8)), (40, pool(8))):
        with pytest.raises(RequestRefused) as refusal:
            refuse(rows, geometry)
        assert refusal.value.code == "context_length_exceeded"
        assert str(rows) in str(refusal.value)
    with pytest.raises(RequestRefused, match="empty"):
        refuse(0)
    with pytest.raises(RequestRefused, match="max_tokens must be at least 1, not 0"):
        refuse(5, max_tokens=0)
    for token in (-1, 100):
        with pytest.raises(RequestRefused, match=f"token {token} of the prompt"):
            admission.refuse(pool(8), policy, Submission((1, token), Parameters(1)), vocab_size=100)


def test_a_pool_whose_window_group_cannot_hold_a_piece_is_refused() -> None:
    windows = Geometry(4, (Group(num_blocks=64), Group("window", num_blocks=10, window=8)))
    with pytest.raises(ValueError, match="group 1 has 10 blocks"):
        admission.check_pool(windows, Policy(64, prefill_chunk=64, max_running=4))
    admission.check_pool(windows, Policy(64, prefill_chunk=16, max_running=4))


def test_decode_rows_come_first_and_prompt_pieces_follow_in_admission_order() -> None:
    policy = Policy(max_batch_tokens=20, max_running=8, prefill_chunk=16)
    view = view_of(pool(64), arrived(0, 5), arrived(1, 3))
    view, _ = run_step(view, policy)
    view = receive(receive(view, arrived(2, 30)), arrived(3, 2))
    plan = scheduler.plan_step(view, policy)
    assert [(p.seq, p.rows, p.purpose, p.samples) for p in plan.pieces] == [
        (0, 1, "decode", True),
        (1, 1, "decode", True),
        (2, 16, "prompt", False),
        (3, 2, "prompt", True),
    ]
    order = [
        seq
        for event in plan.events
        if isinstance(event, Appended | AppendedEach)
        for seq in (event.seqs if isinstance(event, AppendedEach) else (event.seq,))
    ]
    assert order == [0, 1, 2, 3]


def test_the_batch_is_in_the_order_of_the_events_where_one_row_starts_a_block() -> None:
    view = view_of(pool(64), arrived(0, 4), arrived(1, 3))
    view, _ = run_step(view, POLICY)
    view, plan = run_step(view, POLICY)
    assert [piece.seq for piece in plan.pieces] == [1, 0]
    batch = scheduler.batch(scheduler.begin(view, plan), plan)
    assert [piece.sequence.id for piece in batch.pieces] == [1, 0]


def test_a_batch_carries_tokens_positions_and_parameters_of_what_samples() -> None:
    policy = Policy(max_batch_tokens=8, max_running=4, prefill_chunk=8, prefill_tile=4)
    view = view_of(pool(64), arrived(0, 11))
    plan = scheduler.plan_step(view, policy)
    first = scheduler.batch(scheduler.begin(view, plan), plan).pieces[0]
    assert (first.tokens, first.pads, first.start) == (tuple(range(8)), 0, 0)
    assert first.samples == 0
    view, _ = run_step(view, policy)
    plan = scheduler.plan_step(view, policy)
    second = scheduler.batch(scheduler.begin(view, plan), plan).pieces[0]
    assert (second.tokens, second.pads, second.start) == ((8, 9, 10), 1, 8)
    assert list(second.sample_positions) == [11]
    assert second.parameters == Parameters(8)


def test_closing_events_go_step_written_trim_publish_and_close_in_batch_order() -> None:
    policy = Policy(max_batch_tokens=64, max_running=4, prefill_chunk=32, prefill_tile=8)
    view = view_of(pool(64), arrived(0, 5, max_tokens=1), arrived(1, 9, first=20))
    plan = scheduler.plan_step(view, policy)
    view = scheduler.begin(view, plan)
    outcomes = scheduler.outcomes(view, plan, (1, 2), ())
    events = scheduler.close_step(view, plan, outcomes)
    kinds = [(type(e).__name__, getattr(e, "seq", None)) for e in events]
    assert kinds == [
        ("StepWritten", None),
        ("Trimmed", 0),
        ("BlockPublished", 0),
        ("Closed", 0),
        ("Trimmed", 1),
        ("BlockPublished", 1),
        ("BlockPublished", 1),
    ]
    assert [e.rows for e in events if isinstance(e, Trimmed)] == [3, 7]


def test_an_answer_ends_by_end_token_by_length_and_by_a_finished_input() -> None:
    ends = Parameters(2, end_tokens=(9,))
    requests = [RequestArrived(n, "", (1, 2, 3, n), ends) for n in range(4)]
    view = view_of(pool(64), *requests)
    plan = scheduler.plan_step(view, POLICY)
    view = scheduler.begin(view, plan)
    finished = (Finished(2, 1, "stop"), Finished(3, 0, "stop"))
    tokens = (9, 5, 6, 7)
    found = scheduler.outcomes(view, plan, tokens, finished)
    assert [(o.tokens, o.reason) for o in found] == [
        ((), "stop"),
        ((5,), None),
        ((6,), "stop"),
        ((), "stop"),
    ]
    events = scheduler.close_step(view, plan, found)
    assert [(e.seq, e.reason) for e in events if isinstance(e, Closed)] == [
        (0, "stop"),
        (2, "stop"),
        (3, "stop"),
    ]
    view = scheduler.settle(view, plan, found, events)
    assert view.running == (1,)
    plan = scheduler.plan_step(view, POLICY)
    found = scheduler.outcomes(scheduler.begin(view, plan), plan, (8,), ())
    assert [(o.tokens, o.reason) for o in found] == [((8,), "length")]


def test_planning_changes_nothing_and_gives_the_same_plan_twice() -> None:
    view = view_of(pool(24), *(arrived(n, 10 + n, first=n) for n in range(5)))
    for _ in range(6):
        before = structs.astuple(view)
        assert scheduler.plan_step(view, POLICY) == scheduler.plan_step(view, POLICY)
        assert structs.astuple(view) == before
        view, _ = run_step(view, POLICY)


def test_a_step_that_only_closes_has_events_and_no_rows() -> None:
    view, _ = run_step(view_of(pool(8), arrived(0, 4)), POLICY)
    view = receive(view, RequestCancelled(0))
    plan = scheduler.plan_step(view, POLICY)
    assert (plan.events, plan.pieces, plan.idle) == ((Closed(0, "cancelled"),), (), False)
    view = scheduler.begin(view, plan)
    assert scheduler.close_step(view, plan, ()) == ()
    view = scheduler.settle(view, plan, (), ())
    assert view.step == 3
    assert scheduler.plan_step(view, POLICY).idle


def test_pads_that_do_not_fit_the_pool_are_left_out() -> None:
    sim = Sim(pool(8), structs.replace(POLICY, prefill_tile=32, prefill_chunk=32))
    inbox = sim.submit(range(5), 1)
    other = sim.submit(range(31), 1)
    sim.run(steps_max=20)
    assert inbox.tokens == answer_alone(range(5), 1)
    assert other.tokens == answer_alone(range(31), 1)


def test_a_checkpoint_restores_a_view_that_plans_the_same() -> None:
    sim = Sim(pool(12), structs.replace(POLICY, max_running=6))
    for prompt in prompts(8, seed=3):
        sim.submit(prompt, 6)
    for turn in range(30):
        sim.step()
        if turn == 4:
            sim.engine.cancel(2)
            sim.engine.cancel(0)
        view = sim.engine.view
        again = restore(checkpoint(view))
        assert again.requests == view.requests
        assert scheduler.plan_step(again, POLICY) == scheduler.plan_step(view, POLICY)


def test_the_plan_on_tape_can_be_made_again_from_the_recorded_inputs() -> None:
    sim = Sim(pool(14), structs.replace(POLICY, max_running=6))
    for n, prompt in enumerate(prompts(10, seed=5)):
        sim.submit(prompt, 6 + n)
    sim.run({5: [lambda: sim.engine.cancel(3)], 9: [lambda: sim.submit(range(9), 4)]})
    view, plan, count = initial(pool(14)), None, 0
    for record in sim.capture.records:
        if isinstance(record, RequestArrived | RequestCancelled):
            view = receive(view, record)
        elif isinstance(record, StepPlanned):
            plan = scheduler.plan_step(view, sim.policy)
            assert plan.events == record.events
            view = scheduler.begin(view, plan)
            assert view.state.digest == record.digest
        elif isinstance(record, StepDone):
            assert plan is not None
            outcomes = scheduler.outcomes(view, plan, record.tokens, ())
            events = scheduler.close_step(view, plan, outcomes)
            assert events == record.events
            view = scheduler.settle(view, plan, outcomes, events)
            assert view.state.digest == record.digest
            count += 1
    assert count > 10
    assert sim.engine.status()["preemptions"] > 0
