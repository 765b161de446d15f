"""The scheduler as a pure function: what is refused, admitted, shared, preempted; in what order."""

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
from server.view import LOOK_AHEAD, View, checkpoint, initial, receive, restore
from statemachine.events import (
    Appended,
    AppendedEach,
    Closed,
    Opened,
    Preempted,
    PrefixAdopted,
    StepWritten,
    Trimmed,
)
from statemachine.geometry import Geometry, Group
from statemachine.records import (
    Finished,
    Parameters,
    RequestArrived,
    RequestCancelled,
    StepDone,
    StepPlanned,
)

from .sim import POLICY, SMALL, Sim, answer_alone, idle, prompts


def pool(num_blocks: int, block_size: int = 4) -> Geometry:
    return Geometry(block_size=block_size, groups=(Group(num_blocks=num_blocks),))


def arrived(request: int, rows: int, max_tokens: int = 8, first: int = 0) -> RequestArrived:
    tokens = tuple(range(first, first + rows))
    return RequestArrived(request, "", tokens, Parameters(max_tokens))


def view_of(geometry: Geometry, *records: RequestArrived) -> View:
    view = initial(geometry)
    for record in records:
        view = receive(view, record)
    return view


def run_step(view: View, policy: Policy, token: int = 7) -> tuple[View, scheduler.StepPlan]:
    plan = scheduler.plan_step(view, policy)
    view = scheduler.begin(view, plan)
    tokens = tuple(token + piece.seq for piece in plan.pieces if piece.samples)
    outcomes = scheduler.outcomes(view, plan, tokens, ())
    events = scheduler.close_step(view, plan, outcomes)
    return scheduler.settle(view, plan, outcomes, events), plan


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


def test_p10_a_decode_step_that_lacks_a_block_preempts_before_it_appends() -> None:
    policy = Policy(max_running=4, prefix_cache=False, watermark_blocks=0)
    view = view_of(pool(5), arrived(0, 4), arrived(1, 8), arrived(2, 3))
    view, _ = run_step(view, policy)
    assert view.state.free_blocks() == 1
    plan = scheduler.plan_step(view, policy)
    assert [e.seq for e in plan.events if isinstance(e, Preempted)] == [2]
    assert sorted(piece.seq for piece in plan.pieces) == [0, 1]
    assert tuple(plan.waiting) == (2,)


def test_the_row_with_the_fewest_answer_tokens_is_preempted_but_never_the_oldest() -> None:
    policy = Policy(max_running=4, prefix_cache=False, watermark_blocks=0)
    view = view_of(pool(6), arrived(0, 8))
    view, _ = run_step(view, policy)
    view = receive(receive(view, arrived(1, 3)), arrived(2, 3))
    view, _ = run_step(view, policy)  # 0 has two answer tokens, 1 and 2 have one
    view, _ = run_step(view, policy)
    view, plan = run_step(view, policy)
    assert [e.seq for e in plan.events if isinstance(e, Preempted)] == [2]
    assert view.running == (0, 1)


def test_p27_a_prompt_over_the_pool_is_refused_and_a_pair_that_needs_each_others_blocks_ends() -> (
    None
):
    sim = Sim(pool(8), structs.replace(POLICY, context_tokens=128, prefill_chunk=8))
    with pytest.raises(RequestRefused):
        sim.submit(range(40))
    small = sim.submit((1, 2, 3, 4))
    sim.run()
    assert small.reason == "length"
    pair = [sim.submit([n] * 24, 6) for n in (5, 6)]
    sim.run(steps_max=60)
    assert [len(inbox.tokens) for inbox in pair] == [6, 6]
    assert sim.idle_counts() == idle(pool(8))


def test_p28_small_requests_pass_a_big_one_and_the_big_one_starts_within_its_bound() -> None:
    policy = structs.replace(POLICY, max_running=8, prefix_cache=False)
    sim = Sim(pool(16), policy)
    sim.submit(range(28), 4)
    sim.step()
    big = sim.submit([7] * 44, 2)
    smalls = [sim.submit([n] * 6, 2) for n in (1, 2)]
    sim.run()
    opened = [event.seq for event in sim.events(Opened)]
    closed = [event.seq for event in sim.events(Closed)]
    assert opened == [0, 1, 2, 3], "ids open in order, also those that are passed"
    assert closed.index(2) < closed.index(1)
    assert closed.index(3) < closed.index(1)
    assert big.tokens
    assert all(small.reason == "length" for small in smalls)


def test_p28_a_stream_of_small_requests_passes_a_big_one_eight_times_and_no_more() -> None:
    policy = structs.replace(POLICY, max_running=3, prefix_cache=False, watermark_blocks=0)
    sim = Sim(pool(16), policy)
    sim.submit(range(28), 24)
    sim.step()
    sim.submit([7] * 48, 2)
    for n in range(40):
        sim.submit([n] * 4, 2)
    sim.run()
    closed = [event.seq for event in sim.events(Closed)]
    first_row = [event.seq for event in sim.events(Appended) if event.purpose == "prompt"]
    passed = set(first_row[: first_row.index(1)]) - {0}
    assert len(passed) == admission.PASSES_MAX
    assert len(closed) == 42


