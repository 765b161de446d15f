"""Hints: what a divergence leaves open and the state can tell: whose table it was that was read."""

from __future__ import annotations

from msgspec import structs

from statemachine.state import State

from .divergence import OBSERVATION, Divergence, Values
from .observed import table_hash


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
