"""`replay bisect`: the first bad step of a long capture, and of a command."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import attrs
import pytest
from msgspec import structs

from replay.bisect import BisectReport, bisect
from replay.bisect_command import bisect_command
from replay.cli import main
from replay.reader import Tape
from statemachine.codec import TapeEncoder
from statemachine.records import Checkpoint, Record, RequestArrived, StepDone

from .sim import POLICY, SMALL, Sim
from .simulation_play import play
from .simulation_random import random_load
from .tampering import write

SEED = 32
"""A load with lookahead, in some twenty segments."""


@pytest.fixture
def captures(tmp_path: Path) -> Path:
    folder = tmp_path / "captures"
    load = attrs.evolve(random_load(SEED), fail={}, full_disk={}, segment_bytes=300)
    play(load, folder)
    return folder


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.tape*"))


def spoil(segment: Path, kind: type[Record] = StepDone, last: bool = False) -> int:
    """Write another digest into one record of a segment; returns its step."""
    records = list(Tape(str(segment)))
    places = [at for at, it in enumerate(records) if isinstance(it, kind)]
    place = places[-1 if last else 0]
    found = records[place]
    assert isinstance(found, StepDone | Checkpoint)
    records[place] = structs.replace(found, digest=found.digest ^ 1)
    segment.unlink()
    plain = segment.with_name(segment.name.removesuffix(".zst"))
    plain.write_bytes(TapeEncoder().encode(records))
    return found.step


def looked_at(report: BisectReport) -> list[int]:
    return [probe.segment for probe in report.probes]


def test_what_stays_wrong_is_found_with_few_segments_judged(captures: Path) -> None:
    files = segments(captures)
    assert len(files) >= 16
    steps = {number: spoil(files[number]) for number in range(5, len(files))}
    report = bisect(str(captures))
    assert (report.exit_code, report.segment, report.step) == (1, 5, steps[5])
    assert (report.kind, report.in_order) == ("fold", False)
    assert report.verdict.startswith(f"FIRST BAD STEP {steps[5]}, in segment 5 (")
    # The last one, then halves.
    assert len(report.probes) <= 1 + len(files).bit_length()
    assert {4, 5} <= set(looked_at(report))
    assert report.trusted == len(files) - len(report.probes)


def test_where_the_last_segment_is_clean_they_are_judged_in_order(captures: Path) -> None:
    files = segments(captures)
    step = spoil(files[3])
    report = bisect(str(captures))
    assert (report.segment, report.step, report.in_order) == (3, step, True)
    assert looked_at(report) == [len(files) - 1, 0, 1, 2, 3]


def test_every_segment_is_judged_when_that_is_asked_for(captures: Path) -> None:
    files = segments(captures)
    first, _ = spoil(files[2]), spoil(files[-1])
    report = bisect(str(captures), every=True)
    assert (report.segment, report.step, looked_at(report)) == (2, first, [0, 1, 2])
    # On trust the halves go astray: 3 to the last but one are clean.
    assert bisect(str(captures)).segment == len(files) - 1


def test_a_segment_must_lead_to_the_next_ones_checkpoint(captures: Path) -> None:
    files = segments(captures)
    step = spoil(files[4], Checkpoint)
    report = bisect(str(captures), every=True)
    assert (report.segment, report.step) == (3, step)
    assert "the recorded state has digest" in report.summary


def test_a_clean_capture_is_clean_at_both_depths(captures: Path) -> None:
    for depth in ("fold", "plan"):
        report = bisect(str(captures), depth)
        assert (report.exit_code, report.step, report.trusted) == (0, -1, 0), depth
        assert report.verdict.startswith("CLEAN: no segment is bad")


def judge(program: str) -> str:
    return shlex.join([sys.executable, "-c", program, "{tape}"])


MANY = """
import sys
from replay.reader import Tape
from statemachine.records import StepDone
steps = [it.step for it in Tape(sys.argv[1]) if isinstance(it, StepDone)]
sys.exit(len(steps) > 6)
"""


def plain(folder: Path) -> str:
    sim = Sim(SMALL, POLICY)
    for prompt in ((1, 2, 3), (4, 5, 6)):
        sim.submit(prompt, 20)
    sim.run()
    sim.engine.stop()
    return write(folder, sim.capture.records)


def test_a_command_judges_beginnings_of_the_tape(tmp_path: Path) -> None:
    path = plain(tmp_path)
    report = bisect_command(path, [judge(MANY)])
    assert (report.exit_code, report.step, report.segment) == (1, 7, -1)
    assert len(report.probes) <= 6
    assert {6, 7} <= {probe.last_step for probe in report.probes}


def test_segments_are_one_beginning_for_a_command(captures: Path) -> None:
    report = bisect_command(str(captures), [judge(MANY)])
    assert report.step == 7


def test_two_commands_are_searched_for_where_they_disagree(tmp_path: Path) -> None:
    path = plain(tmp_path)
    later = MANY.replace("> 6", "> 11")
    # Behind the twelfth step both fail, and agree again: the tape's end must show the difference.
    never = "raise SystemExit(3)"
    assert bisect_command(path, [judge(MANY), judge(never)]).step == 7
    assert bisect_command(path, [judge(MANY), judge(later)]).exit_code == 0


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("true", "'true' has no {tape}"),
        ("nowhere-to-be-found {tape}", "nowhere-to-be-found cannot be run"),
        (
            "sh -c 'echo broken >&2; exit 4' {tape}",
            "sh exited with 4, where 0 is good and 1 is bad: broken",
        ),
        ("'", "cannot be read: No closing quotation"),
    ],
)
def test_a_command_that_judges_nothing_is_one_sentence(
    command: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bisect", plain(tmp_path), "--command", command]) == 2
    assert said in capsys.readouterr().err


def test_a_tape_without_steps_has_nothing_to_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [it for it in Tape(plain(tmp_path)) if not isinstance(it, StepDone)]
    start = next(at for at, it in enumerate(records) if isinstance(it, RequestArrived))
    path = write(tmp_path, records[:start])
    assert main(["bisect", path, "--command", "true {tape}"]) == 2
    assert "has no step that was answered" in capsys.readouterr().err
    assert main(["bisect", path, "--command", "true {tape}", "--every"]) == 2
    assert "leave out --depth and --every" in capsys.readouterr().err


def test_the_report_says_where_to_look(captures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = spoil(segments(captures)[-1])
    assert main(["bisect", str(captures), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["format"], report["step"]) == (1, step)
    assert main(["bisect", str(captures)]) == 1
    said = capsys.readouterr().out
    assert f"try: replay {captures} --from {step} --until {step}" in said
    assert "not looked at: what went wrong is taken to stay wrong" in said
