"""Hints: what a divergence leaves open and the state can tell: whose table, or row, was read."""

from __future__ import annotations

from msgspec import structs

from statemachine.observing import table_hash
from statemachine.state import NO_ENTRY, Entry, State
from statemachine.tags import PAD, UNWRITTEN, block_tags, root_key, sequence_tags

from .divergence import CONTENT, OBSERVATION, Divergence, Values


def with_hint(found: Divergence, state: State) -> tuple[Divergence, str]:
    """The divergence with what the state can add to it, and a sentence on it; "" for nothing."""
    if found.kind == CONTENT:
        return found, _whose_row(found, state)
    return with_table(found, state)


def _whose_row(found: Divergence, state: State) -> str:
    """Which row it is that stands where another one should."""
    tags = [str(it.observed) for it in found.values if it.name == "tag of the row"]
    if not tags or int(tags[0], 16) in (UNWRITTEN, PAD):
        return ""
    tag = int(tags[0], 16)
    for seq in sorted(state.sequences, key=lambda seq: seq != found.sequence):
        held = sequence_tags(state.geometry, state.sequences[seq], 0, state.sequences[seq].offset)
        if tag in held:
            mine = "its own" if seq == found.sequence else f"that of sequence {seq}"
            return f"the row that stands there is {mine} at position {held.index(tag)}"
    for number in sorted(state.entries):
        entry: Entry = state.entries[number]
        parent: Entry | None = None if entry.parent == NO_ENTRY else state.entries[entry.parent]
        key = root_key(state.geometry, entry.namespace) if parent is None else parent.key
        if tag in block_tags(state.geometry, key, entry.tokens):
            return "the row that stands there is one that the prefix index knows, of another prompt"
    return "the row that stands there was left by a sequence that is gone: no live one has it"


def with_table(found: Divergence, state: State) -> tuple[Divergence, str]:
    """The divergence with the table that was read, and a sentence on it, if it is known: another
    sequence's, or its own before its last blocks.
    """
    values = {it.name: it for it in found.values}
    for group in range(len(state.groups)):
        hashes, table = values.get(f"hash of the table (group {group})"), f"table (group {group})"
        if found.kind != OBSERVATION or hashes is None or table not in values:
            continue
        if hashes.observed in (None, hashes.derived):
            continue
        read, whose = _owner(state, found.sequence, group, str(hashes.observed))
        if whose:
            known = Values(table, None, values[table].derived, read)
            changed = tuple(known if it.name == table else it for it in found.values)
            what = f"the table that was read is {whose}"
            return structs.replace(found, values=changed), what
    return found, ""


def _owner(state: State, seq: int, group: int, digest: str) -> tuple[tuple[int, ...], str]:
    """A table with this hash, and whose it is; "" where none is known."""
    for other in sorted(state.sequences):
        table: tuple[int, ...] = state.sequences[other].tables[group]
        if f"{table_hash(table):016x}" == digest:
            return table, f"that of sequence {other}"
    own = state.sequences[seq].tables[group] if seq in state.sequences else ()
    for cut in range(len(own)):
        if f"{table_hash(own[:cut]):016x}" == digest:
            blocks = "block" if len(own) - cut == 1 else f"{len(own) - cut} blocks"
            return own[:cut], f"its own without the last {blocks}"
    return (), ""
