"""The queue's order: who starts first, who may pass whom and how often, who waits for a prefix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from server import scheduler
from server.admission import PASSES_MAX
from server.policy import PRIORITY, Policy
from server.view import StepPlan, View, initial, receive
from server.waiting import CHUNK, Waiting, waiting_of
from statemachine.events import (
    PROMPT,
    Appended,
    Closed,
    Namespace,
    Preempted,
    PrefixAdopted,
)
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters, RequestArrived

from .follow import clean, planned, pool, random_load, same_answers
from .sim import POLICY, SMALL, Sim, answer_alone, idle

BY_PRIORITY = structs.replace(POLICY, scheduling=PRIORITY)
AWARE = structs.replace(POLICY, prefix_aware=True)
TOKENS = tuple(range(10, 50))


def started(sim: Sim) -> list[int]:
    """Requests in the order of their first rows."""
    order: list[int] = []
    for event in sim.events(Appended):
        if event.purpose == PROMPT and event.seq not in order:
            order.append(event.seq)
    return order


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 400), st.integers(-2, 2)), max_size=300),
    st.booleans(),
)
def test_a_queue_is_a_sorted_list(changes: list[tuple[bool, int, int]], by_priority: bool) -> None:
    queue, naive = Waiting(by_priority), dict[int, int]()
    for adds, request, priority in changes:
        if adds and request not in naive:
            queue = queue.add(request, priority)
            naive[request] = priority
        elif not adds:
            queue = queue.remove(request, naive.pop(request, priority))
    order = sorted(naive, key=lambda it: (naive[it] if by_priority else 0, it))
    assert list(queue) == order
    assert len(queue) == len(naive)
    assert queue.first(5) == tuple(order[:5])
    assert all(0 < len(chunk) < 2 * CHUNK for chunk in queue.chunks)
    assert list(waiting_of(naive.items(), by_priority)) == order


def test_a_queue_that_grows_past_a_chunk_stays_sorted_and_leaves_older_versions_alone() -> None:
    versions = [Waiting()]
    places = [(number * 37) % 500 for number in range(500)]
    for number in places:
        versions.append(versions[-1].add(number, 0))
    for count in (1, 63, 127, 128, 129, 300, 500):
        assert list(versions[count]) == sorted(places[:count])
    assert len(versions[-1].chunks) > 3
    assert versions[-1].remove(999, 0) is versions[-1]


def test_requests_start_in_order_of_arrival_whatever_their_priority() -> None:
    sim = Sim(policy=structs.replace(POLICY, max_running=1))
    for priority in (0, 5, -5, 0):
        sim.submit([priority % 7] * 6, 2, priority=priority)
    sim.run()
    assert started(sim) == [0, 1, 2, 3]
    clean(sim)


def test_by_priority_lower_ones_start_first_and_equal_ones_in_order_of_arrival() -> None:
    sim = Sim(policy=structs.replace(BY_PRIORITY, max_running=1))
    for number, priority in enumerate((3, 0, 3, -1, 0, 3)):
        sim.submit([number] * 6, 2, priority=priority)
    sim.run()
    assert started(sim) == [3, 1, 4, 0, 2, 5]
    assert [event.seq for event in sim.events(Closed)] == [3, 1, 4, 0, 2, 5]
    clean(sim)


def test_by_priority_a_later_request_starts_before_those_that_wait_but_stops_nobody() -> None:
    sim = Sim(policy=structs.replace(BY_PRIORITY, max_running=1))
    sim.submit([1] * 6, 6, priority=2)
    sim.step()
    sim.submit([2] * 6, 2, priority=1)
    sim.submit([3] * 6, 2, priority=-9)
    sim.run()
    assert started(sim) == [0, 2, 1]
    assert sim.events(Preempted) == []
    clean(sim)


def filled(policy: Policy, priorities: tuple[int, ...]) -> Sim:
    """Requests of eight rows and long answers in a pool that cannot hold them to their ends."""
    policy = structs.replace(policy, watermark_blocks=0, prefix_cache=False)
    sim = Sim(pool(10), policy)
    for number, priority in enumerate(priorities):
        sim.submit([number] * 8, 16, priority=priority)
    return sim


@pytest.mark.parametrize(
    ("priorities", "victim"),
    [((0, 0, 0), 2), ((5, 0, 0), 0), ((0, 5, 0), 1), ((1, 2, 2), 2), ((-1, -1, -2), 1)],
)
def test_by_priority_the_last_in_the_order_makes_room(
    priorities: tuple[int, ...], victim: int
) -> None:
    sim = filled(BY_PRIORITY, priorities)
    sim.run()
    assert sim.events(Preempted)[0] == Preempted(victim)
    for number in range(3):
        assert sim.inboxes[number].tokens == answer_alone([number] * 8, 16)
    clean(sim)


def test_by_priority_the_first_in_the_order_is_never_preempted() -> None:
    for first in range(4):
        sim = filled(BY_PRIORITY, tuple(0 if number == first else 1 for number in range(4)))
        sim.run()
        gone = [event.seq for event in sim.events(Preempted)]
        assert gone
        assert first not in gone
        clean(sim)


def test_by_arrival_priorities_make_no_difference_to_who_makes_room() -> None:
    gone = []
    for priorities in ((0, 0, 0), (9, 0, -9)):
        sim = filled(POLICY, priorities)
        sim.run()
        gone.append([event.seq for event in sim.events(Preempted)])
    assert gone[0] == gone[1] != []


def test_a_preempted_request_goes_back_to_its_place_in_the_queue() -> None:
    sim = filled(BY_PRIORITY, (0, 1, 1, 2, 0))
    while not sim.events(Preempted):
        sim.step()
    (victim,) = [event.seq for event in sim.events(Preempted)]
    waiting = list(sim.engine.view.waiting)
    assert victim in waiting
    assert waiting == sorted(waiting, key=lambda it: ((0, 1, 1, 2, 0)[it], it))
    sim.run()
    clean(sim)


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("scheduling", ["fcfs", PRIORITY])
@pytest.mark.parametrize("max_running", [3, 8, 16])
def test_a_request_starts_after_at_most_eight_that_stood_behind_it(
    max_running: int, scheduling: str, lookahead: bool
) -> None:
    """However many may start in one step, and however long the stream of small ones is."""
    policy = structs.replace(
        POLICY,
        max_running=max_running,
        scheduling=scheduling,
        lookahead=lookahead,
        prefix_cache=False,
        watermark_blocks=0,
    )
    sim = Sim(pool(24), policy)
    sim.submit(range(44), 16)
    sim.step()
    big = sim.submit([7] * 60, 2)
    small: list[Callable[[], object]] = [lambda: sim.submit([8] * 4, 2)] * 3
    sim.run(dict.fromkeys(range(3, 16), small))
    order = started(sim)
    passed = order.index(1) - 1
    assert passed == PASSES_MAX
    assert big.reason == "length"
    clean(sim)


def test_nobody_is_passed_more_often_than_the_bound_in_any_load() -> None:
    """Counted from the tape: later ones in the order whose first rows came before its first."""
    most = 0
    for seed in range(8):
        sim, _ = random_load(seed)
        order = started(sim)
        for place, request in enumerate(order):
            later = sum(other > request for other in order[:place])
            most = max(most, later)
            assert later <= PASSES_MAX
    assert most > 0


def test_by_priority_a_request_is_behind_all_that_come_before_it_in_the_order() -> None:
    """vLLM's meaning: a stream of more urgent requests may keep a less urgent one waiting."""
    sim = Sim(policy=structs.replace(BY_PRIORITY, max_running=1))
    sim.submit([1] * 6, 2)
    sim.submit([2] * 6, 2, priority=1)
    for number in range(3, 15):
        sim.submit([number] * 6, 2)
    sim.run()
    assert started(sim)[-1] == 1
    clean(sim)


