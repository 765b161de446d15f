"""Commands: from what is wanted to the events that do it, block ids included. Pure.

A command looks at a state and returns events, or raises: IllegalCommand where the caller asked for
what may not be, PoolExhausted where blocks are missing. It is all or nothing, over rows and groups.
Blocks are taken in a fixed order: freed ones first in, first out; then ones never used; then the
least recently used cached ones, whose BlockEvicted events come first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many

from . import events as ev
from .appending import NEVER_IN_A_STATE
from .errors import IllegalCommand, InvariantBroken, PoolExhausted
from .events import NO_BLOCK, Event, Namespace
from .geometry import FULL, has_gaps, has_state
from .prefix import Hit, adoption_limit, find, walk
from .prefix import lookup as _lookup
from .sequence import NO_TOKEN, Sequence, pack, written_rows
from .state import NO_ENTRY, State
from .supply import Supply
from .tags import root_key, row_tag
from .transitions import apply_all

Events = tuple[Event, ...]
Moved = Counter[tuple[int, int]]


def _sequence(state: State, seq: int) -> Sequence:
    sequence: Sequence | None = state.sequences.get(seq)
    if sequence is None:
        raise IllegalCommand(f"sequence {seq} is not open")
    return sequence


def _checked(state: State, events: Events) -> Events:
    """The events, if they can be applied; what cannot be is the caller's fault here."""
    try:
        apply_all(state, events)
    except InvariantBroken as error:
        raise IllegalCommand(str(error)) from error
    return events


def _positive(rows: int, what: str) -> None:
    if rows < 1:
        raise IllegalCommand(f"{what} takes at least 1 row, not {rows}")


def open_sequence(state: State, seq: int, namespace: Namespace = Namespace()) -> Events:
    """Open a sequence under a new id, greater than all before."""
    return _checked(state, (ev.Opened(seq, namespace),))


def lookup(state: State, namespace: Namespace, tokens: tuple[int, ...]) -> Hit:
    """The rows of `tokens` that can be found; changes and pins nothing."""
    return _found(state, namespace, tokens, None)


def _found(
    state: State, namespace: Namespace, tokens: tuple[int, ...], rows_max: int | None
) -> Hit:
    try:
        return _lookup(state, namespace, tokens, rows_max)
    except InvariantBroken as error:
        raise IllegalCommand(str(error)) from error


def adopt(state: State, seq: int, prompt_tokens: tuple[int, ...], hit: Hit | None = None) -> Events:
    """Share what the index holds of a prompt now, all but its last row; () where it holds nothing.

    A hit from an earlier look-up only bounds the rows: identity is looked up again.
    """
    sequence = _sequence(state, seq)
    if sequence.offset:
        raise IllegalCommand(f"sequence {seq} has {sequence.offset} rows: only an empty one adopts")
    limit = adoption_limit(len(prompt_tokens))
    if hit is not None:
        if hit.namespace != sequence.namespace:
            raise IllegalCommand(f"sequence {seq} is in another namespace than the look-up")
        limit = min(limit, hit.rows)
    found = _found(state, sequence.namespace, prompt_tokens, limit)
    if not found.rows:
        return ()
    tokens = prompt_tokens[: found.rows]
    return (ev.PrefixAdopted(seq, tokens, len(prompt_tokens), found.blocks),)


def _copies(state: State, sequence: Sequence, moved: Moved | None = None) -> list[int]:
    """Groups in which the block that the next row falls in must be copied before it is written.

    `moved` counts table entries, by group and block, that copies before this one took away.
    """
    index, row = divmod(sequence.offset, state.geometry.block_size)
    if row == 0:
        return []
    groups = []
    for group in state.paged_groups():
        block = sequence.tables[group][index]
        record = state.groups[group].blocks[block]
        if record.refs - (moved[group, block] if moved else 0) > 1 or record.entry:
            groups.append(group)
    return groups


def blocks_needed(state: State, seq: int, rows: int) -> tuple[int, ...]:
    """How many blocks, per group, an append of `rows` rows takes now, copies counted."""
    sequence = _sequence(state, seq)
    wanted = state.geometry.blocks_for(sequence.offset + rows)
    copies = _copies(state, sequence)
    return tuple(
        spec.new_blocks(len(sequence.tables[group]), wanted) + (group in copies)
        for group, spec in enumerate(state.geometry.groups)
    )


