"""Many requests with one long beginning: what the plans of the others are spared."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from server import admission, reuse
from server.draft import Draft
from server.policy import ADOPTS_MAX, PRIORITY, check
from server.scoring import shareable_rows
from server.settings import load_settings
from statemachine import commands
from statemachine.sequence import written_rows
from statemachine.state import State

from .follow import clean, random_load, same_answers
from .sim import POLICY, Sim, answer_alone

LONG = tuple(range(100, 140))
AWARE = structs.replace(POLICY, prefix_aware=True, prefill_chunk=4, max_batch_tokens=40)


def waits(draft: Draft, state: State, request: int, tokens: tuple[int, ...]) -> bool:
    """reuse.waits_for_prefix in the plainest way: all of every text is looked at."""
    size, known = state.geometry.block_size, draft.request(request)
    if not (draft.policy.prefix_aware and draft.policy.prefix_cache):
        return False
    most = shareable_rows(known) // size * size
    found = commands.lookup(state, known.arrived.namespace, tokens[: max(most, 0)]).rows
    for seq in draft.running:
        other = draft.request(seq).arrived
        written = written_rows(state.sequences[seq], state.written_step)
        pairs = zip(other.tokens, tokens, strict=False)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        if same is None:
            same = min(len(other.tokens), len(tokens))
        shared = min(same // size * size, most)
        alike = other.namespace == known.arrived.namespace
        if alike and written < len(other.tokens) and shared > max(found, written):
            return True
    return False


@pytest.mark.parametrize("seed", range(12))
def test_who_waits_for_a_prefix_is_found_as_by_looking_at_all_of_every_text(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    quick = reuse.waits_for_prefix

    def both(draft: Draft, state: State, request: int, tokens: tuple[int, ...]) -> bool:
        asked.append(quick(draft, state, request, tokens))
        assert asked[-1] == waits(draft, state, request, tokens)
        return asked[-1]

    monkeypatch.setattr(admission, "waits_for_prefix", both)
    order = {"scheduling": PRIORITY} if seed % 3 else {}
    random_load(seed, prefix_aware=True, lookahead=bool(seed % 2), **order)
    sim = Sim(policy=structs.replace(AWARE, lookahead=bool(seed % 2)))
    for number in range(8):
        cut = (7 * number + seed) % 34 + 4
        sim.submit((*LONG[:cut], number), 3)
        for _ in range((number + seed) % 3):
            sim.step()
    sim.run()
    clean(sim)
    assert {*asked} == {False, True}


def test_nothing_is_looked_up_for_those_that_wait_while_a_prompt_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []
    lookup = commands.lookup

    def counted(state: State, namespace: Any, tokens: tuple[int, ...]) -> Any:
        looked.append(len(tokens))
        return lookup(state, namespace, tokens)

    sim = Sim(policy=AWARE)
    sim.submit((*LONG, 0), 2)
    sim.step()
    others = [sim.submit((*LONG, number), 2) for number in (1, 2, 3)]
    with monkeypatch.context() as patch:
        patch.setattr(commands, "lookup", counted)
        while sim.engine.view.state.sequences[0].committed < len(LONG) - 4:
            sim.step()
            assert sim.engine.view.running == (0,)
    assert looked == []
    sim.run()
    assert [it.cached_tokens for it in others] == [len(LONG)] * 3
    assert [it.tokens for it in others] == [answer_alone((*LONG, n), 2) for n in (1, 2, 3)]
    clean(sim)


def test_nobody_waits_for_a_prompt_that_is_computed_again_and_can_be_found() -> None:
    sim = Sim(policy=AWARE)
    sim.submit((*LONG, 0), 2)
    sim.run()
    sim.submit((*LONG, 1), 2, score_from=1, logprobs=0)
    sim.step()
    found = sim.submit((*LONG, 2), 2)
    sim.step()
    assert sim.engine.view.running == (1, 2)
    sim.run()
    assert found.cached_tokens == len(LONG)
    clean(sim)


def admitted_together(adopts_max: int) -> list[int]:
    """How many requests that adopt 40 rows each the plans admit, after the one that computes."""
    sim = Sim(policy=structs.replace(AWARE, adopts_max=adopts_max))
    sim.submit((*LONG, 0), 2)
    sim.run()
    for number in range(1, 5):
        sim.submit((*LONG, number), 12)
    counts: list[int] = []
    before = 0
    while sim.engine.view.waiting or not counts:
        sim.step()
        now = len(sim.engine.view.running)
        counts.append(now - before)
        before = now
    sim.run()
    clean(sim)
    return counts


def test_a_plan_admits_nobody_behind_as_many_adopted_rows_as_it_may() -> None:
    assert admitted_together(0) == [4]
    assert admitted_together(200) == [4]
    assert admitted_together(41) == [2, 2]
    assert admitted_together(40) == [1, 1, 1, 1]
    assert admitted_together(1) == [1, 1, 1, 1]


@pytest.mark.parametrize("seed", range(6))
def test_a_bound_on_what_is_adopted_changes_no_answer_and_always_ends(seed: int) -> None:
    _, answers = random_load(seed, adopts_max=1, prefix_aware=True, lookahead=seed % 2 == 0)
    same_answers(random_load(seed)[1], answers)


def test_servers_set_the_bound_and_it_is_no_negative_number() -> None:
    assert load_settings({"model": "x"}, {}).policy().adopts_max == ADOPTS_MAX
    for name in ("adopts_max", "opens_max"):
        with pytest.raises(ValueError, match=f"^{name} must be at least 0, not -1$"):
            check(structs.replace(POLICY, **{name: -1}))
