"""A draft model: what it guesses, what becomes of its cache, and that it changes no answer.

The fake model says 1 2 3 4 over and over; the fake draft model says so too, but where it is told to
be wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kernel.fake import Failure, FakeKernel
from replay.cli import main as replay_command
from replay.divergence import Diverged, Divergence
from replay.errors import Unusable
from replay.fold import Fold
from replay.plan import PlanChecker
from server import draft_round
from server.draft_pool import FAILURES_MAX
from statemachine.codec import TapeDecoder, TapeEncoder
from statemachine.events import (
    DECODE,
    DRAFT,
    LOOKAHEAD,
    PROMPT,
    Appended,
    AppendedEach,
    BlockPublished,
    Closed,
    Committed,
    CommittedEach,
    Event,
    Namespace,
    Opened,
    PoolReset,
    Preempted,
    PrefixAdopted,
    Rewound,
    StepWritten,
    Trimmed,
)
from statemachine.geometry import Geometry, Group
from statemachine.records import (
    Checkpoint,
    Drafted,
    Record,
    StepDone,
    StepFailed,
    StepPlanned,
)

from .follow import GUESSING, clean, done, fork, planned, pool
from .sim import SMALL, Sim, prompts, tape_bytes

ROUND = (1, 2, 3, 4)
PROMPT_TOKENS = (9, 8, 7, 6, 5, 9)
"""Six tokens, so that the first answer's token is at position 6 and says 3."""
PLAIN = structs.replace(GUESSING, draft_tokens=0)
GUESSES = structs.replace(GUESSING, draft_tokens=3)
Script = Callable[[int, int], int | None]


def going_round(seq: int, position: int) -> int:
    return ROUND[position % 4]


def wrong_at(*places: int) -> Script:
    return lambda seq, position: 60 if position in places else ROUND[position % 4]


def drafting(
    draft: Script | None = going_round,
    script: Script | None = going_round,
    policy: Any = GUESSES,
    geometry: Geometry = SMALL,
    draft_geometry: Geometry | None = None,
    fail: dict[int, Failure] | None = None,
    **kernel: Any,
) -> Sim:
    small = FakeKernel(draft_geometry or SMALL, script=draft, fail=fail)
    return Sim(geometry, policy, draft=small, script=script, **kernel)


def rounds(sim: Sim, kind: Any, step: int) -> tuple[Event, ...]:
    """Events of one record of the draft model's pool."""
    found = [it.record for it in sim.records(Drafted) if isinstance(it.record, kind)]
    events: tuple[Event, ...] = next(it.events for it in found if it.step == step)
    return events


def draft_events(sim: Sim, kind: Any) -> list[Any]:
    """Events of a kind in the draft model's pool."""
    return [
        it for record in sim.records(Drafted) for it in record.record.events if type(it) is kind
    ]


def gone(sim: Sim) -> None:
    """Nothing is left, in either pool, and the tape replays."""
    clean(sim)
    view = sim.engine.view
    assert view.draft is not None
    state = view.draft.state
    assert not state.sequences
    assert [state.held_blocks(group) for group in state.paged_groups()] == [0] * len(state.groups)


def outline(sim: Sim) -> str:
    """The tape's steps; those of the draft model in small letters."""
    marks: dict[Any, str] = {StepPlanned: "P", StepDone: "D", StepFailed: "F"}
    found = []
    for record in sim.capture.records:
        inner: Any = record.record if isinstance(record, Drafted) else record
        if type(inner) in marks:
            mark = f"{marks[type(inner)]}{inner.step}"
            found.append(mark.lower() if isinstance(record, Drafted) else mark)
    return " ".join(found)


def test_a_round_of_guesses_stands_before_the_step_that_verifies_them() -> None:
    sim = drafting()
    inbox = sim.submit(PROMPT_TOKENS, 6)
    sim.run()
    # D1 says the first token; three guesses, all right, and one token behind them; the last token
    # of six is not worth a guess.
    assert outline(sim) == "P1 D1 p1 p2 d1 p3 d2 d3 P2 D2 P3 D3 p4 d4"
    assert inbox.tokens == tuple(ROUND[at % 4] for at in range(6, 12))
    assert planned(sim, 2) == (Appended(0, 2, 4, (3, 4, 1, 2), ((2,),), DRAFT),)
    assert done(sim, 2)[:2] == (StepWritten(2), Committed(0, (3, 4, 1, 2)))
    gone(sim)


