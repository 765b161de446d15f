"""Draft model: what a small model guesses, as pure functions of the view; and how the view goes on.

    plan_draft -> begin_draft -> (the forward) -> close_draft -> settle_draft
                                 (it raised)   -> fail_draft

A round stands before each plan that may use its guesses. Its first step brings the small model's
cache to the end of each answer that goes on, and draws a guess there; each step behind it feeds the
guess before, whose token nobody has read yet, and draws the next. A step is issued before the one
before it is read, and that one is read then: P1 P2 D1 P3 D2 D3. What is guessed is an input to
plan_step, as an arrival is.

A sequence's text in this pool is its request's, with its own guesses behind. Where the answer went
another way, the next round first trims what does not agree. Blocks are published by then only, so
that no guess is ever found by another. A sequence that finds no block gets no guess: nobody is
preempted for one. Whatever raises, the pages are thrown away and the pool starts anew.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs

from kernel.batch import Batch, Piece
from statemachine import commands
from statemachine.errors import PoolExhausted
from statemachine.events import (
    DECODE,
    LOOKAHEAD,
    PROMPT,
    Appended,
    AppendedEach,
    BlockCopied,
    Event,
    Namespace,
)
from statemachine.records import Parameters, RequestArrived
from statemachine.sequence import Sequence, unpack
from statemachine.state import State
from statemachine.transitions import apply_all

from .admission import capacity_tokens, limit_tokens
from .draft_pool import DraftPiece, DraftPool, DraftStep
from .policy import DRAFT_TOKENS_MAX, Policy
from .tokenlog import TokenLog
from .view import RequestState, View

ENDED = "ended"
"""Why a sequence of this pool is closed: its request is gone."""


def plan_draft(view: View, policy: Policy) -> DraftStep:
    """The draft model's next step; one that is `idle` means that the round is over, or none is due.

    The view must have a draft pool.
    """
    pool = _pool(view)
    making = _Making(pool)
    if pool.flights:
        _go_on(making, pool.flights[-1])
        return making.step()
    for seq in sorted(pool.state.sequences):
        if seq not in view.requests:
            making.do(commands.close(making.state, seq, ENDED))
    wanted = _asking(view, policy) if pool.guesses and not view.alone else {}
    if wanted:
        _make_ready(making, view, wanted)
        _catch_up(making, view, policy, wanted)
    return making.step(tuple(wanted))


def _pool(view: View) -> DraftPool:
    assert view.draft is not None, "there is no draft model"
    return view.draft


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
        if request.guesses is not None or not _is_decoding(stream, sequence):
            continue
        left = limit_tokens(request, capacity) - stream.length
        most = min(policy.draft_tokens, left - 1, spare)
        if most > 0 and not request.arrived.parameters.embed:
            wanted[seq] = most
            spare -= most
    return wanted


def _is_decoding(stream: TokenLog, sequence: Sequence) -> bool:
    """Whether one row is left, and an answer: decoding.decoding asks the same."""
    one_left = stream.length - sequence.committed == 1 and stream.length > len(stream.prompt)
    return one_left and not sequence.speculative and not sequence.pads


def _make_ready(making: _Making, view: View, wanted: Iterable[int]) -> None:
    """Sequences are open, and hold nothing but what their requests' texts begin with; those of
    requests that were preempted hold nothing.
    """
    running = set(view.running)
    for seq, sequence in sorted(making.state.sequences.items()):
        if sequence.committed and seq not in running:
            making.do(commands.preempt(making.state, seq))
    for seq in range(making.state.last_seq + 1, max(wanted) + 1):
        known = view.requests.get(seq)
        if known is not None:
            salt = known.arrived.namespace.salt  # what an adapter changes, this model has not
            making.do(commands.open_sequence(making.state, seq, Namespace(salt=salt)))
    for seq in wanted:
        _agree(making, view.requests[seq].stream, seq)


def _agree(making: _Making, stream: TokenLog, seq: int) -> None:
    """Trim what the text does not say, and the row that yields its next token."""
    rows = making.state.sequences[seq].committed
    if not rows:
        return
    guessed = _last_tokens(making.state.sequences[seq], making.state.geometry.block_size)
    agreed = rows - len(guessed)
    for token, said in zip(guessed, stream.slice(agreed, rows), strict=False):
        if token != said:
            break
        agreed += 1
    agreed = min(agreed, stream.length - 1)
    if agreed < rows:
        making.do(commands.trim(making.state, seq, rows - agreed))


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
    for seq in wanted:
        _share(making, view, policy, seq)
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


def _share(making: _Making, view: View, policy: Policy, seq: int) -> None:
    """Publish what is sure by now; adopt what others computed; let windows move on."""
    sequence = making.state.sequences[seq]
    if policy.prefix_cache:
        if sequence.committed:
            making.do(commands.publish(making.state, seq))
        else:
            stream = view.requests[seq].stream
            tokens = stream.slice(0, stream.length)
            making.do(commands.adopt(making.state, seq, tokens))
    making.do(commands.front_trims(making.state, seq))


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
        making.do(commands.append(making.state, seq, making.pool.step, tokens, purpose=PROMPT))
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


def begin_draft(view: View, step: DraftStep) -> View:
    """The view once a draft step's opening events are applied."""
    pool, requests = _pool(view), view.requests
    for seq in step.asked:
        requests = requests.set(seq, structs.replace(requests[seq], guesses=()))
    flights = (*pool.flights, step)
    pool = structs.replace(pool, state=step.state, step=step.step + 1, flights=flights)
    return structs.replace(view, requests=requests, draft=pool)


