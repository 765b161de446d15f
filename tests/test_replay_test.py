"""`replay test`: the file fails while a fault is in the code, and passes once it is out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from replay import pytestfile
from replay.again import inputs_of, run_again
from replay.cli import main
from replay.errors import Unusable
from replay.judge import first_divergence
from replay.minimize import minimize
from replay.pytestfile import TestReport, found_again, write_test
from replay.reader import Tape
from replay.run import PLAN, Options, checker_for
from statemachine.codec import TapeEncoder
from statemachine.records import Checkpoint, Header, StepDone, StepFailed, StepTimed

from .faults import loads, real
from .faults.catalogue import BY_NAME
from .faults.fault import Witness
from .faults.loads import Load
from .faults.runner import record

ROOT = Path(__file__).parent.parent
SHALLOWEST = Options(depth="")
FAULTS = (
    *("S1", "S2", "S3", "S4", "S9", "S13", "S14-sink", "pad-visible", "neighbours-table"),
    *("shared-block-written", "refs-stay", "S3-lookahead", "lookahead-slot", "fork-not-copied"),
    *("pads-not-trimmed", "S3-one-ahead", "copy-skipped", "wrong-victim", "end-token-missed"),
    *("cancel-leaks", "preempted-in-flight", "checkpoint-in-flight", "not-rewound-at-stop-string"),
)
UNSEEN = ("salt-not-in-key", "version-not-in-key")
"""Rules that both sides share, of which no answer tells."""


def taped(name: str, folder: Path) -> Path:
    """A fault's load on tape."""
    tape = folder / f"{name}.log"
    record(BY_NAME[name].load, tape, BY_NAME[name], Witness())
    return tape


def the_test(file: Path) -> Callable[[], None]:
    """What is in a file that was written."""
    names: dict[str, object] = {"__file__": str(file), "__name__": file.stem}
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), names)
    found = names["test_what_came_in_then_is_served_rightly"]
    assert callable(found)
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_the_file_passes_without_the_fault_and_fails_with_it(name: str, tmp_path: Path) -> None:
    file = tmp_path / "test_incident.py"
    report = write_test(str(taped(name, tmp_path)), str(file), SHALLOWEST)
    assert report.fails_now == ""
    the_test(file)()
    with BY_NAME[name].active(Witness(step=1)), pytest.raises(AssertionError):
        the_test(file)()


@pytest.mark.parametrize("name", ["S1", "S9", "pads-not-trimmed", "lookahead-slot"])
def test_so_does_the_file_of_a_minimized_tape(name: str, tmp_path: Path) -> None:
    file, small = tmp_path / "test_incident.py", tmp_path / "small.log"
    minimize(str(taped(name, tmp_path)), str(small), SHALLOWEST)
    write_test(str(small), str(file), SHALLOWEST)
    the_test(file)()
    with BY_NAME[name].active(Witness(step=1)), pytest.raises(AssertionError):
        the_test(file)()


@pytest.mark.parametrize(("name", "requests"), [("S2", 2), ("S3-lookahead", 2), ("S1", 1)])
def test_minimized_again_with_the_fault_in_the_code_it_fails_now(
    name: str, requests: int, tmp_path: Path
) -> None:
    """What a batch neighbour or a pool is needed for stays, though the tape diverges without."""
    tape, small, file = taped(name, tmp_path), tmp_path / "small.log", tmp_path / "test_x.py"
    with BY_NAME[name].active(Witness(step=1)):
        report = minimize(str(tape), str(small), SHALLOWEST, again=True)
        assert report.after.requests == requests
        assert write_test(str(small), str(file), SHALLOWEST).fails_now.startswith("step ")
    the_test(file)()
    with pytest.raises(Unusable, match="lead to no divergence"):
        minimize(str(tape), str(small), SHALLOWEST, again=True)


@pytest.mark.parametrize("name", UNSEEN)
def test_what_such_a_test_cannot_see_is_what_the_docs_say(name: str, tmp_path: Path) -> None:
    tape = taped(name, tmp_path)
    with BY_NAME[name].active(Witness(step=1)):
        assert found_again(tape.read_bytes()) == ""


def every_kind_of_load() -> list[Load]:
    return [
        loads.MIXED, loads.TIGHT, loads.EVAL_FAILS, loads.BUILD_FAILS, loads.WINDOWS,
        loads.CANCELS, loads.ENDING, loads.AHEAD, loads.AHEAD_STOPS, loads.AHEAD_EVAL_FAILS,
        loads.AHEAD_BUILD_FAILS, loads.DRAFTS, loads.BOTH, loads.FORKS, loads.FLUSHED,
        loads.PRIORITIES, loads.STARVING, loads.QUEUED,
    ]  # fmt: skip


