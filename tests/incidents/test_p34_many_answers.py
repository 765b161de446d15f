"""P34: four answers to one prompt share its rows, copy before they part, and count it once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from server.policy import Policy
from server.submission import Submission
from statemachine.events import Appended, BlockCopied, Closed, Forked, Preempted
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters, RequestCancelled

from ..faults.loads import TINY, Request, tokens
from ..faults.runner import record
from ..sim import Inbox, Sim, answer_alone
from . import asking
from .serving import settle

PROMPT = tuple(n % 50 for n in range(40))
"""Two blocks of 16 and a half one."""
ANSWERS = 4
POLICY = Policy(max_batch_tokens=64, prefill_chunk=16, context_tokens=128, prefix_cache=False)
ROOM = Geometry(16, (Group(num_blocks=32),))


def submit(sim: Sim, max_tokens: int, parent: int = 0) -> list[Inbox]:
    """n = 4 with seed 1: the children are requests of their own, with seeds that follow it."""
    inboxes = []
    for number in range(ANSWERS):
        inbox = Inbox()
        parameters = Parameters(max_tokens, temperature=1.0, seed=1 + number)
        given = Submission(PROMPT, parameters, parent=parent if number else -1)
        assert sim.engine.submit(given, inbox) == parent + number
        inboxes.append(inbox)
    return inboxes


def alone(max_tokens: int) -> list[tuple[int, ...]]:
    cold = structs.replace(POLICY, max_batch_tokens=512, prefill_chunk=512)
    return [
        answer_alone(PROMPT, max_tokens, ROOM, cold, temperature=1.0, seed=1 + number)
        for number in range(ANSWERS)
    ]


def prompt_rows(sim: Sim) -> int:
    return sum(e.rows for e in sim.events(Appended) if e.purpose == "prompt")


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("lookahead", [False, True])
def test_p34_four_answers_to_a_fresh_prompt_compute_it_once_and_find_nothing_cached(
    lookahead: bool, prefix_cache: bool, tmp_path: Path
) -> None:
    policy = structs.replace(POLICY, lookahead=lookahead, prefix_cache=prefix_cache)
    sim = Sim(ROOM, policy)
    inboxes = submit(sim, 12)
    sim.run()
    assert {update.cached_tokens for inbox in inboxes for update in inbox.updates} == {0}
    assert sim.events(Forked) == [Forked(0, child) for child in (1, 2, 3)]
    assert prompt_rows(sim) == 40 + 3, "each child computes the last row of the prompt again"
    # Three of the four copy the tail block; the last one of it may write it in place.
    assert len({(e.seq, e.target) for e in sim.events(BlockCopied)}) == 3
    assert {(e.index, e.group) for e in sim.events(BlockCopied)} == {(2, 0)}
    found = [inbox.tokens for inbox in inboxes]
    assert len(set(found)) == ANSWERS
    assert found == alone(12)
    again = submit(sim, 12, parent=ANSWERS)
    sim.run()
    assert [inbox.tokens for inbox in again] == found
    assert {inbox.cached_tokens for inbox in again} == {32 if prefix_cache else 0}
    settle(sim, tmp_path)


@pytest.mark.parametrize("lookahead", [False, True])
def test_p34_a_pool_that_preempts_children_changes_no_answer(
    lookahead: bool, tmp_path: Path
) -> None:
    """Six blocks hold the prompt and four tails, and no more."""
    policy = structs.replace(POLICY, lookahead=lookahead, watermark_blocks=0)
    sim = Sim(Geometry(16, (Group(num_blocks=6),)), policy)
    inboxes = submit(sim, 30)
    sim.run()
    assert {event.seq for event in sim.events(Preempted)} & {1, 2, 3}
    assert [inbox.tokens for inbox in inboxes] == alone(30)
    assert {update.cached_tokens for inbox in inboxes for update in inbox.updates} == {0}
    settle(sim, tmp_path)


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("gone", [(0,), (2,), (0, 1, 2, 3)], ids=["parent", "child", "all"])
def test_p34_a_cancel_after_token_3_ends_each_child_once(
    gone: tuple[int, ...], lookahead: bool, tmp_path: Path
) -> None:
    sim = Sim(ROOM, structs.replace(POLICY, lookahead=lookahead))
    inboxes = submit(sim, 20)
    while len(inboxes[3].tokens) < 3:
        sim.step()
    for request in gone:
        sim.engine.cancel(request)
    sim.run()
    assert [record.request for record in sim.records(RequestCancelled)] == list(gone)
    assert sorted(event.seq for event in sim.events(Closed)) == [0, 1, 2, 3]
    for number, (inbox, expected) in enumerate(zip(inboxes, alone(20), strict=True)):
        assert inbox.reason == ("cancelled" if number in gone else "length")
        assert inbox.tokens == expected[: len(inbox.tokens)]
    settle(sim, tmp_path)


@pytest.mark.parametrize("lookahead", [False, True])
def test_p34_four_answers_of_a_real_model_are_those_of_four_requests(
    lookahead: bool, tmp_path: Path, capsys: Any
) -> None:
    """Over pages of MLX: the copies are real. Shapes are the same, so tokens are equal."""
    policy = structs.replace(asking.POLICY, lookahead=lookahead, prefix_cache=False)
    prompt = tokens(40, 1)

    def asked(parent: int | None) -> tuple[Request, ...]:
        return tuple(
            Request(prompt, 6, temperature=2.0, seed=1 + n, parent=parent if n else None)
            for n in range(ANSWERS)
        )

    tape = tmp_path / "forked.log"
    forked = record(asking.load(TINY, asked(0), policy), tape)
    single = record(asking.load(TINY, asked(None), policy), tmp_path / "single.log")
    assert forked.answers == single.answers
    assert len(set(forked.answers)) == ANSWERS
    for depth in ("fold", "plan"):
        assert asking.replayed(tape, TINY, depth, capsys)[0] == 0
