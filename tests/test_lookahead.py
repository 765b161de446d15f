"""Lookahead: a step is planned while one is in flight, and what becomes of rows that were too many.

In outlines P2 D1 is: step 2 was planned, then step 1 done. A lookahead row of P(n+1) learns its
token in D(n), or is taken back there.
"""

from __future__ import annotations

import pytest
from msgspec import structs

from kernel.batch import Batch
from statemachine.events import (
    DECODE,
    LOOKAHEAD,
    PROMPT,
    Appended,
    AppendedEach,
    BlockPublished,
    Closed,
    CommittedEach,
    Opened,
    PoolReset,
    Preempted,
    Rewound,
    StepWritten,
    Trimmed,
)
from statemachine.records import Finished, StepDone, StepFailed

from .ahead import BARE, sevens, turns
from .follow import AHEAD, Letters, clean, done, outline, planned, pool, random_load, same_answers
from .sim import SMALL, Sim, answer_alone

SEEDS = range(8)


def test_a_step_is_planned_before_the_tokens_of_the_one_before_it_are_read() -> None:
    sim = Sim(policy=AHEAD, script=lambda seq, position: 40 + position)
    inbox = sim.submit(range(5), 4)
    sim.run()
    assert outline(sim) == "P1 P2 D1 P3 D2 P4 D3 D4"
    assert planned(sim, 1) == (Opened(0), Appended(0, 1, 5, tuple(range(5)), ((0, 1),), PROMPT))
    assert planned(sim, 2) == (AppendedEach(2, (0,), None, LOOKAHEAD),)
    assert [type(event) for event in done(sim, 1)] == [StepWritten, CommittedEach, BlockPublished]
    assert done(sim, 1)[1] == CommittedEach((0,), (45,))
    assert done(sim, 2) == (StepWritten(2), CommittedEach((0,), (46,)))
    assert done(sim, 4)[-1] == Closed(0, "length")
    assert inbox.tokens == (45, 46, 47, 48)
    pending = [[piece.pending for piece in batch.pieces] for batch in sim.kernel.batches]
    assert pending == [[0], [1], [1], [1]]
    clean(sim)


def test_without_lookahead_each_step_is_done_before_the_next_is_planned() -> None:
    sim = Sim(script=sevens)
    sim.submit(range(5), 3)
    sim.run()
    assert outline(sim) == "P1 D1 P2 D2 P3 D3"


def test_a_row_behind_an_end_token_is_rewound_and_the_block_that_it_took_goes_back() -> None:
    sim = Sim(policy=BARE, script=lambda seq, position: 9 if position == 4 else 7)
    inbox = sim.submit(range(4), 6, end_tokens=(9,))
    turns(sim, 1)
    assert sim.engine.status()["held"] == 1
    sim.run()
    assert planned(sim, 2) == (Appended(0, 2, 1, None, ((1,),), LOOKAHEAD),)
    assert done(sim, 1) == (StepWritten(1), Rewound(0, 1), Closed(0, "stop"))
    assert done(sim, 2) == (StepWritten(2),)
    assert outline(sim) == "P1 P2 D1 D2"
    assert (inbox.tokens, inbox.reason) == ((), "stop")
    assert [record.offsets for record in sim.records(StepDone)] == [(-1,), (-1,)]
    clean(sim)


def test_a_row_behind_a_stop_string_is_rewound_once_and_nothing_behind_it_is_told() -> None:
    spelled = {9: 3, 10: 4, 11: 5}
    sim = Sim(policy=BARE, decoder=Letters, script=lambda seq, position: spelled.get(position, 20))
    inbox = sim.submit(range(9), 20, stop=("DEF",))
    other = sim.submit(range(6), 5)
    sim.run()
    assert (inbox.tokens, inbox.reason) == ((3, 4, 5), "stop")
    assert sim.records(Finished) == [Finished(0, 3, "stop")]
    assert sim.events(Rewound) == [Rewound(0, 1)]
    assert done(sim, 3)[:2] == (StepWritten(3), Rewound(0, 1))
    assert Closed(0, "stop") in done(sim, 3)
    assert len(other.tokens) == 5
    clean(sim)


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_a_row_that_certainly_ends_by_length_is_never_issued(max_tokens: int) -> None:
    sim = Sim(policy=AHEAD)
    inbox = sim.submit(range(7), max_tokens)
    sim.run()
    assert (len(inbox.tokens), inbox.reason) == (max_tokens, "length")
    assert sim.events(Rewound) == []
    rows = sum(len(p.tokens) + p.pending for batch in sim.kernel.batches for p in batch.pieces)
    assert rows == 7 + max_tokens - 1
    clean(sim)


def test_a_row_is_never_issued_behind_what_context_and_pool_hold() -> None:
    for geometry, policy in ((SMALL, structs.replace(AHEAD, context_tokens=12)), (pool(3), AHEAD)):
        sim = Sim(geometry, policy)
        inbox = sim.submit(range(7), 50)
        sim.run()
        assert (len(inbox.tokens), inbox.reason) == (5, "length")
        assert sim.events(Rewound) == []
        clean(sim)


def test_a_cancel_before_the_plan_closes_and_issues_no_row() -> None:
    sim = Sim(policy=AHEAD)
    inbox = sim.submit(range(5), 8)
    turns(sim, 1)
    sim.engine.cancel(0)
    sim.run()
    assert planned(sim, 2) == (Closed(0, "cancelled"),)
    assert done(sim, 1) == (StepWritten(1),)
    assert outline(sim) == "P1 P2 D1 D2"
    assert (inbox.tokens, inbox.reason) == ((), "cancelled")
    clean(sim)