def test_the_draft_models_sequences_have_events_of_their_own() -> None:
    sim = drafting()
    sim.submit(PROMPT_TOKENS, 6)
    sim.run()
    assert rounds(sim, StepPlanned, 1) == (
        Opened(0),
        Appended(0, 1, 7, (*PROMPT_TOKENS, 3), ((0, 1),), PROMPT),
    )
    assert rounds(sim, StepPlanned, 2) == (AppendedEach(2, (0,), None, LOOKAHEAD),)
    assert rounds(sim, StepDone, 1) == (StepWritten(1), CommittedEach((0,), (4,)))
    assert rounds(sim, StepPlanned, 3) == (Appended(0, 3, 1, None, ((2,),), LOOKAHEAD),)
    assert rounds(sim, StepDone, 2) == (StepWritten(2), CommittedEach((0,), (1,)))
    assert rounds(sim, StepDone, 3) == (StepWritten(3),)
    assert rounds(sim, StepPlanned, 4) == (Closed(0, "ended"),)
    gone(sim)


def test_p03_where_all_guesses_hold_the_drafter_has_two_rows_to_catch_up_with() -> None:
    sim = drafting()
    sim.submit(PROMPT_TOKENS, 12)
    sim.run()
    # The last guess (position 9 is 2) was never fed to the draft model, nor was the token behind.
    assert rounds(sim, StepPlanned, 4)[-1] == Appended(0, 4, 2, (2, 3), ((),), PROMPT)
    assert draft_events(sim, Trimmed) == []
    assert sim.events(Rewound) == []
    gone(sim)


@pytest.mark.parametrize("right", [0, 1, 2])
def test_guesses_that_do_not_hold_leave_the_drafters_cache_before_its_next_row(right: int) -> None:
    sim = drafting(wrong_at(7 + right))
    inbox = sim.submit(PROMPT_TOKENS, 12)
    sim.run()
    assert inbox.tokens == tuple(ROUND[at % 4] for at in range(6, 18))
    assert done(sim, 2)[2] == Rewound(0, 3 - right)
    # Rows of two guesses were fed; one row of the token that was drawn instead is missing.
    opening = rounds(sim, StepPlanned, 4)
    assert [it for it in opening if isinstance(it, Trimmed)] == [Trimmed(0, 2 - right)][: 2 - right]
    (last,) = [it for it in opening if isinstance(it, Appended | AppendedEach)]
    token = ROUND[(7 + right) % 4]
    assert last.tokens == (token,)
    assert last.purpose == DECODE
    gone(sim)


def test_a_token_that_was_guessed_and_not_verified_is_fed_again_to_be_guessed_on_from() -> None:
    # Two sequences of six rows fill the pool: there is no block for a row behind guesses.
    policy = structs.replace(GUESSES, watermark_blocks=0)
    sim = drafting(policy=policy, geometry=pool(4))
    inboxes = [sim.submit((40 + n, *PROMPT_TOKENS[1:]), 8) for n in range(2)]
    sim.run()
    assert planned(sim, 2) == (AppendedEach(2, (0, 1), (3, 3), DECODE),)
    # What was drawn in step 2 is what had been guessed, and its row is there; what it yields not.
    opening = rounds(sim, StepPlanned, 4)
    assert opening[:2] == (Trimmed(0, 2), Trimmed(1, 2))
    assert [(it.tokens, it.purpose) for it in opening if isinstance(it, AppendedEach)] == [
        ((4, 4), DECODE)
    ]
    assert [it.tokens for it in inboxes] == [tuple(ROUND[at % 4] for at in range(6, 14))] * 2
    gone(sim)


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("wrong", [1, 2, 3, 100])
def test_a_draft_model_changes_no_answer_greedy_or_sampled(wrong: int, lookahead: bool) -> None:
    def run(sim: Sim) -> list[tuple[int, ...]]:
        boxes = [
            sim.submit(prompt, 10, temperature=float(number % 2), seed=number)
            for number, prompt in enumerate(prompts(8, seed=wrong))
        ]
        sim.run()
        return [box.tokens for box in boxes]

    def small(seq: int, position: int) -> int | None:
        return position % 5 if position % wrong == 0 else None

    policy = structs.replace(GUESSES, lookahead=lookahead)
    plain = run(Sim(policy=structs.replace(PLAIN, lookahead=lookahead)))
    sim = drafting(small, None, policy)
    assert run(sim) == plain
    guessed = sum(it.rows - 1 for it in sim.events(Appended) if it.purpose == DRAFT)
    refused = sum(it.rows for it in sim.events(Rewound))
    assert guessed > 40
    # With the same noise a draft model that is the model itself is always right, sampled or not.
    assert (refused == 0) == (wrong == 100)
    gone(sim)


