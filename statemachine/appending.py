"""Appending: rows that are issued, and the copy on write that may have to come first."""

from __future__ import annotations

from msgspec import structs

from . import events as ev
from .column import append_column, look_ahead_column, recent_marks
from .content import grown
from .draft import Draft
from .errors import InvariantBroken
from .events import NO_BLOCK
from .geometry import has_state
from .sequence import NO_TOKEN, Sequence, Speculative, pack, written_rows

SPECULATIVE_ROWS_MAX = 65_536
"""The most rows of one append that may be taken back."""
NEVER_IN_A_STATE = (ev.LOOKAHEAD, ev.PAD)
"""Rows that are taken back one by one. Drafts go back to a block's edge, or stay."""
_WITH_TOKENS = (*ev.COMMITTED_AT_ONCE, ev.DRAFT)


def _check_step(draft: Draft, step: int, purpose: str) -> None:
    if purpose not in ev.PURPOSES:
        raise InvariantBroken(f"purpose {purpose!r} is none of {', '.join(ev.PURPOSES)}")
    if purpose in NEVER_IN_A_STATE and has_state(draft.geometry):
        raise InvariantBroken(
            f"{purpose} rows cannot follow in a recurrent group: its state cannot be taken back"
        )
    if not (step > draft.written_step and step >= draft.issued_step):
        raise InvariantBroken(
            f"step {step} cannot append: step {draft.issued_step} was issued and "
            f"{draft.written_step} written"
        )


def _check_append(draft: Draft, sequence: Sequence, step: int, purpose: str) -> None:
    """What must hold before rows of a purpose are appended in a step."""
    _check_step(draft, step, purpose)
    if sequence.preempted and purpose != ev.PROMPT:
        raise InvariantBroken(
            f"sequence {sequence.id} is preempted: it starts again with its prompt, not with "
            f"{purpose} rows"
        )
    if sequence.pads and purpose != ev.PAD:
        raise InvariantBroken(
            f"sequence {sequence.id} ends in {sequence.pads} pads: only pads may follow"
        )
    speculative = sequence.speculative
    if not speculative:
        return
    if purpose not in (ev.DRAFT, ev.LOOKAHEAD):
        raise InvariantBroken(
            f"sequence {sequence.id} ends in {len(speculative)} speculative rows: "
            f"{purpose} rows cannot follow"
        )
    if (purpose == ev.LOOKAHEAD) != (speculative[0].token == NO_TOKEN):
        raise InvariantBroken(f"sequence {sequence.id}: lookahead and draft rows never mix")


def _require_writable(draft: Draft, sequence: Sequence) -> None:
    """The block that the next row falls in, where there is one, is this sequence's alone."""
    index, row = divmod(sequence.offset, draft.geometry.block_size)
    if row == 0:
        return
    for group in draft.paged_groups:
        number = sequence.tables[group][index]
        record = draft.block(group, number)
        if record is None or record.refs != 1 or record.entry:
            raise InvariantBroken(
                f"block {number} of group {group} is shared or published: "
                f"sequence {sequence.id} must copy it before it writes"
            )


def appended(draft: Draft, event: ev.Appended) -> None:
    """Rows were issued: blocks taken, the offset moved, tokens committed or speculative."""
    old, tokens = draft.sequence(event.seq), event.tokens
    _check_append(draft, old, event.step, event.purpose)
    if event.rows < 1:
        raise InvariantBroken(f"an append of {event.rows} rows to sequence {old.id}")
    wants_tokens = event.purpose in _WITH_TOKENS
    if not ((tokens is not None and len(tokens) == event.rows) if wants_tokens else tokens is None):
        raise InvariantBroken(
            f"an append of {event.rows} {event.purpose} rows to sequence {old.id} with "
            f"{'no' if tokens is None else len(tokens)} tokens"
        )
    _require_writable(draft, old)
    tables = _grown_tables(draft, old, event)
    draft.issued_step = event.step
    draft.put(old, _with_rows(draft, old, event.step, event.rows, tokens, event.purpose, tables))


def _grown_tables(draft: Draft, old: Sequence, event: ev.Appended) -> tuple[tuple[int, ...], ...]:
    """The tables with the event's new blocks, which are exactly as many as the rows need."""
    geometry = draft.geometry
    if len(event.blocks) != len(geometry.groups):
        raise InvariantBroken("an append names new blocks for each group")
    wanted = geometry.blocks_for(old.offset + event.rows)
    tables = []
    for group, blocks in enumerate(event.blocks):
        table = old.tables[group]
        spec = geometry.groups[group]
        missing = spec.new_blocks(len(table), wanted)
        if missing and spec.recurrent and old.offset % geometry.block_size:
            raise InvariantBroken(
                f"rows of sequence {old.id} begin inside of a block and end in another: in a "
                f"recurrent group ({group}) a block's slot ends with its last row"
            )
        if len(blocks) != missing:
            raise InvariantBroken(
                f"sequence {old.id} needs {missing} new blocks in group {group}, not {len(blocks)}"
            )
        if blocks:
            held = draft.group(group)
            for block in blocks:
                held.take(block)
            first = wanted - missing
            draft.table_gains(old.id, group, first, blocks)
            table += (NO_BLOCK,) * (first - len(table)) + blocks
        tables.append(table)
    return tuple(tables)


