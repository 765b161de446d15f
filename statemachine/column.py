"""Column: one row to each, or of each, of many sequences: the common decode step, made fast.

It does exactly what the single events do to each of them (a test says so); what is the same for all
rows is looked up once, and a row's new record and its digest line are made in one go.
"""

from __future__ import annotations

from collections.abc import Callable

from xxhash import xxh3_64_intdigest as xxh3

from .content import extend
from .digest import SEQUENCE, packer
from .draft import Draft
from .errors import InvariantBroken
from .events import AppendedEach, Committed, CommittedEach
from .sequence import NO_TOKEN, Sequence, pack
from .state import Block

_TOKEN_BYTES = 8
Reader = tuple[int, Callable[[int], Block | None]]


def append_column(draft: Draft, event: AppendedEach) -> None:
    """Commit one token to each sequence. Step, purpose and columns were checked by the caller."""
    assert event.tokens is not None
    step, geometry, delta, at = event.step, draft.geometry, 0, 0
    size, full_bytes = geometry.block_size, geometry.block_size * _TOKEN_BYTES
    written, sequences, packed = draft.written_step, draft.sequences, pack(event.tokens)
    readers: list[Reader] = [(group, draft.blocks(group).get) for group in draft.paged_groups]
    for seq in event.seqs:
        old = sequences.get(seq)
        if old is None:
            raise InvariantBroken(f"sequence {seq} is not open")
        committed = old.committed
        index = committed // size
        if old.speculative or old.pads or committed == index * size:
            _refuse(old)
        for group, read in readers:
            record = read(old.tables[group][index])
            if record is None or record.refs != 1 or record.entry:
                _refuse_block(old, group, index)
        committed += 1
        tail = old.tail + packed[at : at + _TOKEN_BYTES]
        at += _TOKEN_BYTES
        keys, blocks = old.keys, old.packed
        if len(tail) == full_bytes:
            grown = extend(geometry, old, (event.tokens[at // _TOKEN_BYTES - 1],))
            keys, blocks, tail = grown.keys, grown.packed, b""
        marks = old.marks
        if len(marks) == 4 and marks[2] <= written:
            marks = (marks[2], marks[3], step, committed)
        else:
            marks = (*recent_marks(marks, written, step), step, committed)
        root, starts, adopted = old.root, old.starts, old.adopted
        key = keys[-1] if keys else root
        values = (SEQUENCE, seq, root, committed, 0, 0, adopted * 2, key, *starts, *marks)
        line = xxh3(packer(len(values))(*values) + tail)
        delta += line - old.line
        sequences[seq] = Sequence(
            seq, old.namespace, root, committed, (), 0, keys, blocks, tail,
            old.tables, starts, marks, adopted, False, line,
        )  # fmt: skip
    draft.delta += delta


def commit_column(
    draft: Draft, event: CommittedEach, alone: Callable[[Draft, Committed], None]
) -> None:
    """Commit one speculative row of each sequence. Columns were checked by the caller.

    alone: commits one sequence's, or refuses to, where that is not its only speculative row.
    """
    geometry, sequences, delta, at = draft.geometry, draft.sequences, 0, 0
    full_bytes, packed = geometry.block_size * _TOKEN_BYTES, pack(event.tokens)
    for seq, token in zip(event.seqs, event.tokens, strict=True):
        old = sequences.get(seq)
        at += _TOKEN_BYTES
        if old is None or not _ends_in(old, token):
            alone(draft, Committed(seq, (token,)))
            continue
        tail = old.tail + packed[at - _TOKEN_BYTES : at]
        keys, blocks = old.keys, old.packed
        if len(tail) == full_bytes:
            grown = extend(geometry, old, (token,))
            keys, blocks, tail = grown.keys, grown.packed, b""
        committed, root, starts, marks = old.committed + 1, old.root, old.starts, old.marks
        adopted = old.adopted
        key = keys[-1] if keys else root
        values = (SEQUENCE, seq, root, committed, 0, 0, adopted * 2, key, *starts, *marks)
        line = xxh3(packer(len(values))(*values) + tail)
        delta += line - old.line
        sequences[seq] = Sequence(
            seq, old.namespace, root, committed, (), 0, keys, blocks, tail,
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


def _refuse(old: Sequence) -> None:
    if old.speculative or old.pads:
        raise InvariantBroken(
            f"sequence {old.id} ends in {len(old.speculative)} speculative rows and {old.pads} "
            "pads: a decode row cannot follow"
        )
    raise InvariantBroken(f"sequence {old.id} is at a block's edge: append it alone")


def _refuse_block(old: Sequence, group: int, index: int) -> None:
    raise InvariantBroken(
        f"block {old.tables[group][index]} of group {group} is shared or published: "
        f"sequence {old.id} must copy it before it writes"
    )