def test_nobody_gets_a_row_ahead_of_its_token_while_a_draft_model_guesses() -> None:
    sim = drafting(policy=structs.replace(GUESSES, lookahead=True))
    for prompt in prompts(6):
        sim.submit(prompt, 8)
    sim.run()
    purposes = {it.purpose for kind in (Appended, AppendedEach) for it in sim.events(kind)}
    assert purposes == {PROMPT, DECODE, DRAFT}
    gone(sim)


def test_the_drafter_adopts_what_it_computed_for_another_and_only_of_the_same_salt() -> None:
    sim = drafting()
    text = tuple(range(10, 26))
    sim.submit(text, 4)
    sim.run()
    sim.submit((*text, 30), 4)
    sim.run()
    sim.submit((*text, 30), 4, namespace=Namespace(salt="b"))
    sim.submit((*text, 31), 4, namespace=Namespace(adapter="a", version=3))
    sim.run()
    adopted = {it.seq: len(it.tokens) for it in draft_events(sim, PrefixAdopted)}
    assert adopted == {1: 16, 3: 16}
    assert {it.seq: it.namespace for it in draft_events(sim, Opened)} == {
        0: Namespace(), 1: Namespace(), 2: Namespace(salt="b"), 3: Namespace(),
    }  # fmt: skip
    gone(sim)


def test_no_block_of_a_guess_is_published_in_the_drafters_pool() -> None:
    sim = drafting(wrong_at(*range(7, 40, 3)), policy=structs.replace(GUESSES, draft_tokens=6))
    inbox = sim.submit(PROMPT_TOKENS, 24)
    sim.run()
    text = (*PROMPT_TOKENS, *inbox.tokens)
    view = sim.engine.view
    assert view.draft is not None
    assert draft_events(sim, BlockPublished)
    for entry in view.draft.state.entries.values():
        tokens = tuple(
            int.from_bytes(entry.tokens[at : at + 8], "little") for at in range(0, 32, 8)
        )
        assert any(text[at : at + 4] == tokens for at in range(0, len(text), 4))
    gone(sim)


def test_a_request_that_is_preempted_leaves_the_drafters_pool_too_and_comes_back() -> None:
    policy = structs.replace(GUESSES, watermark_blocks=0)
    sim = drafting(policy=policy, geometry=pool(9), draft_geometry=pool(64))
    inboxes = [sim.submit((40 + n, *PROMPT_TOKENS), 16) for n in range(3)]
    sim.run()
    assert sim.events(Preempted)
    assert draft_events(sim, Preempted)
    assert [it.tokens for it in inboxes] == [tuple(ROUND[at % 4] for at in range(7, 23))] * 3
    gone(sim)


def test_where_the_drafters_pool_is_full_nothing_is_guessed_and_nobody_waits_for_it() -> None:
    sim = drafting(draft_geometry=pool(3))
    inboxes = [sim.submit((40 + n, *PROMPT_TOKENS), 12) for n in range(3)]
    sim.run()
    plain = Sim(policy=PLAIN, script=going_round)
    for n in range(3):
        plain.submit((40 + n, *PROMPT_TOKENS), 12)
    plain.run()
    assert [it.tokens for it in inboxes] == [tuple(ROUND[at % 4] for at in range(7, 19))] * 3
    assert sim.events(Preempted) == draft_events(sim, Preempted) == []
    drafts = {it.seq for it in sim.events(Appended) if it.purpose == DRAFT}
    assert 0 < len(drafts) < 3
    assert sim.engine.status()["steps"] <= plain.engine.status()["steps"]
    gone(sim)


