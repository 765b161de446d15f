"""What the page at `/` draws: a pool packed into a snapshot."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from msgspec import structs

from server.http.pool_snapshot import (
    CACHED,
    CELLS_MAX,
    FREE,
    NOBODY,
    OWN,
    PUBLISHED,
    RUNS_MAX,
    SEQUENCES_MAX,
    SHARED,
    shared_runs,
    snapshot,
)
from statemachine.geometry import Geometry, Group

from .page_server import cells_of
from .sim import POLICY, Sim

PROMPT = tuple(range(1, 19))
WHOLE = structs.replace(POLICY, prefill_chunk=64)
"""Prompts in one piece."""


def taken(sim: Sim) -> dict[str, Any]:
    """A snapshot of a simulation's engine."""
    engine = sim.engine
    data = snapshot(engine.view, engine.counters, engine.healthy, 7)
    found: dict[str, Any] = json.loads(data)
    return found


def sharing() -> Sim:
    """Two sequences that share 4 blocks of 4, one of its own, and a cached rest of another."""
    sim = Sim(policy=WHOLE)
    sim.submit(range(50, 60), 1)
    sim.run()
    sim.submit(PROMPT, 30)
    sim.step()
    sim.submit((*PROMPT[:16], 60, 61, 62, 63, 1), 30)
    sim.step()
    return sim


def test_a_snapshot_says_who_holds_which_block_and_how() -> None:
    sim = sharing()
    state = sim.engine.view.state
    (first,), (second,) = (state.sequences[seq].tables for seq in (1, 2))
    (pool,) = taken(sim)["pools"]
    cells = cells_of(pool)
    assert [cells[block] for block in first] == [(SHARED, 0)] * 4 + [(OWN, 0)]
    assert [cells[block] for block in second] == [(SHARED, 0)] * 4 + [(PUBLISHED, 1), (OWN, 1)]
    assert pool["also"] == [[], [first[0], 4]]
    rest = [cell for number, cell in enumerate(cells) if number not in {*first, *second}]
    assert sorted(set(rest)) == [(FREE, NOBODY), (CACHED, NOBODY)]
    assert rest.count((CACHED, NOBODY)) == pool["cached"] == state.cached_blocks() == 2
    assert (pool["num_blocks"], pool["each"], pool["held"], pool["free"]) == (64, 1, 7, 55)


def test_a_snapshot_lists_its_sequences_and_counts_and_nothing_of_what_was_said() -> None:
    now = taken(sharing())
    assert now["sequences"] == [
        {"seq": 1, "prompt": 18, "answer": 2, "rows": 19, "adopted": 0},
        {"seq": 2, "prompt": 21, "answer": 1, "rows": 21, "adopted": 16},
    ]
    counted = {name: now[name] for name in ("at_ms", "healthy", "step", "running", "waiting")}
    assert counted == {"at_ms": 7, "healthy": True, "step": 3, "running": 2, "waiting": 0}
    assert (now["prompt_tokens"], now["generation_tokens"]) == (49, 4)
    assert (now["prefix_queries"], now["prefix_hits"]) == (49, 16)
    numbers = [*PROMPT, *range(50, 64)]
    assert set(now) & {"tokens", "text", "external_id"} == set()
    assert str(numbers)[1:-1] not in json.dumps(now)


def test_a_big_pool_is_drawn_in_cells_of_several_blocks() -> None:
    big = Geometry(4, (Group(num_blocks=3 * CELLS_MAX - 1),))
    sim = Sim(big, WHOLE)
    sim.submit(PROMPT, 30)  # blocks 0 to 4, of which 4 are published
    sim.step()
    (pool,) = taken(sim)["pools"]
    cells = cells_of(pool)
    assert (pool["each"], len(cells)) == (3, CELLS_MAX)
    assert cells[:3] == [(PUBLISHED, 100), (PUBLISHED, 66), (FREE, 0)]
    assert len(pool["cells"]) == 4 * -(-2 * CELLS_MAX // 3)
    sim.run()
    assert cells_of(taken(sim)["pools"][0])[:2] == [(CACHED, 0), (CACHED, 0)]


def test_a_snapshot_stays_small_with_many_sequences() -> None:
    sim = Sim(
        Geometry(4, (Group(num_blocks=CELLS_MAX),)),
        structs.replace(POLICY, max_running=400, max_batch_tokens=4000),
    )
    for number in range(300):
        sim.submit([number % 60, number // 60, 3, 4, 5], 30)
    for _ in range(20):  # a step admits 16
        sim.step()
    now = taken(sim)
    assert (len(now["sequences"]), now["sequences_left_out"]) == (SEQUENCES_MAX, 300 - 256)
    sequences = sim.engine.view.state.sequences
    blocks = [len(sequences[seq].tables[0]) for seq in sorted(sequences)]
    holders = [low for state, low in cells_of(now["pools"][0]) if state in (OWN, PUBLISHED)]
    assert holders.count(NOBODY) == sum(blocks[SEQUENCES_MAX:]) > 0
    assert holders.count(3) == blocks[3] > 0
    view, counters = sim.engine.view, sim.engine.counters
    assert len(snapshot(view, counters, True, 0)) < 32 * 1024


def test_blocks_beside_a_first_holder_are_runs_and_only_so_many() -> None:
    tables = [np.array(table) for table in ([0, 1, 2], [2, 0, 5], [9, 8, 0, 1, 2, 5])]
    owner = np.array([0, 0, 0, NOBODY, NOBODY, 1, NOBODY, NOBODY, 2, 2], np.uint16)
    assert shared_runs(tables, owner) == ((), (0, 1, 2, 1), (0, 3, 5, 1))
    apart = np.arange(0, 4 * RUNS_MAX, 2)
    owner = np.zeros(4 * RUNS_MAX, np.uint16)
    first, second, third = shared_runs([apart, apart, apart], owner)
    assert (first, len(second), third) == ((), 2 * RUNS_MAX, ())
    assert second[-2:] == (2 * RUNS_MAX - 2, 1)


def test_a_window_group_has_a_pool_of_its_own_and_a_model_owned_one_has_none() -> None:
    sim = Sim(Geometry(4, (Group(num_blocks=32), Group("window", 16, window=8))))
    sim.submit(PROMPT, 30)
    sim.step()
    pools = taken(sim)["pools"]
    assert [(pool["kind"], len(cells_of(pool))) for pool in pools] == [("full", 32), ("window", 16)]
    owned = Sim(Geometry(4, (Group("opaque"),)), structs.replace(POLICY, prefix_cache=False))
    owned.submit(PROMPT, 4)
    owned.step()
    assert taken(owned)["pools"] == []
    assert [it["rows"] for it in taken(owned)["sequences"]] == [16]
