"""Admission: what may be served at all, and what may start now.

Refusal on arrival (`refusal`), what a pool must hold for a policy (`check_pool`), and the choice of
the next requests from the queue (`admit`). Pure: it asks commands on scratch states, and has no
block arithmetic beyond "how many blocks do that many rows take".

The queue's order holds, but for this: a request that does not fit is passed by later ones that do,
at most PASSES_MAX of them in its life; then nothing behind it starts before it does. Only the first
LOOK_AHEAD of the queue are looked at in a step.
"""

from __future__ import annotations

from typing import Protocol

from statemachine import commands
from statemachine.events import Event, PrefixAdopted
from statemachine.geometry import WINDOW, Geometry
from statemachine.prefix import Hit
from statemachine.state import State
from statemachine.transitions import apply_all

from .policy import Policy
from .sharing import sharers
from .submission import RequestRefused, Submission
from .view import LOOK_AHEAD, RequestState, View

PASSES_MAX = 8
"""Requests that may be admitted past one that does not fit, in its whole life."""


def capacity_tokens(geometry: Geometry, policy: Policy) -> int:
    """The longest prompt + answer that context and pool hold: where answers end with "length"."""
    rows = [
        group.num_blocks * geometry.block_size
        for group in geometry.groups
        if group.paged and group.kind != WINDOW
    ]
    return min([policy.context_tokens, *rows])


def refuse(geometry: Geometry, policy: Policy, submission: Submission, vocab_size: int = 0) -> None:
    """Raise RequestRefused where a request can never be served as it is.

    vocab_size: token ids must be below it; 0 asks only that they are not negative.
    """
    prompt = len(submission.tokens)
    if not prompt:
        raise RequestRefused("the prompt is empty: send at least one token", param="messages")
    for token in (min(submission.tokens), max(submission.tokens)):
        if token < 0 or (vocab_size and token >= vocab_size):
            raise RequestRefused(
                f"token {token} of the prompt is outside of the vocabulary", param="messages"
            )
    if submission.parameters.max_tokens < 1:
        raise RequestRefused(
            f"max_tokens must be at least 1, not {submission.parameters.max_tokens}",
            param="max_tokens",
        )
    if prompt + 1 > policy.context_tokens:
        raise RequestRefused(
            f"the prompt has {prompt} tokens, and with one token of answer it exceeds the context "
            f"of {policy.context_tokens} tokens: shorten it",
            code="context_length_exceeded",
            param="messages",
        )
    held = capacity_tokens(geometry, policy)
    if prompt + 1 > held:
        raise RequestRefused(
            f"the prompt has {prompt} tokens, and with one token of answer it exceeds what the "
            f"cache can hold ({held} tokens): shorten it, or serve with more blocks",
            code="context_length_exceeded",
            param="messages",
        )


def check_pool(geometry: Geometry, policy: Policy) -> None:
    """Raise ValueError where a window group could not hold its window and one piece of a prompt."""
    for number, group in enumerate(geometry.groups):
        if group.kind != WINDOW:
            continue
        needed = _window_blocks(geometry, policy, number)
        if group.num_blocks < needed:
            raise ValueError(
                f"group {number} has {group.num_blocks} blocks, but its window of {group.window} "
                f"rows and a piece of a prompt take {needed}: give it more, or a smaller "
                "prefill_chunk"
            )


