"""Column: one row to each, or of each, of many sequences: the common decode step, made fast.

It does exactly what the single events do to each of them (a test says so); what is the same for all
rows is looked up once, and a row's new record and its digest line are made in one go.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NoReturn

from immutables import Map, MapMutation
from xxhash import xxh3_64_intdigest as xxh3

from .content import grown
from .digest import SEQUENCE, packer, row_bytes
from .draft import Draft
from .errors import InvariantBroken
from .events import AppendedEach, Committed, CommittedEach
from .sequence import NO_TOKEN, Sequence, Speculative, pack
from .state import Block

_split = struct.Struct("8s").iter_unpack

Blocks = list[tuple[int, Map[int, Block] | MapMutation[int, Block]]]
"""Numbers of paged groups, and the records of their blocks."""


def append_column(draft: Draft, event: AppendedEach) -> None:
    """Commit one token to each sequence. Step, purpose and columns were checked by the caller."""
    assert event.tokens is not None
    step, geometry, sequences, delta = event.step, draft.geometry, draft.sequences, 0
    size, written, blocks = geometry.block_size, draft.written_step, _blocks(draft)
    width, pack_values = 0, packer(0)
    for seq, (token,) in zip(event.seqs, _split(pack(event.tokens)), strict=True):
        try:
            old = sequences[seq]
        except KeyError:
            raise _not_open(seq) from None
        committed, keys, packed, tail = old.committed, old.keys, old.packed, old.tail
        if old.speculative or old.pads or not tail:
            _refuse(old)
        for group, records in blocks:
            record = records[old.tables[group][-1]]
            if record.refs != 1 or record.entry:
                _refuse_block(old, group)
        committed += 1
        tail += token
        if committed % size == 0:
            keys, packed, tail = grown(geometry, old, token)
        marks = old.marks
        while len(marks) > 2 and marks[2] <= written:
            marks = marks[2:]
        if marks[-2] == step:
            marks = marks[:-2]
        marks = (*marks, step, committed)
        root, starts, adopted = old.root, old.starts, old.adopted
        key = keys[-1] if keys else root
        values = (SEQUENCE, seq, root, committed, 0, 0, adopted * 2, key, *starts, *marks)
        if len(values) != width:
            width = len(values)
            pack_values = packer(width)
        line = xxh3(pack_values(*values) + tail)
        delta += line - old.line
        sequences[seq] = Sequence(
            seq, old.namespace, root, committed, (), 0, keys, packed, tail,
            old.tables, starts, marks, adopted, False, line,
        )  # fmt: skip
    draft.delta += delta


def look_ahead_column(
    draft: Draft, event: AppendedEach, alone: Callable[[Draft, int, AppendedEach], None]
) -> None:
    """Issue one row without a token to each sequence. Step and columns were checked by the caller.

    alone: appends to one sequence, or refuses to, where its row is not the first speculative one.
    """
    step, sequences, delta = event.step, draft.sequences, 0
    written, blocks = draft.written_step, _blocks(draft)
    rows = (Speculative(NO_TOKEN, step),)
    rows_bytes = b"".join(map(row_bytes, rows))
    width, pack_values = 0, packer(0)
    for seq in event.seqs:
        old = sequences.get(seq)
        if old is None or old.speculative or old.pads or not old.tail:
            alone(draft, seq, event)
            continue
        committed, tail, keys, marks = old.committed, old.tail, old.keys, old.marks
        for group, records in blocks:
            record = records[old.tables[group][-1]]
            if record.refs != 1 or record.entry:
                _refuse_block(old, group)
        while len(marks) > 2 and marks[2] <= written:
            marks = marks[2:]
        if marks[-2] == step:
            marks = marks[:-2]
        marks = (*marks, step, committed + 1)
        root, starts, adopted = old.root, old.starts, old.adopted
        key = keys[-1] if keys else root
        values = (SEQUENCE, seq, root, committed, 1, 0, adopted * 2, key, *starts, *marks)
        if len(values) != width:
            width = len(values)
            pack_values = packer(width)
        line = xxh3(pack_values(*values) + tail + rows_bytes)
        delta += line - old.line
        sequences[seq] = Sequence(
            seq, old.namespace, root, committed, rows, 0, keys, old.packed, tail,
            old.tables, starts, marks, adopted, False, line,
        )  # fmt: skip
    draft.delta += delta


def commit_column(
    draft: Draft, event: CommittedEach, alone: Callable[[Draft, Committed], None]
) -> None:
    """Commit one speculative row of each sequence. Columns were checked by the caller.

    alone: commits one sequence's, or refuses to, where that is not its only speculative row.
    """
    geometry, sequences, delta = draft.geometry, draft.sequences, 0
    size, rows = geometry.block_size, _split(pack(event.tokens))
    width, pack_values = 0, packer(0)
    for seq, token, (token_bytes,) in zip(event.seqs, event.tokens, rows, strict=True):
        old = sequences.get(seq)
        if old is None or not _ends_in(old, token):
            alone(draft, Committed(seq, (token,)))
            continue
        committed, keys, packed, marks = old.committed + 1, old.keys, old.packed, old.marks
        tail = old.tail + token_bytes
        if committed % size == 0:
            keys, packed, tail = grown(geometry, old, token_bytes)
        root, starts, adopted = old.root, old.starts, old.adopted
        key = keys[-1] if keys else root
        values = (SEQUENCE, seq, root, committed, 0, 0, adopted * 2, key, *starts, *marks)
        if len(values) != width:
            width = len(values)
            pack_values = packer(width)
        line = xxh3(pack_values(*values) + tail)
        delta += line - old.line
        sequences[seq] = Sequence(
            seq, old.namespace, root, committed, (), 0, keys, packed, tail,
            old.tables, starts, marks, adopted, False, line,
        )  # fmt: skip
    draft.delta += delta


def _ends_in(old: Sequence, token: int) -> bool:
    """Whether the last row is the only speculative one, and its token may be this one."""
    rows = old.speculative
    return len(rows) == 1 and not old.pads and rows[0].token in (NO_TOKEN, token)


def recent_marks(marks: tuple[int, ...], written: int, step: int) -> tuple[int, ...]:
    """Marks worth keeping before one of `step`: of those written only the newest."""
    while len(marks) >= 4 and marks[2] <= written:
        marks = marks[2:]
    if marks and marks[-2] == step:
        return marks[:-2]
    return marks


def _blocks(draft: Draft) -> Blocks:
    return [(group, draft.blocks(group)) for group in draft.paged_groups]


def _not_open(seq: int) -> InvariantBroken:
    return InvariantBroken(f"sequence {seq} is not open")


def _refuse(old: Sequence) -> NoReturn:
    if old.speculative or old.pads:
        raise InvariantBroken(
            f"sequence {old.id} ends in {len(old.speculative)} speculative rows and {old.pads} "
            "pads: a decode row cannot follow"
        )
    raise InvariantBroken(f"sequence {old.id} is at a block's edge: append it alone")


def _refuse_block(old: Sequence, group: int) -> NoReturn:
    raise InvariantBroken(
        f"block {old.tables[group][-1]} of group {group} is shared or published: "
        f"sequence {old.id} must copy it before it writes"
    )