def test_p28_a_short_prompt_gets_its_first_token_in_the_step_after_it_arrived() -> None:
    policy = Policy(max_batch_tokens=16, max_running=8, prefill_chunk=16, context_tokens=4000)
    sim = Sim(pool(1024), policy)
    sim.submit([n % 50 for n in range(2000)], 2)
    sim.step()
    small = sim.submit((1, 2, 3, 4), 2)
    sim.step()
    assert len(small.tokens) == 1
    rows = [p.rows for p in sim.kernel.batches[-1].pieces]
    assert rows == [12, 4], "what the small one does not need goes to the long one"


def test_a_queue_of_ten_thousand_is_looked_at_in_front_only() -> None:
    policy = Policy(max_running=8, prefix_cache=False, watermark_blocks=0)
    view = view_of(pool(8), arrived(0, 24, max_tokens=5))
    view, _ = run_step(view, policy)
    for request in range(1, 3000):
        view = receive(view, arrived(request, 20))
    plan = scheduler.plan_step(view, policy)
    assert plan.stuck
    assert not [e for e in plan.events if isinstance(e, Opened)]
    view, _ = run_step(view, policy)
    view = receive(view, arrived(3000, 1))
    assert view.stuck, "an arrival behind the front changes nothing for the front"
    assert scheduler.plan_step(view, policy).waiting is view.waiting
    cancelled = receive(view, RequestCancelled(1))
    assert not cancelled.stuck
    assert len(cancelled.waiting) == 2999
    assert LOOK_AHEAD == 16


def test_a_cancel_of_a_waiting_request_computes_nothing_and_of_a_running_one_closes_it() -> None:
    policy = structs.replace(POLICY, max_running=1)
    sim = Sim(SMALL, policy)
    first, second, third = (sim.submit([n] * 9, 20) for n in (1, 2, 3))
    sim.step()
    sim.engine.cancel(1)
    sim.engine.cancel(0)
    sim.step()
    assert (first.reason, second.reason) == ("cancelled", "cancelled")
    assert [e.seq for e in sim.events(Closed)] == [0]
    assert sim.engine.status()["running"] == 1
    sim.run()
    assert {p.sequence.id for b in sim.kernel.batches for p in b.pieces} == {0, 2}
    assert third.reason == "length"
    assert sim.idle_counts() == idle(SMALL)


def test_a_cancel_of_a_preempted_request_closes_its_sequence() -> None:
    policy = Policy(max_running=4, prefix_cache=False, watermark_blocks=0)
    view = view_of(pool(5), arrived(0, 4), arrived(1, 8), arrived(2, 3))
    for _ in range(2):
        view, _ = run_step(view, policy)
    assert tuple(view.waiting) == (2,)
    view = receive(view, RequestCancelled(2))
    assert (tuple(view.waiting), view.closing) == ((), (2,))
    view, plan = run_step(view, policy)
    assert plan.events[0] == Closed(2, "cancelled")
    assert 2 not in view.state.sequences


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


def test_adoption_is_decided_at_admission_and_pins_nothing_in_the_queue() -> None:
    policy = structs.replace(POLICY, max_running=1)
    sim = Sim(SMALL, policy)
    prompt = tuple(range(20))
    sim.submit(prompt, 3)
    sim.run()
    running = sim.submit([50] * 9, 10)
    waiting = sim.submit((*prompt, 63), 3)
    sim.step()
    held = sim.engine.status()["held"]
    assert held == 3, "only the running request holds blocks"
    assert not sim.events(PrefixAdopted)
    sim.run()
    assert len(running.tokens) == 10
    assert waiting.cached_tokens == 20
    assert [len(e.tokens) for e in sim.events(PrefixAdopted)] == [20]


