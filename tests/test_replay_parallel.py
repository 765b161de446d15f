"""Segments of a folder replayed side by side: what one pass over all of them finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from msgspec import structs

from kernel.fake import FakeClock, FakeKernel
from replay.cli import main
from replay.divergence import Divergence
from replay.parallel import replay_segments
from replay.reader import Tape, segments_of
from replay.run import CLEAN, DIVERGED, FOLD, PLAN, TORN, Options, Outcome, replay
from server.capture import CaptureWriter
from server.engine import Engine
from server.loop import Parts
from server.submission import Submission
from statemachine.codec import TapeEncoder
from statemachine.records import Checkpoint, Header, Parameters, Record, StepDone, StepPlanned

from .sim import POLICY, TIGHT, header, prompts
from .tampering import changed, first_step

JOBS = 2
Change = Callable[[list[Record]], list[Record]]


@pytest.fixture(scope="module")
def segments(tmp_path_factory: pytest.TempPathFactory) -> list[list[Record]]:
    """The records of each segment of a capture."""
    folder = tmp_path_factory.mktemp("captures")
    writer = CaptureWriter(f"{folder}/", segment_bytes=1800)
    parts = Parts(FakeKernel(TIGHT), POLICY, writer, header(TIGHT, POLICY))
    engine = Engine(lambda: parts, clock=FakeClock())
    engine.open()
    for number, prompt in enumerate(prompts(12, seed=5)):
        engine.submit(Submission(prompt, Parameters(10, seed=number)), lambda update: None)
    while engine.step():
        pass
    engine.stop()
    found = [list(Tape(str(file))) for file in sorted(folder.iterdir())]
    assert len(found) > 4
    return found


def folder_of(folder: Path, segments: list[list[Record]], number: int, change: Change) -> str:
    """A folder of the segments, one of them changed."""
    for at, records in enumerate(segments):
        mine = change(records) if at == number else records
        (folder / f"000001-{at:05}.tape").write_bytes(TapeEncoder().encode(mine))
    return str(folder)


def both(folder: str, **options: Any) -> tuple[Outcome, Outcome]:
    """By one pass, and by processes."""
    asked = Options(**options)
    return replay(folder, asked), replay_segments(folder, asked, JOBS)


def told(outcome: Outcome) -> dict[str, Any]:
    """All that an outcome says, the events before a divergence apart: a pass that began later
    knows fewer of these.
    """
    found = {name: getattr(outcome, name) for name in Outcome.__slots__ if name[0] != "_"}
    if outcome.divergence is not None:
        found["divergence"] = structs.replace(outcome.divergence, last_events=())
        del found["counts"]  # a pass that ends early has compared less of what is beside it
    return found


@pytest.mark.parametrize("depth", [FOLD, PLAN])
def test_a_clean_folder_is_told_as_by_one_pass(
    tmp_path: Path, segments: list[list[Record]], depth: str
) -> None:
    one, many = both(folder_of(tmp_path, segments, 0, list), depth=depth)
    assert one.exit_code == CLEAN
    assert one.counts.steps > 10
    assert told(many) == told(one)


def wrong_digest(records: list[Record]) -> list[Record]:
    place = first_step(records, lambda it: isinstance(it, StepDone))
    return changed(records, place, digest=7)


def wrong_token(records: list[Record]) -> list[Record]:
    """The scheduler is told of other samples than those that the next step appends."""
    place = first_step(records, lambda it: isinstance(it, StepDone) and len(it.tokens) > 2)
    tokens = getattr(records[place], "tokens")  # noqa: B009
    return changed(records, place, tokens=tuple(token ^ 1 for token in tokens))


def no_last_answer(records: list[Record]) -> list[Record]:
    """A step is in flight where the next segment begins."""
    last = max(at for at, it in enumerate(records) if isinstance(it, StepDone))
    return records[:last]


def no_last_step(records: list[Record]) -> list[Record]:
    """All is in order, and the next segment begins from another state."""
    last = max(at for at, it in enumerate(records) if isinstance(it, StepPlanned))
    return records[:last]


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("change", [wrong_digest, wrong_token, no_last_answer, no_last_step])
def test_the_first_divergence_is_the_one_that_one_pass_finds(
    tmp_path: Path, segments: list[list[Record]], change: Change, number: int
) -> None:
    one, many = both(folder_of(tmp_path, segments, number, change), depth=PLAN)
    assert one.exit_code == DIVERGED
    assert told(many) == told(one)


def test_of_two_divergences_the_earlier_is_told(
    tmp_path: Path, segments: list[list[Record]]
) -> None:
    twice = [wrong_digest(it) if at == 3 else it for at, it in enumerate(segments)]
    one, many = both(folder_of(tmp_path, twice, 1, wrong_digest), depth=FOLD)
    assert isinstance(one.divergence, Divergence)
    assert told(many) == told(one)


def test_a_tape_that_was_cut_is_torn(tmp_path: Path, segments: list[list[Record]]) -> None:
    one, many = both(folder_of(tmp_path, segments, len(segments) - 1, lambda it: it[:-1]))
    assert one.exit_code == TORN
    assert told(many) == told(one)


@pytest.mark.parametrize("kept", [0, 5, 60, -7])
def test_a_last_segment_that_was_cut_anywhere_is_torn(
    tmp_path: Path, segments: list[list[Record]], kept: int
) -> None:
    folder = folder_of(tmp_path, segments, 0, list)
    last = sorted(tmp_path.iterdir())[-1]
    last.write_bytes(last.read_bytes()[:kept])
    one, many = both(folder, depth=PLAN)
    assert one.exit_code == TORN
    assert told(many) == told(one)


def test_a_segment_without_a_checkpoint_cannot_be_started_from(
    tmp_path: Path, segments: list[list[Record]], capsys: pytest.CaptureFixture[str]
) -> None:
    def without(records: list[Record]) -> list[Record]:
        return [it for it in records if not isinstance(it, Checkpoint)]

    folder = folder_of(tmp_path, segments, 2, without)
    assert replay(folder, Options(PLAN)).exit_code == CLEAN
    assert main([folder, "--depth", "plan", "--jobs", "2"]) == 2
    assert "has no checkpoint to start from: replay without --jobs" in capsys.readouterr().err


def test_one_file_is_replayed_as_ever_and_says_so(
    tmp_path: Path, segments: list[list[Record]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.log"
    path.write_bytes(TapeEncoder().encode(segments[0]))
    assert main([str(path), "--jobs", "4", "--json"]) == TORN
    report = json.loads(capsys.readouterr().out)
    assert "it has one segment: there was nothing to share among processes" in report["notes"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--depth", "forward"], "--jobs is for fold and plan: at forward, the model is shared"),
        (["--from", "3"], "--jobs replays a whole tape: leave out --from and --until, or --jobs"),
        (["--until", "3"], "--jobs replays a whole tape: leave out --from and --until, or --jobs"),
    ],
)
def test_what_jobs_do_not_go_with_is_refused_in_a_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["any.log", "--jobs", "2", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_segment_of_another_run_is_refused(tmp_path: Path, segments: list[list[Record]]) -> None:
    def other(records: list[Record]) -> list[Record]:
        first = records[0]
        assert isinstance(first, Header)
        return [structs.replace(first, model="another"), *records[1:]]

    folder = folder_of(tmp_path, segments, 2, other)
    with pytest.raises(Exception, match="is of another run than the segment before it"):
        replay_segments(folder, Options(), JOBS)


def test_a_segment_that_is_compressed_once_the_folder_was_looked_at_is_read_all_the_same(
    tmp_path: Path, segments: list[list[Record]]
) -> None:
    folder = folder_of(tmp_path, segments, 0, list)
    (first, *_) = segments_of(folder, [])
    place = Path(first.sources[0])
    packed = zstandard.ZstdCompressor().compress(place.read_bytes())
    place.with_name(place.name + ".zst").write_bytes(packed)
    place.unlink()
    tape = Tape(folder, segment=first)
    assert list(tape)[: len(segments[0])] == segments[0]
    assert tape.bytes_total == len(packed)
