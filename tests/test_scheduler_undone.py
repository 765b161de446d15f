"""The scheduler's adoptions, and what it undoes after a step that failed."""

from __future__ import annotations

from msgspec import structs

from server import scheduler
from server.view import receive
from statemachine.events import PrefixAdopted, StepWritten, Trimmed
from statemachine.geometry import Geometry, Group

from .follow import pool
from .sim import POLICY, SMALL, Sim, answer_alone
from .views import arrived, run_step, view_of


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