def test_a_long_prompt_is_caught_up_with_in_pieces_while_its_answer_goes_on() -> None:
    policy = structs.replace(GUESSES, prefill_chunk=8, max_batch_tokens=8, max_running=4)
    sim = drafting(policy=policy)
    inbox = sim.submit(tuple(range(5, 35)), 12)
    sim.run()
    pieces = [it.rows for it in draft_events(sim, Appended) if it.purpose == PROMPT]
    # 31 rows are due when the first token is there; each piece lets one more token be said.
    assert pieces[:5] == [8, 8, 8, 8, 3]
    first = next(it for it in sim.events(Appended) if it.purpose == DRAFT)
    assert first.tokens == tuple(ROUND[at % 4] for at in range(34, 38))
    assert inbox.tokens == tuple(ROUND[at % 4] for at in range(30, 42))
    gone(sim)


@pytest.mark.parametrize("stage", ["build", "eval"])
@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_a_step_of_the_draft_model_that_fails_costs_its_guesses_and_nothing_else(
    stage: str, step: int
) -> None:
    sim = drafting(fail={step: Failure(stage)})
    inboxes = [sim.submit((40 + n, *PROMPT_TOKENS), 12) for n in range(2)]
    sim.run()
    assert [it.tokens for it in inboxes] == [tuple(ROUND[at % 4] for at in range(7, 19))] * 2
    failed = [it.record for it in sim.records(Drafted) if isinstance(it.record, StepFailed)]
    assert [(it.step, it.stage, it.events) for it in failed[:1]] == [(step, "eval", (PoolReset(),))]
    assert all(it.stage == "void" for it in failed[1:])
    status = sim.engine.status()
    assert (status["failed_steps"], status["preemptions"]) == (0, 0)
    drafts = [it.step for it in sim.events(Appended) if it.purpose == DRAFT]
    assert len(drafts) >= 2
    gone(sim)


def test_a_draft_model_that_fails_again_and_again_is_not_asked_any_more() -> None:
    fail = {step: Failure("eval") for step in range(1, 30)}
    sim = drafting(policy=structs.replace(GUESSES, lookahead=True), fail=fail)
    inboxes = [sim.submit((40 + n, *PROMPT_TOKENS), 12) for n in range(2)]
    sim.run()
    assert [it.tokens for it in inboxes] == [tuple(ROUND[at % 4] for at in range(7, 19))] * 2
    resets = draft_events(sim, PoolReset)
    assert len(resets) == FAILURES_MAX == 3
    # From then on rows are issued ahead of their tokens, as without a draft model.
    assert any(it.purpose == LOOKAHEAD for it in sim.events(AppendedEach))
    assert not any(it.purpose == DRAFT for it in sim.events(Appended))
    gone(sim)


def test_what_the_served_model_does_not_know_is_not_guessed_and_nothing_behind_it() -> None:
    sim = drafting(lambda seq, position: 70 if position == 8 else ROUND[position % 4])
    draft = sim.parts.draft
    assert draft is not None
    assert sim.parts.header is not None
    model = structs.replace(draft.model, vocab_size=64)
    sim = _again(sim, model)
    inbox = sim.submit(PROMPT_TOKENS, 8)
    strange = sim.submit((70, *PROMPT_TOKENS), 8)
    sim.run()
    # Of 4 70 2 the first is guessed; a prompt with 70 in it cannot be read at all.
    drafts = [(it.seq, it.tokens) for it in sim.events(Appended) if it.purpose == DRAFT]
    assert drafts[0] == (0, (3, 4))
    assert {seq for seq, _ in drafts} == {0}
    assert inbox.tokens == tuple(ROUND[at % 4] for at in range(6, 14))
    assert strange.tokens == tuple(ROUND[at % 4] for at in range(7, 15))
    gone(sim)


def _again(sim: Sim, model: Any) -> Sim:
    """A simulation of the same kernels, whose header names the draft model so."""
    assert sim.parts.draft is not None
    assert sim.parts.header is not None
    parts = structs.replace(
        sim.parts,
        draft=structs.replace(sim.parts.draft, model=model),
        header=structs.replace(sim.parts.header, draft=model),
    )
    sim.capture.writes.clear()
    sim.parts = parts
    sim.engine = type(sim.engine)(lambda: parts, clock=lambda: 0.0)
    sim.engine.open()
    return sim


