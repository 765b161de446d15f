"""Shadow tags: for every physical row, the identity of what was written there last.

Owns one array of tags a group, kept in issue order. It compares what a step's attention will read,
through the tables that the step really uses, with what the sequences should hold there. Checks
addressing, never arithmetic. numpy only: the fake kernel has it too.

Of a recurrent group a slot has one tag, that of the last row that went through its state. The state
that a piece goes on from is compared before the step, the one that it leaves behind after it.

A row that is issued before its token was read is tagged as pending. Once the kernel has sampled
that token the row gets the tag of what was fed, so that a commit of another token is found.

Modes: `edges` compares the row before each piece, its last row, and the last row of every block
that is new in a table; `full` compares every row that is read; `off` does nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from collections.abc import Sequence as Items

import numpy as np
from attrs import define, field, frozen

from statemachine.events import NO_BLOCK, BlockCopied
from statemachine.geometry import Geometry
from statemachine.records import ShadowFinding, ShadowReport
from statemachine.sequence import Sequence
from statemachine.tags import UNWRITTEN, newest_tags, next_tags, pending_tags

from .batch import Batch
from .expected import Expected, Tags, is_pending
from .metadata import Ints, Longs, StepMetadata

EDGES = "edges"
FULL = "full"
OFF = "off"
MODES = (EDGES, FULL, OFF)

FINDINGS_MAX = 16
SEQUENCES_MAX = 4096
"""Tables remembered, least recently stepped first out: their blocks count as new again."""


class Shadow:
    """`tags`: of all physical rows, [num_blocks * block_size] uint64 a group, [num_blocks] of a
    recurrent one.
    """

    def __init__(self, geometry: Geometry, mode: str = EDGES) -> None:
        if mode not in MODES:
            raise ValueError(f"sanitize must be one of {', '.join(MODES)}, not {mode!r}")
        self._geometry = geometry
        self._mode = mode
        self._expected = Expected(geometry)
        self.tags: list[Tags] = []
        self._tables: OrderedDict[int, tuple[Ints, ...]] = OrderedDict()
        self._last: tuple[tuple[int, ...], tuple[Ints, ...]] = ((), ())
        self._newest_step = 0
        self._waiting: dict[int, _Pending] = {}
        """By the step that samples their tokens."""
        self.reset()

    @property
    def mode(self) -> str:
        return self._mode

    def reset(self) -> None:
        """The pages were thrown away: no row is written."""
        groups = enumerate(self._geometry.groups)
        rows = [group.num_blocks * self._block_rows(number) for number, group in groups]
        self.tags = [np.full(count, UNWRITTEN, np.uint64) for count in rows]
        self._tables.clear()
        self._last = ((), ())
        self._waiting.clear()

    def copy_blocks(self, copies: Items[BlockCopied]) -> None:
        """Whole blocks, as the pages do."""
        blocks = [self._by_block(group) for group in range(len(self.tags))]
        read = [blocks[copied.group][copied.source].copy() for copied in copies]
        for copied, tags in zip(copies, read, strict=True):
            blocks[copied.group][copied.target] = tags

    def block_tags(self, group: int, blocks: Items[int]) -> list[tuple[int, ...]]:
        """Tags of whole blocks; () for each where the mode is off."""
        if self._mode == OFF:
            return [()] * len(blocks)
        held = self._by_block(group)
        return [tuple(held[block].tolist()) for block in blocks]

    def load_blocks(self, group: int, blocks: Items[int], tags: Items[tuple[int, ...]]) -> None:
        """Whole blocks were written, outside of any step, by what says to have these tags."""
        held = self._by_block(group)
        for block, mine in zip(blocks, tags, strict=True):
            held[block] = mine

    def apply(self, batch: Batch, metadata: StepMetadata) -> ShadowReport:
        """A step is issued: tag its rows, compare what it reads. Call in issue order, and after
        `copy_blocks` for the step's copies.
        """
        if self._mode == OFF:
            return ShadowReport()
        report = _Report()
        self._compare_read_states(batch, metadata, report)
        newest, pending = self._write(batch, metadata)
        for group, spec in enumerate(self._geometry.groups):
            if spec.recurrent:
                self._compare_made_states(batch, metadata, group, report)
            elif spec.paged and self._mode == FULL:
                self._compare_all(batch, metadata, group, report)
            elif spec.paged:
                self._compare_edges(batch, metadata, group, newest, report)
        self._last = (metadata.seqs, metadata.tables)
        if pending is not None:
            self._follow(batch, pending)
        self._newest_step = metadata.step
        return report.frozen()

    def learn(self, step: int, tokens: Mapping[int, int]) -> None:
        """A step's samples are known, by sequence the last: rows that were fed them get tags."""
        rows = self._waiting.pop(step, None)
        if rows is not None:
            self._retag(rows, [tokens[it.id] for it in rows.sequences])

    def _follow(self, batch: Batch, pending: _Pending) -> None:
        """Rows whose token the sequence does not know: tag them where the pieces have it (in a
        replay), else keep them until it was sampled.
        """
        told = [batch.pieces[number] for number in pending.numbers]
        if any(piece.pending for piece in told):
            self._waiting[self._newest_step] = pending
        else:
            self._retag(pending, [piece.tokens[-1] for piece in told])

    def _retag(self, rows: _Pending, tokens: list[int]) -> None:
        """Give pending rows the tags of their tokens, where nothing else was written since."""
        if {len(it.speculative) for it in rows.sequences} == {1}:
            fed = next_tags(self._geometry, rows.sequences, tokens)
        else:
            fed = list(map(self._expected.fed, rows.sequences, tokens))
        new = np.array(fed, np.uint64)
        for tags, spec, slots in zip(self.tags, self._geometry.groups, rows.slots, strict=True):
            if spec.paged and not spec.recurrent:
                held = tags[slots]
                tags[slots] = np.where(held == rows.tags, new, held)

    def _write(self, batch: Batch, metadata: StepMetadata) -> tuple[list[int], _Pending | None]:
        """Tag the step's rows with what their sequences say they are. Returns each piece's last
        tag, and the pieces that end in a row whose token is not known.
        """
        sequences = [piece.sequence for piece in batch.pieces]
        pending = [number for number, it in enumerate(sequences) if is_pending(it)]
        if len(pending) == metadata.total_rows:
            written = newest = pending_tags(sequences)
        else:
            written, newest = self._tags_of(batch)
        tags = np.array(written, np.uint64)
        for group, spec in enumerate(self._geometry.groups):
            if spec.recurrent:
                self.tags[group][metadata.state_writes[group]] = newest
            elif spec.paged:
                self.tags[group][metadata.slots[group]] = tags
        if not pending:
            return newest, None
        places = (metadata.first + metadata.rows - 1)[pending]
        waiting = [sequences[number] for number in pending]
        return newest, _Pending(pending, waiting, metadata.slots[:, places], tags[places])

    def _tags_of(self, batch: Batch) -> tuple[list[int], list[int]]:
        """Tags of the step's rows, and each piece's last one."""
        written: list[int] = []
        newest: list[int] = []
        for piece in batch.pieces:
            sequence, rows = piece.sequence, piece.rows
            end = sequence.offset
            if rows == 1:
                written.append(self._expected.row(sequence, end - 1))
            else:
                written.extend(self._expected.rows(sequence, end - rows, end))
            newest.append(written[-1])
        return written, newest

    def _compare_read_states(self, batch: Batch, metadata: StepMetadata, report: _Report) -> None:
        """The states that pieces go on from; a piece that begins afresh reads none."""
        for group, spec in enumerate(self._geometry.groups):
            if not spec.recurrent:
                continue
            read = metadata.state_reads[group]
            asked = np.flatnonzero((read != NO_BLOCK) | (metadata.start > 0))
            positions = metadata.start[asked] - 1
            expected = [
                self._expected.row(batch.pieces[piece].sequence, position)
                if position >= 0
                else UNWRITTEN
                for piece, position in zip(asked.tolist(), positions.tolist(), strict=True)
            ]
            check = _Check(metadata, group, asked, positions, read[asked])
            self._compare(check, np.array(expected, np.uint64), report)

    def _compare_made_states(
        self, batch: Batch, metadata: StepMetadata, group: int, report: _Report
    ) -> None:
        """The states that pieces leave behind, each where its table says."""
        numbers = np.arange(len(batch.pieces))
        lasts = np.array([piece.sequence.offset - 1 for piece in batch.pieces], np.int64)
        rows = zip(batch.pieces, lasts.tolist(), strict=True)
        expected = [self._expected.row(piece.sequence, last) for piece, last in rows]
        slots = metadata.tables[group][numbers, lasts // self._geometry.block_size]
        check = _Check(metadata, group, numbers, lasts, slots)
        self._compare(check, np.array(expected, np.uint64), report)

    def _compare_all(
        self, batch: Batch, metadata: StepMetadata, group: int, report: _Report
    ) -> None:
        sink = self._geometry.groups[group].sink
        for number, piece in enumerate(batch.pieces):
            first = int(metadata.first[number])
            low = int(metadata.live_from[group, first])
            end = int(metadata.until[first + int(metadata.rows[number]) - 1])
            slots = metadata.first_slots(group, np.array([number]), end)[0]
            for begin, stop in ((0, min(sink, low)), (low, end)):
                expected = self._expected.span(piece.sequence, begin, stop)
                numbers, positions = np.full(stop - begin, number), np.arange(begin, stop)
                check = _Check(metadata, group, numbers, positions, slots[begin:stop])
                self._compare(check, expected, report)

    def _compare_edges(
        self,
        batch: Batch,
        metadata: StepMetadata,
        group: int,
        newest: list[int],
        report: _Report,
    ) -> None:
        """The row before each piece, its last row (whose tag `newest` is), and new blocks."""
        starts = metadata.positions[metadata.first]
        before = np.flatnonzero(starts > metadata.live_from[group, metadata.first])
        numbers, positions = before.tolist(), (starts[before] - 1).tolist()
        sequences = [piece.sequence for piece in batch.pieces]
        expected = self._rows_before([sequences[number] for number in numbers], positions)
        row = self._expected.row
        for number, position in self._new_block_ends(metadata, group):
            numbers.append(number)
            positions.append(position)
            expected.append(row(sequences[number], position))
        lasts = starts + metadata.rows - 1
        for number in np.flatnonzero(lasts != metadata.end - 1).tolist():
            newest[number] = row(sequences[number], int(lasts[number]))
        asked = np.array(numbers + list(range(len(sequences))), np.int64)
        places = np.concatenate([np.array(positions, np.int64), lasts])
        slots = metadata.slots_of(group, asked, places)
        check = _Check(metadata, group, asked, places, slots)
        self._compare(check, np.array(expected + newest, np.uint64), report)

    def _rows_before(self, sequences: list[Sequence], positions: list[int]) -> list[int]:
        """Tags of a row of each, which is the last committed one where a step runs ahead."""
        if [it.committed - 1 for it in sequences] == positions:
            return newest_tags(self._geometry, sequences)
        return list(map(self._expected.row, sequences, positions))

    def _new_block_ends(self, metadata: StepMetadata, group: int) -> list[tuple[int, int]]:
        """(piece, last position read) of each block that is new in a piece's table."""
        table = metadata.tables[group]
        fresh = table != self._table_before(metadata, group)
        fresh &= np.arange(table.shape[1]) < metadata.covers[:, None]
        size, sink = self._geometry.block_size, self._geometry.groups[group].sink
        ends: list[tuple[int, int]] = []
        for number, index in np.argwhere(fresh).tolist():
            first = int(metadata.first[number])
            end = int(metadata.until[first + int(metadata.rows[number]) - 1])
            position = min(end, (index + 1) * size) - 1
            if position >= metadata.live_from[group, first] or position < sink:
                ends.append((number, position))
        return ends

    def _table_before(self, metadata: StepMetadata, group: int) -> Ints:
        """The pieces' tables as their sequences' last steps used them, as wide as they are now."""
        table = metadata.tables[group]
        before = np.full_like(table, NO_BLOCK)
        if self._last[0] == metadata.seqs:
            known = self._last[1][group][:, : table.shape[1]]
            before[:, : known.shape[1]] = known
            return before
        self._remember(*self._last)
        for number, seq in enumerate(metadata.seqs):
            if seq in self._tables:
                row = self._tables[seq][group][: table.shape[1]]
                before[number, : len(row)] = row
        return before

    def _compare(self, check: _Check, expected: Tags, report: _Report) -> None:
        metadata, group, slots = check.metadata, check.group, check.slots
        report.checked += len(slots)
        found, nowhere = self.tags[group][slots], slots < 0
        differs = (found != expected) | nowhere
        if not differs.any():
            return
        found = np.where(nowhere, np.uint64(UNWRITTEN), found)
        wrong = np.flatnonzero(differs)
        report.found += len(wrong)
        for place in wrong[: FINDINGS_MAX - len(report.findings)].tolist():
            report.findings.append(
                ShadowFinding(
                    seq=metadata.seqs[int(check.numbers[place])],
                    group=group,
                    position=int(check.positions[place]),
                    block=int(slots[place]) // self._block_rows(group),
                    expected=int(expected[place]),
                    found=int(found[place]),
                )
            )

    def _block_rows(self, group: int) -> int:
        """Tags that a block has."""
        return 1 if self._geometry.groups[group].recurrent else self._geometry.block_size

    def _by_block(self, group: int) -> Tags:
        """A group's tags, [num_blocks, tags of a block]: a view."""
        return self.tags[group].reshape(-1, self._block_rows(group))

    def _remember(self, seqs: tuple[int, ...], tables: tuple[Ints, ...]) -> None:
        """Keep a step's tables by sequence; those not seen for long are dropped."""
        known = self._tables
        for number, seq in enumerate(seqs):
            known[seq] = tuple(table[number].copy() for table in tables)
            known.move_to_end(seq)
        while len(known) > SEQUENCES_MAX:
            known.popitem(last=False)


@define(eq=False)
class _Check:
    """Rows to look at in one group: piece numbers, positions and physical rows, [N] each."""

    metadata: StepMetadata
    group: int
    numbers: Longs
    positions: Longs
    slots: Longs | Ints


@frozen(eq=False)
class _Pending:
    """Pieces that end in a row whose token is not known, [Q]: numbers, sequences, slots [G, Q], and
    the tags that the rows were given.
    """

    numbers: list[int]
    sequences: list[Sequence]
    slots: Ints
    tags: Tags


@define
class _Report:
    checked: int = 0
    found: int = 0
    findings: list[ShadowFinding] = field(factory=list)

    def frozen(self) -> ShadowReport:
        return ShadowReport(self.checked, self.found, tuple(self.findings))