@pytest.mark.parametrize("load", every_kind_of_load(), ids=lambda load: load.name)
def test_inputs_that_are_run_again_lead_to_the_same_tape(load: Load, tmp_path: Path) -> None:
    """Arrivals, cancels, flushes, stop strings and failures, each at the step that saw it."""
    tape = tmp_path / "tape.log"
    record(load, tape)
    recorded = list(Tape(str(tape)))
    again = run_again(inputs_of(recorded))
    kept = [
        [
            # What was drawn behind a guess that is not taken, or an end, is in nobody's answer.
            structs.replace(it, tokens=()) if isinstance(it, StepDone) else it
            for it in records
            if not isinstance(it, StepTimed | Header | StepFailed)
        ]
        for records in (recorded, again)
    ]
    assert kept[0] == kept[1]
    failed = [
        [(it.step, it.stage, it.blamed, it.events) for it in records if isinstance(it, StepFailed)]
        for records in (recorded, again)
    ]
    assert failed[0] == failed[1]
    assert first_divergence(again, Options(PLAN), checker_for) is None


def test_the_file_is_one_that_pytest_runs_and_says_what_it_sees(tmp_path: Path) -> None:
    file = tmp_path / "test_incident.py"
    assert main(["test", str(taped("S1", tmp_path)), "-o", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    assert "the caches saw start 64, where the state has 37" in text
    assert "cannot see faults in MLX arithmetic" in " ".join(text.split())
    assert max(len(line) for line in text.splitlines()) <= 100
    assert run_pytest(file).returncode == 0
    (tmp_path / "conftest.py").write_text(
        "import pytest\n"
        "from tests.faults.catalogue import BY_NAME\n"
        "from tests.faults.fault import Witness\n\n"
        "@pytest.fixture(autouse=True)\n"
        "def fault():\n"
        "    with BY_NAME['S1'].active(Witness(step=1)):\n"
        "        yield\n"
    )
    done = run_pytest(file)
    assert done.returncode == 1
    assert "the caches saw start 64, where the state has 37" in done.stdout


def run_pytest(file: Path) -> subprocess.CompletedProcess[str]:
    """A test file in an interpreter of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    return subprocess.run(
        [*command, "--rootdir", str(file.parent)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_large_tape_lies_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytestfile, "EMBEDDED_MAX", 100)
    file = tmp_path / "test_incident.py"
    report = write_test(str(taped("S1", tmp_path)), str(file), SHALLOWEST)
    assert report.beside == "test_incident.tape"
    assert (tmp_path / report.beside).exists()
    the_test(file)()
    with BY_NAME["S1"].active(Witness(step=1)), pytest.raises(AssertionError):
        the_test(file)()


def test_a_fault_in_a_layer_is_seen_with_the_model(tmp_path: Path) -> None:
    fault = BY_NAME["plan-table-of-the-first"]
    tape, file = tmp_path / "tape.log", tmp_path / "test_incident.py"
    record(fault.load, tape, fault, Witness())
    model = str(real.path_of(fault.load.kernel))
    report = write_test(str(tape), str(file), Options(depth="", model=model))
    assert (report.depth, report.diverges, report.fails_now) == ("forward", "token", "")
    the_test(file)()
    with fault.active(Witness(step=1)), pytest.raises(AssertionError):
        the_test(file)()


def test_json_has_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "test_incident.py"
    assert main(["test", str(taped("S1", tmp_path)), "-o", str(file), "--json"]) == 0
    report = msgspec.json.decode(capsys.readouterr().out, type=TestReport)
    assert (report.diverges, report.step, report.fails_now) == ("observation", 2, "")


def test_what_no_test_can_be_made_of_is_said_in_one_sentence_with_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tape, clean, out = taped("row-hidden", tmp_path), tmp_path / "clean", tmp_path / "test_x.py"
    record(loads.MIXED, clean)
    short, redacted = tmp_path / "short", tmp_path / "redacted"
    minimize(str(tape), str(short), SHALLOWEST, short=True)
    assert any(isinstance(it, Checkpoint) and it.step for it in Tape(str(short)))
    header, *rest = Tape(str(tape))
    assert isinstance(header, Header)
    redacted.write_bytes(TapeEncoder().encode([structs.replace(header, redacted=True), *rest]))
    for arguments, said in (
        ([str(clean), "-o", str(out)], "there is nothing to test for"),
        ([str(short), "-o", str(out)], "begins in the middle of a run"),
        ([str(redacted), "-o", str(out)], "redacted"),
        ([str(tape), "-o", str(tmp_path / "incident.py")], "call it test_SOMETHING.py"),
        ([str(tape), "-o", str(tmp_path / "no" / "test_x.py")], "cannot be written"),
    ):
        assert main(["test", *arguments]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def test_no_tape_is_written_over_by_a_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tape = taped("S13", tmp_path)
    data = tape.read_bytes()
    itself = tmp_path / "test_S13.py"
    itself.write_bytes(data)
    with pytest.raises(Unusable, match=r"test_S13\.py is the tape itself, which is never changed"):
        write_test(str(itself), str(itself), SHALLOWEST)
    monkeypatch.setattr(pytestfile, "EMBEDDED_MAX", 0)
    other = tmp_path / "test_incident.tape"
    other.write_bytes(b"another tape")
    with pytest.raises(
        Unusable, match=r"test_incident\.tape, where the tape would go, holds anoth"
    ):
        write_test(str(tape), str(tmp_path / "test_incident.py"), SHALLOWEST)
    assert (itself.read_bytes(), other.read_bytes()) == (data, b"another tape")
    other.unlink()
    for _ in range(2):  # the same tape may be written again
        assert write_test(str(tape), str(other.with_suffix(".py")), SHALLOWEST).beside == other.name
