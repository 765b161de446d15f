"""Decoding: one row for each answer that goes on, drafts behind some, rows ahead of their tokens.

The policy's part that runs in nearly every step, so that it costs little for a row. scheduler.py
says who makes room for whom.
"""

from __future__ import annotations

from msgspec import structs

from statemachine import commands
from statemachine.errors import PoolExhausted
from statemachine.events import DECODE, DRAFT, LOOKAHEAD, Appended, AppendedEach, Event
from statemachine.geometry import has_state
from statemachine.sequence import Sequence
from statemachine.transitions import apply_all

from .admission import capacity_tokens, limit_tokens
from .draft import Draft
from .policy import Policy
from .speculation import Ngrams, followed_at, index, propose
from .tokenlog import TokenLog
from .view import PlannedPiece, RequestState


def decoding(draft: Draft) -> list[int]:
    """Running sequences with one row left and an answer, in admission order."""
    requests, sequences = draft.view.requests, draft.state.sequences
    found = []
    for seq in draft.running:
        sequence = sequences[seq]
        # Nearly all have a row in flight where steps run ahead.
        if not sequence.speculative and is_decoding(requests[seq].stream, sequence):
            found.append(seq)
    return found


def is_decoding(stream: TokenLog, sequence: Sequence) -> bool:
    """Whether one row is left to issue, and it is an answer's."""
    one_left = stream.length - sequence.committed == 1 and stream.length > len(stream.prompt)
    return one_left and not sequence.speculative and not sequence.pads


def sampling(draft: Draft) -> list[int]:
    """Running sequences of the step in flight that may have a row before its tokens are read."""
    samplers = {
        piece.seq
        for piece in draft.view.flights[-1].pieces
        if piece.samples and piece.purpose != DRAFT and not piece.pads
    }
    requests, policy, pool = draft.view.requests, draft.policy, draft.view.draft
    if pool is not None:
        if pool.guesses and policy.draft_tokens:
            return []  # a draft model guesses behind a token that is known
        policy = structs.replace(policy, draft_tokens=0)
    capacity = capacity_tokens(draft.state.geometry, policy)
    return [
        seq
        for seq in draft.running
        if seq in samplers and not _waits_for_token(requests[seq], policy, capacity)
    ]


def _waits_for_token(request: RequestState, policy: Policy, capacity: int) -> bool:
    """Whether the token in flight is to be read first: it ends the answer, drafts may follow, or
    what is sampled next depends on it.
    """
    stream = request.stream
    if stream.length + 1 >= limit_tokens(request, capacity):
        return True
    if request.arrived.parameters.reads_answer:
        return True
    if not policy.draft_tokens:
        return False
    at = followed_at(stream, ngrams_of(request, policy), policy.lookup_ngram)
    return at is not None and at + 1 < stream.length


def ngrams_of(request: RequestState, policy: Policy) -> Ngrams:
    """The index of a request's stream; made here where nobody kept it."""
    if request.ngrams is not None:
        return request.ngrams
    return index(request.stream, policy.lookup_ngram)


def plan_ahead(draft: Draft, seqs: list[int]) -> None:
    """A row without a token to each of `seqs`, the last ones left out while blocks are short."""
    while seqs:
        try:
            events = commands.append_each(draft.state, draft.view.step, seqs, None, LOOKAHEAD)
        except PoolExhausted:
            last = max(n for n, seq in enumerate(seqs) if _takes_block(draft, seq))
            seqs = seqs[:last] + seqs[last + 1 :]
            continue
        draft.do(events)
        draft.pieces += [PlannedPiece(seq, 1, 0, LOOKAHEAD, 1) for seq in _order(events)]
        draft.rows_left -= len(seqs)
        return


def _takes_block(draft: Draft, seq: int) -> bool:
    return any(commands.blocks_needed(draft.state, seq, 1))


