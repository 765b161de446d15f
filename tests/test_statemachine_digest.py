"""Digest: the same in every process, for the same state, and another for any other state."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from statemachine import commands
from statemachine import events as ev
from statemachine.digest import MASK, recompute, scalars_line
from statemachine.events import Event, Namespace
from statemachine.geometry import Geometry, Group
from statemachine.state import State, new_state
from statemachine.transitions import apply_all

from .model import plain

ROOT = Path(__file__).parent.parent
GEOMETRY = Geometry(4, (Group("full", 12), Group("window", 9, window=5, sink=1)), "golden")
GOLDEN = 8876611083299709202
"""Changes only with what a digest covers: then tapes of format 1 no longer fold."""


def story() -> tuple[State, list[Event]]:
    """A pool that did a bit of everything, and its events."""
    state, told = new_state(GEOMETRY), list[Event]()

    def do(events: tuple[Event, ...]) -> None:
        nonlocal state
        state = apply_all(state, events)
        told.extend(events)

    do(commands.open_sequence(state, 3, Namespace("A", 2, "salt")))
    do(commands.append(state, 3, 1, tuple(range(11))))
    do(commands.step_written(state, 1))
    do(commands.publish(state, 3))
    do(commands.front_trims(state, 3))
    do(commands.open_sequence(state, 4, Namespace("A", 2, "salt")))
    do(commands.adopt(state, 4, tuple(range(8))))
    do(commands.append(state, 4, 2, (7, 50)))
    do(commands.fork(state, 4, 5))
    do(commands.append_each(state, 3, [3, 4, 5], (1, 2, 3), ev.DECODE))
    do(commands.append(state, 3, 4, None, 2, ev.LOOKAHEAD))
    do(commands.append(state, 4, 4, (8, 9), None, ev.DRAFT))
    do(commands.append(state, 5, 4, None, 1, ev.PAD))
    do(commands.step_written(state, 3))
    do(commands.commit(state, 4, (8,)))
    do(commands.rewind(state, 3, 1))
    do(commands.open_sequence(state, 9))
    do(commands.append(state, 9, 4, (1, 2, 3, 4, 5)))
    do(commands.preempt(state, 9))
    return state, told


def test_the_golden_digest_is_what_it_was() -> None:
    state, _ = story()
    assert state.digest == recompute(state) == GOLDEN


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_the_digest_is_the_same_in_every_process(hash_seed: str) -> None:
    program = "from tests.test_statemachine_digest import story; print(story()[0].digest)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == str(GOLDEN), done.stderr


def test_a_state_that_is_built_from_its_parts_in_another_order_has_the_same_digest() -> None:
    """Maps remember how they were made; a digest does not."""
    state, _ = story()

    def rebuilt(value: object) -> object:
        if type(value).__name__ == "Map":
            items = sorted(value.items(), reverse=True)  # type: ignore[attr-defined]
            made = type(value)({-1: None})
            for key, item in items:
                made = made.set(key, rebuilt(item))
            return made.delete(-1)
        if hasattr(value, "__struct_fields__"):
            fields = {name: rebuilt(getattr(value, name)) for name in value.__struct_fields__}
            return type(value)(**fields)
        if isinstance(value, tuple):
            return tuple(rebuilt(item) for item in value)
        return value

    other = rebuilt(state)
    assert isinstance(other, State)
    assert plain(other) == plain(state)
    assert recompute(other) == GOLDEN


def test_two_histories_that_end_in_equal_states_end_in_equal_digests() -> None:
    """Drafts that are accepted leave what decoded rows do; a trim takes back what it names."""

    def begun() -> State:
        state = apply_all(new_state(GEOMETRY), commands.open_sequence(new_state(GEOMETRY), 0))
        state = apply_all(state, commands.append(state, 0, 1, (1, 2)))
        return apply_all(state, commands.step_written(state, 1))

    decoded = begun()
    decoded = apply_all(decoded, commands.append(decoded, 0, 2, (3,), None, ev.DECODE))
    drafted = begun()
    drafted = apply_all(drafted, commands.append(drafted, 0, 2, (3, 9), None, ev.DRAFT))
    drafted = apply_all(drafted, commands.rewind(drafted, 0, 1))
    assert drafted.digest != decoded.digest
    drafted = apply_all(drafted, commands.commit(drafted, 0, (3,)))
    assert plain(drafted) == plain(decoded)
    assert drafted.digest == decoded.digest
    guessed = begun()
    guessed = apply_all(guessed, commands.append(guessed, 0, 2, None, 1, ev.LOOKAHEAD))
    guessed = apply_all(guessed, commands.commit(guessed, 0, (3,)))
    assert guessed.digest == decoded.digest


def test_every_event_changes_the_digest() -> None:
    state, told = new_state(GEOMETRY), story()[1]
    seen = {state.digest}
    for event in told:
        state = apply_all(state, (event,))
        assert state.digest == recompute(state)
        assert state.digest not in seen, event
        seen.add(state.digest)
    assert {type(event).__name__ for event in told} >= {"BlockCopied", "FrontTrimmed", "Forked"}


@pytest.mark.parametrize(
    "field", ["committed", "pads", "adopted", "preempted", "starts", "marks", "tail", "root"]
)
def test_the_digest_covers_each_length_of_a_sequence(field: str) -> None:
    state, _ = story()
    sequence = state.sequences[4]
    value = getattr(sequence, field)
    other = {
        int: lambda: value + 1,
        bool: lambda: not value,
        tuple: lambda: (*value[:-1], value[-1] + 1),
        bytes: lambda: value + b"\1" * 8,
    }[type(value)]()
    changed = structs.replace(sequence, **{field: other})
    assert recompute(structs.replace(state, sequences=state.sequences.set(4, changed))) != GOLDEN


def test_the_digest_covers_queue_positions_and_counters() -> None:
    state, _ = story()
    for field in ("issued_step", "written_step", "last_seq", "next_entry"):
        moved = structs.replace(state, **{field: getattr(state, field) + 1})
        assert scalars_line(moved) != scalars_line(state)
        assert recompute(moved) != GOLDEN
    queue = state.groups[1].free
    assert len(queue.items) >= 2
    (first, a), (second, b) = sorted(queue.items.items())[:2]
    swapped = queue.items.set(first, b).set(second, a)
    group = structs.replace(state.groups[1], free=structs.replace(queue, items=swapped))
    assert recompute(structs.replace(state, groups=(state.groups[0], group))) != GOLDEN


def test_the_digest_is_a_sum_modulo_two_to_the_64() -> None:
    state, told = story()
    for count in range(0, len(told), 5):
        assert 0 <= apply_all(new_state(GEOMETRY), told[:count]).digest <= MASK
    assert state.digest <= MASK
