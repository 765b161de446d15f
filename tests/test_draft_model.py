"""A draft model: what it guesses, what becomes of its cache, and that it changes no answer."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

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
    Preempted,
    PrefixAdopted,
    Rewound,
    StepWritten,
    Trimmed,
)
from statemachine.records import (
    Drafted,
    StepDone,
    StepFailed,
    StepPlanned,
)

from .drafting import (
    GUESSES,
    PLAIN,
    PROMPT_TOKENS,
    ROUND,
    a_run,
    draft_events,
    drafting,
    going_round,
    gone,
    wrong_at,
)
from .follow import done, planned, pool
from .sim import Sim, prompts


def rounds(sim: Sim, kind: Any, step: int) -> tuple[Event, ...]:
    """Events of one record of the draft model's pool."""
    found = [it.record for it in sim.records(Drafted) if isinstance(it.record, kind)]
    events: tuple[Event, ...] = next(it.events for it in found if it.step == step)
    return events


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
