"""`--capture-redact`: what users said is on no tape, from the first byte on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from replay.cli import main
from replay.reader import Tape
from replay.run import CLEAN, PLAN, UNUSABLE, Options, replay
from server.build import build_engine
from server.capture import CaptureWriter
from server.redaction.live import LiveRedactor
from server.redaction.redacting import NotRedactable
from server.settings import Settings, SettingsError
from statemachine.records import Checkpoint, Gap, Header, StepDone

from . import sim as sims
from .redacting import numbers_in, private
from .sim import SMALL, Sim

SECRETS = {3_000_005, 777_777, 888_888, 999_999}


@pytest.fixture
def redacting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the engines of a test write their tape, redacted, in small segments."""
    path = tmp_path / "tape"
    path.mkdir()

    def writer() -> CaptureWriter:
        return CaptureWriter(path, segment_bytes=9_000, redact=LiveRedactor().feed)

    monkeypatch.setattr(sims, "MemoryCapture", writer)
    return path


@pytest.mark.parametrize(
    "policy", [{"lookahead": True}, {"draft_tokens": 3, "lookup_ngram": 2}], ids=["ahead", "drafts"]
)
def test_a_tape_is_written_without_a_token_and_plans_all_the_same(
    redacting: Path, policy: dict[str, Any]
) -> None:
    sim = private(policy)
    records = list(Tape(str(redacting)))
    assert [it.redacted for it in records if isinstance(it, Header)].count(False) == 0
    assert sum(isinstance(it, Checkpoint) for it in records) > 1, "the tape has one segment"
    assert sum(isinstance(it, StepDone) for it in records) == sim.next_step - 1
    assert not SECRETS & {number for record in records for number in numbers_in(record)}
    written = b"".join(it.read_bytes() for it in redacting.iterdir())
    assert b"alice" not in written
    assert b"secret" not in written
    assert replay(str(redacting), Options(depth=PLAN)).exit_code == CLEAN


def test_a_redacted_tape_is_not_run_through_a_model(
    redacting: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private({})
    assert main([str(redacting), "--depth", "forward"]) == UNUSABLE
    assert "the tape is redacted" in capsys.readouterr().err


def test_two_tapes_of_the_same_load_have_no_number_in_common(tmp_path: Path) -> None:
    sim = private({})
    names = []
    for at in range(2):
        writer = CaptureWriter(tmp_path / f"{at}.log", redact=LiveRedactor().feed)
        writer.write(sim.capture.records)
        writer.close()
        found = {it for record in Tape(str(tmp_path / f"{at}.log")) for it in numbers_in(record)}
        names.append({it for it in found if it > 1 << 40})
    assert len(names[0]) > 200
    # The state before the first request is everybody's.
    assert len(names[0] & names[1]) <= 1


def test_what_cannot_be_redacted_ends_the_tape_and_not_the_server(tmp_path: Path) -> None:
    path = tmp_path / "tape.log"
    redactor = LiveRedactor()
    writer = CaptureWriter(path, redact=redactor.feed)
    sim = Sim(SMALL)
    sim.submit((1, 2, 3), 2)
    sim.run()
    records = sim.capture.records
    writer.write(records[:4])
    size = path.stat().st_size
    assert redactor._redactor is not None
    redactor._redactor.stopped = "Closed cannot be applied: sequence 7 is not open"
    with pytest.raises(NotRedactable, match="sequence 7 is not open"):
        writer.write(records[4:])
    assert path.stat().st_size == size
    assert not any(isinstance(record, Gap) for record in Tape(str(path)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (Settings(capture_redact=True), "capture_redact needs a tape: say with capture where"),
        (
            Settings(capture="tape.log", capture_redact=True, draft_model="small"),
            "what a draft model guesses cannot be redacted: leave draft_model or capture_redact",
        ),
    ],
)
def test_a_redacted_tape_that_cannot_be_is_refused_at_the_start(
    settings: Settings, said: str
) -> None:
    with pytest.raises(SettingsError, match=f"^{said}"):
        build_engine(settings)
