"""Reuse: which computed rows a request may start from, and which it had better wait for.

Its parent's by a fork, what the prefix index holds or the prefix store offers, or none. Nothing is
held for a request in the queue: what is there is looked up when it starts. Pure, a part of
admission.
"""

from __future__ import annotations

from collections.abc import Iterator

from statemachine import commands
from statemachine.errors import IllegalCommand
from statemachine.events import Event
from statemachine.prefix import Hit
from statemachine.sequence import pack, written_rows
from statemachine.state import State
from statemachine.tags import row_tag
from statemachine.transitions import apply_all

from .draft import Draft
from .policy import PRIORITY
from .scoring import shareable_rows
from .view import UNKNOWN, RequestState


def _parent(draft: Draft, request: int) -> RequestState | None:
    """The live request whose rows a request without an answer may share, if there is one."""
    known = draft.request(request)
    parent: RequestState | None = draft.view.requests.get(known.arrived.parent)
    if parent is None or known.output_tokens or not shareable_rows(known):
        return None
    same = parent.arrived.tokens == known.arrived.tokens
    return parent if same and parent.arrived.namespace == known.arrived.namespace else None


def waits_for_parent(draft: Draft, request: int) -> bool:
    """Whether the rows that it is to share are still to come."""
    parent = _parent(draft, request)
    if parent is None:
        return False
    number = parent.arrived.request
    if number in draft.running:
        return bool(draft.state.sequences[number].committed < len(parent.arrived.tokens))
    # One that was preempted once, or stands behind, is not worth waiting for.
    by_priority = draft.policy.scheduling == PRIORITY
    behind = by_priority and parent.priority > draft.request(request).priority
    return number < request and not behind and parent.cached_tokens == UNKNOWN


def waits_for_prefix(draft: Draft, state: State, request: int, tokens: tuple[int, ...]) -> bool:
    """Whether a running request will soon publish more of a prompt than can be found now."""
    if not (draft.policy.prefix_aware and draft.policy.prefix_cache):
        return False
    size = state.geometry.block_size
    namespace = draft.request(request).arrived.namespace
    most = shareable_rows(draft.request(request)) // size
    found: int | None = None
    for seq in draft.running:
        running = draft.request(seq)
        if running.arrived.namespace != namespace or running.arrived.tokens[:size] != tokens[:size]:
            continue
        prompt, sequence = running.arrived.tokens, state.sequences[seq]
        written = written_rows(sequence, state.written_step)
        if written >= len(prompt):
            continue
        # Who waits for a long prompt is asked about in each step: what can be told without a walk
        # over all of its blocks is told first.
        full = len(sequence.keys) * size
        if _shares_next(prompt, tokens[: most * size], full, size):
            key = row_tag(state.geometry, sequence.parent_key, pack(tokens[full : full + size]))
            if key not in state.by_key:
                return True  # nothing that can be found reaches as far
        elif full <= written:
            continue  # all that they share is written
        shared = min(_common(prompt, tokens) // size, most) * size
        if found is None:
            found = commands.lookup(state, namespace, tokens[: most * size]).rows
        if shared > max(found, written):
            return True
    return False


def _shares_next(prompt: tuple[int, ...], tokens: tuple[int, ...], full: int, size: int) -> bool:
    """Whether two texts have their first `full` tokens and the block behind these in common."""
    end = full + size
    if end > min(len(prompt), len(tokens)) or prompt[full:end] != tokens[full:end]:
        return False
    return prompt[:full] == tokens[:full]


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


def sharings(
    draft: Draft, state: State, request: int, tokens: tuple[int, ...]
) -> Iterator[tuple[Event, ...]]:
    """Ways to share rows, best first: its parent's, what the index holds, none."""
    forked = _fork(draft, state, request)
    if forked is not None:
        yield forked
    loaded = _loads(draft, state, request, tokens)
    if loaded:
        after = apply_all(state, loaded)
        hit = _adoptions(draft, after, request, tokens)[0]
        yield loaded + commands.adopt(after, request, tokens, hit)
    for hit in _adoptions(draft, state, request, tokens):
        yield commands.adopt(state, request, tokens, hit)


def _loads(draft: Draft, state: State, request: int, tokens: tuple[int, ...]) -> tuple[Event, ...]:
    """Kept blocks that were offered, as far as a request may share their rows."""
    known = draft.request(request)
    if known.offered is None or not draft.policy.prefix_cache:
        return ()
    blocks = state.geometry.blocks_for(max(0, shareable_rows(known)))
    first, end = known.offered.first, min(known.offered.end, blocks)
    if not first < end:
        return ()
    return commands.load(state, request, draft.view.step, tokens, first, end)


def _fork(draft: Draft, state: State, request: int) -> tuple[Event, ...] | None:
    """Share the parent's rows, all but the prompt's last, which yields this one's first token (and
    those that yield its scores).

    None where there is no parent, or its windows have moved on.
    """
    parent = _parent(draft, request)
    if parent is None or parent.arrived.request not in draft.running:
        return None
    try:
        forked = commands.fork(state, parent.arrived.request, request)
        state = apply_all(state, forked)
        rows = state.sequences[request].offset - shareable_rows(draft.request(request))
        return forked + commands.trim(state, request, rows)
    except IllegalCommand:
        return None


def _adoptions(
    draft: Draft, state: State, request: int, tokens: tuple[int, ...]
) -> list[Hit | None]:
    """What to bound the adoption by, best first; None takes all that the index holds.

    Adopted blocks count beside all that a window holds at once. Where nothing else runs, and so
    nothing will make room, a request must be able to start without them.
    """
    known = draft.request(request)
    namespace, rows = known.arrived.namespace, shareable_rows(known)
    found: Hit | None = None
    if rows < len(tokens) - 1:
        found = commands.lookup(state, namespace, tokens[:rows])
    if draft.policy.prefix_cache and draft.running:
        return [found]
    nothing = commands.lookup(state, namespace, ())
    return [found, nothing] if draft.policy.prefix_cache else [nothing]