def append(
    state: State,
    seq: int,
    step: int,
    tokens: tuple[int, ...] | None = None,
    rows: int | None = None,
    purpose: str = ev.PROMPT,
    applied: bool = False,
) -> Events:
    """Issue rows of one purpose in `step`: tokens where they are known, else a number of rows.

    applied: the caller applies the events to this state at once, which finds what may not be, so
    that it need not be done twice.
    """
    count = len(tokens) if tokens is not None else (rows or 0)
    _positive(count, "an append")
    if tokens is not None and rows not in (None, len(tokens)):
        raise IllegalCommand(f"{len(tokens)} tokens are given for {rows} rows")
    supplies = [Supply(state, group) for group in range(len(state.geometry.groups))]
    sequence, moved = _sequence(state, seq), Moved()
    events = tuple(_append(state, supplies, moved, sequence, step, count, tokens, purpose))
    return events if applied else _checked(state, events)


def _append(
    state: State,
    supplies: list[Supply],
    moved: Moved,
    sequence: Sequence,
    step: int,
    rows: int,
    tokens: tuple[int, ...] | None,
    purpose: str,
) -> list[Event]:
    size = state.geometry.block_size
    events: list[Event] = []
    copies = _copies(state, sequence, moved)
    wanted = state.geometry.blocks_for(sequence.offset + rows)
    blocks: list[tuple[int, ...]] = []
    for group, spec in enumerate(state.geometry.groups):
        missing = spec.new_blocks(len(sequence.tables[group]), wanted)
        blocks.append(supplies[group].take(missing + (group in copies)))
        events += supplies[group].drain()
    for group in copies:
        index, kept = divmod(sequence.offset, size)
        source, (target, *others) = sequence.tables[group][index], blocks[group]
        blocks[group] = tuple(others)
        events.append(ev.BlockCopied(sequence.id, step, group, index, source, target, kept))
        moved[group, source] += 1
    events.append(ev.Appended(sequence.id, step, rows, tokens, tuple(blocks), purpose))
    return events


def append_each(
    state: State, step: int, seqs: Many[int], tokens: tuple[int, ...] | None, purpose: str
) -> Events:
    """One row to each of many sequences: those inside their blocks in columns, then the others.

    The order of the batch is the order in which sequences occur in the events.
    """
    if not seqs:
        raise IllegalCommand("an append needs at least one sequence")
    if tokens is not None and len(tokens) != len(seqs):
        raise IllegalCommand(f"{len(tokens)} tokens are given for {len(seqs)} sequences")
    if len(set(seqs)) != len(seqs):
        raise IllegalCommand("an append names each sequence once")
    inside, edge, doubtful = _split_by_edge(state, seqs, purpose)
    events: list[Event] = []
    if inside:
        columns = None if tokens is None else tuple([tokens[place] for place in inside])
        chosen = tuple([seqs[place] for place in inside])
        events.append(ev.AppendedEach(step, chosen, columns, purpose))
    moved = Moved()
    if edge:
        supplies = [Supply(state, group) for group in range(len(state.geometry.groups))]
        for place in edge:
            row = None if tokens is None else (tokens[place],)
            sequence = state.sequences[seqs[place]]
            events += _append(state, supplies, moved, sequence, step, 1, row, purpose)
    if doubtful or moved or _columns_are_doubtful(state, step, tokens, purpose):
        return _checked(state, tuple(events))
    return tuple(events)


def _columns_are_doubtful(
    state: State, step: int, tokens: tuple[int, ...] | None, purpose: str
) -> bool:
    """Whether columns should be applied to find out: doing so always would double a step's cost."""
    if not max(state.written_step + 1, state.issued_step) <= step < 1 << 64:
        return True
    if purpose not in ev.PURPOSES:
        return True
    if purpose in NEVER_IN_A_STATE and has_state(state.geometry):
        return True
    if tokens is None:
        return purpose not in (ev.LOOKAHEAD, ev.PAD)
    return purpose in (ev.LOOKAHEAD, ev.PAD) or not _are_content_ids(tokens)


def _are_content_ids(tokens: tuple[int, ...]) -> bool:
    return {*map(type, tokens)} == {int} and min(tokens) >= 0 and max(tokens) < 1 << 64


