"""P37, P38: what is carried from one run to the next: nothing that a flush does not empty."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kernel import expected, shadow
from kernel.fake import FakeKernel, run_pinned
from server.engine import Engine
from server.loop import Parts
from server.policy import Policy
from server.submission import Submission
from statemachine.geometry import Geometry, Group
from statemachine.records import (
    FlushRequested,
    Parameters,
    RequestArrived,
    StepDone,
    StepPlanned,
)

from ..sim import Inbox, Sim
from .serving import replays

ROOM = Geometry(4, (Group(num_blocks=64),))
POLICY = Policy(max_batch_tokens=64, prefill_chunk=16, context_tokens=64)
TIMED = tuple(tuple(range(n, n + 20 + n)) for n in range(5))
WARM_UPS = {"none": None, "another text": (60,) * 24, "the first request": TIMED[0]}


def timed(warm_up: tuple[int, ...] | None, policy: Policy, folder: Path) -> list[Any]:
    """Cached counts and tokens of five requests, one after the other, after a warm-up."""
    sim = Sim(ROOM, policy)
    if warm_up is not None:
        sim.submit(warm_up, 8)
        sim.run()
        assert sim.engine.status()["cached"] > 0
        sim.engine.flush()
        sim.run()
    assert sim.engine.status()["free"] == 64
    assert not sim.engine.view.state.sequences
    found: list[Any] = []
    for prompt in TIMED:
        inbox = sim.submit(prompt, 8)
        sim.run()
        found.append((inbox.cached_tokens, inbox.tokens))
    sim.engine.stop()
    _reset_stands_between(sim, warm_up is not None)
    replays(sim.capture.records, folder)
    return found


def _reset_stands_between(sim: Sim, warmed: bool) -> None:
    """On tape: the warm-up, the flush, and then the first timed request at offset 0."""
    inputs = [r for r in sim.capture.records if isinstance(r, RequestArrived | FlushRequested)]
    kinds = [type(record).__name__ for record in inputs]
    before = ["RequestArrived", "FlushRequested"] if warmed else []
    assert kinds == before + ["RequestArrived"] * len(TIMED)
    first = len(before) // 2
    plans = (r for r in sim.capture.records if isinstance(r, StepPlanned))
    kinds = next(
        [type(event).__name__ for event in plan.events]
        for plan in plans
        if any(getattr(event, "seq", -1) == first for event in plan.events)
    )
    assert kinds == ["Opened", "Appended"], "nothing was adopted"
    done = next(r for r in sim.records(StepDone) if r.observation.starts)
    assert done.observation.starts == (0,)


@pytest.mark.parametrize("lookahead", [False, True])
def test_p37_timed_requests_are_the_same_after_any_warm_up_and_a_flush(
    lookahead: bool, tmp_path: Path
) -> None:
    policy = structs.replace(POLICY, lookahead=lookahead)
    runs = {name: timed(warm_up, policy, tmp_path) for name, warm_up in WARM_UPS.items()}
    assert runs["none"][0][0] == 0
    assert runs["another text"] == runs["none"]
    assert runs["the first request"] == runs["none"]


class Letters:
    """A detokeniser that keeps all that it was fed."""

    def __init__(self) -> None:
        self.text = ""

    def add(self, token: int) -> str:
        self.text += chr(ord("0") + token)
        return self.text[-1]

    def finish(self) -> str:
        return ""


def sizes(engine: Engine) -> dict[str, int]:
    """Every table, map and queue that knows a request."""
    loop, view = engine._opened_loop(), engine.view
    return {
        "requests": len(view.requests),
        "waiting": len(view.waiting),
        "running": len(view.running),
        "closing": len(view.closing),
        "alone": len(view.alone),
        "flights": len(view.flights) + len(loop._flights),
        "sequences": len(view.state.sequences),
        "clients": len(loop._clients),
        "texts": len(loop._clients._texts),
        "lost": len(loop._clients.lost),
        "inbox": len(engine._inbox),
        "unwritten": len(loop._writes),
    }


def test_p38_a_thousand_cycles_leave_every_table_as_small_as_the_first_and_memory_flat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Start, cancel and finish, with stop strings. Without a tape, which grows by its nature.

    The sanitizer remembers a stated number of sequences, ended ones too: here 32, which are there
    after 100 cycles.
    """
    monkeypatch.setattr(shadow, "SEQUENCES_MAX", 32)
    monkeypatch.setattr(expected, "SEQUENCES_MAX", 32)
    policy = structs.replace(POLICY, lookahead=True, draft_tokens=2)
    kernel = FakeKernel(ROOM)
    engine = Engine(lambda: Parts(kernel, policy, decoder=Letters))
    engine.open()
    first, blocks = {}, {}
    for cycle in range(1, 1001):
        for number, rows in enumerate((5, 6)):
            given = Parameters(3, stop=("never", "Q"))
            submission = Submission(((cycle + number) % 50,) * rows, given)
            request = engine.submit(submission, Inbox())
        engine.step()
        engine.cancel(request)
        run_pinned(engine, {})
        kernel.batches.clear()
        if cycle == 1:
            first = sizes(engine)
        assert sizes(engine) == first
        if cycle in (100, 1000):
            gc.collect()
            blocks[cycle] = sys.getallocatedblocks()
    assert set(first.values()) == {0}
    assert engine.status()["held"] == 0
    # One object kept for each request would be 1,800 more.
    assert blocks[1000] - blocks[100] < 900
