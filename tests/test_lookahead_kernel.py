"""A step that is issued before the one before it was read, and drafts that are verified in one:
the same tokens as one after the other, and every row tagged with what was fed.
"""

from __future__ import annotations

from typing import Any

import pytest

from kernel.batch import Batch, Kernel, Piece, StepResult
from kernel.fake import FakeKernel
from kernel.shadow import EDGES, FULL
from statemachine import commands
from statemachine.events import DECODE, LOOKAHEAD, PROMPT, BlockCopied, Event
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters
from statemachine.sequence import Sequence
from statemachine.state import State, new_state
from statemachine.transitions import apply_all

GEOMETRY = Geometry(4, (Group(num_blocks=64),), identity="lookahead")
WINDOWS = Geometry(4, (Group(num_blocks=64), Group("window", 64, window=5, sink=1)))
GREEDY = Parameters(64)
DRAWN = Parameters(64, temperature=1.0, seed=5)


class Turns:
    """A kernel with a state machine beside it, step by step: what an engine does, by hand."""

    def __init__(
        self, kernel: Kernel, parameters: Parameters = GREEDY, publish: bool = True
    ) -> None:
        self.kernel = kernel
        self.state: State = new_state(kernel.geometry)
        self.streams: dict[int, list[int]] = {}
        self.results: list[StepResult] = []
        self.batches: list[Batch] = []
        self._parameters = parameters
        self._publish = publish

    def do(self, *events: Event) -> tuple[Event, ...]:
        self.state = apply_all(self.state, events)
        return events

    def sequence(self, seq: int) -> Sequence:
        return self.state.sequences[seq]

    def open(self, seq: int, tokens: tuple[int, ...]) -> None:
        self.do(*commands.open_sequence(self.state, seq))
        self.streams[seq] = list(tokens)

    def piece(self, seq: int, tokens: tuple[int, ...], purpose: str, **more: Any) -> Piece:
        """Append, and say it as a piece; its copies are in `self.copies`."""
        step = len(self.batches) + 1
        rows = {"tokens": tokens} if tokens else {"rows": 1}
        events = self.do(*commands.append(self.state, seq, step, purpose=purpose, **rows))
        self.copies = tuple(event for event in events if isinstance(event, BlockCopied))
        given = {"samples": 1, "parameters": self._parameters, **more}
        return Piece(self.sequence(seq), tokens, **given)

    def prompt(self, seq: int, **more: Any) -> Piece:
        done = self.sequence(seq).offset
        return self.piece(seq, tuple(self.streams[seq][done:]), PROMPT, **more)

    def next_row(self, seq: int) -> Piece:
        return self.piece(seq, (self.streams[seq][-1],), DECODE)

    def ahead(self, seq: int) -> Piece:
        return self.piece(seq, (), LOOKAHEAD, pending=1)

    def issue(self, *pieces: Piece, copies: tuple[BlockCopied, ...] = ()) -> object:
        self.batches.append(Batch(len(self.batches) + 1, pieces, copies))
        return self.kernel.issue(self.batches[-1])

    def close(self, ticket: object, step: int) -> StepResult:
        """Collect; the samples join their streams, and the rows that were fed them commit."""
        result = self.kernel.collect(ticket)
        self.results.append(result)
        self.do(*commands.step_written(self.state, step))
        for number, token in zip(result.sampled, result.tokens, strict=True):
            seq = self.batches[step - 1].pieces[number].sequence.id
            self.streams[seq].append(token)
            if self.sequence(seq).speculative:
                self.do(*commands.commit(self.state, seq, (token,)))
        for seq in list(self.state.sequences) if self._publish else ():
            self.do(*commands.publish(self.state, seq))
            self.do(*commands.front_trims(self.state, seq))
        return result


def one_by_one(turns: Turns, steps: int) -> Turns:
    turns.close(turns.issue(*[turns.prompt(seq) for seq in turns.streams]), 1)
    for step in range(2, steps + 1):
        turns.close(turns.issue(*[turns.next_row(seq) for seq in turns.streams]), step)
    return turns


def looking_ahead(turns: Turns, steps: int) -> Turns:
    ticket = turns.issue(*[turns.prompt(seq) for seq in turns.streams])
    for step in range(2, steps + 1):
        ahead = turns.issue(*[turns.ahead(seq) for seq in turns.streams])
        turns.close(ticket, step - 1)
        ticket = ahead
    turns.close(ticket, steps)
    return turns


def opened(kernel: Kernel, parameters: Parameters = GREEDY) -> Turns:
    turns = Turns(kernel, parameters)
    for seq, rows in enumerate((3, 6, 9)):
        turns.open(seq, tuple(range(seq, seq + rows)))
    return turns


def fake(geometry: Geometry = GEOMETRY, **options: Any) -> FakeKernel:
    return FakeKernel(geometry, vocab_size=1 << 20, **options)


@pytest.mark.parametrize("sanitize", [EDGES, FULL])
@pytest.mark.parametrize("geometry", [GEOMETRY, WINDOWS])
@pytest.mark.parametrize("parameters", [GREEDY, DRAWN])
def test_lookahead_changes_no_token_of_the_fake_and_finds_nothing_wrong(
    parameters: Parameters, geometry: Geometry, sanitize: str
) -> None:
    plain = one_by_one(opened(fake(geometry, sanitize=sanitize), parameters), 20)
    ahead = looking_ahead(opened(fake(geometry, sanitize=sanitize), parameters), 20)
    assert ahead.streams == plain.streams
    assert [seen(it) for it in ahead.results] == [seen(it) for it in plain.results]
    assert [it.shadow.found for it in ahead.results] == [0] * 20
    assert all(it.shadow.checked for it in ahead.results)


def seen(result: StepResult) -> tuple[object, ...]:
    """What does not go by block ids, which depend on when a window lets go of one."""
    it = result.observation
    return it.starts, it.rows, it.visible, result.sampled, result.logits, result.margins


@pytest.mark.parametrize("sanitize", [EDGES, FULL])
def test_a_commit_of_another_token_than_was_fed_is_found(sanitize: str) -> None:
    turns = Turns(fake(sanitize=sanitize))
    turns.open(0, (1, 2, 3))
    first = turns.issue(turns.prompt(0))
    second = turns.issue(turns.ahead(0))
    (token,) = turns.kernel.collect(first).tokens
    turns.do(*commands.step_written(turns.state, 1))
    turns.do(*commands.commit(turns.state, 0, (token + 1,)))
    third = turns.issue(turns.ahead(0))
    assert turns.kernel.collect(second).shadow.found == 0
    (finding,) = turns.kernel.collect(third).shadow.findings
    assert (finding.seq, finding.position) == (0, 3)
