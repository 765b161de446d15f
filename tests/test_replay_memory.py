"""Memory stays flat: what a replay holds does not grow with the tape."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import zstandard

from replay.cli import main
from replay.divergence import HISTORY_TOKENS, History
from replay.errors import Unusable
from replay.following import Following
from replay.life import Life
from replay.reader import PIECE_BYTES, Tape
from replay.run import Options, replay
from statemachine.codec import MAGIC
from statemachine.events import Appended
from statemachine.records import StepPlanned

from . import long_tape

ROWS = 12_000
GROWS_BYTES = 160_000
"""What the second half may add: a step has its peaks. A small object a row, kept, adds twice that."""


@pytest.fixture(scope="module")
def tape(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    """A long tape with lookahead, in which requests come and go; and its steps."""
    path = tmp_path_factory.mktemp("long") / "long.log"
    steps = long_tape.make(path, ROWS, running=8)
    return str(path), steps


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that was held at once."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def grows(run: Callable[[int], object], steps: int) -> int:
    """Bytes by which the second half of a tape raises the peak."""
    run(steps)  # caches of the process are full then
    half = peak_bytes(lambda: run(steps // 2))
    return peak_bytes(lambda: run(steps)) - half


@pytest.fixture(autouse=True)
def _small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read at once, and what waits for a collection, would hide what stays."""
    monkeypatch.setattr("replay.reader.CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr("replay.run._few_collections", nullcontext)


@pytest.mark.parametrize("depth", ["fold", "plan"])
def test_a_tape_twice_as_long_takes_no_more_memory(tape: tuple[str, int], depth: str) -> None:
    path, steps = tape
    assert grows(lambda until: replay(path, Options(depth, until=until)), steps) < GROWS_BYTES


def test_following_a_tape_to_look_at_it_takes_no_more_memory(tape: tuple[str, int]) -> None:
    path, steps = tape

    def follow(until: int) -> None:
        followers = (Following(), Life(3))
        for record in Tape(path):
            if isinstance(record, StepPlanned) and record.step > until:
                break
            for follower in followers:
                follower.feed(record)

    assert grows(follow, steps) < GROWS_BYTES


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