def _split_by_edge(
    state: State, seqs: Many[int], purpose: str
) -> tuple[list[int], list[int], bool]:
    """Places in `seqs` whose next row stays in its own block, the others, and if one may not be."""
    size, sequences = state.geometry.block_size, state.sequences
    blocks = [(group, state.groups[group].blocks) for group in state.paged_groups()]
    inside: list[int] = []
    edge: list[int] = []
    doubtful = False
    for place, seq in enumerate(seqs):
        try:
            sequence = sequences[seq]
        except KeyError:
            raise IllegalCommand(f"sequence {seq} is not open") from None
        offset = sequence.committed
        if sequence.speculative or sequence.pads or sequence.preempted:
            offset = sequence.offset
            doubtful = doubtful or _may_not_follow(sequence, purpose)
        alone = offset % size != 0
        if alone:
            for group, records in blocks:
                record = records[sequence.tables[group][-1]]
                if record.refs != 1 or record.entry:
                    alone = False
        (inside if alone else edge).append(place)
    return inside, edge, doubtful


def _may_not_follow(sequence: Sequence, purpose: str) -> bool:
    """Whether a row behind what the sequence ends in needs a closer look."""
    rows = sequence.speculative
    if sequence.pads or sequence.preempted:
        return True
    return bool(rows) and (purpose != ev.LOOKAHEAD or rows[0].token != NO_TOKEN)


def step_written(state: State, step: int) -> Events:
    """The writes of a step are real."""
    return _checked(state, (ev.StepWritten(step),))


def commit(state: State, seq: int, tokens: tuple[int, ...]) -> Events:
    """Accept the oldest speculative rows."""
    _positive(len(tokens), "a commit")
    return _checked(state, (ev.Committed(seq, tuple(tokens)),))


def commit_each(state: State, seqs: Many[int], tokens: tuple[int, ...]) -> Events:
    """Accept the oldest speculative row of each of many sequences."""
    if not seqs:
        raise IllegalCommand("a commit needs at least one sequence")
    if len(tokens) != len(seqs):
        raise IllegalCommand(f"{len(tokens)} tokens are given for {len(seqs)} sequences")
    doubtful = len(set(seqs)) != len(seqs) or not _are_content_ids(tokens)
    sequences = state.sequences
    for seq, token in zip(seqs, tokens, strict=True):
        rows = (sequences.get(seq) or _sequence(state, seq)).speculative
        if not rows or rows[0].token not in (NO_TOKEN, token):
            doubtful = True
    events: Events = (ev.CommittedEach(tuple(seqs), tuple(tokens)),)
    return _checked(state, events) if doubtful else events


def trim(state: State, seq: int, rows: int) -> Events:
    """Take `rows` tail rows of any kind back."""
    _positive(rows, "a trim")
    return _checked(state, (ev.Trimmed(seq, rows),))


def rewind(state: State, seq: int, rows: int) -> Events:
    """Take `rows` speculative tail rows back."""
    _positive(rows, "a rewind")
    return _checked(state, (ev.Rewound(seq, rows),))


def front_trim(state: State, seq: int, group: int, rows: int) -> Events:
    """Move a window on by `rows`."""
    _positive(rows, "a front trim")
    return _checked(state, (ev.FrontTrimmed(seq, group, rows),))


def front_trims(state: State, seq: int, to_edge: bool = False) -> Events:
    """All that the windows of a sequence may move on now. to_edge: what is needed at the last edge
    of a block stays, so that all that comes behind it can be taken back.
    """
    sequence = _sequence(state, seq)
    safe = min(sequence.committed, written_rows(sequence, state.written_step))
    if to_edge:
        safe -= safe % state.geometry.block_size
    events: list[Event] = []
    for group, spec in enumerate(state.geometry.groups):
        rows = max(0, safe - spec.span + 1) - sequence.starts[group]
        if spec.moves and rows > 0:
            events.append(ev.FrontTrimmed(seq, group, rows))
    return tuple(events)


def fork(state: State, seq: int, child: int) -> Events:
    """Let a new sequence share every row of another."""
    return _checked(state, (ev.Forked(seq, child),))


def publish(state: State, seq: int) -> Events:
    """Publish all full, written, committed blocks of a sequence that are not in the index yet."""
    sequence = _sequence(state, seq)
    full = min(
        len(sequence.keys),
        written_rows(sequence, state.written_step) // state.geometry.block_size,
    )
    groups = state.paged_groups()
    fresh: list[Event] = []
    lowest = 0
    for index in range(full - 1, -1, -1):
        added = [
            ev.BlockPublished(seq, index, group, block, sequence.keys[index])
            for group in groups
            if (block := sequence.tables[group][index]) != NO_BLOCK
            and not state.groups[group].blocks[block].entry
        ]
        if not added:
            break
        fresh[:0], lowest = added, index
    return tuple(fresh) if _can_be_found(state, sequence, lowest) else ()


