"""The engine: answers that nothing around them changes, ends of every kind, and its tape."""

from __future__ import annotations

import pytest
from msgspec import structs

from kernel.fake import FakeClock
from server.policy import Policy
from server.submission import RequestRefused, Submission, Update
from statemachine.events import (
    Appended,
    Closed,
    Opened,
    Preempted,
    PrefixAdopted,
    Trimmed,
)
from statemachine.geometry import Geometry, Group
from statemachine.records import (
    Checkpoint,
    Finished,
    Header,
    Parameters,
    RequestArrived,
    RequestCancelled,
    StepDone,
    StepPlanned,
    StepTimed,
)

from .engine_runs import WINDOWS, alone, clean, failing
from .follow import Letters
from .sim import (
    POLICY,
    SMALL,
    TIGHT,
    Sim,
    answer_alone,
    prompts,
)

UNCACHED = structs.replace(POLICY, prefix_cache=False)


def test_32_requests_on_a_pool_that_forces_preemption_answer_as_they_do_alone() -> None:
    sim = Sim(TIGHT)
    given = prompts(32)
    inboxes = [sim.submit(prompt, 8) for prompt in given]
    sim.run()
    assert [inbox.tokens for inbox in inboxes] == alone(given, 8)
    assert sim.engine.status()["preemptions"] > 3
    assert sim.events(PrefixAdopted)
    clean(sim)


@pytest.mark.parametrize("geometry", [TIGHT, WINDOWS], ids=["full", "window"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prefill_chunk": 3},
        {"prefill_tile": 8},
        {"prefill_cohort": True},
        {"prefill_cohort": True, "prefill_tile": 4},
        {"prefix_cache": False},
        {"max_batch_tokens": 8, "max_running": 4},
        {"max_running": 1},
        {"watermark_blocks": 0},
    ],
    ids=str,
)
def test_chunks_pads_cohorts_hits_and_neighbours_change_no_answer(
    geometry: Geometry, changes: dict[str, int]
) -> None:
    sim = Sim(geometry, structs.replace(POLICY, **changes))
    given = prompts(12, seed=1)
    inboxes = [sim.submit(prompt, 7) for prompt in given]
    sim.run()
    again = [sim.submit(prompt, 7) for prompt in given]
    sim.run()
    expected = alone(given, 7)
    assert [inbox.tokens for inbox in inboxes] == expected
    assert [inbox.tokens for inbox in again] == expected
    clean(sim)


def test_s1_s2_padded_prompts_leave_their_real_lengths_behind() -> None:
    for rows in (17, 31, 37, 41):
        sim = Sim(SMALL, structs.replace(UNCACHED, prefill_tile=32, prefill_chunk=64))
        inbox = sim.submit(range(rows), 3)
        sim.step()
        view = sim.engine.view
        assert view.state.sequences[0].offset == rows
        assert [
            event.rows for event in sim.capture.records[-1:] if isinstance(event, Trimmed)
        ] == []
        sim.run()
        assert inbox.tokens == answer_alone(range(rows), 3)
    cohort = Sim(SMALL, Policy(128, prefill_chunk=64, prefill_cohort=True, prefix_cache=False))
    inboxes = [cohort.submit([n] * rows, 3) for n, rows in ((1, 17), (2, 50))]
    cohort.step()
    sequences = cohort.engine.view.state.sequences
    assert [sequences[seq].offset for seq in (0, 1)] == [17, 50]
    assert [(p.rows, p.pads) for p in cohort.kernel.batches[0].pieces] == [(50, 33), (50, 0)]
    cohort.run()
    assert [i.tokens for i in inboxes] == [answer_alone([1] * 17, 3), answer_alone([2] * 50, 3)]


def test_sampled_answers_depend_on_seed_and_position_and_on_nothing_else() -> None:
    given = prompts(6, seed=4)
    sim = Sim(TIGHT)
    inboxes = [sim.submit(p, 8, temperature=1.0, seed=n + 1) for n, p in enumerate(given)]
    sim.run()
    single = [answer_alone(p, 8, temperature=1.0, seed=n + 1) for n, p in enumerate(given)]
    assert [inbox.tokens for inbox in inboxes] == single
    assert single[0] != answer_alone(given[0], 8, temperature=1.0, seed=99)