def test_a_request_waits_for_a_prefix_that_is_being_computed_and_then_adopts_it() -> None:
    rows = {}
    for aware in (False, True):
        sim = Sim(policy=structs.replace(POLICY, prefix_aware=aware, prefill_chunk=8))
        first = sim.submit(TOKENS, 2)
        second = sim.submit((*TOKENS[:36], 1, 2, 3), 2)
        sim.run()
        rows[aware] = sum(e.rows for e in sim.events(Appended) if e.purpose == PROMPT)
        assert first.tokens == answer_alone(TOKENS, 2)
        assert second.tokens == answer_alone((*TOKENS[:36], 1, 2, 3), 2)
        assert second.cached_tokens == (36 if aware else 0)
        clean(sim)
    assert rows == {False: 40 + 39, True: 40 + 3}


def test_a_request_waits_no_longer_than_until_its_share_is_published() -> None:
    sim = Sim(policy=structs.replace(AWARE, prefill_chunk=8))
    sim.submit(TOKENS, 2)
    second = sim.submit((*TOKENS[:16], 1, 2, 3), 2)
    sim.run()
    # Steps 1 and 2 write the first 16 rows: the second one starts in step 3, beside the first.
    assert planned(sim, 3)[1] == PrefixAdopted(1, TOKENS[:16], 19, ((0, 1, 2, 3),))
    assert second.cached_tokens == 16
    clean(sim)


