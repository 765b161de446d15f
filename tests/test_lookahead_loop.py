"""Lookahead in the loop: checkpoints, a stop, and when there is work left.

In outlines P2 D1 is: step 2 was planned, then step 1 done; C is a checkpoint.
"""

from __future__ import annotations

from kernel.fake import Failure
from statemachine.events import Closed
from statemachine.records import TapeEnded

from .ahead import sevens, turns
from .follow import AHEAD, clean, follow, outline, planned
from .sim import Sim, answer_alone


def test_a_checkpoint_waits_until_nothing_is_in_flight() -> None:
    sim = Sim(policy=AHEAD, script=sevens)
    inbox = sim.submit(range(5), 6)
    turns(sim, 2)
    sim.capture.checkpoint_due = True
    turns(sim, 1)
    assert sim.engine.view.flights == ()
    turns(sim, 1)
    sim.capture.checkpoint_due = False
    sim.run()
    assert outline(sim).startswith("P1 P2 D1 D2 C P3 P4 D3")
    assert inbox.tokens == (7,) * 6
    clean(sim)


def test_a_request_that_arrives_while_a_checkpoint_waits_is_served_after_it() -> None:
    sim = Sim(policy=AHEAD)
    sim.submit(range(5), 6)
    turns(sim, 2)
    sim.capture.checkpoint_due = True
    late = sim.submit(range(7), 2)
    turns(sim, 2)
    sim.capture.checkpoint_due = False
    sim.run()
    assert late.tokens == answer_alone(range(7), 2)
    clean(sim)


def test_a_stop_tells_what_the_step_in_flight_sampled_before_it_ends_the_tape() -> None:
    sim = Sim(policy=AHEAD, script=lambda seq, position: position)
    inbox = sim.submit(range(5), 9)
    turns(sim, 3)
    assert inbox.tokens == (5, 6)
    sim.engine.stop()
    assert (inbox.tokens, inbox.reason) == ((5, 6, 7), "cancelled")
    assert outline(sim) == "P1 P2 D1 P3 D2 D3 P4 D4 end"
    assert planned(sim, 4) == (Closed(0, "cancelled"),)
    assert sim.capture.records[-1] == TapeEnded(4)
    assert sim.capture.closed
    follow(sim)


def test_a_stop_with_a_step_in_flight_that_fails_ends_the_tape_in_order() -> None:
    sim = Sim(policy=AHEAD, fail={3: Failure("eval")})
    inbox = sim.submit(range(5), 9)
    turns(sim, 3)
    sim.engine.stop()
    assert inbox.reason == "cancelled"
    assert outline(sim) == "P1 P2 D1 P3 D2 F3 P4 D4 end"
    follow(sim)


def test_the_loop_has_work_while_a_step_flies_and_none_after() -> None:
    sim = Sim(policy=AHEAD)
    loop = sim.engine._loop
    assert loop is not None
    assert not loop.busy
    sim.submit(range(5), 1)
    sim.step()
    assert loop.busy
    sim.step()
    assert outline(sim) == "P1", "D1 waits for the next write"
    assert loop.busy
    sim.step()
    assert outline(sim) == "P1 D1"
    assert not loop.busy
    assert not sim.step()


def test_the_loop_has_work_while_a_step_flies_whose_requests_have_all_ended() -> None:
    sim = Sim(policy=AHEAD, script=sevens)
    loop = sim.engine._loop
    assert loop is not None
    sim.submit(range(5), 9, end_tokens=(7,))
    turns(sim, 2)
    assert (len(sim.engine.view.requests), len(sim.engine.view.flights)) == (0, 1)
    turns(sim, 1)
    assert outline(sim) == "P1 P2 D1"
    assert sim.engine.view.flights == ()
    turns(sim, 1)
    assert outline(sim) == "P1 P2 D1 D2"
    assert not loop.busy


def test_a_flight_of_which_nobody_is_left_is_work_even_with_all_else_on_tape() -> None:
    sim = Sim(policy=AHEAD, script=sevens)
    loop = sim.engine._loop
    assert loop is not None
    sim.submit(range(5), 9, end_tokens=(7,))
    turns(sim, 2)
    loop._writes.flush()  # D1 is on tape, so that nothing but the flight is left to do
    assert loop.busy
    sim.run()
    clean(sim)