def test_penalties_and_grammars_are_the_served_models_business() -> None:
    def run(sim: Sim) -> tuple[int, ...]:
        box = sim.submit(PROMPT_TOKENS, 10, frequency_penalty=0.5, logit_bias=((1, 2.0),))
        sim.run()
        return box.tokens

    sim = drafting(None, None)
    assert run(sim) == run(Sim(policy=PLAIN))
    small = sim.parts.draft
    assert small is not None
    assert isinstance(small.kernel, FakeKernel)
    asked = [piece.parameters for batch in small.kernel.batches for piece in batch.pieces]
    assert asked
    assert not any(it and (it.reads_answer or it.logit_bias) for it in asked)
    gone(sim)


def test_copies_of_a_request_are_guessed_each_by_itself() -> None:
    sim = drafting(None, None)
    boxes = [sim.submit(PROMPT_TOKENS, 8, temperature=1.0, seed=1)]
    boxes += [fork(sim, PROMPT_TOKENS, 0, max_tokens=8, temperature=1.0, seed=n) for n in (2, 3)]
    sim.run()
    plain = Sim(policy=PLAIN)
    alone = [plain.submit(PROMPT_TOKENS, 8, temperature=1.0, seed=n) for n in (1, 2, 3)]
    plain.run()
    assert [it.tokens for it in boxes] == [it.tokens for it in alone]
    assert len({it.tokens for it in boxes}) == 3
    assert {it.seq for it in sim.events(Appended) if it.purpose == DRAFT} == {0, 1, 2}
    gone(sim)


@pytest.mark.parametrize("at", range(1, 8))
def test_a_cancel_closes_the_drafters_sequence_as_well(at: int) -> None:
    sim = drafting(wrong_at(8, 11))
    inbox = sim.submit(PROMPT_TOKENS, 30)
    sim.run({at: [lambda: sim.engine.cancel(0)]})
    assert inbox.reason == "cancelled"
    assert inbox.tokens == tuple(ROUND[(6 + n) % 4] for n in range(len(inbox.tokens)))
    gone(sim)


def test_windows_of_the_draft_model_move_on_behind_what_is_sure() -> None:
    geometry = Geometry(4, (Group(num_blocks=64), Group("window", num_blocks=16, window=6, sink=1)))
    sim = drafting(wrong_at(*range(8, 60, 3)), draft_geometry=geometry)
    inbox = sim.submit(PROMPT_TOKENS, 40)
    sim.run()
    assert inbox.tokens == tuple(ROUND[at % 4] for at in range(6, 46))
    assert any(type(it).__name__ == "FrontTrimmed" for it in _all_draft_events(sim))
    assert draft_events(sim, Trimmed)
    gone(sim)


def _all_draft_events(sim: Sim) -> list[Event]:
    return [event for record in sim.records(Drafted) for event in record.record.events]


def test_a_stopped_server_leaves_nothing_open_in_either_pool() -> None:
    sim = drafting()
    sim.submit(PROMPT_TOKENS, 30)
    for _ in range(4):
        sim.step()
    sim.engine.stop()
    fold = Fold()
    for record in sim.capture.records:
        fold.feed(record)
    assert fold.drafted is not None
    assert not fold.state.sequences
    assert not fold.drafted.state.sequences


def cut_at_checkpoint(sim: Sim) -> list[Record]:
    """The tape from its second checkpoint on, behind its header, through bytes."""
    records = sim.capture.records
    at = [n for n, record in enumerate(records) if isinstance(record, Checkpoint)][1]
    encoder = TapeEncoder()
    return list(TapeDecoder().feed(encoder.encode([records[0], *records[at:]])))


@pytest.mark.parametrize("at", range(2, 7))
def test_a_tape_that_begins_in_the_middle_has_the_drafters_pool_and_guesses(at: int) -> None:
    sim = drafting(wrong_at(8, 12, 13, 19))
    for n in range(2):
        sim.submit((40 + n, *PROMPT_TOKENS), 20)

    def due() -> None:
        sim.capture.checkpoint_due = True

    sim.run({at: [due]})
    fold, plan = Fold("event"), PlanChecker()
    for record in cut_at_checkpoint(sim):
        fold.feed(record)
        plan.feed(record)
    fold.finish()
    assert fold.drafted is not None
    assert fold.drafted.counts.steps > 0