def test_a_cancel_between_a_plan_and_the_step_before_it_loses_no_sampled_token() -> None:
    def cancel(batch: Batch) -> None:
        if batch.step == 2:
            sim.engine.cancel(0)

    sim = Sim(policy=AHEAD, delay=cancel, script=sevens)
    inbox = sim.submit(range(5), 8)
    sim.run()
    assert done(sim, 1)[:2] == (StepWritten(1), CommittedEach((0,), (7,)))
    assert planned(sim, 3) == (Closed(0, "cancelled"),)
    assert done(sim, 2) == (StepWritten(2),)
    assert outline(sim) == "P1 P2 D1 P3 D2 D3"
    assert (inbox.tokens, inbox.reason) == ((7,), "cancelled")
    clean(sim)


def test_a_cancel_with_a_lookahead_row_in_flight_changes_no_neighbour() -> None:
    for at in range(1, 9):
        sim = Sim(policy=AHEAD)
        inboxes = [sim.submit([n] * 7, 8) for n in (1, 2, 3)]
        sim.run({at: [lambda sim=sim: sim.engine.cancel(1)]})  # type: ignore[misc]
        whole = [answer_alone([n] * 7, 8) for n in (1, 2, 3)]
        assert [inboxes[0].tokens, inboxes[2].tokens] == [whole[0], whole[2]]
        assert inboxes[1].tokens == whole[1][: len(inboxes[1].tokens)]
        clean(sim)


def test_a_request_whose_text_cannot_be_made_is_closed_by_the_next_plan() -> None:
    sim = Sim(policy=BARE, decoder=Letters, script=lambda seq, position: 60 if seq == 0 else 7)
    inbox = sim.submit(range(5), 8, stop=("never",))
    other = sim.submit(range(6), 8, stop=("never",))
    sim.run()
    assert Closed(0, "cancelled") in planned(sim, 3)
    assert inbox.reason == "error"
    assert other.tokens == (7,) * 8
    clean(sim)


def test_a_padded_piece_has_no_row_behind_it_until_its_pads_are_gone() -> None:
    sim = Sim(policy=structs.replace(BARE, prefill_tile=8), script=sevens)
    sim.submit(range(5), 4)
    sim.run()
    assert outline(sim) == "P1 D1 P2 P3 D2 P4 D3 D4"
    assert done(sim, 1) == (StepWritten(1), Trimmed(0, 3))
    assert planned(sim, 2) == (AppendedEach(2, (0,), (7,), DECODE),)
    assert planned(sim, 3) == (AppendedEach(3, (0,), None, LOOKAHEAD),)
    clean(sim)


def test_a_lookahead_row_that_finds_no_block_is_left_out_and_the_others_are_issued() -> None:
    sim = Sim(pool(4), BARE, script=sevens)
    sim.submit(range(4), 4)
    sim.submit(range(8), 4)
    turns(sim, 2)
    assert planned(sim, 2) == (Appended(0, 2, 1, None, ((3,),), LOOKAHEAD),)
    assert sim.events(Preempted) == []
    sim.run()
    assert [inbox.tokens for inbox in sim.inboxes.values()] == [(7,) * 4] * 2
    clean(sim)


def test_a_row_that_is_left_out_costs_no_block_of_a_row_that_needs_none() -> None:
    sim = Sim(pool(3), BARE, script=sevens)
    sim.submit(range(4), 3)
    sim.submit(range(6), 3)
    turns(sim, 2)
    assert planned(sim, 2) == (AppendedEach(2, (1,), None, LOOKAHEAD),)
    sim.run()
    clean(sim)


def test_a_decode_row_that_finds_no_block_waits_until_the_step_in_flight_was_read() -> None:
    sim = Sim(pool(4), BARE, script=sevens)
    sim.submit(range(4), 4)
    sim.submit(range(8), 4)
    sim.run()
    # Sequence 1 has its token after D1 and no block for its row; 0 has a sample in flight then.
    assert outline(sim).startswith("P1 P2 D1 D2 P3")
    assert planned(sim, 3)[0] == Preempted(1)
    clean(sim)


def test_nobody_is_ever_preempted_with_a_sample_in_flight() -> None:
    """Whatever a plan preempts, the step before it was answered: from the tapes of all loads."""
    found = 0
    for seed in SEEDS:
        sim, _ = random_load(seed, lookahead=True)
        flights = 0
        for record in sim.capture.records:
            if isinstance(record, StepDone | StepFailed):
                flights -= 1
            events = getattr(record, "events", ())
            lost = any(isinstance(event, PoolReset) for event in events)
            if any(isinstance(event, Preempted) for event in events) and not lost:
                assert flights == 0
                found += 1
            flights += type(record).__name__ == "StepPlanned"
    assert found > 3


def test_lookahead_changes_no_token() -> None:
    ahead = taken = 0
    for seed in SEEDS:
        sim, answers = random_load(seed, lookahead=True)
        same_answers(random_load(seed)[1], answers)
        ahead += len([e for e in sim.events(AppendedEach) if e.purpose == LOOKAHEAD])
        taken += len(sim.events(Rewound))
    assert (ahead > 100, taken > 5) == (True, True)