def plan_decode(draft: Draft, seqs: list[int]) -> None:
    """One row to each of `seqs`, after whatever has to make room for them; drafts behind some of
    them, as long as all find their blocks without that.
    """
    drafts = _drafts(draft, seqs) if draft.policy.draft_tokens else {}
    if drafts and _plan_drafts(draft, seqs, drafts):
        return
    _plan_rows(draft, seqs)


def _drafts(draft: Draft, seqs: list[int]) -> dict[int, tuple[int, ...]]:
    """What may come next, where a text was read before; rows of one token each come first."""
    policy, spare = draft.policy, draft.rows_left - len(seqs)
    if draft.waiting.chunks or draft.prompts():
        spare //= 2  # or texts that repeat themselves would keep every prompt out
    geometry = draft.state.geometry
    capacity, states = capacity_tokens(geometry, policy), has_state(geometry)
    found = {}
    for seq in seqs:
        request = draft.request(seq)
        left = limit_tokens(request, capacity) - request.stream.length
        most = min(policy.draft_tokens, left - 1, spare)
        if states:
            # They end with the block: what may not stay is taken back to its edge.
            size = geometry.block_size
            most = min(most, size - 1 - draft.state.sequences[seq].committed % size)
        if most > 0:
            guess = _guess(draft, request, most)
            if guess:
                found[seq] = guess
                spare -= len(guess)
    return found


def _guess(draft: Draft, request: RequestState, most: int) -> tuple[int, ...]:
    """At most `most` tokens that may come next: a draft model's, or what followed the last time."""
    if draft.view.draft is not None:
        return (request.guesses or ())[:most]
    policy = draft.policy
    return propose(request.stream, ngrams_of(request, policy), policy.lookup_ngram, most)


def _plan_drafts(draft: Draft, seqs: list[int], drafts: dict[int, tuple[int, ...]]) -> bool:
    """Decode rows and drafts together; False, and nothing done, where blocks are short."""
    requests, step = draft.view.requests, draft.view.step
    state, events = draft.state, list[Event]()
    plain = [seq for seq in seqs if seq not in drafts]
    pieces: list[PlannedPiece] = []
    try:
        if plain:
            tokens = tuple(requests[seq].stream.last() for seq in plain)
            events += commands.append_each(state, step, plain, tokens, DECODE)
            pieces += [PlannedPiece(seq, 1, 0, DECODE, 1) for seq in _order(tuple(events))]
            state = apply_all(state, events)
        for seq, guess in drafts.items():
            fed = (requests[seq].stream.last(), *guess)
            fresh = commands.append(state, seq, step, fed, purpose=DRAFT, applied=True)
            state = apply_all(state, fresh)
            events += fresh
            pieces.append(PlannedPiece(seq, len(fed), 0, DRAFT, len(fed)))
    except PoolExhausted:
        return False
    draft.state = state
    draft.events += events
    draft.pieces += pieces
    draft.rows_left -= sum(piece.rows for piece in pieces)
    return True


def _plan_rows(draft: Draft, seqs: list[int]) -> None:
    """One row to each of `seqs`, after whatever has to make room for them."""
    requests, step = draft.view.requests, draft.view.step
    while seqs:
        tokens = tuple([requests[seq].stream.last() for seq in seqs])
        try:
            events = commands.append_each(draft.state, step, seqs, tokens, DECODE)
        except PoolExhausted:
            draft.make_room()
            seqs = [seq for seq in seqs if seq in draft.running]
            continue
        draft.do(events)
        draft.pieces += [PlannedPiece(seq, 1, 0, DECODE, 1) for seq in _order(events)]
        draft.rows_left -= len(seqs)
        return


def _order(events: tuple[Event, ...]) -> list[int]:
    """Sequences in the order in which decode events name them: the order of the batch."""
    order: list[int] = []
    for event in events:
        if isinstance(event, AppendedEach):
            order.extend(event.seqs)
        elif isinstance(event, Appended):
            order.append(event.seq)
    return order
