"""Shadow tags: for every physical row, the identity of what was written there last.

Owns one array of tags a group, kept in issue order. It compares what a step's attention will read,
through the tables that the step really uses, with what the sequences should hold there. Checks
addressing, never arithmetic. numpy only: the fake kernel has it too.

Modes: `edges` compares the row before each piece, its last row, and the last row of every block
that is new in a table; `full` compares every row that is read; `off` does nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt
from attrs import define, field

from statemachine.events import BlockCopied
from statemachine.geometry import Geometry
from statemachine.records import ShadowFinding, ShadowReport
from statemachine.sequence import Sequence
from statemachine.tags import UNWRITTEN, committed_tags, row_tag, sequence_tags

from .batch import Batch
from .metadata import Ints, Longs, StepMetadata

Tags = npt.NDArray[np.uint64]

EDGES = "edges"
FULL = "full"
OFF = "off"
MODES = (EDGES, FULL, OFF)

FINDINGS_MAX = 16
SEQUENCES_MAX = 4096
"""Tables remembered, least recently stepped first out: their blocks count as new again."""
TOKEN_BYTES = 8
BLOCKS_MAX = 1 << 16
"""Full blocks whose tags are remembered by key."""


class Shadow:
    """`tags`: of all physical rows, [num_blocks * block_size] uint64 a group."""

    def __init__(self, geometry: Geometry, mode: str = EDGES) -> None:
        if mode not in MODES:
            raise ValueError(f"sanitize must be one of {', '.join(MODES)}, not {mode!r}")
        self._geometry = geometry
        self._mode = mode
        self._expected = _Expected(geometry)
        self.tags: list[Tags] = []
        self._tables: OrderedDict[int, tuple[Ints, ...]] = OrderedDict()
        self.reset()

    @property
    def mode(self) -> str:
        return self._mode

    def reset(self) -> None:
        """The pages were thrown away: no row is written."""
        size = self._geometry.block_size
        rows = [group.num_blocks * size for group in self._geometry.groups]
        self.tags = [np.full(count, UNWRITTEN, np.uint64) for count in rows]
        self._tables.clear()

    def copy_blocks(self, copies: Items[BlockCopied]) -> None:
        """Whole blocks, as the pages do."""
        size = self._geometry.block_size
        blocks = [tags.reshape(-1, size) for tags in self.tags]
        read = [blocks[copied.group][copied.source].copy() for copied in copies]
        for copied, tags in zip(copies, read, strict=True):
            blocks[copied.group][copied.target] = tags

    def apply(self, batch: Batch, metadata: StepMetadata) -> ShadowReport:
        """A step is issued: copy, tag its rows, compare what it reads. Call in issue order."""
        if self._mode == OFF:
            return ShadowReport()
        self.copy_blocks(metadata.copies)
        self._write(batch, metadata)
        report = _Report()
        for group, spec in enumerate(self._geometry.groups):
            if spec.paged:
                compare = self._compare_all if self._mode == FULL else self._compare_edges
                compare(batch, metadata, group, report)
        self._remember(metadata)
        return report.frozen()

    def _write(self, batch: Batch, metadata: StepMetadata) -> None:
        """Tag the step's rows with what their sequences say that they are."""
        written: list[int] = []
        for piece in batch.pieces:
            sequence, rows = piece.sequence, piece.rows
            if rows == 1:
                written.append(self._expected.row(sequence, sequence.offset - 1))
            else:
                end = sequence.offset
                written.extend(self._expected.rows(sequence, end - rows, end))
        tags = np.array(written, np.uint64)
        for group, spec in enumerate(self._geometry.groups):
            if spec.paged:
                self.tags[group][metadata.slots[group]] = tags

    def _compare_all(
        self, batch: Batch, metadata: StepMetadata, group: int, report: _Report
    ) -> None:
        sink = self._geometry.groups[group].sink
        for number, piece in enumerate(batch.pieces):
            first = int(metadata.first[number])
            low = int(metadata.live_from[group, first])
            end = int(metadata.until[first + int(metadata.rows[number]) - 1])
            spans = ((0, min(sink, low)), (low, end))
            positions = np.concatenate([np.arange(*span) for span in spans])
            expected = [self._expected.span(piece.sequence, *span) for span in spans]
            check = _Check(metadata, group, np.full(len(positions), number), positions)
            self._compare(check, np.concatenate(expected), report)

    def _compare_edges(
        self, batch: Batch, metadata: StepMetadata, group: int, report: _Report
    ) -> None:
        numbers: list[int] = []
        positions: list[int] = []
        expected: list[int] = []
        firsts = metadata.positions[metadata.first].tolist()
        lows = metadata.live_from[group, metadata.first].tolist()
        fresh = self._new_block_ends(metadata, group)
        for number, piece in enumerate(batch.pieces):
            sequence, start, low = piece.sequence, firsts[number], lows[number]
            if start > low:
                numbers.append(number)
                positions.append(start - 1)
                expected.append(self._expected.row(sequence, start - 1))
            last = start + piece.rows - 1
            numbers.append(number)
            positions.append(last)
            expected.append(self._expected.row(sequence, last))
            for position in fresh.get(number, ()):
                numbers.append(number)
                positions.append(position)
                expected.append(self._expected.row(sequence, position))
        check = _Check(metadata, group, np.array(numbers, np.int64), np.array(positions, np.int64))
        self._compare(check, np.array(expected, np.uint64), report)

    def _new_block_ends(self, metadata: StepMetadata, group: int) -> dict[int, list[int]]:
        """Last read position in each block that is new in a piece's table, by piece."""
        table = metadata.tables[group]
        before = np.full_like(table, -1)
        for number, seq in enumerate(metadata.seqs):
            known = self._tables.get(seq)
            if known is not None:
                width = min(len(known[group]), table.shape[1])
                before[number, :width] = known[group][:width]
        fresh = (table != before) & (np.arange(table.shape[1]) < metadata.covers[:, None])
        size, sink = self._geometry.block_size, self._geometry.groups[group].sink
        ends: dict[int, list[int]] = {}
        for number, index in np.argwhere(fresh).tolist():
            first = int(metadata.first[number])
            end = int(metadata.until[first + int(metadata.rows[number]) - 1])
            position = min(end, (index + 1) * size) - 1
            if position >= metadata.live_from[group, first] or position < sink:
                ends.setdefault(number, []).append(position)
        return ends

    def _compare(self, check: _Check, expected: Tags, report: _Report) -> None:
        metadata, group = check.metadata, check.group
        slots = metadata.slots_of(group, check.numbers, check.positions)
        found = np.where(slots < 0, np.uint64(UNWRITTEN), self.tags[group][slots])
        wrong = np.flatnonzero((found != expected) | (slots < 0))
        report.checked += len(slots)
        report.found += len(wrong)
        for place in wrong[: FINDINGS_MAX - len(report.findings)].tolist():
            report.findings.append(
                ShadowFinding(
                    seq=metadata.seqs[int(check.numbers[place])],
                    group=group,
                    position=int(check.positions[place]),
                    block=int(slots[place]) // self._geometry.block_size,
                    expected=int(expected[place]),
                    found=int(found[place]),
                )
            )

    def _remember(self, metadata: StepMetadata) -> None:
        """Keep the tables as this step saw them; sequences not seen for long are dropped."""
        known = self._tables
        for number, seq in enumerate(metadata.seqs):
            known[seq] = tuple(table[number] for table in metadata.tables)
            known.move_to_end(seq)
        while len(known) > SEQUENCES_MAX:
            known.popitem(last=False)


