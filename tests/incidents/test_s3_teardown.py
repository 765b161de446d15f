"""S3: a row that was issued ahead goes as it came, and a failed step unwinds what it wrote; 5 of 5
match alone, with lookahead and without.

S15: shapes differ between a batch and a lone request, so tokens go by the margin rule, counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from msgspec import structs

from replay.fold import Fold
from replay.reader import Tape
from server.policy import Policy
from statemachine.events import Closed, Rewound
from statemachine.records import StepDone, StepFailed, StepPlanned

from ..faults.loads import TINY, Load, Request
from ..faults.runner import record
from . import asking
from .asking import flips, load
from .test_s13_eval_fails_late import BUILD, raising

LENGTHS = (15, 16, 33, 37, 48)
CHUNKED = structs.replace(asking.POLICY, prefill_chunk=24, max_batch_tokens=48)
"""Small chunks, so that prompts and decode rows share the steps."""


LOOKING = structs.replace(asking.POLICY, lookahead=True)


def _five(policy: Policy = asking.POLICY) -> Load:
    requests = tuple(Request(asking.of_length(TINY, rows), 8) for rows in LENGTHS)
    return load(TINY, requests, policy)


def _ending(asked: Load, answers: tuple[tuple[int, ...], ...]) -> Load:
    """The same requests, of which every second one ends at a token that it is known to say."""
    requests = [
        evolve(request, end_tokens=(answer[3],)) if number % 2 == 0 else request
        for number, (request, answer) in enumerate(zip(asked.requests, answers, strict=True))
    ]
    return evolve(asked, requests=tuple(requests))


def test_five_of_five_at_once_answer_as_alone_and_flips_are_counted(
    tmp_path: Path, capsys: Any
) -> None:
    tape = tmp_path / "tape.log"
    played = record(_five(), tape)
    for request, answer in zip(_five().requests, played.answers, strict=True):
        assert flips(TINY, request.tokens, answer) == 0
    code, report = asking.replayed(tape, TINY, "reference", capsys)
    assert code == 0
    assert report["figures"]["tokens judged"] == 5 * 8
    assert report["figures"]["excused flips"] == 0


def test_five_of_five_match_the_reference_with_lookahead_as_without(
    tmp_path: Path, capsys: Any
) -> None:
    whole = record(_five(), tmp_path / "whole.log").answers
    off = record(_ending(_five(), whole), tmp_path / "off.log")
    tape = tmp_path / "on.log"
    on = record(_ending(_five(LOOKING), whole), tape)
    assert on.answers == off.answers
    assert on.reasons == off.reasons == ("stop", "length", "stop", "length", "stop")
    matching = [
        flips(TINY, request.tokens, answer) == 0
        for request, answer in zip(_five().requests, on.answers, strict=True)
    ]
    assert matching.count(True) == 5
    code, report = asking.replayed(tape, TINY, "reference", capsys)
    assert (code, report["figures"]["excused flips"]) == (0, 0)


def test_each_answer_that_ends_takes_back_the_one_row_that_was_issued_behind_it(
    tmp_path: Path,
) -> None:
    whole = record(_five(), tmp_path / "whole.log").answers
    tape = tmp_path / "on.log"
    record(_ending(_five(LOOKING), whole), tape)
    fold, rewound = Fold(), list[tuple[int, int]]()
    for item in Tape(str(tape)):
        ahead = {seq: len(it.speculative) for seq, it in fold_sequences(fold)}
        if isinstance(item, StepDone):
            gone = [event for event in item.events if isinstance(event, Rewound)]
            assert all(ahead[event.seq] == event.rows for event in gone)
            closed = {event.seq for event in item.events if isinstance(event, Closed)}
            assert {event.seq for event in gone} == {it for it in closed if ahead[it]}
            rewound += [(event.seq, event.rows) for event in gone]
        fold.feed(item)
    assert sorted(rewound) == [(0, 1), (2, 1), (4, 1)]


def fold_sequences(fold: Fold) -> list[tuple[int, Any]]:
    """Sequences by id; none before a tape's header."""
    return sorted(fold.state.sequences.items()) if fold.counts.records else []


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("step", [2, 4])
def test_a_step_that_cannot_be_built_leaves_offsets_and_tables_as_they_were(
    step: int, lookahead: bool, tmp_path: Path
) -> None:
    tape = tmp_path / "tape.log"
    chunked = _five(structs.replace(CHUNKED, lookahead=lookahead))
    with raising(BUILD, {step}):
        played = record(chunked, tape)
    assert played.answers == record(chunked, tmp_path / "calm.log").answers
    before: dict[int, tuple[int, Any]] = {}
    fold = Fold()
    for item in Tape(str(tape)):
        if isinstance(item, StepPlanned) and item.step == step:
            before = _lengths(fold)
        fold.feed(item)
        if isinstance(item, StepFailed):
            assert _lengths(fold) == before
            return
    raise AssertionError("no step failed")


def test_with_the_fault_in_replay_names_the_step_and_the_offset_that_is_one_ahead(
    tmp_path: Path, capsys: Any
) -> None:
    tape = tmp_path / "tape.log"
    with raising(BUILD, {6}):
        _, witness = asking.with_fault("S3-lookahead", _five(LOOKING), tape)
    code, report = asking.replayed(tape, TINY, "fold", capsys)
    found = report["divergence"]
    assert witness.first is not None
    assert code == 1
    assert (found["class"], found["step"]) == ("observation", witness.first.step)
    assert found["sequence"] == witness.first.sequence
    offset = next(it for it in found["values"] if it["name"] == "offset before the step")
    assert offset["observed"] == offset["derived"] + 1


def _lengths(fold: Fold) -> dict[int, tuple[int, Any]]:
    """Offset and tables of each sequence that has rows."""
    sequences = fold.state.sequences
    return {
        seq: (sequences[seq].offset, sequences[seq].tables)
        for seq in sorted(sequences)
        if sequences[seq].offset
    }
