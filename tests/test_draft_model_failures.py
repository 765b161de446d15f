"""A draft model that fails, is stopped or knows other words, and what stands beside its guesses."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from kernel.fake import Failure, FakeKernel
from replay.fold import Fold
from server import draft_round
from server.draft_pool import FAILURES_MAX
from statemachine.events import (
    DRAFT,
    LOOKAHEAD,
    PROMPT,
    Appended,
    AppendedEach,
    Event,
    PoolReset,
    PrefixAdopted,
    Trimmed,
)
from statemachine.geometry import Geometry, Group
from statemachine.records import (
    Drafted,
    StepFailed,
)

from .drafting import (
    GUESSES,
    PLAIN,
    PROMPT_TOKENS,
    ROUND,
    diverged,
    draft_events,
    drafting,
    going_round,
    gone,
    wrong_at,
)
from .follow import fork
from .sim import SMALL, Sim


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
