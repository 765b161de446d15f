"""n > 1 by fork: copies of a request share its prompt's rows, and copy before they diverge."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs

from server.policy import Policy
from server.submission import Submission
from statemachine.events import (
    PROMPT,
    Appended,
    AppendedEach,
    BlockCopied,
    Closed,
    Forked,
    Namespace,
    Opened,
    Preempted,
    PrefixAdopted,
    Trimmed,
)
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters

from .follow import AHEAD, GUESSING, clean, fork, outline, planned, pool
from .sim import POLICY, SMALL, Inbox, Sim, answer_alone

TOKENS = tuple(range(10, 50))
"""Forty tokens, which is no multiple of 16 nor of 12."""
BLOCKS_16 = Geometry(16, (Group(num_blocks=32),))


def family(sim: Sim, tokens: tuple[int, ...], count: int = 4, max_tokens: int = 8) -> list[Inbox]:
    """A request and its copies, with seeds 1, 2, ... at temperature 1."""
    first = sim.submit(tokens, max_tokens, temperature=1.0, seed=1)
    parent = max(sim.inboxes)
    copies = [
        fork(sim, tokens, parent, max_tokens=max_tokens, temperature=1.0, seed=seed)
        for seed in range(2, count + 1)
    ]
    return [first, *copies]


def alone(
    tokens: tuple[int, ...], count: int = 4, max_tokens: int = 8, geometry: Geometry = SMALL
) -> list[tuple[int, ...]]:
    """What the members of a family answer when each is the only request there is."""
    return [
        answer_alone(tokens, max_tokens, geometry, temperature=1.0, seed=seed)
        for seed in range(1, count + 1)
    ]


@pytest.mark.parametrize("policy", [POLICY, AHEAD, GUESSING], ids=["plain", "ahead", "guessing"])
def test_p34_four_copies_of_a_fresh_prompt_answer_as_four_requests_alone(policy: Policy) -> None:
    answers = []
    for _ in range(2):
        sim = Sim(BLOCKS_16, policy)
        inboxes = family(sim, TOKENS)
        sim.run()
        assert [inbox.cached_tokens for inbox in inboxes] == [0, 0, 0, 0]
        assert [event.child for event in sim.events(Forked)] == [1, 2, 3]
        assert sim.events(PrefixAdopted) == []
        answers.append([inbox.tokens for inbox in inboxes])
        clean(sim)
    assert answers[0] == answers[1] == alone(TOKENS, geometry=BLOCKS_16)
    assert len(set(answers[0])) > 1


def test_p34_a_prompt_is_computed_once_and_each_copy_computes_its_last_row() -> None:
    sim = Sim(BLOCKS_16)
    family(sim, TOKENS)
    sim.run()
    rows = [(e.seq, e.rows) for e in sim.events(Appended) if e.purpose == PROMPT]
    assert rows == [(0, 16), (0, 16), (0, 8), (1, 1), (2, 1), (3, 1)]


def test_p34_full_blocks_are_shared_and_the_last_one_is_copied_before_anybody_diverges() -> None:
    sim = Sim(BLOCKS_16, structs.replace(POLICY, prefill_chunk=64))
    family(sim, TOKENS)
    sim.step()
    assert [type(event) for event in planned(sim, 1)] == [Opened, Appended]
    sim.step()
    # The parent goes on in its own last block, before it is shared; each copy then gets one.
    assert planned(sim, 2) == (
        AppendedEach(2, (0,), (sim.inboxes[0].tokens[0],), "decode"),
        Opened(1), Forked(0, 1), Trimmed(1, 2),
        Opened(2), Forked(0, 2), Trimmed(2, 2),
        Opened(3), Forked(0, 3), Trimmed(3, 2),
        BlockCopied(1, 2, 0, 2, 2, 3, 7),
        Appended(1, 2, 1, TOKENS[-1:], ((),), PROMPT),
        BlockCopied(2, 2, 0, 2, 2, 4, 7),
        Appended(2, 2, 1, TOKENS[-1:], ((),), PROMPT),
        BlockCopied(3, 2, 0, 2, 2, 5, 7),
        Appended(3, 2, 1, TOKENS[-1:], ((),), PROMPT),
    )  # fmt: skip
    state = sim.engine.view.state
    assert [tuple(state.sequences[seq].tables[0]) for seq in range(4)] == [
        (0, 1, 2), (0, 1, 3), (0, 1, 4), (0, 1, 5),
    ]  # fmt: skip
    refs = {block: state.groups[0].blocks[block].refs for block in range(6)}
    assert refs == {0: 4, 1: 4, 2: 1, 3: 1, 4: 1, 5: 1}
    assert sim.engine.status()["held"] == 6
    sim.run()
    clean(sim)


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("num_blocks", [14, 16, 26])
def test_p34_preemption_changes_no_copy(num_blocks: int, lookahead: bool) -> None:
    policy = structs.replace(POLICY, lookahead=lookahead, watermark_blocks=0, context_tokens=80)
    sim = Sim(pool(num_blocks), policy)
    inboxes = family(sim, TOKENS[:37], max_tokens=14)
    sim.run()
    assert [inbox.tokens for inbox in inboxes] == alone(TOKENS[:37], max_tokens=14)
    assert bool(sim.events(Preempted)) == (num_blocks < 26)
    clean(sim)


@pytest.mark.parametrize("lookahead", [False, True])
def test_p34_a_cancel_after_the_third_token_of_any_copy_changes_no_other(lookahead: bool) -> None:
    whole = alone(TOKENS, geometry=BLOCKS_16)
    for gone in range(4):
        sim = Sim(BLOCKS_16, structs.replace(POLICY, lookahead=lookahead))
        inboxes = family(sim, TOKENS)
        while len(inboxes[gone].tokens) < 3:
            sim.step()
        sim.engine.cancel(gone)
        sim.run()
        for number, inbox in enumerate(inboxes):
            kept = len(inbox.tokens) if number == gone else 8
            assert inbox.tokens == whole[number][:kept]
        assert inboxes[gone].reason == "cancelled"
        clean(sim)


def test_a_copy_of_a_prompt_that_ends_with_a_block_shares_all_of_it_but_its_last_row() -> None:
    for rows in (16, 32):
        sim = Sim(BLOCKS_16, structs.replace(POLICY, prefill_chunk=64))
        inboxes = family(sim, TOKENS[:rows], count=2)
        sim.run()
        (copied,) = sim.events(BlockCopied)
        assert (copied.seq, copied.index, copied.rows) == (1, rows // 16 - 1, 15)
        assert [inbox.tokens for inbox in inboxes] == alone(
            TOKENS[:rows], count=2, geometry=BLOCKS_16
        )
        clean(sim)


def test_a_copy_of_a_prompt_of_one_token_shares_nothing_and_answers_the_same() -> None:
    sim = Sim()
    inboxes = family(sim, (5,), count=3)
    sim.run()
    assert [inbox.tokens for inbox in inboxes] == alone((5,), count=3)
    clean(sim)


def test_a_copy_waits_until_the_prompt_that_it_shares_is_computed() -> None:
    sim = Sim(policy=structs.replace(POLICY, prefill_chunk=8))
    family(sim, TOKENS[:30], count=2)
    for _ in range(4):
        sim.step()
        assert sim.events(Forked) == []
    sim.step()
    assert sim.events(Forked) == [Forked(0, 1)]
    sim.run()
    clean(sim)


def test_other_requests_start_while_a_copy_waits_for_its_parent() -> None:
    sim = Sim(policy=structs.replace(POLICY, prefill_chunk=8))
    family(sim, TOKENS[:30], count=2)
    other = sim.submit((1, 2, 3), 2)
    sim.step()
    assert [event.seq for event in sim.events(Appended)] == [0, 2]
    sim.run()
    assert other.tokens == answer_alone((1, 2, 3), 2)
    clean(sim)


def test_a_copy_whose_parent_is_cancelled_first_is_an_ordinary_request() -> None:
    sim = Sim(BLOCKS_16)
    parent, child = family(sim, TOKENS, count=2)
    sim.engine.cancel(0)
    sim.run()
    assert (parent.reason, child.tokens) == ("cancelled", alone(TOKENS, 2, geometry=BLOCKS_16)[1])
    assert sim.events(Forked) == []
    clean(sim)


def test_a_copy_whose_parent_is_cancelled_in_its_prompt_goes_on_without_it() -> None:
    for lookahead in (False, True):
        sim = Sim(BLOCKS_16, structs.replace(POLICY, lookahead=lookahead))
        _, child = family(sim, TOKENS, count=2)
        sim.step()
        sim.step()
        sim.engine.cancel(0)
        sim.run()
        assert child.tokens == alone(TOKENS, 2, geometry=BLOCKS_16)[1]
        assert sim.events(Forked) == []
        clean(sim)


def test_a_copy_whose_parent_has_ended_adopts_what_was_published_and_claims_nothing_cached() -> (
    None
):
    sim = Sim(BLOCKS_16, structs.replace(POLICY, max_running=1))
    parent, child = family(sim, TOKENS, count=2, max_tokens=2)
    sim.run()
    assert sim.events(Forked) == []
    assert [len(event.tokens) for event in sim.events(PrefixAdopted)] == [32]
    assert (parent.cached_tokens, child.cached_tokens) == (0, 0)
    assert child.tokens == alone(TOKENS, 2, 2, geometry=BLOCKS_16)[1]
    clean(sim)


def test_a_copy_whose_parent_was_preempted_first_is_an_ordinary_request() -> None:
    # 1 is admitted beside 0 and preempted in its answer; only then there is room for its copy 2.
    policy = structs.replace(POLICY, watermark_blocks=0, prefix_cache=False, max_running=2)
    sim = Sim(pool(10), policy)
    sim.submit(range(12), 20)
    sim.submit(TOKENS[:11], 12, temperature=1.0, seed=1)
    child = fork(sim, TOKENS[:11], 1, max_tokens=12, temperature=1.0, seed=2)
    sim.run()
    assert sim.events(Preempted)[0] == Preempted(1)
    assert sim.events(Forked) == []
    assert [sim.inboxes[1].tokens, child.tokens] == alone(TOKENS[:11], 2, 12)
    clean(sim)


def test_a_preempted_copy_starts_over_as_an_ordinary_request() -> None:
    policy = structs.replace(POLICY, watermark_blocks=0, prefix_cache=False)
    sim = Sim(pool(8), policy)
    inboxes = family(sim, TOKENS[:13], count=2, max_tokens=14)
    sim.run()
    assert [event.seq for event in sim.events(Preempted)] == [1]
    assert len(sim.events(Forked)) == 1, "with an answer of its own it has no parent any more"
    assert [inbox.tokens for inbox in inboxes] == alone(TOKENS[:13], 2, 14)
    clean(sim)


@pytest.mark.parametrize(
    ("tokens", "namespace"),
    [
        ((*TOKENS[:-1], 9), Namespace()),
        (TOKENS[:-1], Namespace()),
        (TOKENS, Namespace(salt="other")),
        (TOKENS, Namespace("adapter", 1)),
    ],
    ids=["token", "length", "salt", "adapter"],
)
def test_another_prompt_or_namespace_with_a_parent_shares_nothing(
    tokens: tuple[int, ...], namespace: Namespace
) -> None:
    sim = Sim(BLOCKS_16, structs.replace(POLICY, prefix_cache=False))
    sim.submit(TOKENS, 8)
    inbox = Inbox()
    given = Submission(tokens, Parameters(4), namespace=namespace, parent=0)
    sim.inboxes[sim.engine.submit(given, inbox)] = inbox
    sim.step()
    # Nor does it wait for the other's prompt.
    assert {e.seq for e in planned(sim, 1) if isinstance(e, Appended)} == {0, 1}
    sim.run()
    assert sim.events(Forked) == []
    expected = Sim(BLOCKS_16, structs.replace(POLICY, prefix_cache=False))
    own = expected.submit(tokens, 4, namespace=namespace)
    expected.run()
    assert inbox.tokens == own.tokens
    clean(sim)


@pytest.mark.parametrize("parent", [1, 2, 77])
def test_a_parent_that_is_itself_later_or_unknown_is_none(parent: int) -> None:
    sim = Sim()
    sim.submit(TOKENS[:9], 3)
    inbox = fork(sim, TOKENS[:9], parent, max_tokens=3)
    last = sim.submit(TOKENS[:9], 3)
    sim.run()
    assert sim.events(Forked) == []
    assert inbox.tokens == last.tokens == answer_alone(TOKENS[:9], 3)
    clean(sim)


def test_a_parent_whose_windows_have_moved_on_shares_nothing() -> None:
    geometry = Geometry(4, (Group(num_blocks=32), Group("window", num_blocks=32, window=5)))
    sim = Sim(geometry, structs.replace(POLICY, prefix_cache=False))
    sim.submit(TOKENS[:19], 12, temperature=1.0, seed=1)
    for _ in range(9):
        sim.step()
    late = fork(sim, TOKENS[:19], 0, max_tokens=6, temperature=1.0, seed=2)
    sim.run()
    assert sim.events(Forked) == []
    assert late.tokens == alone(TOKENS[:19], 2, 6)[1]
    clean(sim)


def test_a_parent_whose_windows_still_hold_the_prompt_is_shared() -> None:
    geometry = Geometry(4, (Group(num_blocks=32), Group("window", num_blocks=32, window=20)))
    for policy in (POLICY, AHEAD):
        sim = Sim(geometry, policy)
        inboxes = family(sim, TOKENS[:19], count=3)
        sim.run()
        assert len(sim.events(Forked)) == 2
        assert {event.group for event in sim.events(BlockCopied)} == {0, 1}
        assert [inbox.tokens for inbox in inboxes] == alone(TOKENS[:19], 3)
        clean(sim)


@pytest.mark.parametrize("window", [5, 8, 12])
def test_copies_of_a_prompt_longer_than_a_window_answer_as_they_do_alone(window: int) -> None:
    geometry = Geometry(4, (Group(num_blocks=48), Group("window", num_blocks=48, window=window)))
    for policy in (POLICY, AHEAD, structs.replace(AHEAD, prefix_cache=False, prefill_tile=8)):
        sim = Sim(geometry, policy)
        inboxes = family(sim, TOKENS[:19], count=3)
        sim.run()
        assert [inbox.tokens for inbox in inboxes] == alone(TOKENS[:19], 3)
        clean(sim)


def test_copies_share_rows_without_the_prefix_cache_too() -> None:
    sim = Sim(BLOCKS_16, structs.replace(POLICY, prefix_cache=False))
    inboxes = family(sim, TOKENS)
    sim.run()
    assert len(sim.events(Forked)) == 3
    assert sim.engine.status()["cached"] == 0
    assert [inbox.tokens for inbox in inboxes] == alone(TOKENS, geometry=BLOCKS_16)
    clean(sim)


@pytest.mark.parametrize("tile", [8, 16])
def test_copies_share_a_padded_prompt_whether_its_pads_are_gone_or_not(tile: int) -> None:
    for policy in (POLICY, AHEAD):
        sim = Sim(policy=structs.replace(policy, prefill_tile=tile))
        inboxes = family(sim, TOKENS[:13])
        sim.run()
        assert len(sim.events(Forked)) == 3
        assert [inbox.tokens for inbox in inboxes] == alone(TOKENS[:13])
        clean(sim)


def test_a_copy_says_of_cached_tokens_what_its_parent_does() -> None:
    sim = Sim(BLOCKS_16)
    sim.submit(TOKENS, 1)
    sim.run()
    inboxes = family(sim, TOKENS, count=3)
    sim.run()
    assert [inbox.cached_tokens for inbox in inboxes] == [32, 32, 32]
    clean(sim)


@pytest.mark.parametrize("where", ["parent", "child"])
@pytest.mark.parametrize("lookahead", [False, True])
def test_a_parent_or_copy_may_be_cancelled_at_any_step(where: str, lookahead: bool) -> None:
    whole = alone(TOKENS[:21], 3)
    number = 0 if where == "parent" else 1
    for at in range(1, 10):
        sim = Sim(SMALL, structs.replace(POLICY, lookahead=lookahead))
        inboxes: list[Inbox] = []

        def start(sim: Sim = sim, inboxes: list[Inbox] = inboxes) -> None:
            inboxes += family(sim, TOKENS[:21], 3)

        def cancel(sim: Sim = sim) -> None:
            sim.engine.cancel(number)

        actions: dict[int, list[Callable[[], object]]] = {1: [start]}
        actions.setdefault(at, []).append(cancel)
        sim.run(actions)
        for place, inbox in enumerate(inboxes):
            kept = len(inbox.tokens) if place == number else 8
            assert inbox.tokens == whole[place][:kept]
        clean(sim)


def test_the_row_that_a_copy_computes_again_is_its_own() -> None:
    """What a copy was seen to hold is on tape as its sequence's, from the first step on."""
    sim = Sim(BLOCKS_16)
    family(sim, TOKENS, count=2)
    sim.run()
    assert [event.seq for event in sim.events(Closed)] == [0, 1]
    assert outline(sim).startswith("P1 D1 P2 D2 P3 D3 P4 D4")
    assert planned(sim, 4)[-1].seq == 1  # type: ignore[union-attr]
