"""The scheduler's queue: who is admitted, passed, preempted and cancelled."""

from __future__ import annotations

import pytest
from msgspec import structs

from server import admission, scheduler
from server.policy import Policy
from server.submission import RequestRefused
from server.view import LOOK_AHEAD, receive
from statemachine.events import Appended, Closed, Opened, Preempted
from statemachine.records import RequestCancelled

from .follow import pool
from .sim import POLICY, SMALL, Sim, idle
from .views import arrived, run_step, view_of


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
