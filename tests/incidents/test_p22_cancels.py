"""P22: a cancel at every point of a request's life reaches the scheduler once, and ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from server.policy import Policy
from server.submission import Submission
from statemachine.events import Closed, Forked, Opened
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters, RequestCancelled

from ..sim import Inbox, Sim, answer_alone
from .serving import settle

ROOM = Geometry(4, (Group(num_blocks=96),))
POLICY = Policy(max_batch_tokens=64, prefill_chunk=16, prefix_cache=False, context_tokens=128)
PROMPT = tuple(n % 50 for n in range(80))
LAST_CHUNK = 5
POINTS = {
    "before chunk 1": 1,
    "between chunks 2 and 3": 3,
    "before the last chunk": LAST_CHUNK,
    "at the hand-over to decode": LAST_CHUNK + 1,
    "after token 1": LAST_CHUNK + 2,
    "after token 4": LAST_CHUNK + 5,
}


class Scene:
    """A neighbour that runs all the while, and requests of one prompt that are cancelled."""

    def __init__(self, lookahead: bool, children: int) -> None:
        self.sim = Sim(ROOM, structs.replace(POLICY, lookahead=lookahead))
        self.neighbour = self.sim.submit([7] * 9, 20)
        self.inboxes = [self._send(number) for number in range(children)]

    def _send(self, number: int) -> Inbox:
        inbox = Inbox()
        parameters = Parameters(20, temperature=1.0, seed=1 + number)
        given = Submission(PROMPT, parameters, parent=1 if number else -1)
        assert self.sim.engine.submit(given, inbox) == 1 + number
        return inbox

    def cancel(self, at: int, requests: tuple[int, ...]) -> None:
        """Cancel before step `at`, from a client that may say it twice."""
        engine = self.sim.engine
        self.sim.run({at: [lambda: [engine.cancel(request) for request in requests * 2]]})

    def steps_of(self, request: int) -> list[int]:
        """The steps that had rows of a request."""
        batches: list[Any] = self.sim.kernel.batches
        return [b.step for b in batches if any(p.sequence.id == request for p in b.pieces)]

    def ended_once(self, request: int, at: int) -> None:
        """One abort, one close of what was opened, no forward after it."""
        sim, inbox = self.sim, self.inboxes[request - 1]
        assert inbox.reason == "cancelled"
        assert [r for r in sim.records(RequestCancelled) if r.request == request] == [
            RequestCancelled(request)
        ]
        closes = [e for e in sim.events(Closed) if e.seq == request]
        opens = [e for e in (*sim.events(Opened), *sim.events(Forked)) if _new(e) == request]
        assert len(closes) == len({_new(e) for e in opens})
        assert all(close.reason == "cancelled" for close in closes)
        assert all(step < at for step in self.steps_of(request))
        assert inbox.tokens == alone(seed=request)[: len(inbox.tokens)]


def _new(event: Opened | Forked) -> int:
    return event.seq if isinstance(event, Opened) else event.child


def alone(seed: int) -> tuple[int, ...]:
    cold = structs.replace(POLICY, max_batch_tokens=512, prefill_chunk=128)
    return answer_alone(PROMPT, 20, ROOM, cold, temperature=1.0, seed=seed)


@pytest.mark.parametrize("lookahead", [False, True], ids=["plain", "lookahead"])
@pytest.mark.parametrize("point", POINTS)
def test_p22_a_cancel_at_any_point_is_one_abort_and_one_close(
    point: str, lookahead: bool, tmp_path: Path
) -> None:
    scene, at = Scene(lookahead, 1), POINTS[point]
    scene.cancel(at, (1,))
    scene.ended_once(1, at)
    assert len(scene.steps_of(1)) == at - 1
    told = max(0, at - LAST_CHUNK - int(lookahead))
    assert len(scene.inboxes[0].tokens) == told
    assert scene.neighbour.reason == "length"
    assert scene.neighbour.tokens == answer_alone([7] * 9, 20, ROOM, POLICY)
    settle(scene.sim, tmp_path)


@pytest.mark.parametrize("lookahead", [False, True], ids=["plain", "lookahead"])
@pytest.mark.parametrize("point", POINTS)
def test_p22_of_two_children_each_has_its_own_abort(
    point: str, lookahead: bool, tmp_path: Path
) -> None:
    scene, at = Scene(lookahead, 2), POINTS[point]
    scene.cancel(at, (1, 2))
    for request in (1, 2):
        scene.ended_once(request, at)
    settle(scene.sim, tmp_path)


@pytest.mark.parametrize("lookahead", [False, True], ids=["plain", "lookahead"])
@pytest.mark.parametrize("gone", [1, 2], ids=["parent", "child"])
@pytest.mark.parametrize("at", [3, LAST_CHUNK + 1, LAST_CHUNK + 2, LAST_CHUNK + 3])
def test_p22_a_child_goes_on_without_its_parent_and_a_parent_without_its_child(
    at: int, gone: int, lookahead: bool, tmp_path: Path
) -> None:
    scene = Scene(lookahead, 2)
    scene.cancel(at, (gone,))
    scene.ended_once(gone, at)
    stays = 3 - gone
    assert scene.inboxes[stays - 1].tokens == alone(seed=stays)
    assert scene.inboxes[stays - 1].reason == "length"
    settle(scene.sim, tmp_path)
