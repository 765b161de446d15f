"""Redacted state: a state with pseudonyms in the place of tokens and namespaces, and all that
follows from these (keys, lines, digest) worked out anew. Lengths, tables and blocks are the same.
Also what both states are asked for while a tape is redacted.
"""

from __future__ import annotations

from collections.abc import Callable

from immutables import Map
from msgspec import structs

from statemachine.digest import recompute, sequence_line
from statemachine.sequence import NO_TOKEN, Sequence, pack, unpack
from statemachine.state import NO_ENTRY, Entry, State
from statemachine.tags import block_tags, root_key, row_tag

from .pseudonyms import Pseudonyms

TOKEN_BYTES = 8

IsEnd = Callable[[int, int, int], bool]
"""Whether a token at a position of a sequence ends its request: (sequence, position, token)."""


def redacted_state(state: State, names: Pseudonyms, is_end: IsEnd) -> State:
    """The state under pseudonyms."""
    sequences = {
        number: _sequence(state, sequence, names, is_end)
        for number, sequence in state.sequences.items()
    }
    entries: dict[int, Entry] = {}
    for number in sorted(state.entries):
        _entry(state, number, names, entries)
    by_key: dict[int, tuple[int, ...]] = {}
    for numbers in state.by_key.values():
        for number in numbers:
            key = entries[number].key
            by_key[key] = (*by_key.get(key, ()), number)
    changed = structs.replace(
        state, sequences=Map(sequences), entries=Map(entries), by_key=Map(by_key)
    )
    return structs.replace(changed, digest=recompute(changed))


def _sequence(state: State, sequence: Sequence, names: Pseudonyms, is_end: IsEnd) -> Sequence:
    geometry, size = state.geometry, state.geometry.block_size
    root, space = names.root(sequence.namespace), names.namespace(sequence.namespace)
    rows = names.rows(root, root, sequence.tokens)
    full = len(sequence.packed) * size
    key = first = root_key(geometry, space)
    packed, keys = [], []
    for begin in range(0, full, size):
        packed.append(pack(rows[begin : begin + size]))
        key = row_tag(geometry, key, packed[-1])
        keys.append(key)
    before, speculative = rows[-1] if rows else root, []
    for position, row in enumerate(sequence.speculative, start=sequence.committed):
        if row.token != NO_TOKEN:
            end = is_end(sequence.id, position, row.token)
            before = names.row(root, before, row.token, end)
            row = structs.replace(row, token=before)
        speculative.append(row)
    changed = structs.replace(
        sequence,
        namespace=space,
        root=first,
        packed=tuple(packed),
        keys=tuple(keys),
        tail=pack(rows[full:]),
        speculative=tuple(speculative),
    )
    return structs.replace(changed, line=sequence_line(changed))


def _entry(state: State, number: int, names: Pseudonyms, done: dict[int, Entry]) -> None:
    """Adds an index entry, its parents before it."""
    path = []
    while number != NO_ENTRY and number not in done:
        path.append(number)
        number = state.entries[number].parent
    for at in reversed(path):
        entry: Entry = state.entries[at]
        parent = done.get(entry.parent)
        space, root = names.namespace(entry.namespace), names.root(entry.namespace)
        before = root if parent is None else last_row(parent.tokens)
        tokens = pack(names.rows(root, before, unpack(entry.tokens)))
        key = root_key(state.geometry, space) if parent is None else parent.key
        key = row_tag(state.geometry, key, tokens)
        done[at] = structs.replace(entry, namespace=space, tokens=tokens, key=key)


def last_row(packed: bytes) -> int:
    """The last of packed content ids."""
    return int.from_bytes(packed[-TOKEN_BYTES:], "little")


def end_of(state: State, seq: int) -> int:
    """A sequence's rows that are no pads."""
    sequence: Sequence = state.sequences[seq]
    return sequence.committed + len(sequence.speculative)


def row_at(sequence: Sequence, position: int) -> int | None:
    """The content id of a row; None where it has none, or none yet."""
    if position >= sequence.committed:
        index = position - sequence.committed
        rows = sequence.speculative
        known = index < len(rows) and rows[index].token != NO_TOKEN
        return rows[index].token if known else None
    if position < 0:
        return None
    full = len(sequence.packed)
    size = (sequence.committed * TOKEN_BYTES - len(sequence.tail)) // TOKEN_BYTES
    if position >= size:
        at = position - size
        return last_row(sequence.tail[: (at + 1) * TOKEN_BYTES])
    index, row = divmod(position, size // full)
    return last_row(sequence.packed[index][: (row + 1) * TOKEN_BYTES])


def key_of_block(state: State, group: int, block: int) -> int | None:
    """The key under which a block can be found; None where it cannot."""
    if not 0 <= group < len(state.groups) or block not in state.groups[group].blocks:
        return None
    entry = state.groups[group].blocks[block].entry
    return None if entry == NO_ENTRY else state.entries[entry].key


def entry_tags(state: State, number: int) -> list[int]:
    """Tags of the rows of an index entry."""
    entry = state.entries[number]
    parent = root_key(state.geometry, entry.namespace)
    if entry.parent != NO_ENTRY:
        parent = state.entries[entry.parent].key
    return block_tags(state.geometry, parent, entry.tokens)
