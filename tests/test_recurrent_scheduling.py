"""The scheduler over recurrent groups: where prompts are cut, what is found again, who waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from msgspec import structs

from kernel.layout import Layout
from kernel.pages import LayerShape
from kernel.recurrent import ArrayKind, StateKind
from server import admission, pool_size
from server.pool_size import pool_blocks, pool_slots
from server.settings import Settings, SettingsError
from server.sharing import rows_to_edge
from server.submission import Submission
from statemachine.events import (
    DRAFT,
    Appended,
    BlockEvicted,
    BlockPublished,
    Committed,
    Preempted,
    PrefixAdopted,
    Trimmed,
)
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters

from .sim import POLICY, Inbox, Sim, answer_alone, idle

WITH_STATES = structs.replace(POLICY, prefill_chunk=16)


def hybrid(slots: int, blocks: int = 64) -> Geometry:
    return Geometry(4, (Group(num_blocks=blocks), Group("recurrent", slots)))


def pieces(sim: Sim, seq: int) -> list[int]:
    """Rows of each append of a sequence to the end of its prompt."""
    return [event.rows for event in sim.events(Appended) if event.seq == seq and event.rows > 1]


@pytest.mark.parametrize(
    ("first", "rows", "length", "expected"),
    [
        (0, 16, 10, 8),  # the last edge before the end
        (0, 16, 8, 4),  # the last row is computed, so the edge at the end is no use
        (8, 2, 10, 2),
        (0, 10, 40, 8),  # a budget that ends inside of a block gives the rest back
        (0, 3, 40, 3),  # one that reaches no edge moves all the same
        (3, 16, 40, 1),  # inside of a block: to its end
        (6, 1, 40, 1),
        (0, 3, 3, 3),
    ],
)
def test_a_piece_ends_at_an_edge_or_inside_of_the_block_that_it_begins_in(
    first: int, rows: int, length: int, expected: int
) -> None:
    assert rows_to_edge(4, first, rows, length) == expected


def test_a_prompt_is_cut_at_its_last_edge_and_the_next_one_starts_from_there() -> None:
    sim = Sim(hybrid(12), WITH_STATES)
    prompt = tuple(range(10))
    first = sim.submit(prompt, 2)
    sim.run()
    second = sim.submit((*prompt, 7), 2)
    sim.run()
    assert pieces(sim, 0) == [8, 2]
    assert (first.cached_tokens, second.cached_tokens) == (0, 8)
    (adopted,) = sim.events(PrefixAdopted)
    assert [len(table) for table in adopted.blocks] == [2, 2]
    assert adopted.blocks[1][0] == -1
    assert second.tokens == answer_alone((*prompt, 7), 2)
    assert sim.idle_counts() == idle(hybrid(12))


def test_an_answer_leaves_a_state_at_each_edge_that_a_conversation_goes_on_from() -> None:
    sim = Sim(hybrid(12), WITH_STATES)
    first = sim.submit(tuple(range(5)), 9)
    sim.run()
    kept = [event.index for event in sim.events(BlockPublished) if event.group == 1]
    assert kept == [0, 1, 2]
    again = (*range(5), *first.tokens, 3, 3)
    second = sim.submit(again, 2)
    sim.run()
    assert second.cached_tokens == 12
    assert second.tokens == answer_alone(again, 2)


def test_states_that_only_wait_to_be_found_give_way_and_the_rows_are_computed_again() -> None:
    sim = Sim(hybrid(3), WITH_STATES)
    prompt = tuple(range(9))
    sim.submit(prompt, 2)
    sim.run()
    sim.submit(tuple(range(50, 59)), 2)
    sim.submit(tuple(range(70, 79)), 2)
    sim.run()
    last = sim.submit(prompt, 2)
    sim.run()
    assert {event.group for event in sim.events(BlockEvicted)} == {1}
    assert last.cached_tokens == 0
    assert last.tokens == answer_alone(prompt, 2)


def test_requests_beyond_the_slots_wait_or_are_preempted_and_answer_as_alone() -> None:
    geometry = hybrid(5)
    sim = Sim(geometry, structs.replace(WITH_STATES, watermark_blocks=0))
    prompts = [tuple(range(first, first + 7)) for first in (0, 20, 40, 60, 80, 100)]
    inboxes = [sim.submit(prompt, 12) for prompt in prompts]
    sim.run()
    assert [inbox.tokens for inbox in inboxes] == [answer_alone(it, 12) for it in prompts]
    assert sim.events(Preempted)
    assert sim.idle_counts() == idle(geometry)


def test_a_copy_of_a_running_request_starts_from_its_parents_last_edge() -> None:
    sim = Sim(hybrid(12), WITH_STATES)
    prompt = tuple(range(10))
    parent = sim.submit(prompt, 6)
    inbox = Inbox()
    copy = Submission(prompt, Parameters(6, seed=1), parent=0)
    sim.inboxes[sim.engine.submit(copy, inbox)] = inbox
    sim.run()
    (adopted,) = sim.events(PrefixAdopted)
    assert (adopted.seq, len(adopted.tokens)) == (1, 8)
    assert parent.tokens == answer_alone(prompt, 6)
    assert inbox.reason == "length"


def test_a_pool_without_the_slots_of_one_request_is_refused() -> None:
    admission.check_pool(hybrid(3), WITH_STATES)
    with pytest.raises(
        ValueError, match=r"^group 1 has 2 slots, but a request takes up to 3: .* num_slots$"
    ):
        admission.check_pool(hybrid(2), WITH_STATES)


def layout(rows: bool, states: bool) -> Any:
    """What sizes a pool: a block of 4 KiB, a slot of 64 KiB."""
    shape = LayerShape(0, 2, 16, 16, mx.float32)
    kind = StateKind((ArrayKind((128, 128), mx.float32),))
    found = SimpleNamespace(shapes=(shape,) * rows, states=(kind,) * states)
    found.slot_bytes = 65_536 * states
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(max_running=8), 32),
        (Settings(max_running=8, num_slots=5), 5),
        (Settings(max_running=4096), 2048),  # an eighth of 1 GiB
    ],
)
def test_slots_are_four_for_each_running_request_in_an_eighth_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, expected: int
) -> None:
    monkeypatch.setattr(pool_size, "memory_bytes", lambda: 1 << 30)
    made: Layout = layout(rows=True, states=True)
    assert pool_slots(settings, made) == expected


def test_settings_for_what_a_model_does_not_keep_are_refused() -> None:
    states: Layout = layout(rows=False, states=True)
    rows: Layout = layout(rows=True, states=False)
    assert pool_blocks(Settings(), states) == (0, 0)
    assert pool_slots(Settings(), rows) == 0
    for asked in (Settings(num_blocks=9), Settings(kv_memory=1 << 20), Settings(kv_bits=8)):
        with pytest.raises(SettingsError, match=r"^this model keeps states, not K and V: leave nu"):
            pool_blocks(asked, states)
    with pytest.raises(SettingsError, match=r"^this model keeps no states: leave num_slots out$"):
        pool_slots(Settings(num_slots=9), rows)
    with pytest.raises(SettingsError, match=r"slots take .* GiB, but there are"):
        pool_slots(Settings(num_slots=1 << 30), states)


def test_drafts_stay_in_their_block_and_those_that_fail_go_back_to_its_edge() -> None:
    geometry = Geometry(4, (Group(num_blocks=64), Group("window", 64, 3), Group("recurrent", 12)))
    drafting = structs.replace(WITH_STATES, draft_tokens=3, lookup_ngram=1)
    sim = Sim(geometry, drafting, vocab_size=2)
    prompt = (0, 1, 1, 0, 1)
    inboxes = [sim.submit((*prompt, *range(last)), 30) for last in range(2)]
    sim.run()
    alone = [answer_alone((*prompt, *range(last)), 30, vocab_size=2) for last in range(2)]
    assert [inbox.tokens for inbox in inboxes] == alone
    drafts = [event for event in sim.events(Appended) if event.purpose == DRAFT]
    assert max(event.rows for event in drafts) == 4
    assert sim.events(Committed), "no draft was accepted"
    trims = sim.events(Trimmed)
    assert trims, "every draft was accepted"
    assert sim.idle_counts() == idle(geometry)