def _window_blocks(geometry: Geometry, policy: Policy, group: int) -> int:
    """Blocks that one sequence holds at most in a window group, chunks trimmed as they go."""
    spec = geometry.groups[group]
    chunk = min(policy.prefill_chunk, policy.max_batch_tokens)
    padded = -(-chunk // policy.prefill_tile) * policy.prefill_tile
    return geometry.blocks_for(spec.window + padded) + 1 + geometry.blocks_for(spec.sink)


class Draft(Protocol):
    """What admission needs of the plan that is being made (scheduler.Draft)."""

    view: View
    policy: Policy
    state: State
    running: list[int]
    waiting: tuple[int, ...]
    rows_left: int
    stuck: bool
    admitted: list[tuple[int, int]]
    passed: list[int]

    def do(self, events: tuple[Event, ...]) -> None:
        """Apply events and keep them."""

    def request(self, seq: int) -> RequestState:
        """A live request."""

    def prompts(self) -> list[int]:
        """Running sequences that have prompt rows to issue, in admission order."""


def admit(draft: Draft) -> None:
    """Start requests from the queue, as far as they fit and can have rows in this step."""
    view, policy = draft.view, draft.policy
    room = min(
        policy.max_running - len(draft.running),
        sharers(policy, draft.rows_left) - len(draft.prompts()),
    )
    if room < 1 or view.stuck:
        return
    skipped: list[int] = []
    started: list[int] = []
    for request in view.waiting[:LOOK_AHEAD]:
        if len(started) == room:
            break
        found = _try(draft, request, skipped)
        if found is None:
            skipped.append(request)
            if _passes(draft, request) >= PASSES_MAX:
                break
            continue
        draft.do(found)
        draft.running.append(request)
        draft.admitted.append((request, _adopted(found)))
        draft.passed.extend(skipped)
        started.append(request)
    if started:
        front = tuple(r for r in draft.waiting[:LOOK_AHEAD] if r not in started)
        draft.waiting = front + draft.waiting[LOOK_AHEAD:]
    else:
        draft.stuck = bool(skipped)


def _passes(draft: Draft, request: int) -> int:
    return draft.request(request).passed + draft.passed.count(request)


def _adopted(events: tuple[Event, ...]) -> int:
    return sum(len(event.tokens) for event in events if isinstance(event, PrefixAdopted))


def _try(draft: Draft, request: int, skipped: list[int]) -> tuple[Event, ...] | None:
    """Events that open a request and adopt its prefix, if all of its rows then fit; else None.

    Ids are opened in order, so those that it passes are opened too; they stay in the queue.
    """
    opening: tuple[Event, ...] = ()
    state = draft.state
    for seq in (*skipped, request):
        if seq not in state.sequences:
            opened = commands.open_sequence(state, seq, draft.request(seq).arrived.namespace)
            state, opening = apply_all(state, opened), opening + opened
    stream = draft.request(request).stream
    tokens = stream.slice(0, stream.length)
    for hit in _adoptions(draft, state, request):
        adopted = commands.adopt(state, request, tokens, hit)
        if _fits(draft, apply_all(state, adopted), request, len(tokens)):
            return opening + adopted
    return None


def _adoptions(draft: Draft, state: State, request: int) -> list[Hit | None]:
    """What to bound the adoption by, best first; None takes all that the index holds.

    Adopted blocks count beside all that a window holds at once. Where nothing else runs, and so
    nothing will make room, a request must be able to start without them.
    """
    if draft.policy.prefix_cache and draft.running:
        return [None]
    namespace = draft.request(request).arrived.namespace
    nothing = commands.lookup(state, namespace, ())
    return [None, nothing] if draft.policy.prefix_cache else [nothing]


def _fits(draft: Draft, state: State, request: int, rows: int) -> bool:
    """Whether all rows of a request fit, beside those that running prompts still have to issue."""
    policy, geometry = draft.policy, state.geometry
    left = rows - state.sequences[request].offset
    alone = not draft.running
    pads = 0 if alone else -left % policy.prefill_tile
    needed = list(_needed(state, policy, request, left + pads))
    for seq in draft.prompts():
        owed = draft.request(seq).stream.length - state.sequences[seq].offset
        for group, blocks in enumerate(_needed(state, policy, seq, owed)):
            needed[group] += blocks
    spare = 0 if alone else policy.watermark_blocks
    return all(
        needed[group] + spare <= state.free_blocks(group) + state.cached_blocks(group)
        for group, spec in enumerate(geometry.groups)
        if spec.paged
    )


def _needed(state: State, policy: Policy, seq: int, rows: int) -> tuple[int, ...]:
    """Blocks that `rows` more rows take, per group; of a window, no more than it holds at once."""
    geometry = state.geometry
    return tuple(
        min(blocks, _window_blocks(geometry, policy, group))
        if geometry.groups[group].kind == WINDOW
        else blocks
        for group, blocks in enumerate(commands.blocks_needed(state, seq, rows))
    )