def test_others_start_while_a_request_waits_for_a_prefix() -> None:
    sim = Sim(policy=structs.replace(AWARE, prefill_chunk=8))
    sim.submit(TOKENS, 2)
    sim.submit((*TOKENS[:36], 1), 2)
    sim.submit((3, 4, 5), 2)
    sim.step()
    assert started(sim) == [0, 2]
    sim.run()
    clean(sim)


def starts_at_once(sim: Sim, request: int) -> bool:
    """Whether a request has rows in the first step."""
    return request in {event.seq for event in planned(sim, 1) if isinstance(event, Appended)}


@pytest.mark.parametrize(
    ("tokens", "namespace"),
    [
        (TOKENS, Namespace(salt="other")),
        (TOKENS, Namespace("adapter", 2)),
        ((*TOKENS[:3], *range(20)), Namespace()),
        (TOKENS[:4], Namespace()),
        ((9, *TOKENS), Namespace()),
    ],
    ids=["salt", "adapter", "no-block", "all-but-the-last-row", "shifted"],
)
def test_a_request_does_not_wait_for_what_it_could_not_adopt(
    tokens: tuple[int, ...], namespace: Namespace
) -> None:
    sim = Sim(policy=structs.replace(AWARE, prefill_chunk=8))
    sim.submit(TOKENS, 2)
    sim.submit(tokens, 2, namespace=namespace)
    sim.step()
    assert starts_at_once(sim, 1)
    sim.run()
    clean(sim)


def test_a_request_does_not_wait_for_a_shorter_share_than_it_can_find() -> None:
    """0 left 24 rows in the index. 1 computes 16 of them again, as a request does that found no
    room to adopt them; 2 can find all 24 now.
    """
    view = initial(SMALL, AWARE)

    def step(view: View, policy: Policy) -> tuple[View, StepPlan]:
        plan = scheduler.plan_step(view, policy)
        view = scheduler.begin(view, plan)
        tokens = (7,) * sum(piece.samples for piece in plan.pieces)
        found = scheduler.outcomes(view, plan, tokens, ())
        events = scheduler.close_step(view, plan, found)
        return scheduler.settle(view, plan, found, events), plan

    texts = (TOKENS[:24], (*TOKENS[:16], *range(30)), (*TOKENS[:24], 60, 61))
    view = receive(view, RequestArrived(0, "", texts[0], Parameters(1)))
    for _ in range(2):
        view, _ = step(view, AWARE)
    view = receive(view, RequestArrived(1, "", texts[1], Parameters(1)))
    view, _ = step(view, structs.replace(AWARE, prefix_cache=False, prefill_chunk=4))
    view = receive(view, RequestArrived(2, "", texts[2], Parameters(1)))
    view, plan = step(view, AWARE)
    assert plan.admitted == ((2, 24),)


def test_nobody_waits_for_a_prefix_without_the_prefix_cache() -> None:
    sim = Sim(policy=structs.replace(AWARE, prefix_cache=False))
    sim.submit(TOKENS, 2)
    sim.submit(TOKENS, 2)
    sim.step()
    assert starts_at_once(sim, 1)
    sim.run()
    clean(sim)


def test_a_prefix_whose_request_is_cancelled_is_waited_for_no_longer() -> None:
    for lookahead in (False, True):
        sim = Sim(policy=structs.replace(AWARE, prefill_chunk=8, lookahead=lookahead))
        sim.submit(TOKENS, 2)
        second = sim.submit((*TOKENS[:36], 1), 2)
        sim.step()
        sim.step()
        assert started(sim) == [0]
        sim.engine.cancel(0)
        sim.step()
        assert started(sim) == [0, 1]
        sim.run()
        assert second.tokens == answer_alone((*TOKENS[:36], 1), 2)
        clean(sim)


