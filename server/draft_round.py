"""Draft round: what the draft model's next step does, as a pure function of the view.

Owns who is guessed for and how far; which rows of a text the small model has not seen, and which of
its own it must forget; where a sequence finds no block it gets no guess. draft_model.py says how
the view goes on, and what a round is.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from statemachine import commands
from statemachine.errors import PoolExhausted
from statemachine.events import (
    DECODE,
    LOOKAHEAD,
    PROMPT,
    Appended,
    AppendedEach,
    BlockPublished,
    Event,
    Namespace,
    Opened,
)
from statemachine.sequence import Sequence, unpack
from statemachine.state import State
from statemachine.transitions import apply_all

from .admission import capacity_tokens, limit_tokens
from .decoding import is_decoding
from .draft_pool import DraftPiece, DraftPool, DraftStep, pool_in
from .policy import DRAFT_TOKENS_MAX, Policy
from .tokenlog import TokenLog
from .view import RequestState, View

ENDED = "ended"
"""Why a sequence of this pool is closed: its request is gone."""


def plan_draft(view: View, policy: Policy) -> DraftStep:
    """The draft model's next step; one that is `idle` means that the round is over, or none is due.

    The view must have a draft pool.
    """
    pool = pool_in(view.draft)
    making = _Making(pool)
    if pool.flights:
        _go_on(making, pool.flights[-1])
        return making.step()
    ended = [seq for seq in sorted(pool.state.sequences) if seq not in view.requests]
    making.do(tuple(chain.from_iterable(commands.close(pool.state, it, ENDED) for it in ended)))
    if view.flush:
        making.do(commands.flush(making.state))
    wanted = _asking(view, policy) if pool.guesses and not view.alone else {}
    if wanted:
        _make_ready(making, view, wanted)
        _catch_up(making, view, policy, wanted)
    return making.step(tuple(wanted))


class _Making:
    """A step that is being made."""

    def __init__(self, pool: DraftPool) -> None:
        self.pool = pool
        self.state: State = pool.state
        self.events: list[Event] = []
        self.pieces: dict[int, DraftPiece] = {}

    def do(self, events: tuple[Event, ...]) -> None:
        """Apply events and keep them."""
        if events:
            self.state = apply_all(self.state, events)
            self.events.extend(events)

    def step(self, asked: tuple[int, ...] = ()) -> DraftStep:
        """What was made, its pieces in the order in which the events name them."""
        pieces: list[DraftPiece] = []
        for event in self.events:
            if isinstance(event, AppendedEach):
                pieces += [self.pieces[seq] for seq in event.seqs]
            elif isinstance(event, Appended):
                pieces.append(self.pieces[event.seq])
        return DraftStep(self.pool.step, tuple(self.events), tuple(pieces), self.state, asked)


def _asking(view: View, policy: Policy) -> dict[int, int]:
    """Answers that go on and were not guessed since their last token, and how many tokens at most:
    no more than rows of one token each leave.
    """
    requests, sequences = view.requests, view.state.sequences
    capacity = capacity_tokens(view.state.geometry, policy)
    spare = policy.max_batch_tokens - len(view.running)
    if view.waiting.chunks:
        spare //= 2
    wanted: dict[int, int] = {}
    for seq in view.running:
        request: RequestState = requests[seq]
        stream, sequence = request.stream, sequences[seq]
        if request.guesses is not None or not is_decoding(stream, sequence):
            continue
        left = limit_tokens(request, capacity) - stream.length
        most = min(policy.draft_tokens, left - 1, spare)
        if most > 0 and not request.arrived.parameters.embed:
            wanted[seq] = most
            spare -= most
    return wanted


def _make_ready(making: _Making, view: View, wanted: Iterable[int]) -> None:
    """Sequences are open, and hold nothing but what their requests' texts begin with; those of
    requests that were preempted hold nothing.
    """
    running = set(view.running)
    for seq, sequence in sorted(making.state.sequences.items()):
        if sequence.committed and seq not in running:
            making.do(commands.preempt(making.state, seq))
    ids = range(making.state.last_seq + 1, max(wanted) + 1)
    live = [view.requests[seq].arrived for seq in ids if seq in view.requests]
    # What an adapter changes, this model has not.
    making.do(tuple([Opened(it.request, Namespace(salt=it.namespace.salt)) for it in live]))
    trims: list[Event] = []
    for seq in wanted:  # trims of some sequences ask nothing of the others'
        trims += _agree(making.state, view.requests[seq].stream, seq)
    making.do(tuple(trims))


def _agree(state: State, stream: TokenLog, seq: int) -> tuple[Event, ...]:
    """Trim what the text does not say, and the row that yields its next token."""
    rows = state.sequences[seq].committed
    if not rows:
        return ()
    guessed = _last_tokens(state.sequences[seq], state.geometry.block_size)
    agreed = rows - len(guessed)
    for token, said in zip(guessed, stream.slice(agreed, rows), strict=False):
        if token != said:
            break
        agreed += 1
    agreed = min(agreed, stream.length - 1)
    return commands.trim(state, seq, rows - agreed) if agreed < rows else ()


def _last_tokens(sequence: Sequence, block_size: int) -> tuple[int, ...]:
    """The tokens of the last DRAFT_TOKENS_MAX rows at least, as far as there are any."""
    found = sequence.tail
    blocks = DRAFT_TOKENS_MAX // block_size + 1
    for packed in reversed(sequence.packed[-blocks:]):
        found = packed + found
    return unpack(found)


def _catch_up(making: _Making, view: View, policy: Policy, wanted: dict[int, int]) -> None:
    """The rows that are missing: where it is one, in columns; then those that lack the fewest."""
    single: list[int] = []
    several: list[tuple[int, int]] = []
    _share(making, view, policy, wanted)
    for seq in wanted:
        stream, held = view.requests[seq].stream, making.state.sequences[seq].committed
        if held and stream.length - held == 1:
            single.append(seq)
        else:
            several.append((stream.length - held, seq))
    budget = policy.max_batch_tokens
    known = [seq for seq in single[:budget] if _is_known(making, view, seq, 1)]
    _append_singles(making, view, known, wanted)
    budget -= len(known)
    for missing, seq in sorted(several):
        rows = min(missing, policy.prefill_chunk, budget)
        if rows > 0 and _is_known(making, view, seq, rows):
            budget -= _append_several(making, view, seq, rows, wanted[seq])


def _share(making: _Making, view: View, policy: Policy, wanted: Iterable[int]) -> None:
    """Publish what is sure by now, let windows move on, adopt what others computed."""
    state, events = making.state, list[Event]()
    published: set[tuple[int, int]] = set()
    held = [seq for seq in wanted if state.sequences[seq].committed]
    for seq in held:
        for event in commands.publish(state, seq) if policy.prefix_cache else ():
            assert isinstance(event, BlockPublished)
            if (event.group, event.block) not in published:  # two of them may share it
                published.add((event.group, event.block))
                events.append(event)
        events += commands.front_trims(state, seq)
    making.do(tuple(events))
    for seq in wanted:
        if policy.prefix_cache and seq not in held:
            stream = view.requests[seq].stream
            tokens = stream.slice(0, stream.length)
            making.do(commands.adopt(making.state, seq, tokens))


def _is_known(making: _Making, view: View, seq: int, rows: int) -> bool:
    """Whether this model knows the tokens of the next rows."""
    vocab, held = making.pool.vocab_size, making.state.sequences[seq].committed
    return not vocab or max(view.requests[seq].stream.slice(held, held + rows)) < vocab


def _append_singles(making: _Making, view: View, seqs: list[int], wanted: dict[int, int]) -> None:
    tokens = {seq: view.requests[seq].stream.last() for seq in seqs}
    for seq in _append_each(making, seqs, tokens, DECODE):
        making.pieces[seq] = DraftPiece(seq, 1, DECODE, 1, 0, wanted[seq] - 1)


def _append_several(making: _Making, view: View, seq: int, rows: int, most: int) -> int:
    """Rows that were appended: none where blocks are short."""
    stream, held = view.requests[seq].stream, making.state.sequences[seq].committed
    tokens = stream.slice(held, held + rows)
    try:
        making.do(
            commands.append(
                making.state, seq, making.pool.step, tokens, purpose=PROMPT, applied=True
            )
        )
    except PoolExhausted:
        return 0
    whole = held + rows == stream.length
    making.pieces[seq] = DraftPiece(seq, rows, PROMPT, int(whole), 0, most - 1 if whole else 0)
    return rows


def _go_on(making: _Making, last: DraftStep) -> None:
    """One row more to each sequence that is to be guessed on."""
    before = {piece.seq: piece for piece in last.pieces if piece.more}
    for seq in _append_each(making, list(before), None, LOOKAHEAD):
        piece = before[seq]
        making.pieces[seq] = DraftPiece(seq, 1, LOOKAHEAD, 1, piece.place + 1, piece.more - 1)


def _append_each(
    making: _Making, seqs: list[int], tokens: dict[int, int] | None, purpose: str
) -> list[int]:
    """One row each; those that got theirs: the last ones get none while blocks are short."""
    while seqs:
        known = None if tokens is None else tuple([tokens[seq] for seq in seqs])
        try:
            making.do(commands.append_each(making.state, making.pool.step, seqs, known, purpose))
        except PoolExhausted:
            state = making.state
            short = max(
                n for n, seq in enumerate(seqs) if any(commands.blocks_needed(state, seq, 1))
            )
            seqs = seqs[:short] + seqs[short + 1 :]
            continue
        return seqs
    return []