def diverged(records: list[Record]) -> Divergence | None:
    fold, plan = Fold(), PlanChecker()
    try:
        for record in records:
            fold.feed(record)
            plan.feed(record)
    except Diverged as found:
        return found.divergence
    return None


def a_run() -> Sim:
    sim = drafting(wrong_at(8, 12))
    sim.submit(PROMPT_TOKENS, 12)
    sim.run()
    return sim


def test_a_round_that_is_missing_on_tape_is_found_by_plan() -> None:
    records = a_run().capture.records
    found = diverged([it for it in records if not isinstance(it, Drafted)])
    assert found is not None
    assert (found.kind, found.step, found.draft_step) == ("plan", 2, -1)
    assert "the draft model has a step due before it" in found.summary


def test_another_guess_than_the_one_on_tape_is_found_at_the_plan_that_uses_it() -> None:
    records = list(a_run().capture.records)
    place = next(
        n for n, it in enumerate(records)
        if isinstance(it, Drafted) and isinstance(it.record, StepDone) and it.record.step == 3
    )  # fmt: skip
    drafted: Any = records[place]
    records[place] = Drafted(structs.replace(drafted.record, tokens=(55,)))
    found = diverged(records)
    assert found is not None
    assert (found.kind, found.step, found.record, found.draft_step) == (
        "plan",
        2,
        "StepPlanned",
        -1,
    )


def test_what_is_wrong_in_the_drafters_pool_is_told_with_both_steps() -> None:
    records = list(a_run().capture.records)
    place = next(
        n for n, it in enumerate(records)
        if isinstance(it, Drafted) and isinstance(it.record, StepDone) and it.record.step == 4
    )  # fmt: skip
    drafted: Any = records[place]
    seen = structs.replace(drafted.record.observation, starts=(9,))
    records[place] = Drafted(structs.replace(drafted.record, observation=seen))
    found = diverged(records)
    assert found is not None
    assert (found.kind, found.step, found.draft_step, found.sequence) == ("observation", 3, 4, 0)
    assert found.summary.startswith(
        "in step 4 of the draft model: sequence 0: the caches saw start"
    )


def test_steps_of_a_draft_model_that_no_header_names_are_unusable() -> None:
    first, *records = a_run().capture.records
    fold = Fold()
    fold.feed(structs.replace(first, draft=None))
    drafted = next(it for it in records if isinstance(it, Drafted))
    with pytest.raises(Unusable, match="its header names no draft model"):
        fold.feed(drafted)


def test_guesses_are_counted_like_those_that_are_looked_up() -> None:
    from replay.tally import Tally

    sim, tally = a_run(), Tally()
    for record in sim.capture.records:
        tally.feed(record)
    rows = tally.cache.rows
    assert (rows.guessed, rows.accepted) == (
        sum(it.rows - 1 for it in sim.events(Appended) if it.purpose == DRAFT),
        sum(len(it.tokens) - 1 for it in sim.events(Committed)),
    )
    assert 0 < rows.accepted < rows.guessed


@pytest.fixture
def tape(tmp_path: Path) -> str:
    sim = a_run()
    sim.engine.stop()
    path = tmp_path / "drafted.tape"
    path.write_bytes(tape_bytes(sim.capture.records))
    return str(path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["TAPE"],
        ["TAPE", "--depth", "plan", "--invariants", "event"],
        ["show", "TAPE", "--at", "2"],
        ["stat", "TAPE"],
        ["html", "TAPE", "-o", "OUT.html"],
        ["diff", "TAPE", "TAPE"],
        ["repair", "TAPE", "-o", "OUT.tape"],
        ["upgrade", "TAPE", "-o", "OUT.tape"],
        ["bisect", "TAPE"],
        *(["export", "TAPE", "--to", to, "-o", "OUT"] for to in ("jsonl", "perfetto", "kv-events")),
    ],
    ids=" ".join,
)
def test_commands_of_replay_take_a_tape_with_a_draft_model(
    tape: str, tmp_path: Path, arguments: list[str]
) -> None:
    named = [it.replace("TAPE", tape).replace("OUT", str(tmp_path / "out")) for it in arguments]
    assert replay_command(named) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["redact", "TAPE", "-o", "OUT"], "whose guesses this version cannot redact"),
        (["what-if", "TAPE"], "what it would have guessed in other steps is not on it"),
    ],
    ids=["redact", "what-if"],
)
def test_what_would_need_other_guesses_is_refused_in_a_sentence(
    tape: str, tmp_path: Path, capsys: Any, arguments: list[str], said: str
) -> None:
    named = [it.replace("TAPE", tape).replace("OUT", str(tmp_path / "out")) for it in arguments]
    assert replay_command(named) == 2
    assert said in capsys.readouterr().err
    assert [it.name for it in tmp_path.iterdir()] == ["drafted.tape"]