def test_a_preempted_prefill_is_waited_for_by_nobody() -> None:
    policy = structs.replace(AWARE, prefill_chunk=4, watermark_blocks=0)
    sim = Sim(pool(12), policy)
    sim.submit(range(50, 58), 30)  # grows until 1, which is in its prompt, has to make room
    sim.submit(TOKENS[:36], 2)
    while not sim.events(Preempted):
        sim.step()
    assert sim.events(Preempted) == [Preempted(1)]
    late = sim.submit((*TOKENS[:8], 1, 2), 2)
    sim.run()
    assert late.tokens == answer_alone((*TOKENS[:8], 1, 2), 2)
    clean(sim)


@pytest.mark.parametrize("seed", range(8))
def test_prefix_aware_admission_by_priority_changes_no_answer_and_always_ends(seed: int) -> None:
    settings = {"prefix_aware": True, "scheduling": PRIORITY, "lookahead": seed % 2 == 0}
    _, answers = random_load(seed, **settings)
    same_answers(random_load(seed)[1], answers)


@pytest.mark.parametrize("max_running", [2, 8])
def test_many_that_wait_for_each_others_prefixes_all_end_in_a_tiny_pool(max_running: int) -> None:
    for blocks in (11, 12, 16):
        policy = structs.replace(
            AWARE, max_running=max_running, prefill_chunk=4, lookahead=blocks > 11
        )
        sim = Sim(pool(blocks), policy)
        texts = [(*TOKENS[: 4 * (1 + number % 7)], number, number) for number in range(12)]
        inboxes = [sim.submit(text, 8) for text in texts]
        sim.run(steps_max=1_000)
        assert [i.tokens for i in inboxes] == [answer_alone(text, 8) for text in texts]
        clean(sim)


def test_part_3_21_a_partial_prefill_samples_no_token() -> None:
    sim = Sim(policy=structs.replace(POLICY, prefill_chunk=16))
    inbox = sim.submit(TOKENS, 2)
    for expected in ((), (), ()):
        sim.step()
        if sim.next_step < 4:
            assert inbox.tokens == expected
            assert [p.samples for p in sim.kernel.batches[-1].pieces] == [0]
    assert [p.samples for p in sim.kernel.batches[-1].pieces] == [1]
    assert len(inbox.tokens) == 1


def test_part_3_22_three_long_prompts_share_1024_rows_evenly_the_last_one_taking_the_rest() -> None:
    geometry = Geometry(16, (Group(num_blocks=600),))
    policy = Policy(max_batch_tokens=1024, prefill_chunk=1024, context_tokens=4096)
    sim = Sim(geometry, policy)
    for number in range(3):
        sim.submit([number] * 2000, 1)
    sim.step()
    assert [len(piece.tokens) for piece in sim.kernel.batches[0].pieces] == [341, 341, 342]
    sim.run()
    totals = [sum(len(piece.tokens) for piece in batch.pieces) for batch in sim.kernel.batches]
    assert totals[:5] == [1024] * 5
    assert sum(totals) == 6000


def test_part_3_23_preemption_frees_requeues_and_recomputes_the_same_answer() -> None:
    sim = filled(POLICY, (0, 0))
    while not sim.events(Preempted):
        sim.step()
    (event,) = sim.events(Preempted)
    view = sim.engine.view
    assert tuple(view.waiting) == (event.seq,) == (1,)
    assert view.running == (0,)
    sequence = view.state.sequences[1]
    assert (sequence.offset, sequence.tables) == (0, ((),))
    sent = sim.inboxes[1].tokens
    sim.run()
    recomputed = [e.rows for e in sim.events(Appended) if e.seq == 1 and e.purpose == PROMPT]
    assert sum(recomputed) == 8 + 8 + len(sent)
    assert sim.inboxes[1].tokens == answer_alone([1] * 8, 16)
    assert sim.inboxes[1].tokens[: len(sent)] == sent
    clean(sim)


@pytest.mark.parametrize("arrival", range(20, 28))
def test_a_request_starts_once_a_window_that_moved_on_left_room_for_it(arrival: int) -> None:
    geometry = Geometry(4, (Group("window", num_blocks=8, window=8),))
    policy = structs.replace(
        POLICY, prefill_chunk=4, lookahead=True, watermark_blocks=0, context_tokens=200
    )
    sim = Sim(geometry, policy)
    sim.submit(range(8), 100)
    while sim.next_step < arrival:
        sim.step()
    sim.submit(range(30, 50), 3)
    for _ in range(6):
        sim.step()
    assert sim.engine.view.running == (0, 1)
    sim.run()
    assert sim.idle_counts() == idle(geometry)
