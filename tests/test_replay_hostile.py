"""Tapes that lie, with every checksum and digest in order: a sentence and exit code 1 or 2."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from immutables import Map
from msgspec import structs

from replay.cli import main
from replay.divergence import OBSERVATION, PLAN
from replay.report import LINE_CHARS_MAX
from replay.run import DIVERGED, UNUSABLE
from statemachine.codec import encode_state
from statemachine.digest import recompute
from statemachine.events import Appended, AppendedEach, Closed, Event, Namespace, Opened
from statemachine.geometry import Geometry, Group
from statemachine.records import (
    Checkpoint,
    Header,
    Record,
    RequestCancelled,
    StepDone,
    StepPlanned,
)
from statemachine.sequence import Sequence
from statemachine.state import Block, Queue, State, new_state
from statemachine.transitions import apply_all

from .sim import POLICY, header
from .tampering import changed, divergence_of, first_step, write
from .tapes import golden

POOL = Geometry(block_size=4, groups=(Group(num_blocks=64),))
RECORDS: list[Record] = golden.records()
OPENED = Opened(0, Namespace())


def prompt(rows: int, *blocks: int) -> Appended:
    return Appended(0, 1, rows, tuple(range(1, rows + 1)), (blocks,), "prompt")


def planned(state: State, step: int, *events: Event) -> StepPlanned:
    """A step whose digest fits, where its events can be applied."""
    return StepPlanned(step, events, apply_all(state, events).digest)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and the sentence that explains it."""
    code = main(list(arguments))
    shown = capsys.readouterr()
    return code, shown.err if code == UNUSABLE else shown.out


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(4, (Group(num_blocks=10**12),)),
        Geometry(10**9, (Group(num_blocks=64),)),
        Geometry(4, (Group("window", num_blocks=64, window=2**40),)),
        Geometry(4, (Group("window", num_blocks=64, window=8, sink=2**40),)),
    ],
)
def test_a_pool_beyond_what_kernels_can_count_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], geometry: Geometry
) -> None:
    records: list[Record] = [header(geometry, POLICY), StepPlanned(1, (OPENED, prompt(3, 0)), 0)]
    code, text = said(capsys, write(tmp_path, records))
    assert (code, text.count("\n")) == (UNUSABLE, 1)
    assert "the tape's header makes no sense: group 0" in text


def test_a_block_far_beyond_those_ever_used_is_refused_at_once(tmp_path: Path) -> None:
    geometry = Geometry(4, (Group(num_blocks=2**28),))
    records: list[Record] = [
        header(geometry, POLICY),
        StepPlanned(1, (OPENED, prompt(3, 2**27)), 0),
    ]
    found = divergence_of(tmp_path, records)
    assert "far beyond block 0, the next one that was never used" in found.summary


def with_sequence(**changes: Any) -> Callable[[State], State]:
    def change(state: State) -> State:
        sequence: Sequence = structs.replace(state.sequences[0], **changes)
        return structs.replace(state, sequences=Map({0: sequence}))

    return change


def with_blocks(**changes: Any) -> Callable[[State], State]:
    return lambda state: structs.replace(
        state, groups=(structs.replace(state.groups[0], **changes),)
    )


LIES: dict[str, Callable[[State], State]] = {
    "no table": with_sequence(tables=()),
    "a table too many": with_sequence(tables=((0,), (0,))),
    "an empty table": with_sequence(tables=((),)),
    "a block that is free": with_sequence(tables=((63,),)),
    "half a mark": with_sequence(marks=(1,)),
    "no start": with_sequence(starts=()),
    "rows without tokens": with_sequence(committed=10**15),
    "pads without end": with_sequence(pads=10**15),
    "an entry that is missing": with_blocks(blocks=Map({0: Block(1, 0, 77)})),
    "blocks that were never used": with_blocks(unused=10**12),
    "a queue without end": with_blocks(
        unused=2, free=Queue(Map({10**12: 1}), Map({1: 10**12}), 0, 10**12 + 1)
    ),
    "a key of nothing": lambda state: structs.replace(state, by_key=Map({5: (4,)})),
    "an id to come": lambda state: structs.replace(state, last_seq=-1),
    "no groups": lambda state: structs.replace(state, groups=()),
}


@pytest.mark.parametrize("lie", list(LIES))
def test_a_checkpoint_that_lies_is_refused_where_a_replay_starts_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lie: str
) -> None:
    sound = apply_all(new_state(POOL), (OPENED, prompt(3, 0)))
    state = LIES[lie](sound)
    state = structs.replace(state, digest=recompute(state))
    records: list[Record] = [
        structs.replace(header(POOL, POLICY), segment=1),
        Checkpoint(1, encode_state(state), (), state.digest),
        StepPlanned(2, (Closed(0, "x"),), 0),
    ]
    code, text = said(capsys, write(tmp_path, records))
    assert (code, text.count("\n")) == (UNUSABLE, 1)
    assert "the checkpoint after step 1 makes no sense, so nothing can start from it" in text