def draft_batch(view: View, step: DraftStep) -> Batch:
    """What the draft model's kernel is handed for a step."""
    pieces = []
    for planned in step.pieces:
        sequence, request = step.state.sequences[planned.seq], view.requests[planned.seq]
        ahead = planned.purpose == LOOKAHEAD
        end = sequence.committed
        pieces.append(
            Piece(
                sequence=sequence,
                tokens=() if ahead else request.stream.slice(end - planned.rows, end),
                pending=int(ahead),
                samples=planned.samples,
                parameters=drawn_as(request.arrived.parameters) if planned.samples else None,
            )
        )
    copies = tuple(event for event in step.events if isinstance(event, BlockCopied))
    return Batch(step.step, tuple(pieces), copies)


def drawn_as(parameters: Parameters) -> Parameters:
    """How a guess is drawn: as the answer is, with its seed, so that the same noise falls on both
    models' logits; without what reads the answer, which has tokens by then that nobody has read.
    """
    return Parameters(
        max_tokens=parameters.max_tokens,
        temperature=parameters.temperature,
        top_p=parameters.top_p,
        top_k=parameters.top_k,
        min_p=parameters.min_p,
        seed=parameters.seed,
    )


def drafted_arrival(record: RequestArrived) -> RequestArrived:
    """A request as the draft model's kernel knows it."""
    return structs.replace(
        record,
        parameters=drawn_as(record.parameters),
        namespace=Namespace(salt=record.namespace.salt),
    )


def close_draft(view: View, tokens: tuple[int, ...]) -> tuple[Event, ...]:
    """The closing events of the oldest draft step: the rows behind it learn their tokens.

    Raises ValueError where there are not as many tokens as samples.
    """
    pool = _pool(view)
    oldest, *behind = pool.flights
    drawn = _drawn(oldest, tokens)
    if not oldest.pieces:
        return ()
    events = commands.step_written(pool.state, oldest.step)
    seqs = [piece.seq for piece in behind[0].pieces] if behind else []
    if seqs:
        known = tuple([drawn[seq] for seq in seqs])
        events += commands.commit_each(apply_all(pool.state, events), seqs, known)
    return events


def _drawn(step: DraftStep, tokens: tuple[int, ...]) -> dict[int, int]:
    samplers = [piece.seq for piece in step.pieces if piece.samples]
    if len(samplers) != len(tokens):
        raise ValueError(
            f"step {step.step} of the draft model has {len(samplers)} samples, not {len(tokens)}"
        )
    return dict(zip(samplers, tokens, strict=True))


def settle_draft(
    view: View, tokens: tuple[int, ...], events: tuple[Event, ...], state: State | None = None
) -> View:
    """The view after the oldest draft step: guesses joined those before them, up to the first that
    the model that is served does not know.
    """
    pool, requests = _pool(view), view.requests
    oldest, *behind = pool.flights
    drawn = _drawn(oldest, tokens)
    for piece in oldest.pieces:
        request = requests.get(piece.seq)
        if not piece.samples or request is None or len(request.guesses or ()) != piece.place:
            continue
        token = drawn[piece.seq]
        if not pool.vocab_size or token < pool.vocab_size:
            guesses = (*(request.guesses or ()), token)
            requests = requests.set(piece.seq, structs.replace(request, guesses=guesses))
    pool = structs.replace(
        pool,
        state=apply_all(pool.state, events) if state is None else state,
        flights=tuple(behind),
        failures=0,
    )
    return structs.replace(view, requests=requests, draft=pool)


def fail_draft(view: View) -> tuple[View, tuple[Event, ...]]:
    """The view after the oldest draft step raised, and the events that say so. What flies behind it
    is void, which `void_draft` says.
    """
    pool = _pool(view)
    events = commands.pool_reset(pool.state)
    pool = structs.replace(
        pool,
        state=apply_all(pool.state, events),
        flights=pool.flights[1:],
        failures=pool.failures + 1,
    )
    return structs.replace(view, draft=pool), events


def void_draft(view: View) -> View:
    """The view after the oldest draft step was given up behind one that lost the pages."""
    pool = _pool(view)
    return structs.replace(view, draft=structs.replace(pool, flights=pool.flights[1:]))