@define(eq=False)
class _Check:
    """Rows to look at in one group: piece numbers and positions, [N] each."""

    metadata: StepMetadata
    group: int
    numbers: Longs
    positions: Longs


@define
class _Report:
    checked: int = 0
    found: int = 0
    findings: list[ShadowFinding] = field(factory=list)

    def frozen(self) -> ShadowReport:
        return ShadowReport(self.checked, self.found, tuple(self.findings))


class _Expected:
    """Tags that sequences should have, from the sequences alone."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._blocks: OrderedDict[tuple[int, int, bytes], Tags] = OrderedDict()

    def rows(self, sequence: Sequence, first: int, end: int) -> list[int]:
        """Rows [first, end); a row beyond the sequence's offset should not be there at all."""
        inside = min(end, sequence.offset)
        tags = sequence_tags(self._geometry, sequence, first, inside) if first < inside else []
        return tags + [UNWRITTEN] * (end - max(first, inside))

    def row(self, sequence: Sequence, position: int) -> int:
        """One row, at most one hash where it is committed."""
        if position >= sequence.committed:
            return self.rows(sequence, position, position + 1)[0]
        index, row = divmod(position, self._geometry.block_size)
        if row == self._geometry.block_size - 1:
            return sequence.keys[index]
        tokens = sequence.block_tokens(index)[: (row + 1) * TOKEN_BYTES]
        return row_tag(self._geometry, sequence.block_parent(index), tokens)

    def span(self, sequence: Sequence, first: int, end: int) -> Tags:
        """Rows [first, end) as an array; full blocks' tags come from a cache by content."""
        size = self._geometry.block_size
        full = min(end // size, len(sequence.keys))
        parts: list[Tags] = []
        position = first
        while position < end:
            index = position // size
            if index < full:
                stop = (index + 1) * size
                parts.append(self._block(sequence, index)[position % size :])
            else:
                stop = end
                parts.append(np.array(self.rows(sequence, position, end), np.uint64))
            position = stop
        return np.concatenate(parts) if parts else np.empty(0, np.uint64)

    def _block(self, sequence: Sequence, index: int) -> Tags:
        """Tags of a full committed block. The key names parent and tokens, and both are compared:
        a hash that collides is no excuse for another block's tags.
        """
        key = (sequence.keys[index], sequence.block_parent(index), sequence.block_tokens(index))
        tags = self._blocks.get(key)
        if tags is None:
            size = self._geometry.block_size
            span = committed_tags(self._geometry, sequence, index * size, (index + 1) * size)
            tags = self._blocks[key] = np.array(span, np.uint64)
            if len(self._blocks) > BLOCKS_MAX:
                self._blocks.popitem(last=False)
        else:
            self._blocks.move_to_end(key)
        return tags