def _can_be_found(state: State, sequence: Sequence, index: int) -> bool:
    """Whether the block before `index` is in the index: its own may have left a short window."""
    if index == 0 or has_gaps(state.geometry):
        return True
    for group in state.paged_groups():
        block = sequence.tables[group][index - 1]
        if block != NO_BLOCK and state.groups[group].blocks[block].entry:
            return True
    parent = NO_ENTRY
    for key, tokens in zip(sequence.keys[:index], sequence.packed, strict=False):
        entry = find(state, sequence.namespace, parent, key, tokens)
        if entry is None:
            return False
        parent = entry.id
    return True


def load(
    state: State, seq: int, step: int, tokens: tuple[int, ...], first: int, end: int
) -> Events:
    """Publish kept blocks [first, end) of `tokens`, as far as these are not in the index already,
    blocks are left for them and the block before each can be found. Evicts none of the same text.
    """
    geometry = state.geometry
    if not 0 <= first < end <= len(tokens) // geometry.block_size:
        raise IllegalCommand(f"{len(tokens)} tokens have no whole blocks {first} to {end - 1}")
    if any(group.kind != FULL for group in geometry.groups):
        raise IllegalCommand("only groups that keep all rows have kept blocks")
    try:
        return _load(state, _sequence(state, seq), step, tokens, first, end)
    except InvariantBroken as error:
        raise IllegalCommand(str(error)) from error


def _load(
    state: State, sequence: Sequence, step: int, tokens: tuple[int, ...], first: int, end: int
) -> Events:
    geometry, size, namespace = state.geometry, state.geometry.block_size, sequence.namespace
    spared = [set[int]() for _ in geometry.groups]
    for entry in walk(state, namespace, tokens):
        for group, blocks in enumerate(entry.blocks):
            spared[group].update(blocks)
    supplies = [Supply(state, group, frozenset(it)) for group, it in enumerate(spared)]
    events: list[Event] = []
    parent, key = NO_ENTRY, root_key(geometry, namespace)
    for index in range(end):
        data = tokens[index * size : (index + 1) * size]
        packed = pack(data)
        key = row_tag(geometry, key, packed)
        known = find(state, namespace, parent, key, packed)
        missing = [at for at in range(len(supplies)) if known is None or not known.blocks[at]]
        if missing and index < first:
            break
        made: list[Event] = []
        try:
            for group in missing:
                (block,) = supplies[group].take(1)
                made += supplies[group].drain()
                made.append(ev.BlockLoaded(sequence.id, step, group, block, parent, data, key))
        except PoolExhausted:
            break
        state = apply_all(state, made)
        events += made
        found = find(state, namespace, parent, key, packed)
        assert found is not None
        parent = found.id
    return tuple(events)


def store(state: State, group: int, block: int) -> Events:
    """Read a published block for the prefix store."""
    record = state.groups[group].blocks.get(block) if group in state.paged_groups() else None
    key = state.entries[record.entry].key if record is not None and record.entry else 0
    return _checked(state, (ev.BlockStored(group, block, key),))


def evict(state: State, blocks: int, group: int | None = None) -> Events:
    """Evict at most `blocks` cached blocks, least recently used first, of one group or of each."""
    _positive(blocks, "an eviction")
    groups = state.paged_groups() if group is None else [group]
    if group is not None and group not in state.paged_groups():
        raise IllegalCommand(f"group {group} holds no blocks")
    events: list[Event] = []
    for number in groups:
        cached = state.groups[number].cached
        found = 0
        for position in range(cached.head, cached.tail):
            block = cached.items.get(position)
            if block is not None and found < blocks:
                key = state.entries[state.groups[number].blocks[block].entry].key
                events.append(ev.BlockEvicted(number, block, key))
                found += 1
    return tuple(events)


def flush(state: State) -> Events:
    """Evict all cached blocks; blocks in use stay published until they are let go."""
    most = max((spec.num_blocks for spec in state.geometry.groups), default=0)
    return evict(state, most) if most else ()


def reset(state: State, seq: int) -> Events:
    """Empty a sequence; it starts again at 0."""
    return _checked(state, (ev.Reset(seq),))


def preempt(state: State, seq: int) -> Events:
    """Empty a sequence; it waits."""
    return _checked(state, (ev.Preempted(seq),))


def close(state: State, seq: int, reason: str = "") -> Events:
    """Empty a sequence and forget it."""
    _sequence(state, seq)  # all that closing asks for: to try it would release each block
    return (ev.Closed(seq, reason),)


def pool_reset(state: State) -> Events:
    """The page arrays were lost."""
    return _checked(state, (ev.PoolReset(),))
