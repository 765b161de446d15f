"""A state beside a naive model of it: every event is checked in every way there is.

`check` compares lengths, tables and counts, and for every visible row of every sequence that the
page row holds that row's own identity (PROV).
"""

from __future__ import annotations

from typing import Any

from statemachine import commands, invariants
from statemachine import events as ev
from statemachine.digest import recompute
from statemachine.errors import IllegalCommand, PoolExhausted
from statemachine.events import NO_BLOCK
from statemachine.geometry import Geometry
from statemachine.sequence import visible, written_rows
from statemachine.state import State, new_state
from statemachine.transitions import apply, apply_all

from .naive_pool import Model
from .naive_rows import Cell, ModelSequence

__all__ = ["Driver", "Model", "ModelSequence", "check", "plain"]


def check(model: Model, state: State) -> None:
    """Assert that a state says what a model says, and that PROV holds in every page."""
    assert (state.issued_step, state.written_step) == (model.issued_step, model.written_step)
    assert set(state.sequences) == set(model.sequences)
    pages = model.pages_now()
    for seq, mine in model.sequences.items():
        _check_sequence(model, state, seq, mine, pages)
    for group in model.groups():
        held = set(model.refs(group))
        known = {block for at, block in model.published if at == group}
        assert state.held_blocks(group) == len(held)
        assert state.cached_blocks(group) == len(known - held)
        assert state.published_blocks(group) == len(known)
        total = model.geometry.groups[group].num_blocks
        assert state.free_blocks(group) == total - len(held | known)


def _check_sequence(
    model: Model,
    state: State,
    seq: int,
    mine: ModelSequence,
    pages: dict[tuple[int, int, int], Cell],
) -> None:
    theirs = state.sequences[seq]
    size = model.geometry.block_size
    assert theirs.offset == mine.offset
    assert theirs.committed == len(mine.tokens)
    assert theirs.tokens == tuple(mine.tokens)
    assert len(theirs.speculative) == len(mine.speculative)
    assert theirs.pads == mine.pads
    assert theirs.preempted == mine.preempted
    assert theirs.starts == tuple(mine.starts)
    assert theirs.tables == tuple(tuple(table) for table in mine.tables)
    assert written_rows(theirs, state.written_step) == mine.written(state.written_step)
    for group in model.groups():
        spec = model.geometry.groups[group]
        newest = mine.offset - 1
        if spec.kind == "recurrent":
            model.check_state(seq, group, mine.offset, pages)
            reported = visible(model.geometry, theirs, group)
            assert reported == min(2, mine.offset - mine.starts[group])
            continue
        rows = {*range(mine.starts[group], mine.offset), *range(min(spec.sink, mine.offset))}
        for row in rows:
            block = mine.tables[group][row // size]
            assert block != NO_BLOCK, f"row {row} of sequence {seq} is live and has no block"
            cell = pages.get((group, block, row % size))
            assert cell is not None, f"row {row} of sequence {seq} was never written"
            if mine.cells[row].identity is None:
                assert cell is mine.cells[row], f"row {row} of sequence {seq} is {cell}"
            else:
                assert cell.identity == mine.identity(row), (
                    f"row {row} of sequence {seq} carries {cell}"
                )
        seen = [
            row
            for row in sorted(rows)
            if spec.kind == "full" or row < spec.sink or row > newest - spec.window
        ]
        assert visible(model.geometry, theirs, group) == len(seen)


def plain(value: Any) -> Any:
    """A state, or a part of one, as nested tuples: a deep copy that can be compared."""
    if hasattr(value, "__struct_fields__"):
        fields = tuple(plain(getattr(value, name)) for name in value.__struct_fields__)
        return (type(value).__name__, *fields)
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if hasattr(value, "items"):
        return tuple(sorted((key, plain(item)) for key, item in value.items()))
    return value


class Driver:
    """A state and its model side by side; every event is checked in every way there is."""

    def start_from(self, geometry: Geometry) -> None:
        self.state = new_state(geometry)
        self.model = Model(geometry)
        self.step = 1
        self.last: tuple[ev.Event, ...] = ()

    def seqs(self) -> list[int]:
        return sorted(self.model.sequences)

    def carry_out(self, command: Any, *arguments: Any, **named: Any) -> tuple[ev.Event, ...] | None:
        """Run a command and apply its events; None where it was refused and changed nothing."""
        before, frozen = self.state, plain(self.state)
        try:
            events: tuple[ev.Event, ...] = command(self.state, *arguments, **named)
        except (IllegalCommand, PoolExhausted):
            assert plain(before) == frozen
            return None
        together = apply_all(self.state, events)
        for event in events:
            self.take(event)
        assert plain(before) == frozen, "a state that was given has changed"
        assert plain(self.state) == plain(together)
        if events:
            self.last = events
        return events

    def take(self, event: ev.Event) -> None:
        self.model.entries = self.state.entries
        self.state = apply(self.state, event)
        self.model.apply(event)
        invariants.check_step(self.state)
        invariants.check_all(self.state)
        assert self.state.digest == recompute(self.state)
        check(self.model, self.state)
        self.step = max(self.step, self.state.written_step + 1, self.state.issued_step)

    def wind_up(self) -> None:
        """Nothing leaks: with all closed, written and flushed, every block is free."""
        for seq in self.seqs():
            self.carry_out(commands.close, seq)
        if self.state.issued_step > self.state.written_step:
            self.carry_out(commands.step_written, self.state.issued_step)
        self.carry_out(commands.flush)
        for group in self.model.groups():
            assert self.state.free_blocks(group) == self.state.geometry.groups[group].num_blocks
        assert not self.state.entries
        assert not self.state.by_key
        assert not self.state.pins
