"""Admission: what may be served at all, and what may start now.

Refusal on arrival (`refusal`), what a pool must hold for a policy (`check_pool`), and the choice of
the next requests from the queue (`admit`). Pure: it asks commands on scratch states, and has no
block arithmetic beyond "how many blocks do that many rows take".

The queue's order holds, but for this: a request that cannot start is passed by later ones that
can, at most PASSES_MAX of them in its life; then nothing behind it starts before it does. Only the
first LOOK_AHEAD of the queue are looked at in a step. What keeps a request from starting: its rows
do not fit; a running request is still computing more of its prompt than can be found (it moves, so
this ends); its parent, whose rows it is to share, has not got to the end of their prompt.

Ids are opened in order: so those that a request passes are opened with it, and stay queued. Where
these are more than one plan may open (opens_max), it opens so many, and nobody behind is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from statemachine import commands
from statemachine.events import Event, Opened, PrefixAdopted
from statemachine.geometry import Geometry, has_state
from statemachine.records import NO_PARENT
from statemachine.sequence import held_blocks
from statemachine.state import State
from statemachine.transitions import apply_all

from .draft import Draft
from .parameters import refuse_parameters
from .policy import Policy
from .reuse import sharings, waits_for_parent, waits_for_prefix
from .sharing import sharers
from .submission import RequestRefused, Submission
from .view import LOOK_AHEAD, RequestState

PASSES_MAX = 8
"""Requests that may be admitted past one that does not fit, in its whole life."""


SLOTS = 2
"""Slots that a request takes as it crosses a block's edge: one to read, one to write."""
SLOTS_MIN = SLOTS + 1
"""One more for a slot that it shares, and must copy."""


def capacity_tokens(geometry: Geometry, policy: Policy) -> int:
    """The longest prompt + answer that context and pool hold: where answers end with "length"."""
    rows = [
        group.num_blocks * geometry.block_size
        for group in geometry.groups
        if group.paged and not group.moves
    ]
    return min([policy.context_tokens, *rows])


def limit_tokens(request: RequestState, capacity: int) -> int:
    """Prompt + answer at which a request ends with "length"."""
    asked = len(request.stream.prompt) + request.arrived.parameters.max_tokens
    return asked if asked < capacity else capacity


def refuse(
    geometry: Geometry,
    policy: Policy,
    submission: Submission,
    vocab_size: int = 0,
    cannot: Mapping[str, str] | None = None,
) -> None:
    """Raise RequestRefused where a request can never be served as it is.

    vocab_size: token ids must be below it; 0 asks only that they are not negative. cannot: see
    parameters.refuse_parameters.
    """
    refuse_parameters(submission.parameters, vocab_size, cannot)
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
    """Raise ValueError where a window group could not hold its window and one piece of a prompt, or
    a recurrent one the slots of one request.
    """
    for number, group in enumerate(geometry.groups):
        if group.recurrent and group.num_blocks < SLOTS_MIN:
            raise ValueError(
                f"group {number} has {group.num_blocks} slots, but a request takes up to "
                f"{SLOTS_MIN}: give it more with num_slots"
            )
        if not group.moves or group.recurrent:
            continue
        needed = _window_blocks(geometry, policy, number)
        if group.num_blocks < needed:
            raise ValueError(
                f"group {number} has {group.num_blocks} blocks, but its window of {group.window} "
                f"rows and a piece of a prompt take {needed}: give it more, or a smaller "
                "prefill_chunk"
            )