def test_a_second_header_is_two_tapes_in_one_and_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [*RECORDS[:6], RECORDS[0], *RECORDS[6:]]
    assert isinstance(records[0], Header)
    code, text = said(capsys, write(tmp_path, records))
    assert (code, text.count("\n")) == (UNUSABLE, 1)
    assert "a header stands in the middle" in text


SAMPLED = first_step(RECORDS, lambda it: isinstance(it, StepDone) and len(it.sampled) > 1)


@pytest.mark.parametrize("place", [-1, 0, 99])
def test_a_sample_of_a_piece_that_is_none_or_comes_again_is_an_observation(
    tmp_path: Path, place: int
) -> None:
    done: Any = RECORDS[SAMPLED]
    numbers = (*done.sampled[:-1], place)
    found = divergence_of(tmp_path, changed(RECORDS, SAMPLED, sampled=numbers))
    assert (found.kind, found.step) == (OBSERVATION, done.step)
    assert "samples of pieces" in found.summary


def test_a_sample_of_a_piece_that_ends_inside_its_prompt_is_found_by_planning_again(
    tmp_path: Path,
) -> None:
    place = first_step(
        RECORDS,
        lambda it: isinstance(it, StepDone) and 0 < len(it.sampled) < len(it.observation.rows),
    )
    done: Any = RECORDS[place]
    pieces = len(done.observation.rows)
    other = next(at for at in range(pieces) if at not in done.sampled)
    numbers = tuple(sorted({*done.sampled[1:], other}))
    assert all(at < to for at, to in pairwise(numbers))
    found = divergence_of(tmp_path, changed(RECORDS, place, sampled=numbers), depth="plan")
    assert (found.kind, found.step) == (PLAN, done.step)
    assert "sampled, where pieces" in found.summary


def test_a_cancel_that_was_slipped_in_is_found_where_the_next_plan_does_not_close_it(
    tmp_path: Path,
) -> None:
    place = first_step(
        RECORDS,
        lambda it: (
            isinstance(it, StepPlanned) and any(isinstance(e, AppendedEach) for e in it.events)
        ),
    )
    plan: Any = RECORDS[place]
    seq = next(e.seqs[0] for e in plan.events if isinstance(e, AppendedEach))
    records = [*RECORDS[: place + 1], RequestCancelled(seq), *RECORDS[place + 1 :]]
    found = divergence_of(tmp_path, records, depth="plan")
    assert (found.kind, found.step) == (PLAN, plan.step + 1)
    closed = f'{{"type":"Closed","seq":{seq},"reason":"cancelled"}}'
    assert found.values[0].derived == closed


def test_columns_of_unequal_length_are_reported_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = Opened(1, Namespace())
    bad = AppendedEach(1, (0, 1), (5,), "decode")
    path = write(tmp_path, [header(POOL, POLICY), StepPlanned(1, (OPENED, two, bad), 0)])
    assert said(capsys, path)[0] == DIVERGED
    code, text = said(capsys, "show", path, "--seq", "1", "--events")
    assert code == 0
    assert "AppendedEach" in text
    assert "decode: 1 row, position 0" in said(capsys, "show", path, "--seq", "1")[1]
    code, text = said(capsys, "show", path, "--at", "1")
    assert code == 0
    assert "THE TAPE CANNOT BE FOLLOWED TO HERE: at step 1 an event cannot be applied" in text


def test_a_long_event_is_cut_in_the_report_for_people_and_whole_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, [header(POOL, POLICY), StepPlanned(1, (OPENED, prompt(5000, 0)), 0)])
    code, text = said(capsys, path)
    assert code == DIVERGED
    assert max(map(len, text.splitlines())) < LINE_CHARS_MAX + 100
    assert "4999" not in text
    assert "4999" in said(capsys, path, "--json")[1]


def test_the_sound_state_that_the_lies_change_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = apply_all(new_state(POOL), (OPENED, prompt(3, 0)))
    records: list[Record] = [
        structs.replace(header(POOL, POLICY), segment=1),
        Checkpoint(1, encode_state(sound), (), sound.digest),
        planned(sound, 2, Closed(0, "x")),
    ]
    code, text = said(capsys, write(tmp_path, records))
    assert code == 3
    assert "CLEAN BUT TORN" in text