def test_a_report_says_which_step_of_the_draft_model_it_is(tape: str, capsys: Any) -> None:
    records = list(a_run().capture.records)
    place = next(
        n for n, it in enumerate(records)
        if isinstance(it, Drafted) and isinstance(it.record, StepDone) and it.record.step == 4
    )  # fmt: skip
    drafted: Any = records[place]
    seen = structs.replace(drafted.record.observation, starts=(9,))
    records[place] = Drafted(structs.replace(drafted.record, observation=seen))
    Path(tape).write_bytes(tape_bytes(records))
    assert replay_command([tape]) == 1
    assert "step      3, before it step 4 of the draft model" in capsys.readouterr().out


@pytest.mark.parametrize("strict", [False, True])
def test_a_tape_that_ends_inside_a_round_says_so(strict: bool, tape: str, capsys: Any) -> None:
    records = a_run().capture.records
    place = next(
        n for n, it in enumerate(records)
        if isinstance(it, Drafted) and isinstance(it.record, StepPlanned) and it.record.step == 5
    )  # fmt: skip
    Path(tape).write_bytes(tape_bytes(records[: place + 1]))
    assert replay_command([tape, *(["--strict"] if strict else [])]) == (1 if strict else 3)
    said = capsys.readouterr().out
    if strict:
        assert "in step 4 of the draft model: step 4 was issued and never answered" in said
    else:
        assert "the tape ends inside step 4 of the draft model" in said


def test_a_flush_empties_the_drafters_index_too() -> None:
    sim = drafting()
    text = tuple(range(10, 26))
    sim.submit(text, 4)
    sim.run()
    view = sim.engine.view
    assert view.draft is not None
    assert view.draft.state.cached_blocks() > 0
    sim.engine.flush()
    sim.run()
    view = sim.engine.view
    assert view.draft is not None
    assert (view.state.cached_blocks(), view.draft.state.cached_blocks()) == (0, 0)
    sim.submit((*text, 30), 4)
    sim.run()
    assert draft_events(sim, PrefixAdopted) == []
    gone(sim)


def test_a_wrong_cache_of_the_draft_model_is_told_and_changes_no_answer() -> None:
    # Its kernel compares fewer rows than the tape's header says.
    small = FakeKernel(SMALL, script=going_round, sanitize="edges")
    sim = Sim(SMALL, GUESSES, draft=small, script=going_round)
    inbox = sim.submit(PROMPT_TOKENS, 12)
    sim.run()
    assert inbox.tokens == tuple(ROUND[at % 4] for at in range(6, 18))
    assert sim.engine.status()["divergences"] > 0
    found = diverged(sim.capture.records)
    assert found is not None
    assert (found.kind, found.step, found.draft_step) == ("content", 2, 1)


def test_a_scheduler_that_raises_for_the_draft_model_ends_its_guesses_and_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim = drafting()
    inbox = sim.submit(PROMPT_TOKENS, 12)
    for _ in range(2):
        sim.step()
    with monkeypatch.context() as broken:
        broken.setattr(draft_round, "_make_ready", lambda *_: 1 // 0)
        sim.run()
        records = sim.capture.records
        found = diverged(records)
    assert inbox.tokens == tuple(ROUND[at % 4] for at in range(6, 18))
    assert inbox.reason == "length"
    assert not sim.engine._loop.busy  # type: ignore[union-attr]
    assert found is not None
    assert "the scheduler raised ZeroDivisionError for the draft model" in found.summary
    again = diverged(records)
    assert again is not None
    assert "the draft model has a step due before it, which the tape has not" in again.summary
