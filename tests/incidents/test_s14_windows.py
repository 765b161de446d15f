"""S14: a window keeps what the next rows read, whatever is appended, taken back or left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve
from msgspec import structs

from replay.fold import Fold
from replay.reader import Tape
from server.policy import Policy
from statemachine import commands
from statemachine.errors import IllegalCommand
from statemachine.events import NO_BLOCK, FrontTrimmed, Rewound
from statemachine.records import Header, StepDone
from statemachine.state import State, new_state
from statemachine.transitions import apply_all

from ..faults import loads
from ..faults.catalogue import BY_NAME
from ..faults.loads import Load
from ..faults.runner import record, replay, run

WINDOW, SINK, SIZE = 8, 2, 4
GEOMETRY = loads.WINDOWS.geometry

POLICIES = {
    "one row at a time": loads.POLICY,
    "chunks shorter than the window": structs.replace(loads.POLICY, prefill_chunk=5),
    "lookahead": loads.LOOKING,
    "drafts": loads.GUESSING,
    "drafts and lookahead": structs.replace(loads.GUESSING, lookahead=True, lookup_ngram=2),
}


def _load(policy: Policy) -> Load:
    return evolve(loads.DRAFTS, name="windows", policy=policy, geometry=GEOMETRY)


@pytest.mark.parametrize("name", POLICIES)
def test_the_window_holds_what_its_rows_read_and_nothing_changes_an_answer(
    name: str, tmp_path: Path
) -> None:
    tape = tmp_path / "tape.log"
    load = _load(POLICIES[name])
    played = record(load, tape)
    plain = evolve(load, policy=loads.POLICY, geometry=loads.DRAFTS.geometry)
    assert played.answers == record(plain, tmp_path / "plain.log").answers
    # Every row that each piece reads was compared with what its sequence should have there.
    assert replay(load, tape, "plan") is None
    fold, seen = Fold(), 0
    for item in Tape(str(tape)):
        if isinstance(item, StepDone):
            pieces = fold.pieces[item.step]
            for start, end, (_, visible) in zip(
                pieces.starts, pieces.ends, item.observation.visible, strict=True
            ):
                live = min(end, WINDOW)
                assert visible == live + min(SINK, end - live)
                seen += end > WINDOW and end - start > 1
        fold.feed(item)
    assert seen, "no rows were appended together to a window that is full"


@pytest.mark.parametrize("name", POLICIES)
def test_a_front_trim_never_takes_a_sink_nor_a_row_of_the_window(name: str, tmp_path: Path) -> None:
    tape = tmp_path / "tape.log"
    record(_load(POLICIES[name]), tape)
    fold, trims = Fold(), 0
    for item in Tape(str(tape)):
        fold.feed(item)
        trims += sum(isinstance(event, FrontTrimmed) for event in getattr(item, "events", ()))
        if isinstance(item, Header):
            continue
        for _, sequence in sorted(fold.state.sequences.items()):
            table = sequence.tables[1]
            holes = [index for index, block in enumerate(table) if block == NO_BLOCK]
            sinks = range(-(-SINK // SIZE))
            assert not set(holes) & set(sinks)
            assert all((index + 1) * SIZE <= sequence.starts[1] for index in holes)
            assert sequence.starts[1] <= max(0, sequence.committed - WINDOW + 1)
    assert trims


def test_drafts_are_taken_back_behind_a_window_that_has_moved_on(tmp_path: Path) -> None:
    tape = tmp_path / "tape.log"
    record(_load(loads.GUESSING), tape)
    fold, moved = Fold(), 0
    for item in Tape(str(tape)):
        if isinstance(item, StepDone):
            for event in item.events:
                if isinstance(event, Rewound):
                    moved += fold.state.sequences[event.seq].starts[1] > 0
        fold.feed(item)
    assert moved


def _filled(rows: int) -> State:
    """A sequence with written rows whose window moved on as far as it may."""
    state = new_state(GEOMETRY)
    state = apply_all(state, commands.open_sequence(state, 0))
    state = apply_all(state, commands.append(state, 0, 1, tokens=tuple(range(rows))))
    state = apply_all(state, commands.step_written(state, 1))
    return apply_all(state, commands.front_trims(state, 0))


def test_a_trim_that_needs_rows_which_the_window_left_behind_is_refused_in_all_groups() -> None:
    state = _filled(20)
    assert state.sequences[0].starts == (0, 20 - WINDOW + 1)
    before = state.digest
    with pytest.raises(IllegalCommand, match="needs rows from 12 on"):
        commands.trim(state, 0, 1)
    assert state.digest == before
    short = _filled(WINDOW - 1)
    after = apply_all(short, commands.trim(short, 0, 3))
    assert after.sequences[0].offset == WINDOW - 4


@pytest.mark.parametrize("name", ["S14-sink", "S14-window", "S14-append", "S14-lookahead"])
def test_with_the_fault_in_replay_names_the_first_wrong_event(name: str, tmp_path: Path) -> None:
    assert run(BY_NAME[name], tmp_path).holds
