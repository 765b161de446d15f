"""Tapes that grow while they are followed, and what `replay follow` says of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kernel.fake import FakeClock, FakeKernel
from replay.follow import Follower, FollowReport, Options
from server.capture import CaptureWriter
from server.engine import Engine
from server.loop import Parts
from server.submission import Submission
from statemachine.records import Parameters

from .sim import POLICY, TIGHT, header, prompts

ACT = Callable[[], object]


def server(path: str | Path, **options: Any) -> Engine:
    """An engine over the fake kernel that writes to a path, with requests in its queue."""
    writer = CaptureWriter(path, **options)
    parts = Parts(FakeKernel(TIGHT), POLICY, writer, header(TIGHT, POLICY))
    engine = Engine(lambda: parts, clock=FakeClock())
    engine.open()
    for number, prompt in enumerate(prompts(8, seed=5)):
        engine.submit(Submission(prompt, Parameters(10, seed=number)), lambda update: None)
    return engine


def follow(
    path: str | Path, acts: Sequence[ACT] = (), **options: Any
) -> tuple[int, list[FollowReport]]:
    """Follow a tape, with one act after each look at it; then it is stopped by hand."""
    said: list[FollowReport] = []
    turns = iter(acts)

    def wait() -> None:
        act = next(turns, None)
        if act is None:
            raise KeyboardInterrupt
        act()

    settings = Options(**{"between_s": 1e9, **options})
    code = Follower(str(path), settings, said.append, FakeClock()).run(wait)
    assert next(turns, None) is None, "it ended before all of the acts"
    return code, said


def texts(said: list[FollowReport]) -> list[str]:
    return [it.text for it in said]


def segments_in(tmp_path: Path) -> Path:
    """A closed capture in a folder of uncompressed segments."""
    import zstandard

    folder = tmp_path / "captures"
    folder.mkdir()
    engine = server(folder, segment_bytes=600)
    while engine.step():
        pass
    engine.stop()
    for packed in folder.glob("*.zst"):
        with packed.open("rb") as file:
            data = zstandard.ZstdDecompressor().stream_reader(file).read()
        packed.with_suffix("").write_bytes(data)
        packed.unlink()
    return folder
