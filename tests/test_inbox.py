"""The engine's inbox while a step takes long: what is counted as waiting, and at what cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from server.engine import QueueFull

from .follow import clean
from .sim import Sim


class Counted(list[Any]):
    """An inbox that counts what is looked at."""

    looked = 0

    def __iter__(self) -> Iterator[Any]:
        for given in super().__iter__():
            self.looked += 1
            yield given


def test_requests_in_the_inbox_wait_and_what_else_is_in_it_does_not() -> None:
    sim = Sim(waiting_max=4)
    sim.submit([1, 2], 4)
    sim.step()
    sim.engine.cancel(0)
    sim.engine.flush()
    for number in range(2):
        sim.submit([3, number], 2)
    sim.engine.cancel(1)
    for number in range(2, 4):
        sim.submit([3, number], 2)
    sim.engine.cancel(7)
    with pytest.raises(QueueFull, match=r"^4 requests are waiting already"):
        sim.submit([9, 9], 2)
    sim.step()
    sim.submit([4, 4], 2)
    sim.run()
    assert [sim.inboxes[number].reason for number in range(6)] == [
        *("cancelled", "cancelled", "length", "length", "length", "length"),
    ]
    clean(sim)


def test_a_request_behind_many_in_the_inbox_costs_no_walk_over_them() -> None:
    sim = Sim(waiting_max=100)
    inbox = Counted()
    sim.engine._inbox = inbox
    for number in range(100):
        sim.submit([1, number], 1)
    assert inbox.looked == 99
    with pytest.raises(QueueFull, match=r"^100 requests are waiting already"):
        sim.submit([1, 100], 1)
    sim.run()
    clean(sim)