def test_s4_a_prompt_that_is_found_whole_adopts_all_but_its_last_row() -> None:
    for rows in (16, 17, 31, 32, 33, 48):
        sim = Sim(SMALL, POLICY)
        first = sim.submit(range(rows), 6)
        sim.run()
        again = sim.submit(range(rows), 6)
        sim.run()
        assert again.tokens == first.tokens == answer_alone(range(rows), 6)
        # Blocks of 4: a part of the last block is used where it was published whole.
        assert again.cached_tokens == min(rows // 4 * 4, rows - 1)


def test_no_lookup_and_no_publication_without_the_prefix_cache() -> None:
    sim = Sim(SMALL, structs.replace(POLICY, prefix_cache=False))
    answers = []
    for _ in range(2):
        answers.append(sim.submit(range(20), 6))
        sim.run()
    assert answers[0].tokens == answers[1].tokens
    assert answers[1].cached_tokens == 0
    status = sim.engine.status()
    assert (status["cached"], status["free"]) == (0, 64)


def test_a_lone_request_whose_adoption_does_not_fit_starts_without_it() -> None:
    # The window group has just what a window of 8 rows and a piece of 16 take: 7 blocks. Two are
    # adopted, and six more would be needed for the rest of the prompt.
    geometry = Geometry(4, (Group(num_blocks=64), Group("window", num_blocks=7, window=8)))
    sim = Sim(geometry, structs.replace(POLICY, context_tokens=128))
    prompt = [n % 50 for n in range(64)]
    sim.submit(prompt[:40], 1)
    sim.run()
    longer = sim.submit(prompt, 2)
    sim.run(steps_max=30)
    assert (longer.reason, longer.cached_tokens) == ("length", 0)
    shorter = sim.submit((*prompt[:56], 60, 61), 2)
    sim.run(steps_max=30)
    assert shorter.cached_tokens == 56


def test_the_oldest_running_request_is_not_preempted_even_with_the_fewest_tokens() -> None:
    policy = Policy(max_running=4, prefill_chunk=1, prefix_cache=False, watermark_blocks=0)
    view = view_of(pool(6), arrived(0, 16), arrived(1, 3, max_tokens=20))
    gone: list[int] = []
    while not gone:
        view, plan = run_step(view, policy)
        gone = [e.seq for e in plan.events if isinstance(e, Preempted)]
    assert view.requests[0].output_tokens == 0
    assert view.requests[1].output_tokens > 0
    assert gone == [1]


def test_an_admission_leaves_the_watermark_free_while_others_run() -> None:
    for watermark, running in ((2, (0,)), (1, (0, 1))):
        policy = Policy(max_running=4, prefix_cache=False, watermark_blocks=watermark)
        view, _ = run_step(view_of(pool(8), arrived(0, 7)), policy)
        view, _ = run_step(receive(view, arrived(1, 20)), policy)
        assert view.running == running
    alone = Policy(max_running=4, prefix_cache=False, watermark_blocks=8)
    assert run_step(view_of(pool(8), arrived(0, 7)), alone)[0].running == (0,)


def test_pads_that_do_not_fit_the_pool_are_left_out() -> None:
    sim = Sim(pool(8), structs.replace(POLICY, prefill_tile=32, prefill_chunk=32))
    inbox = sim.submit(range(5), 1)
    other = sim.submit(range(31), 1)
    sim.run(steps_max=20)
    assert inbox.tokens == answer_alone(range(5), 1)
    assert other.tokens == answer_alone(range(31), 1)


def test_a_failed_build_is_trimmed_back_and_its_sequences_are_tried_alone() -> None:
    view = view_of(pool(64), arrived(0, 5), arrived(1, 6))
    view, _ = run_step(view, POLICY)
    offsets = [view.state.sequences[seq].offset for seq in (0, 1)]
    view = receive(view, arrived(2, 7, first=20))
    plan = scheduler.plan_step(view, POLICY)
    view = scheduler.begin(view, plan)
    events = scheduler.fail_step(view, plan, "build")
    assert events == (Trimmed(0, 1), Trimmed(1, 1), Trimmed(2, 7))
    view = scheduler.settle_failed(view, plan, "build", (), events)
    assert [view.state.sequences[seq].offset for seq in (0, 1, 2)] == [*offsets, 0]
    assert view.alone == (0, 1, 2)
    steps = []
    for _ in range(4):
        view, plan = run_step(view, POLICY)
        steps.append([piece.seq for piece in plan.pieces])
    assert steps[:3] == [[0], [1], [2]]
    assert sorted(steps[3]) == [0, 1, 2]


def test_a_failed_build_gives_up_copied_rows_and_releases_what_was_pinned() -> None:
    policy = structs.replace(POLICY, max_running=4)
    view = view_of(pool(64), arrived(0, 8, max_tokens=1))
    view, _ = run_step(view, policy)
    view = receive(view, arrived(1, 8))
    plan = scheduler.plan_step(view, policy)
    view = scheduler.begin(view, plan)
    assert plan.step in view.state.pins
    events = scheduler.fail_step(view, plan, "build")
    # Seven rows were adopted; the copy of the last three may never have run.
    assert events == (Trimmed(1, 4), StepWritten(plan.step))
    view = scheduler.settle_failed(view, plan, "build", (), events)
    assert not view.state.pins
    assert view.state.sequences[1].offset == 4
    view, plan = run_step(view, policy)
    assert [(p.seq, p.rows) for p in plan.pieces] == [(1, 4)]


def test_a_failed_eval_sends_all_back_to_the_queue_with_their_tokens() -> None:
    view = view_of(pool(64), arrived(0, 5), arrived(1, 6), arrived(2, 3))
    policy = structs.replace(POLICY, max_running=2)
    view, _ = run_step(view, policy)
    plan = scheduler.plan_step(view, policy)
    view = scheduler.begin(view, plan)
    events = scheduler.fail_step(view, plan, "eval")
    view = scheduler.settle_failed(view, plan, "eval", (), events)
    assert (view.running, tuple(view.waiting)) == ((), (0, 1, 2))
    assert view.requests[0].stream.output() == (7,)
    assert view.state.free_blocks() == 64
    view, plan = run_step(view, policy)
    assert [(p.seq, p.rows) for p in plan.pieces] == [(0, 6), (1, 7)]


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
