"""Turns: a kernel with a state machine beside it, by hand: one row at a time, looking ahead, or
verifying drafts. What the tests of the kernel's side of these share.
"""

from __future__ import annotations

from typing import Any

from kernel.batch import Batch, Kernel, Piece, StepResult
from statemachine import commands
from statemachine.events import DECODE, DRAFT, LOOKAHEAD, PROMPT, BlockCopied, Event
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

    def __init__(self, kernel: Kernel, parameters: Parameters = GREEDY) -> None:
        self.kernel = kernel
        self.state: State = new_state(kernel.geometry)
        self.streams: dict[int, list[int]] = {}
        self.results: list[StepResult] = []
        self.batches: list[Batch] = []
        self.copies: tuple[BlockCopied, ...] = ()
        self._parameters = parameters

    def do(self, *events: Event) -> tuple[Event, ...]:
        self.state = apply_all(self.state, events)
        return events

    def sequence(self, seq: int) -> Sequence:
        return self.state.sequences[seq]

    def open(self, seq: int, tokens: tuple[int, ...]) -> None:
        self.do(*commands.open_sequence(self.state, seq))
        self.streams[seq] = list(tokens)

    def piece(self, seq: int, tokens: tuple[int, ...], purpose: str, **more: Any) -> Piece:
        """Append, and say it as a piece; `copies` has its block copies."""
        step = len(self.batches) + 1
        rows: dict[str, Any] = {"tokens": tokens} if tokens else {"rows": 1}
        events = self.do(*commands.append(self.state, seq, step, purpose=purpose, **rows))
        self.copies += tuple(event for event in events if isinstance(event, BlockCopied))
        given = {"samples": 1, "parameters": self._parameters, **more}
        return Piece(self.sequence(seq), tokens, **given)

    def prompt(self, seq: int) -> Piece:
        done = self.sequence(seq).offset
        return self.piece(seq, tuple(self.streams[seq][done:]), PROMPT)

    def next_row(self, seq: int) -> Piece:
        return self.piece(seq, (self.streams[seq][-1],), DECODE)

    def ahead(self, seq: int) -> Piece:
        return self.piece(seq, (), LOOKAHEAD, pending=1)

    def draft(self, seq: int, guesses: tuple[int, ...]) -> Piece:
        tokens = (self.streams[seq][-1], *guesses)
        return self.piece(seq, tokens, DRAFT, samples=len(tokens))

    def issue(self, *pieces: Piece) -> object:
        self.batches.append(Batch(len(self.batches) + 1, pieces, self.copies))
        self.copies = ()
        return self.kernel.issue(self.batches[-1])

    def close(self, ticket: object, step: int) -> StepResult:
        """Collect; what was drawn joins the streams, rows that stood commit, others rewind."""
        result = self.kernel.collect(ticket)
        self.results.append(result)
        self.do(*commands.step_written(self.state, step))
        drawn: dict[int, list[int]] = {}
        for number, token in zip(result.sampled, result.tokens, strict=True):
            drawn.setdefault(number, []).append(token)
        for number, tokens in drawn.items():
            self._join(self.batches[step - 1].pieces[number], tokens)
        for seq in list(self.state.sequences):
            self.do(*commands.publish(self.state, seq))
            self.do(*commands.front_trims(self.state, seq))
        return result

    def _join(self, piece: Piece, drawn: list[int]) -> None:
        seq, guesses = piece.sequence.id, piece.tokens[1:]
        stood = 0
        if len(drawn) > 1:
            while stood < len(guesses) and guesses[stood] == drawn[stood]:
                stood += 1
            self.do(*commands.commit(self.state, seq, piece.tokens[: stood + 1]))
            if stood < len(guesses):
                self.do(*commands.rewind(self.state, seq, len(guesses) - stood))
        elif self.sequence(seq).speculative:
            self.do(*commands.commit(self.state, seq, (drawn[0],)))
        self.streams[seq] += drawn[: stood + 1]


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


def guessing(turns: Turns, answers: dict[int, list[int]], most: int) -> Turns:
    """As far as `answers`, by drafts out of them: the last of each second draft is wrong."""
    turns.close(turns.issue(*[turns.prompt(seq) for seq in turns.streams]), 1)
    step = 1
    while any(len(turns.streams[seq]) < len(answers[seq]) for seq in answers):
        pieces = []
        step += 1
        for seq, answer in answers.items():
            length = len(turns.streams[seq])
            guesses = answer[length : min(length + most, len(answer) - 1)]
            if step % 2 and guesses:
                guesses[-1] ^= 1
            if length < len(answer):
                pieces.append(turns.draft(seq, tuple(guesses)))
        turns.close(turns.issue(*pieces), step)
    return turns


def opened(kernel: Kernel, parameters: Parameters = GREEDY) -> Turns:
    turns = Turns(kernel, parameters)
    for seq, rows in enumerate((3, 6, 9)):
        turns.open(seq, tuple(range(seq, seq + rows)))
    return turns


def seen(result: StepResult) -> tuple[object, ...]:
    """What does not go by block ids, which depend on when a window lets go of one."""
    it = result.observation
    return it.starts, it.rows, it.visible, result.sampled, result.logits, result.margins