def test_p19_a_preempted_request_is_computed_again_with_prompt_and_answer() -> None:
    geometry = Geometry(4, (Group(num_blocks=6),))
    sim = Sim(
        geometry, structs.replace(UNCACHED, watermark_blocks=0), fail=failing("eval", None, 17)
    )
    older, younger = sim.submit([1] * 9, 14), sim.submit([2] * 6, 8)
    sim.run()
    assert older.tokens == answer_alone([1] * 9, 14)
    assert younger.tokens == answer_alone([2] * 6, 8)
    assert sim.events(Preempted) == [Preempted(1)]
    rows = [e.rows for e in sim.events(Appended) if e.seq == 1 and e.purpose == "prompt"]
    # Preempted with four answer tokens; computed again, one token on, after the failed eval.
    assert rows == [6, 10, 12]
    clean(sim)


def test_p20_cached_tokens_are_those_of_the_first_admission() -> None:
    geometry = Geometry(4, (Group(num_blocks=17),))
    sim = Sim(geometry, structs.replace(POLICY, watermark_blocks=0))
    first = sim.submit([9] * 33, 30)
    for _ in range(4):
        sim.step()
    second = sim.submit([9] * 22 + [8] * 6, 14)
    sim.run()
    assert sim.events(Preempted) == [Preempted(1)]
    assert [len(e.tokens) for e in sim.events(PrefixAdopted)] == [20, 24]
    assert {update.cached_tokens for update in second.updates} == {20}
    assert first.cached_tokens == 0


def test_every_token_is_told_once_and_the_end_with_the_last_one() -> None:
    sim = Sim()
    inbox = sim.submit(range(6), 4)
    sim.run()
    assert [len(update.tokens) for update in inbox.updates] == [1, 1, 1, 1]
    assert [update.finish_reason for update in inbox.updates] == [None, None, None, "length"]


def test_an_end_token_stops_and_is_no_part_of_the_answer() -> None:
    sim = Sim(script=lambda seq, position: 63 if position == 8 else None)
    inbox = sim.submit(range(6), 9, end_tokens=(63,))
    sim.run()
    assert (inbox.reason, len(inbox.tokens)) == ("stop", 2)
    assert 63 not in inbox.tokens
    assert sim.events(Closed) == [Closed(0, "stop")]


@pytest.mark.parametrize(("rows", "answer"), [(63, 1), (62, 2), (60, 4), (10, 54)])
def test_p26_an_answer_without_a_cap_ends_by_length_where_the_context_is_full(
    rows: int, answer: int
) -> None:
    sim = Sim()
    inbox = sim.submit([n % 60 for n in range(rows)], 1_000_000)
    sim.run()
    assert (inbox.reason, len(inbox.tokens)) == ("length", answer)
    for refused in (64, 65):
        with pytest.raises(RequestRefused):
            sim.submit(range(refused))
    clean(sim)


def test_an_answer_ends_by_length_where_the_pool_is_full() -> None:
    geometry = Geometry(4, (Group(num_blocks=6),))
    sim = Sim(geometry)
    assert sim.engine.context_tokens == 24
    inbox = sim.submit(range(10), 1000)
    sim.run()
    assert (inbox.reason, len(inbox.tokens)) == ("length", 14)
    clean(sim)


def test_a_stop_string_across_tokens_ends_with_a_finished_record_before_its_step_is_done() -> None:
    spelled = {10: 3, 11: 4, 12: 5, 13: 6}  # D E F G
    sim = Sim(decoder=Letters, script=lambda seq, position: spelled.get(position, 20))
    inbox = sim.submit(range(9), 20, stop=("EF", "X"))
    other = sim.submit(range(9), 6)
    sim.run()
    assert inbox.tokens == (20, 3, 4, 5)
    assert inbox.reason == "stop"
    assert other.tokens == (20, 3, 4, 5, 6, 20)
    assert sim.records(Finished) == [Finished(0, 4, "stop")]
    place = sim.capture.records.index(Finished(0, 4, "stop"))
    assert isinstance(sim.capture.records[place - 1], StepPlanned)
    assert isinstance(sim.capture.records[place + 1], StepDone)


def test_an_end_token_is_no_text_in_which_a_stop_string_could_be() -> None:
    sim = Sim(decoder=Letters, script=lambda seq, position: 63 if position == 8 else 7)
    inbox = sim.submit(range(6), 9, end_tokens=(63,), stop=(chr(ord("A") + 63),))
    sim.run()
    assert (inbox.reason, inbox.tokens) == ("stop", (7, 7))
    assert sim.records(Finished) == []


def test_a_detokeniser_that_raises_ends_its_request_only() -> None:
    sim = Sim(decoder=Letters, script=lambda seq, position: 60 if seq == 0 else 7)
    inbox = sim.submit(range(5), 9, stop=("never",))
    other = sim.submit(range(7), 5, stop=("never",))
    sim.run()
    assert inbox.reason == "error"
    assert (other.reason, len(other.tokens)) == ("length", 5)
    clean(sim)


