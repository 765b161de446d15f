"""Lookahead where a step fails: what the one before it and the one behind it come to.

In outlines P2 D1 is: step 2 was planned, then step 1 done; F3: step 3 failed.
"""

from __future__ import annotations

import pytest

from kernel.fake import Failure
from statemachine.events import (
    DECODE,
    LOOKAHEAD,
    Appended,
    AppendedEach,
    BlockCopied,
    Closed,
    CommittedEach,
    PoolReset,
    Rewound,
    StepWritten,
    Trimmed,
)
from statemachine.geometry import Geometry, Group
from statemachine.records import StepFailed

from .ahead import BARE, sevens, turns
from .follow import AHEAD, clean, done, failed, fork, offsets, outline, planned, pool
from .sim import Sim, answer_alone


def test_a_failed_build_is_undone_after_the_step_before_it_was_read() -> None:
    sim = Sim(policy=BARE, fail={3: Failure("build")}, script=sevens)
    inboxes = [sim.submit(range(5), 6), sim.submit(range(6), 6)]
    turns(sim, 2)
    before = offsets(sim)
    turns(sim, 1)
    assert outline(sim) == "P1 P2 D1 P3"
    assert planned(sim, 3) == (AppendedEach(3, (0, 1), None, LOOKAHEAD),)
    assert offsets(sim) == before == {0: 6, 1: 7}
    assert sim.engine.view.alone == (0, 1)
    sim.run()
    assert done(sim, 2) == (StepWritten(2), CommittedEach((0, 1), (7, 7)))
    assert failed(sim, 3) == (Trimmed(0, 1), Trimmed(1, 1))
    assert outline(sim).startswith("P1 P2 D1 P3 D2 F3 P4 D4 P5 D5 P6 P7 D6")
    assert planned(sim, 4) == (AppendedEach(4, (0,), (7,), DECODE),)
    assert planned(sim, 5) == (AppendedEach(5, (1,), (7,), DECODE),)
    assert [inbox.tokens for inbox in inboxes] == [(7,) * 6] * 2
    clean(sim)


def test_a_failed_build_is_trimmed_for_those_only_that_the_step_before_it_did_not_end() -> None:
    ends = {(0, 6): 9}
    sim = Sim(
        policy=BARE,
        fail={3: Failure("build")},
        script=lambda seq, position: ends.get((seq, position), 7),
    )
    inboxes = [sim.submit(range(5), 6, end_tokens=(9,)), sim.submit(range(6), 6)]
    sim.run()
    assert done(sim, 2) == (
        StepWritten(2), Rewound(0, 1), CommittedEach((1,), (7,)), Closed(0, "stop"),
    )  # fmt: skip
    assert failed(sim, 3) == (Trimmed(1, 1),)
    assert [inbox.tokens for inbox in inboxes] == [(7,), (7,) * 6]
    clean(sim)


def test_a_failed_build_ends_the_request_that_the_kernel_names_and_no_other() -> None:
    sim = Sim(policy=BARE, fail={3: Failure("build", 1)}, script=sevens)
    inboxes = [sim.submit(range(5 + n), 6) for n in range(3)]
    sim.run()
    assert failed(sim, 3) == (Trimmed(0, 1), Closed(1, "error"), Trimmed(2, 1))
    assert [inbox.reason for inbox in inboxes] == ["length", "error", "length"]
    assert inboxes[1].tokens == (7, 7), "what was sampled before it was told"
    clean(sim)


def test_a_failed_build_that_names_a_request_which_has_just_ended_blames_nobody_else() -> None:
    sim = Sim(
        policy=BARE,
        fail={3: Failure("build", 0)},
        script=lambda seq, position: 9 if (seq, position) == (0, 6) else 7,
    )
    inboxes = [sim.submit(range(5), 6, end_tokens=(9,)), sim.submit(range(6), 6)]
    sim.run()
    assert [inbox.reason for inbox in inboxes] == ["stop", "length"]
    assert failed(sim, 3) == (Trimmed(1, 1),)
    clean(sim)


def test_a_copy_in_a_failed_build_gives_the_copied_rows_up_too() -> None:
    sim = Sim(policy=AHEAD, fail={2: Failure("build")})
    parent = sim.submit(range(6), 4)
    child = fork(sim, tuple(range(6)), 0, max_tokens=4, temperature=1.0, seed=5)
    sim.run()
    copied = [event for event in planned(sim, 2) if isinstance(event, BlockCopied)]
    assert [(event.seq, event.rows) for event in copied] == [(1, 1)]
    # The child goes back behind its copied row; its parent behind its lookahead row.
    assert set(failed(sim, 2)) == {Trimmed(0, 1), Trimmed(1, 2), StepWritten(2)}
    assert parent.tokens == answer_alone(range(6), 4)
    assert child.tokens == answer_alone(range(6), 4, temperature=1.0, seed=5)
    clean(sim)


def test_a_window_that_moved_on_under_a_failed_build_is_computed_again() -> None:
    geometry = Geometry(4, (Group(num_blocks=32), Group("window", num_blocks=32, window=6)))
    for step in range(2, 8):
        sim = Sim(geometry, AHEAD, fail={step: Failure("build")})
        inboxes = [sim.submit([n] * 21, 6) for n in (1, 2)]
        sim.run()
        assert [i.tokens for i in inboxes] == [answer_alone([n] * 21, 6) for n in (1, 2)]
        clean(sim)


def test_a_failed_eval_voids_the_step_behind_it_and_nothing_is_lost_or_told_twice() -> None:
    sim = Sim(policy=BARE, fail={2: Failure("eval")})
    inboxes = [sim.submit([n] * 5, 6) for n in (1, 2)]
    turns(sim, 3)
    assert sim.engine.view.flights == ()
    sim.run()
    assert outline(sim).startswith("P1 P2 D1 P3 F2 F3 P4")
    assert [(r.step, r.stage, r.events) for r in sim.records(StepFailed)] == [
        (2, "eval", (PoolReset(),)),
        (3, "void", ()),
    ]
    # Both start over with the token that was told before.
    assert [e.rows for e in planned(sim, 4) if isinstance(e, Appended)] == [6, 6]
    assert [i.tokens for i in inboxes] == [answer_alone([n] * 5, 6) for n in (1, 2)]
    assert sim.engine.status()["failed_steps"] == 1
    clean(sim)


def test_a_failed_eval_behind_which_a_build_failed_voids_that_step() -> None:
    sim = Sim(policy=BARE, fail={2: Failure("eval"), 3: Failure("build")})
    inbox = sim.submit(range(5), 6)
    sim.run()
    assert [(r.step, r.stage) for r in sim.records(StepFailed)] == [(2, "eval"), (3, "void")]
    assert inbox.tokens == answer_alone(range(5), 6)
    clean(sim)


@pytest.mark.parametrize("stage", ["build", "eval"])
def test_any_one_step_may_fail_under_lookahead(stage: str) -> None:
    for step in range(1, 7):
        sim = Sim(pool(12), AHEAD, fail={step: Failure(stage)})
        inboxes = [sim.submit([n] * (9 + n), 7) for n in (1, 2, 3)]
        sim.run()
        assert [i.tokens for i in inboxes] == [answer_alone([n] * (9 + n), 7) for n in (1, 2, 3)]
        assert [len(i.updates) <= 7 for i in inboxes] == [True] * 3
        clean(sim)
