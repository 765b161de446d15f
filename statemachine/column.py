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

# Values of a line, where a pool has one group, of a sequence with two marks and with three: what
# decodes has two, and one more while a step is in flight. Handing these over one by one, instead of
# as a tuple of any length, is a tenth of a row's cost.
_pack_13, _pack_15 = packer(13), packer(15)


def append_column(draft: Draft, event: AppendedEach) -> None:
    """Commit one token to each sequence. Step, purpose and columns were checked by the caller."""
    assert event.tokens is not None
    step, geometry, sequences, delta = event.step, draft.geometry, draft.sequences, 0
    size, written, blocks = geometry.block_size, draft.written_step, _blocks(draft)
    one_group = len(geometry.groups) == 1
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
        root, starts, marks, adopted = old.root, old.starts, old.marks, old.adopted
        key = keys[-1] if keys else root
        if one_group and len(marks) == 4 and marks[2] <= written:
            _, _, a, b = marks
            marks = (a, b, step, committed)
            data = _pack_13(
                SEQUENCE, seq, root, committed, 0, 0, adopted * 2, key, starts[0], a, b, step,
                committed,
            )  # fmt: skip
        else:
            marks = (*recent_marks(marks, written, step), step, committed)
            values = (SEQUENCE, seq, root, committed, 0, 0, adopted * 2, key, *starts, *marks)
            data = packer(len(values))(*values)
        line = xxh3(data + tail)
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
    one_group = len(draft.geometry.groups) == 1
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
        root, starts, adopted = old.root, old.starts, old.adopted
        key = keys[-1] if keys else root
        if len(marks) == 6 and marks[2] <= written < marks[4] < step:
            marks = (*marks[2:], step, committed + 1)
        else:
            marks = (*recent_marks(marks, written, step), step, committed + 1)
        if one_group and len(marks) == 6:
            a, b, c, d, e, f = marks
            data = _pack_15(
                SEQUENCE, seq, root, committed, 1, 0, adopted * 2, key, starts[0], a, b, c, d, e, f
            )
        else:
            values = (SEQUENCE, seq, root, committed, 1, 0, adopted * 2, key, *starts, *marks)
            data = packer(len(values))(*values)
        line = xxh3(data + tail + rows_bytes)
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
    one_group = len(geometry.groups) == 1
    for seq, token, (token_bytes,) in zip(event.seqs, event.tokens, rows, strict=True):
        old = sequences.get(seq)
        only = None if old is None or old.pads or len(old.speculative) != 1 else old.speculative[0]
        if old is None or only is None or only.token not in (NO_TOKEN, token):
            alone(draft, Committed(seq, (token,)))
            continue
        committed, keys, packed, marks = old.committed + 1, old.keys, old.packed, old.marks
        tail = old.tail + token_bytes
        if committed % size == 0:
            keys, packed, tail = grown(geometry, old, token_bytes)
        root, starts, adopted = old.root, old.starts, old.adopted
        key = keys[-1] if keys else root
        if one_group and len(marks) == 6:
            a, b, c, d, e, f = marks
            data = _pack_15(
                SEQUENCE, seq, root, committed, 0, 0, adopted * 2, key, starts[0], a, b, c, d, e, f
            )
        else:
            values = (SEQUENCE, seq, root, committed, 0, 0, adopted * 2, key, *starts, *marks)
            data = packer(len(values))(*values)
        line = xxh3(data + tail)
        delta += line - old.line
        sequences[seq] = Sequence(
            seq, old.namespace, root, committed, (), 0, keys, packed, tail,
            old.tables, starts, marks, adopted, False, line,
        )  # fmt: skip
    draft.delta += delta


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
