"""Memory stays flat: what a replay holds does not grow with the tape."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from replay.cli import main
from replay.divergence import HISTORY_TOKENS, History
from replay.errors import Unusable
from replay.fold import Fold
from replay.following import Following
from replay.life import Life
from replay.plan import PlanChecker
from replay.reader import PIECE_BYTES, Tape
from statemachine.codec import MAGIC
from statemachine.events import Appended
from statemachine.records import Record, StepDone, StepPlanned

from . import long_tape

ROWS = 9_000
GROWS_BYTES = 100_000
"""What one step may hold more than another; a tuple of each piece would be twice it."""


class Kept:
    """What must not be, so that the test is seen to find it: something of each piece is kept."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, int]] = []

    def feed(self, record: Record) -> None:
        """One record on."""
        if isinstance(record, StepDone):
            self.rows += [(float(row), record.step) for row in record.observation.starts]


@pytest.fixture(scope="module")
def tape(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    """A long tape with lookahead, in which requests come and go; and its steps."""
    path = tmp_path_factory.mktemp("long") / "long.log"
    return str(path), long_tape.make(path, ROWS, running=8)


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that was held at once."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def grows(path: str, steps: int, *followers: Any) -> int:
    """Bytes that are held more at the end of a tape than in its middle."""
    held: list[int] = []
    tracemalloc.start()
    try:
        for record in Tape(path):
            if isinstance(record, StepPlanned) and record.step in (steps // 2, steps):
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
            for follower in followers:
                follower.feed(record)
    finally:
        tracemalloc.stop()
    middle, end = held
    return end - middle


@pytest.mark.parametrize(
    ("make", "flat"),
    [
        (lambda: (Fold(),), True),
        (lambda: (PlanChecker(),), True),
        (lambda: (Following(), Life(3)), True),
        (lambda: (Kept(),), False),
    ],
    ids=["fold", "plan", "show", "a tuple of each piece"],
)
def test_the_second_half_of_a_tape_takes_no_more_memory(
    tape: tuple[str, int], monkeypatch: pytest.MonkeyPatch, make: Any, flat: bool
) -> None:
    monkeypatch.setattr("replay.reader.CHUNK_BYTES", 1 << 12)
    assert (grows(*tape, *make()) < GROWS_BYTES) == flat


def test_the_last_events_are_kept_of_so_many_prompt_tokens_only() -> None:
    history = History()
    prompt = tuple(range(10_000))
    for step in range(200):
        history.add(step, "StepPlanned", (Appended(1, step, 10_000, prompt, ((),), "prompt"),))
    kept = history.of(1)
    assert len(kept) == 8
    assert history.tokens == HISTORY_TOKENS // 10_000 * 10_000
    history.add(200, "StepPlanned", (Appended(1, 200, 10**6, tuple(range(10**6)), (), "prompt"),))
    assert [it.step for it in history.of(1)] == [200]


def test_a_compressed_file_that_unpacks_to_gigabytes_is_refused_in_little_memory(
    tmp_path: Path,
) -> None:
    packer = zstandard.ZstdCompressor().compressobj()
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(64)) + packer.flush()
    assert len(bomb) < 64 * PIECE_BYTES
    path = tmp_path / "bomb.zst"
    path.write_bytes(bomb)

    def read() -> None:
        with pytest.raises(Unusable, match="not a tape"):
            list(Tape(str(path)))

    # zstd's own buffers are not Python's, and are not counted.
    assert peak_bytes(read) < 24 << 20


def test_a_frame_that_claims_four_gigabytes_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from zlib import crc32

    length = (0xFFFFFFFF).to_bytes(4, "little")
    check = crc32(crc32(MAGIC).to_bytes(4, "little"), crc32(length)).to_bytes(4, "little")
    path = tmp_path / "huge.log"
    path.write_bytes(MAGIC + length + check + b"x" * 100)
    assert peak_bytes(lambda: main([str(path)])) < 4 << 20
    said = capsys.readouterr().err
    assert "a frame claims 4294967295 bytes, more than 268435456" in said
    assert said.count("\n") == 1