def _window_blocks(geometry: Geometry, policy: Policy, group: int) -> int:
    """Blocks that one sequence holds at most in a window group, chunks trimmed as they go; with
    lookahead two chunks, or a draft, are there before the first trim.
    """
    spec = geometry.groups[group]
    chunk = min(policy.prefill_chunk, policy.max_batch_tokens)
    padded = -(-chunk // policy.prefill_tile) * policy.prefill_tile
    rows = max(padded * (2 if policy.lookahead else 1), policy.draft_tokens + 1)
    if policy.draft_tokens and has_state(geometry):
        rows += geometry.block_size  # what drafts may be taken back to
    return geometry.blocks_for(spec.window + rows) + 1 + geometry.blocks_for(spec.sink)


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
    opened, far, adopted = _Opened(draft), False, 0
    for request in draft.waiting.first(LOOK_AHEAD):
        if len(started) == room or any(_passes(draft, it) >= PASSES_MAX for it in skipped):
            break
        due = list(islice(_opening(draft, view.state.last_seq, request), policy.opens_max + 1))
        far = 0 < policy.opens_max < len(due)
        if far:
            draft.do(tuple([it for it in due[:-1] if it.seq > draft.state.last_seq]))
            break
        found = _try(draft, request, opened)
        if found is None:
            skipped.append(request)
            continue
        draft.do(found)
        draft.running.append(request)
        draft.admitted.append((request, _cached(draft, request, found)))
        draft.passed.extend(skipped)
        started.append(request)
        adopted += _adopted(found)
        if 0 < policy.adopts_max <= adopted:
            break
    for request in started:
        draft.waiting = draft.waiting.remove(request, draft.request(request).priority)
    if not started:
        draft.stuck = bool(skipped) and not far


def _passes(draft: Draft, request: int) -> int:
    return draft.request(request).passed + draft.passed.count(request)


def _cached(draft: Draft, request: int, events: tuple[Event, ...]) -> int:
    """Prompt tokens that were computed before it came: what it adopted. A copy's are its parent's,
    however it got its rows; of one whose parent is gone nothing is claimed.
    """
    number = draft.request(request).arrived.parent
    if number != NO_PARENT:
        parent = draft.view.requests.get(number)
        return 0 if parent is None else max(parent.cached_tokens, 0)
    return _adopted(events)


def _adopted(events: tuple[Event, ...]) -> int:
    """Rows that events adopt; what a fork shares is the same tables and costs nothing."""
    return sum(len(event.tokens) for event in events if isinstance(event, PrefixAdopted))


def _try(draft: Draft, request: int, opened: _Opened) -> tuple[Event, ...] | None:
    """Events that open a request and share what is there of its prompt, if all of its rows then
    fit; None where it cannot start.
    """
    if waits_for_parent(draft, request):
        return None
    state, opening = opened.up_to(request)
    stream = draft.request(request).stream
    tokens = stream.slice(0, stream.length)
    if waits_for_prefix(draft, state, request, tokens):
        return None
    for shared in sharings(draft, state, request, tokens):
        if _fits(draft, apply_all(state, shared), request, len(tokens)):
            return opening + shared
    return None


class _Opened:
    """States in which requests are open. What one try opened is kept for the next, as long as the
    plan did not go on.
    """

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._base = self._state = draft.state
        self._events: tuple[Opened, ...] = ()

    def up_to(self, request: int) -> tuple[State, tuple[Event, ...]]:
        """A state in which a request is open, and the events that open it and those before it."""
        draft = self._draft
        if self._base is not draft.state:
            self._base, self._state, self._events = draft.state, draft.state, ()
        opening = tuple(_opening(draft, self._state.last_seq, request))
        if opening:
            self._state = apply_all(self._state, opening)
            self._events += opening
        return self._state, tuple([it for it in self._events if it.seq <= request])


def _opening(draft: Draft, last_seq: int, request: int) -> Iterator[Opened]:
    """What opens a request, once `last_seq` is open: all between are opened before it."""
    requests = draft.view.requests
    for seq in range(last_seq + 1, request + 1):
        if seq in requests:
            yield Opened(seq, requests[seq].arrived.namespace)


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
    geometry, needed = state.geometry, list(commands.blocks_needed(state, seq, rows))
    for group, spec in enumerate(geometry.groups):
        if spec.recurrent:
            held = len(held_blocks(state.sequences[seq].tables[group]))
            needed[group] = max(needed[group], SLOTS - held)
        elif spec.moves:
            needed[group] = min(needed[group], _window_blocks(geometry, policy, group))
    return tuple(needed)
