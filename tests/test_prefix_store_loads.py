"""Many requests over kept prefixes: they answer as alone, and every tape is clean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve
from msgspec import structs

from statemachine.codec import TapeDecoder
from statemachine.events import (
    Event,
)
from statemachine.geometry import Geometry, Group

from .sim import Inbox, answer_alone, prompts
from .simulation_check import check_load
from .simulation_random import random_load
from .storing import STORING, Server, replays_clean


@pytest.mark.parametrize("seed", range(6))
def test_many_requests_in_a_tight_pool_answer_as_alone(tmp_path: Path, seed: int) -> None:
    """Preemptions, evictions, loads, with and without lookahead; the sanitizer finds nothing."""
    geometry = Geometry(block_size=4, groups=(Group(num_blocks=24),), identity="weights 1")
    policy = structs.replace(STORING, lookahead=bool(seed % 2), prefix_aware=seed % 3 == 0)
    asked = prompts(16, seed=seed // 2)
    totals = dict.fromkeys(("loaded", "preemptions"), 0)
    for life in range(2):
        server = Server(tmp_path / "store", geometry, policy)
        inboxes: dict[int, Inbox] = {}

        def send(number: int, server: Server = server, into: dict[int, Inbox] = inboxes) -> None:
            into[number] = server.submit(asked[number], 12)

        server.run({1 + at // 2: [lambda at=at: send(at), lambda at=at: send(at + 1)]
                    for at in range(0, 16, 2)})  # fmt: skip
        for number, inbox in inboxes.items():
            assert inbox.tokens == answer_alone(asked[number], 12, geometry=geometry)
        totals["loaded"] += server.engine.counters.kept.loaded
        totals["preemptions"] += server.engine.counters.preemptions
        assert server.engine.counters.shadow_found == 0
        assert server.engine.counters.kept.ignored == 0
        server.stop()
        replays_clean(server, tmp_path / f"{life}.log")
    assert totals["loaded"] > 5
    assert totals["preemptions"] > 0


SEEDS = tuple(range(60))


def test_random_loads_with_a_store_are_clean() -> None:
    """The simulation's loads, as far as their pools can have a store; judged as they are there."""
    had: Counter[str] = Counter()
    for seed in SEEDS:
        load = random_load(seed)
        if [group.kind for group in load.geometry.groups] != ["full"]:
            continue
        if load.geometry.hash != "xxh3":
            continue
        policy = structs.replace(load.policy, store_evicted=True, prefix_cache=True)
        played = check_load(evolve(load, policy=policy), every_event=seed % 10 == 0)
        had.update(type(it).__name__ for it in _events_of(played.tape))
    assert had["BlockStored"] > 50
    assert had["BlockLoaded"] > 10


def _events_of(tape: bytes) -> Iterator[Event]:
    for record in TapeDecoder().feed(tape):
        yield from getattr(record, "events", ())
