"""A wrong cache and the prefix store: what a server computed before it is left to no other one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel.fake import FakeKernel
from server.engine import Engine
from server.kept import KeptBlocks
from server.live_guard import MODES, WARN
from server.parts import Parts
from server.prefix_store import PrefixStore
from server.submission import Submission
from statemachine.records import Parameters

from .sim import FakeClock, Inbox, MemoryCapture, header
from .storing import GEOMETRY, PROMPT, STORING, files, warm
from .test_live_guard import Lying, start_of

WRONG_STEP = 4
STOPS = [mode for mode in MODES if mode != WARN]


def _guarded(folder: Path, mode: str) -> Engine:
    kernel: FakeKernel = Lying(GEOMETRY, {WRONG_STEP: start_of(0, 3)})
    store = PrefixStore(folder, 1 << 30, GEOMETRY, kernel.block_spec, ("here",))
    parts = Parts(
        kernel,
        STORING,
        MemoryCapture(),
        header(GEOMETRY, STORING),
        kept=KeptBlocks(store, kernel, GEOMETRY),
        on_divergence=mode,
    )
    engine = Engine(lambda: parts, clock=FakeClock())
    engine.open()
    return engine


def _end_at_the_wrong_step(engine: Engine) -> Inbox:
    """Serve until a step is found wrong, and stop the engine before it takes another turn."""
    inbox = Inbox()
    engine.submit(Submission(PROMPT, Parameters(40)), inbox)
    while not engine.status()["divergences"]:
        assert engine.step()
    engine.stop()
    return inbox


@pytest.mark.parametrize("mode", STOPS)
def test_a_server_that_ends_as_its_cache_is_found_wrong_leaves_no_block_to_the_next(
    mode: str, tmp_path: Path
) -> None:
    warm(tmp_path, tuple(range(60, 83)))
    assert len(files(tmp_path)) == 7
    inbox = _end_at_the_wrong_step(_guarded(tmp_path, mode))
    assert inbox.reason == "error"
    assert files(tmp_path) == []


def test_a_server_that_is_told_to_warn_only_keeps_its_blocks(tmp_path: Path) -> None:
    assert _end_at_the_wrong_step(_guarded(tmp_path, WARN)).reason == "cancelled"
    assert len(files(tmp_path)) == 6
