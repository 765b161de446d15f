"""S12: nothing is held for a request in the queue, and whoever runs gets on.

A parked prefill, a decode row at a block's edge and queued repeats of a prompt that is in the index
share a pool in which the last blocks would be pinned.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve
from msgspec import structs

from replay.plan import Planner
from replay.reader import Tape
from server.view import View
from statemachine.events import Appended
from statemachine.geometry import Geometry, Group
from statemachine.records import StepPlanned

from ..faults import loads
from ..faults.catalogue import BY_NAME
from ..faults.loads import Load, Request, tokens
from ..faults.runner import record, replay

DONOR = tokens(16, 1)
POOL = Geometry(block_size=4, groups=(Group(num_blocks=11),))


def _parked() -> Load:
    """A donor that leaves its prompt in the index; then a decoder, a long prompt, and repeats."""
    return Load(
        "parked and queued",
        (
            Request(DONOR, 2),
            Request(tokens(7, 2), 24, at=6),
            Request(tokens(26, 3), 6, at=6),
            *(Request((*DONOR, 9 + n), 6, at=7) for n in range(4)),
        ),
        structs.replace(loads.POLICY, prefill_chunk=8, max_batch_tokens=12, max_running=12),
        POOL,
    )


def _views(tape: Path) -> Iterator[View]:
    """The scheduler's view after each record of a tape."""
    planner = Planner()
    for item in Tape(str(tape)):
        planner.feed(item)
        if planner.view is not None:
            yield planner.view


def _held_in_queue(tape: Path) -> set[int]:
    """Requests that wait and hold rows, at any moment, by the events of the tape alone."""
    found: set[int] = set()
    for view in _views(tape):
        for request in view.waiting:
            sequence = view.state.sequences.get(request)
            if sequence is not None and (sequence.offset or any(sequence.tables)):
                found.add(request)
    return found


@pytest.mark.parametrize("lookahead", [False, True])
def test_with_the_last_blocks_wanted_by_all_every_request_ends_within_its_own_steps(
    lookahead: bool, tmp_path: Path
) -> None:
    load = _parked()
    load = evolve(load, policy=structs.replace(load.policy, lookahead=lookahead))
    tape = tmp_path / "tape.log"
    played = record(load, tape)
    assert set(played.reasons) == {"length"}
    # One after the other, each with its prompt in chunks of 8 and a step a token, is the most.
    alone = [-(-len(it.tokens) // 8) + it.max_tokens for it in load.requests]
    assert played.steps <= sum(alone) + 7
    assert played.adopted_rows >= 16
    assert played.held_blocks == 0
    assert replay(load, tape, "plan") is None


def test_a_request_in_the_queue_holds_no_block(tmp_path: Path) -> None:
    for number, load in enumerate((_parked(), loads.QUEUED, loads.TIGHT, loads.AHEAD_TIGHT)):
        tape = tmp_path / f"{number}.log"
        record(load, tape)
        assert _held_in_queue(tape) == set()
        assert any(len(view.waiting) for view in _views(tape))


def test_the_hit_of_a_request_is_looked_up_when_it_starts_and_not_when_it_came(
    tmp_path: Path,
) -> None:
    """Its blocks were evicted while it waited: what it adopts is what is there then."""
    one = structs.replace(loads.POLICY, max_running=1)
    asked = (Request(DONOR, 2), Request(tokens(7, 2), 9, at=6), Request((*DONOR, 9), 4, at=7))
    waiting = Load("a repeat that waits", asked, one)
    flushed = evolve(waiting, flush_at=(9,))
    tape = tmp_path / "tape.log"
    assert record(waiting, tmp_path / "kept.log").adopted_rows == 16
    played = record(flushed, tape)
    assert (played.adopted_rows, set(played.reasons)) == (0, {"length"})
    assert replay(flushed, tape, "plan") is None


def test_prompts_that_share_a_beginning_compute_it_once_when_they_come_at_once(
    tmp_path: Path,
) -> None:
    def prompt_rows(load: Load, name: str) -> int:
        tape = tmp_path / name
        record(load, tape)
        events = [
            event
            for item in Tape(str(tape))
            if isinstance(item, StepPlanned)
            for event in item.events
            if isinstance(event, Appended) and event.purpose == "prompt"
        ]
        return sum(event.rows for event in events)

    aware = loads.AWARE
    blind = evolve(aware, policy=structs.replace(aware.policy, prefix_aware=False))
    own = sum(len(request.tokens) - 40 for request in aware.requests)
    assert prompt_rows(aware, "aware.log") == 40 + own
    assert prompt_rows(blind, "blind.log") > 40 + own


def test_a_long_prompt_is_passed_eight_times_and_then_starts_before_all_behind_it(
    tmp_path: Path,
) -> None:
    tape = tmp_path / "tape.log"
    record(loads.STARVING, tape)
    long = 1
    passed = max(
        (view.requests[long].passed for view in _views(tape) if long in view.requests), default=0
    )
    assert passed == 8
    order = [
        event.seq
        for item in Tape(str(tape))
        if isinstance(item, StepPlanned)
        for event in item.events
        if isinstance(event, Appended) and event.purpose == "prompt"
    ]
    first = [seq for place, seq in enumerate(order) if seq not in order[:place]]
    assert first.index(long) == 9


def test_with_the_fault_in_replay_names_the_request_that_was_given_rows_in_the_queue(
    tmp_path: Path,
) -> None:
    fault = BY_NAME["S12"]
    tape = tmp_path / "tape.log"
    record(fault.load, tape, fault)
    found = replay(fault.load, tape, "plan")
    assert found is not None
    assert (found.kind, found.record) == ("plan", "StepPlanned")
    assert '"PrefixAdopted"' in found.event or '"Opened"' in found.event