def _with_rows(
    draft: Draft,
    old: Sequence,
    step: int,
    rows: int,
    tokens: tuple[int, ...] | None,
    purpose: str,
    tables: tuple[tuple[int, ...], ...],
) -> Sequence:
    """The sequence with rows of a purpose at its end, and the tables that hold them."""
    marks = (*recent_marks(old.marks, draft.written_step, step), step, old.offset + rows)
    if purpose in ev.COMMITTED_AT_ONCE:
        assert tokens is not None
        keys, packed, tail = grown(draft.geometry, old, pack(tokens))
        return structs.replace(
            old,
            committed=old.committed + rows,
            keys=keys,
            packed=packed,
            tail=tail,
            tables=tables,
            marks=marks,
            preempted=False,
        )
    if purpose == ev.PAD:
        return structs.replace(old, pads=old.pads + rows, tables=tables, marks=marks)
    if rows > SPECULATIVE_ROWS_MAX:
        raise InvariantBroken(f"at most {SPECULATIVE_ROWS_MAX} rows are speculative")
    given = tokens if tokens is not None else (NO_TOKEN,) * rows
    if tokens is not None:
        pack(tokens)
    added = tuple(Speculative(token, step) for token in given)
    return structs.replace(old, speculative=old.speculative + added, tables=tables, marks=marks)


def appended_each(draft: Draft, event: ev.AppendedEach) -> None:
    """One row to each of many sequences, inside of their blocks: the common decode step."""
    tokens = event.tokens
    if not (len(set(event.seqs)) == len(event.seqs) > 0):
        raise InvariantBroken("an append names each sequence once")
    if tokens is not None and len(tokens) != len(event.seqs):
        raise InvariantBroken("an append names a token a sequence")
    if (tokens is None) != (event.purpose in (ev.LOOKAHEAD, ev.PAD)):
        raise InvariantBroken(
            f"{event.purpose} rows {'need' if tokens is None else 'have no'} tokens"
        )
    _check_step(draft, event.step, event.purpose)
    draft.issued_step = event.step
    if event.purpose in ev.COMMITTED_AT_ONCE:
        append_column(draft, event)
    elif event.purpose == ev.LOOKAHEAD:
        look_ahead_column(draft, event, _append_in_its_block)
    else:
        for seq in event.seqs:
            _append_in_its_block(draft, seq, event)


def _append_in_its_block(draft: Draft, seq: int, event: ev.AppendedEach) -> None:
    """One sequence's row of a column."""
    old, tokens = draft.sequence(seq), event.tokens
    if old.offset % draft.geometry.block_size == 0:
        raise InvariantBroken(f"sequence {seq} is at a block's edge: append it alone")
    _check_append(draft, old, event.step, event.purpose)
    _require_writable(draft, old)
    row = None if tokens is None else (tokens[event.seqs.index(seq)],)
    draft.put(old, _with_rows(draft, old, event.step, 1, row, event.purpose, old.tables))


def block_copied(draft: Draft, event: ev.BlockCopied) -> None:
    """Copy on write: the table names the target; the source is pinned until the step is written."""
    old, group, index = draft.sequence(event.seq), event.group, event.index
    size = draft.geometry.block_size
    if not (0 <= group < len(old.tables)):
        raise InvariantBroken(f"there is no group {group}")
    table = old.tables[group]
    if not (0 <= index == len(table) - 1 and table[index] == event.source != NO_BLOCK):
        raise InvariantBroken(
            f"block {event.source} is not the last of sequence {old.id}'s table in group {group}"
        )
    if not (event.rows == old.offset - index * size < size):
        raise InvariantBroken(
            f"sequence {old.id} has {old.offset - index * size} rows in its last block, not "
            f"{event.rows}"
        )
    if event.step <= draft.written_step or event.step < draft.issued_step:
        raise InvariantBroken(
            f"step {event.step} cannot copy: step {draft.issued_step} was issued and "
            f"{draft.written_step} written"
        )
    if written_rows(old, event.step - 1) != old.offset:
        raise InvariantBroken(
            f"rows of sequence {old.id} are issued in step {event.step} itself, whose copies run "
            "before its writes: they cannot be copied in it"
        )
    draft.issued_step = event.step
    blocks = draft.group(group)
    blocks.take(event.target)
    draft.pin(event.step, group, event.source)
    blocks.release(event.source, refs=1)
    draft.table_loses(old.id, group, index, (event.source,))
    draft.table_gains(old.id, group, index, (event.target,))
    tables = (*old.tables[:group], (*table[:index], event.target), *old.tables[group + 1 :])
    draft.put(old, structs.replace(old, tables=tables))
