"""A flush: the prefix index is emptied of what nobody holds, by an input and events on tape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs

from kernel.fake import Failure
from replay.plan import Planner
from server.view import restore
from statemachine.events import BlockEvicted, PrefixAdopted
from statemachine.geometry import Geometry, Group
from statemachine.records import Checkpoint, FlushRequested, StepFailed

from .follow import AHEAD, GUESSING, clean, outline, planned, pool
from .sim import POLICY, Sim, answer_alone

TOKENS = tuple(range(10, 30))


def cached(sim: Sim) -> int:
    return sim.engine.status()["cached"]


def warm(sim: Sim) -> None:
    """Five blocks that nobody holds."""
    sim.submit(TOKENS, 1)
    sim.run()
    assert cached(sim) == 5


def test_a_flush_evicts_all_that_nobody_holds_and_the_next_request_finds_nothing() -> None:
    sim = Sim()
    warm(sim)
    sim.engine.flush()
    sim.run()
    assert outline(sim) == "P1 D1 P2 D2 flush P3 D3"
    assert sim.records(FlushRequested) == [FlushRequested()]
    evicted = planned(sim, 3)
    assert {type(event) for event in evicted} == {BlockEvicted}
    assert [event.block for event in sim.events(BlockEvicted)] == [4, 3, 2, 1, 0]
    assert cached(sim) == 0
    again = sim.submit(TOKENS, 3)
    sim.run()
    assert again.cached_tokens == 0
    assert again.tokens == answer_alone(TOKENS, 3)
    assert sim.events(PrefixAdopted) == []
    clean(sim)


def test_a_flush_spares_what_a_running_request_holds_until_that_has_ended() -> None:
    sim = Sim()
    warm(sim)
    running = sim.submit((*TOKENS[:12], 1, 2, 3), 6)
    sim.step()
    assert (running.cached_tokens, cached(sim)) == (12, 2)
    sim.engine.flush()
    sim.step()
    assert len(sim.events(BlockEvicted)) == 2
    assert cached(sim) == 0
    sharing = sim.submit(TOKENS[:13], 2)
    sim.run()
    assert sharing.cached_tokens == 12, "what is held can still be found"
    assert cached(sim) > 0
    sim.engine.flush()
    sim.run()
    assert cached(sim) == 0
    clean(sim)


def test_a_flush_empties_every_group() -> None:
    geometry = Geometry(4, (Group(num_blocks=32), Group("window", num_blocks=32, window=8, sink=2)))
    sim = Sim(geometry)
    sim.submit(TOKENS, 1)
    sim.run()
    assert cached(sim) > 5
    sim.engine.flush()
    sim.run()
    assert {event.group for event in sim.events(BlockEvicted)} == {0, 1}
    assert cached(sim) == 0
    clean(sim)


@pytest.mark.parametrize("turns", [0, 1])
def test_a_flush_of_an_empty_index_makes_no_step_and_lets_the_engine_sleep(turns: int) -> None:
    sim = Sim(policy=structs.replace(POLICY, prefix_cache=False))
    if turns:
        sim.submit(TOKENS, 1)
        sim.run()
    before = sim.next_step
    sim.engine.flush()
    assert sim.step() is False or sim.next_step == before
    sim.run()
    assert sim.next_step == before
    assert sim.records(FlushRequested) == [FlushRequested()]
    clean(sim)


def test_a_flush_before_a_request_evicts_nothing_of_that_request() -> None:
    sim = Sim()
    sim.engine.flush()
    sim.run()
    sim.submit(TOKENS, 2)
    sim.run()
    assert sim.events(BlockEvicted) == []
    assert cached(sim) == 5
    clean(sim)


def test_a_flush_and_a_request_in_one_turn_are_in_that_order() -> None:
    sim = Sim()
    warm(sim)
    late = sim.submit(TOKENS, 2)
    sim.engine.flush()
    sim.run()
    assert late.cached_tokens == 0
    assert [type(event) for event in planned(sim, 3)][:5] == [BlockEvicted] * 5
    clean(sim)


def test_a_flush_takes_what_a_cancel_of_the_same_turn_lets_go_of() -> None:
    sim = Sim()
    sim.submit(TOKENS, 20)
    sim.step()
    sim.step()
    sim.engine.cancel(0)
    sim.engine.flush()
    sim.run()
    assert len(sim.events(BlockEvicted)) == 5
    assert cached(sim) == 0
    clean(sim)


@pytest.mark.parametrize("policy", [POLICY, AHEAD, GUESSING], ids=["plain", "ahead", "guessing"])
def test_a_flush_at_any_step_changes_no_answer(policy: object) -> None:
    for at in range(1, 10):
        sim = Sim(pool(16), policy)  # type: ignore[arg-type]
        flushes: list[Callable[[], object]] = [sim.engine.flush]
        inboxes = [sim.submit((*TOKENS[:12], number), 6) for number in range(3)]
        sim.run({at: flushes, at + 3: flushes})
        assert [i.tokens for i in inboxes] == [
            answer_alone((*TOKENS[:12], number), 6) for number in range(3)
        ]
        clean(sim)


def test_a_flush_that_waits_for_a_step_in_flight_is_done_after_it() -> None:
    # The decode row of 1 finds no block while 0 is in flight: that plan is given up, and the flush
    # that it had begun with is in the next one.
    policy = structs.replace(AHEAD, watermark_blocks=0)
    sim = Sim(pool(4), policy, script=lambda seq, position: 7)
    sim.submit(range(4), 4)
    sim.submit(range(8), 4)
    sim.step()
    sim.step()
    sim.engine.flush()
    sim.step()
    assert sim.engine.view.flush
    assert outline(sim).endswith("P1 P2 D1 flush")
    sim.run()
    assert not sim.engine.view.flush
    clean(sim)


def test_a_checkpoint_keeps_a_flush_that_is_still_to_be_done() -> None:
    sim = Sim(policy=AHEAD)
    warm(sim)
    sim.submit((1, 2, 3), 3)
    sim.step()
    sim.capture.checkpoint_due = True
    sim.engine.flush()
    sim.step()
    assert sim.engine.view.flush
    sim.step()
    sim.capture.checkpoint_due = False
    sim.run()
    kept = sim.records(Checkpoint)[-1]
    assert kept.flush
    assert restore(kept, AHEAD).flush
    assert len(sim.events(BlockEvicted)) == 5
    clean(sim)
    # A reader that starts at the checkpoint evicts the same.
    place = sim.capture.records.index(kept)
    planner = Planner()
    for record in (sim.capture.records[0], *sim.capture.records[place:]):
        planner.feed(record)
    assert planner.view is not None
    assert planner.view.state.digest == sim.engine.view.state.digest


def test_a_flush_with_a_step_that_fails_behind_it_stays_done() -> None:
    for stage in ("build", "eval"):
        sim = Sim(policy=AHEAD, fail={3: Failure(stage)})
        warm(sim)
        inbox = sim.submit((1, 2, 3), 3)
        sim.engine.flush()
        sim.run()
        assert sim.records(StepFailed)[0].stage == stage
        assert sim.events(PrefixAdopted) == []
        assert len(inbox.tokens) == (3 if stage == "eval" else 0)
        assert cached(sim) == (1 if stage == "eval" else 0), "its own block only"
        clean(sim)
