"""Admission: what may be served at all, and what may start now.

Refusal on arrival (`refusal`), what a pool must hold for a policy (`check_pool`), and the choice of
the next requests from the queue (`admit`). Pure: it asks commands on scratch states, and has no
block arithmetic beyond "how many blocks do that many rows take".

The queue's order holds, but for this: a request that cannot start is passed by later ones that
can, at most PASSES_MAX of them in its life; then nothing behind it starts before it does. Only the
first LOOK_AHEAD of the queue are looked at in a step. What keeps a request from starting: its rows
do not fit; a running request is still computing more of its prompt than can be found (it moves, so
this ends); its parent, whose rows it is to share, has not got to the end of their prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from statemachine import commands
from statemachine.errors import IllegalCommand
from statemachine.events import Event, Forked, PrefixAdopted
from statemachine.geometry import WINDOW, Geometry
from statemachine.prefix import Hit
from statemachine.sequence import written_rows
from statemachine.state import State
from statemachine.transitions import apply_all

from .policy import Policy
from .sharing import sharers
from .submission import RequestRefused, Submission
from .view import LOOK_AHEAD, UNKNOWN, RequestState, View
from .waiting import Waiting

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


def limit_tokens(view: View, policy: Policy, request: RequestState) -> int:
    """Prompt + answer at which a request ends with "length"."""
    asked = len(request.stream.prompt) + request.arrived.parameters.max_tokens
    return min(asked, capacity_tokens(view.state.geometry, policy))


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
    """Blocks that one sequence holds at most in a window group, chunks trimmed as they go; with
    lookahead two chunks, or a draft, are there before the first trim.
    """
    spec = geometry.groups[group]
    chunk = min(policy.prefill_chunk, policy.max_batch_tokens)
    padded = -(-chunk // policy.prefill_tile) * policy.prefill_tile
    rows = max(padded * (2 if policy.lookahead else 1), policy.draft_tokens + 1)
    return geometry.blocks_for(spec.window + rows) + 1 + geometry.blocks_for(spec.sink)


class Draft(Protocol):
    """What admission needs of the plan that is being made (scheduler.Draft)."""

    view: View
    policy: Policy
    state: State
    running: list[int]
    waiting: Waiting
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
    for request in draft.waiting.first(LOOK_AHEAD):
        if len(started) == room:
            break
        found = _try(draft, request)
        if found is None:
            skipped.append(request)
            if _passes(draft, request) >= PASSES_MAX:
                break
            continue
        draft.do(found)
        draft.running.append(request)
        draft.admitted.append((request, _cached(draft, request, found)))
        draft.passed.extend(skipped)
        started.append(request)
    for request in started:
        draft.waiting = draft.waiting.remove(request, draft.request(request).priority)
    if not started:
        draft.stuck = bool(skipped)


def _passes(draft: Draft, request: int) -> int:
    return draft.request(request).passed + draft.passed.count(request)


def _cached(draft: Draft, request: int, events: tuple[Event, ...]) -> int:
    """Prompt tokens that were computed before: what it adopted; of a fork, what its parent did."""
    if any(isinstance(event, Forked) for event in events):
        parent = draft.request(draft.request(request).arrived.parent)
        return max(parent.cached_tokens, 0)
    return sum(len(event.tokens) for event in events if isinstance(event, PrefixAdopted))


def _try(draft: Draft, request: int) -> tuple[Event, ...] | None:
    """Events that open a request and share what is there of its prompt, if all of its rows then
    fit; None where it cannot start.
    """
    if _waits_for_parent(draft, request):
        return None
    state = draft.state
    opening = _open(draft, request)
    state = apply_all(state, opening)
    stream = draft.request(request).stream
    tokens = stream.slice(0, stream.length)
    if _waits_for_prefix(draft, state, request, tokens):
        return None
    for shared in _sharings(draft, state, request, tokens):
        if _fits(draft, apply_all(state, shared), request, len(tokens)):
            return opening + shared
    return None


def _open(draft: Draft, request: int) -> tuple[Event, ...]:
    """Ids are opened in order: so those that a request passes are opened too, and stay queued."""
    state, events = draft.state, list[Event]()
    for seq in range(state.last_seq + 1, request + 1):
        known = draft.view.requests.get(seq)
        if known is not None:
            opened = commands.open_sequence(state, seq, known.arrived.namespace)
            state = apply_all(state, opened)
            events += opened
    return tuple(events)


def _parent(draft: Draft, request: int) -> RequestState | None:
    """The live request whose rows a request without an answer may share, if there is one."""
    known = draft.request(request)
    parent: RequestState | None = draft.view.requests.get(known.arrived.parent)
    if parent is None or known.output_tokens:
        return None
    same = parent.arrived.tokens == known.arrived.tokens
    return parent if same and parent.arrived.namespace == known.arrived.namespace else None


def _waits_for_parent(draft: Draft, request: int) -> bool:
    """Whether the rows that it is to share are still to come."""
    parent = _parent(draft, request)
    if parent is None:
        return False
    number = parent.arrived.request
    if number in draft.running:
        return bool(draft.state.sequences[number].committed < len(parent.arrived.tokens))
    # One that was preempted once, or stands behind, is not worth waiting for.
    before = number < request and parent.priority <= draft.request(request).priority
    return before and parent.cached_tokens == UNKNOWN


def _waits_for_prefix(draft: Draft, state: State, request: int, tokens: tuple[int, ...]) -> bool:
    """Whether a running request will soon publish more of a prompt than can be found now."""
    if not (draft.policy.prefix_aware and draft.policy.prefix_cache):
        return False
    size = state.geometry.block_size
    namespace = draft.request(request).arrived.namespace
    most = (len(tokens) - 1) // size
    found: int | None = None
    for seq in draft.running:
        running = draft.request(seq)
        if running.arrived.namespace != namespace or running.arrived.tokens[:size] != tokens[:size]:
            continue
        written = written_rows(state.sequences[seq], state.written_step)
        if written >= len(running.arrived.tokens):
            continue
        shared = min(_common(running.arrived.tokens, tokens) // size, most) * size
        if found is None:
            found = commands.lookup(state, namespace, tokens[: most * size]).rows
        if shared > max(found, written):
            return True
    return False


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """How many tokens two texts have in common from their start."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _sharings(
    draft: Draft, state: State, request: int, tokens: tuple[int, ...]
) -> Iterator[tuple[Event, ...]]:
    """Ways to share rows, best first: its parent's, what the index holds, none."""
    forked = _fork(draft, state, request)
    if forked is not None:
        yield forked
    for hit in _adoptions(draft, state, request):
        yield commands.adopt(state, request, tokens, hit)


def _fork(draft: Draft, state: State, request: int) -> tuple[Event, ...] | None:
    """Share the parent's rows, all but the prompt's last, which yields this one's first token.

    None where there is no parent, or its windows have moved on.
    """
    parent = _parent(draft, request)
    if parent is None or parent.arrived.request not in draft.running:
        return None
    try:
        forked = commands.fork(state, parent.arrived.request, request)
        state = apply_all(state, forked)
        rows = state.sequences[request].offset - (len(parent.arrived.tokens) - 1)
        return forked + commands.trim(state, request, rows)
    except IllegalCommand:
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