def test_a_sink_that_raises_ends_its_request_only() -> None:
    sim = Sim()

    def broken(update: Update) -> None:
        raise RuntimeError("gone")

    sim.engine.submit(Submission((1, 2, 3), Parameters(9)), broken)
    other = sim.submit((4, 5, 6), 4)
    sim.run()
    assert other.reason == "length"
    assert sim.records(RequestCancelled) == [RequestCancelled(0, "error")]
    assert [e for e in sim.events(Closed) if e.seq == 0] == [Closed(0, "cancelled")]
    clean(sim)


def test_a_request_may_be_cancelled_at_any_step_and_the_others_answer_as_before() -> None:
    given = prompts(6, seed=2)
    expected = alone(given, 8)
    policy = structs.replace(POLICY, prefill_chunk=8, max_running=4)
    for at in range(1, 26, 3):
        sim = Sim(TIGHT, policy)
        inboxes = [sim.submit(prompt, 8) for prompt in given]
        ended = (1, 4)
        sim.run({at: [lambda s=sim: [s.engine.cancel(n) for n in (1, 4, 1, 77)]]})
        for n, inbox in enumerate(inboxes):
            if n in ended and inbox.reason == "cancelled":
                assert inbox.tokens == expected[n][: len(inbox.tokens)]
            else:
                assert inbox.tokens == expected[n]
        assert len(sim.records(RequestCancelled)) == sum(i.reason == "cancelled" for i in inboxes)
        clean(sim)


def test_a_cancelled_request_is_in_no_batch_of_a_later_step() -> None:
    sim = Sim()
    inbox = sim.submit(range(5), 30)
    sim.submit(range(9), 12)
    sim.step()
    sim.step()
    sim.engine.cancel(0)
    told = len(inbox.updates)
    sim.run()
    assert len(inbox.updates) == told + 1
    last = max(b.step for b in sim.kernel.batches if 0 in {p.sequence.id for p in b.pieces})
    assert last == 2


def test_records_of_a_step_are_on_tape_before_its_forward() -> None:
    seen: list[type] = []
    sim = Sim(delay=lambda batch: seen.append(type(sim.capture.records[-1])))
    sim.submit(range(5), 3)
    sim.run()
    assert seen == [StepPlanned] * 3
    kinds = [[type(record) for record in write] for write in sim.capture.writes]
    assert kinds == [
        [Header, Checkpoint],
        [RequestArrived, StepPlanned],
        [StepDone, StepTimed, StepPlanned],
        [StepDone, StepTimed, StepPlanned],
        [StepDone, StepTimed],
    ]


def test_a_checkpoint_that_is_due_stands_before_the_plan_it_was_made_for() -> None:
    sim = Sim()
    sim.submit(range(5), 3)
    sim.step()
    sim.capture.checkpoint_due = True
    sim.submit(range(4), 2)
    sim.step()
    sim.capture.checkpoint_due = False
    kinds = [type(record) for record in sim.capture.writes[-1]]
    assert kinds == [StepDone, StepTimed, RequestArrived, Checkpoint, StepPlanned]
    made = sim.records(Checkpoint)[-1]
    assert (made.step, [r.arrived.request for r in made.requests]) == (1, [0, 1])
    sim.run()


def test_p38_nothing_of_an_ended_request_is_kept() -> None:
    sim = Sim(decoder=Letters)
    for cycle in range(40):
        sim.submit([cycle % 50] * 5, 3, stop=("Q",))
        sim.submit([cycle % 50] * 6, 30)
        sim.step()
        sim.engine.cancel(2 * cycle + 1)
        sim.run()
    view, loop = sim.engine.view, sim.engine._opened_loop()
    left = (len(view.requests), tuple(view.waiting), view.running, view.closing)
    assert left == (0, (), (), ())
    assert not view.state.sequences
    assert len(loop._clients) == 0
    assert not loop._clients._texts
    assert not loop._clients.lost
    clean(sim)


def test_step_times_come_from_the_clock_that_was_given() -> None:
    sim = Sim(clock=FakeClock(0.25))
    sim.submit(range(5), 1)
    sim.run()
    (timed,) = sim.records(StepTimed)
    assert timed.parts_us == dict.fromkeys(("plan", "write", "forward", "close"), 250_000)


def test_ids_of_requests_are_those_of_their_sequences() -> None:
    sim = Sim()
    for n in range(3):
        sim.submit([n] * 4, 2)
    sim.run()
    assert [record.request for record in sim.records(RequestArrived)] == [0, 1, 2]
    assert [event.seq for event in sim.events(Opened)] == [0, 1, 2]
