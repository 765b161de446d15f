"""S9: k drafts with a taken: k + 1 rows are appended, a + 1 stay, k - a are unwound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, frozen
from msgspec import structs

from replay.fold import Fold
from replay.reader import Tape
from statemachine.events import DRAFT, Appended, Committed, Rewound
from statemachine.records import StepDone, StepPlanned

from ..faults import loads
from ..faults.loads import FAKE, Load
from ..faults.runner import record
from . import asking
from .asking import flips

pytestmark = pytest.mark.model

LOADS = pytest.mark.parametrize(
    "load", [loads.DRAFTS, loads.TINY_DRAFTS, loads.DRAFTS_WINDOWS], ids=["fake", "tiny", "window"]
)


def _plain(load: Load) -> Load:
    return evolve(load, policy=structs.replace(load.policy, draft_tokens=0))


@frozen
class Round:
    """One draft: rows appended, committed and rewound, and the offset before and after."""

    appended: int
    committed: int
    rewound: int
    before: int
    after: int
    open: bool


def _rounds(tape: Path) -> list[Round]:
    """All drafts of a tape, from its events and from the offsets that it says."""
    fold, found, drafts = Fold(), list[Round](), dict[int, tuple[int, int]]()
    for item in Tape(str(tape)):
        if isinstance(item, StepPlanned):
            sequences = fold.state.sequences
            drafts = {
                event.seq: (event.rows, sequences[event.seq].offset)
                for event in item.events
                if isinstance(event, Appended) and event.purpose == DRAFT
            }
        if isinstance(item, StepDone):
            offsets = dict(zip(fold.pieces[item.step].seqs, item.offsets, strict=True))
            for seq, (rows, before) in drafts.items():
                events = [event for event in item.events if getattr(event, "seq", -1) == seq]
                kept = sum(len(event.tokens) for event in events if isinstance(event, Committed))
                gone = sum(event.rows for event in events if isinstance(event, Rewound))
                after = offsets[seq]
                found.append(Round(rows, kept, gone, before, after, after >= 0))
        fold.feed(item)
    return found


@LOADS
def test_drafts_change_no_greedy_token(load: Load, tmp_path: Path, capsys: Any) -> None:
    tape = tmp_path / "drafts.log"
    drafted = record(load, tape)
    assert drafted.answers == record(_plain(load), tmp_path / "plain.log").answers
    if load.kernel == FAKE:
        return
    for request, answer in zip(load.requests, drafted.answers, strict=True):
        assert flips(load.kernel, request.tokens, answer) == 0
    code, report = asking.replayed(tape, load.kernel, "reference", capsys)
    assert (code, report["figures"]["excused flips"]) == (0, 0)


def test_drafts_change_no_token_that_is_drawn(tmp_path: Path) -> None:
    load = loads.TINY_DRAFTS_DRAWN
    tape = tmp_path / "drafts.log"
    assert record(load, tape).answers == record(_plain(load), tmp_path / "plain.log").answers
    assert _rounds(tape)


@LOADS
def test_of_k_drafts_with_a_taken_a_and_one_rows_stay_and_the_offset_follows(
    load: Load, tmp_path: Path
) -> None:
    tape = tmp_path / "drafts.log"
    record(load, tape)
    rounds = _rounds(tape)
    for it in rounds:
        assert it.committed + it.rewound == it.appended
        assert it.committed >= 1
        if it.open:
            assert it.after == it.before + it.committed
    taken = [(it.appended - 1, it.committed - 1) for it in rounds]
    assert any(a == 0 for _, a in taken)
    assert any(a == k for k, a in taken)
    assert any(0 < a < k for k, a in taken)


def test_an_end_token_inside_of_what_was_taken_keeps_what_is_before_it(tmp_path: Path) -> None:
    load = loads.DRAFTS_ENDING
    tape = tmp_path / "drafts.log"
    drafted = record(load, tape)
    plain = record(_plain(load), tmp_path / "plain.log")
    assert drafted.answers == plain.answers
    assert set(drafted.reasons) == {"stop"}
    assert any(it.rewound and not it.open for it in _rounds(tape))


def test_a_row_is_never_issued_ahead_behind_a_draft(tmp_path: Path) -> None:
    tape = tmp_path / "both.log"
    played = record(loads.BOTH, tape)
    assert played.answers == record(_plain(loads.BOTH), tmp_path / "plain.log").answers
    fold, ahead, drafts = Fold(), 0, 0
    for item in Tape(str(tape)):
        fold.feed(item)
        for _, sequence in sorted(fold.state.sequences.items()):
            tokens = {row.token for row in sequence.speculative}
            assert tokens == {-1} or -1 not in tokens, "one sequence holds rows of both kinds"
            ahead += tokens == {-1}
            drafts += bool(tokens) and -1 not in tokens
    assert ahead
    assert drafts


def test_with_the_fault_in_replay_names_the_first_draft_that_is_not_taken_back(
    tmp_path: Path, capsys: Any
) -> None:
    tape = tmp_path / "tape.log"
    _, witness = asking.with_fault("S9", loads.TINY_DRAFTS, tape)
    code, report = asking.replayed(tape, loads.TINY, "fold", capsys)
    found = report["divergence"]
    assert witness.first is not None
    assert code == 1
    assert (found["class"], found["step"]) == ("observation", witness.first.step)
    assert found["sequence"] == witness.first.sequence
    assert "caches saw start" in found["summary"]
