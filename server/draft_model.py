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

from msgspec import structs

from kernel.batch import Batch, Piece
from statemachine import commands
from statemachine.events import LOOKAHEAD, BlockCopied, Event, Namespace
from statemachine.records import Parameters, RequestArrived
from statemachine.state import State
from statemachine.transitions import apply_all

from .draft_pool import DraftStep, pool_in
from .view import View

GREEDY = Parameters(max_tokens=1)


def begin_draft(view: View, step: DraftStep) -> View:
    """The view once a draft step's opening events are applied."""
    pool, requests = pool_in(view.draft), view.requests
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
    if parameters.temperature <= 0:
        return GREEDY
    return Parameters(
        max_tokens=1,
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
    pool = pool_in(view.draft)
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
    pool = pool_in(view.draft)
    oldest, *behind = pool.flights
    drawn = _drawn(oldest, tokens)
    with view.requests.mutate() as changing:
        for piece in oldest.pieces:
            request = changing.get(piece.seq)
            if not piece.samples or request is None or len(request.guesses or ()) != piece.place:
                continue
            token = drawn[piece.seq]
            if not pool.vocab_size or token < pool.vocab_size:
                guesses = (*(request.guesses or ()), token)
                changing[piece.seq] = structs.replace(request, guesses=guesses)
        requests = changing.finish()
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
    pool = pool_in(view.draft)
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
    pool = pool_in(view.draft)
    return structs.replace(view, draft=structs.replace(pool, flights=pool.flights[1:]))
