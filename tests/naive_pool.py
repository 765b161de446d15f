"""A naive pool: lists of rows, and what stands in every physical row.

It shares no code with transitions.py, prefix.py or publication.py. Each event is carried out on
plain lists; K and V are replaced by *cells* that know which tokens they were computed from.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from statemachine import events as ev
from statemachine.events import NO_BLOCK, Namespace
from statemachine.geometry import Geometry
from statemachine.sequence import unpack

from .naive_rows import STATE, Cell, ModelSequence


class Model:
    """What the events since `new_state(geometry)` mean, on lists."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.sequences: dict[int, ModelSequence] = {}
        self.published: dict[tuple[int, int], tuple[Namespace, tuple[int, ...]]] = {}
        self.pages: dict[tuple[int, int, int], Cell] = {}
        self.queued: dict[int, tuple[list[Any], list[Any]]] = {}
        self.pins: dict[int, list[tuple[int, int]]] = {}
        self.issued_step = 0
        self.written_step = 0
        self.entries: Any = {}  # the state's index, for what a load's parent means

    def groups(self) -> list[int]:
        return [number for number, spec in enumerate(self.geometry.groups) if spec.paged]

    def refs(self, group: int) -> Counter[int]:
        """Table entries and pins of each block of a group."""
        refs = Counter(
            block
            for sequence in self.sequences.values()
            for block in sequence.tables[group]
            if block != NO_BLOCK
        )
        refs.update(block for held in self.pins.values() for at, block in held if at == group)
        return refs

    def apply(self, event: ev.Event) -> None:
        getattr(self, "_" + type(event).__name__.lower())(event)

    def _opened(self, event: ev.Opened) -> None:
        assert event.seq not in self.sequences
        self.sequences[event.seq] = ModelSequence(event.namespace, len(self.geometry.groups))

    def _prefixadopted(self, event: ev.PrefixAdopted) -> None:
        sequence, size = self.sequences[event.seq], self.geometry.block_size
        assert not sequence.offset
        assert 0 < len(event.tokens) < event.prompt_rows
        sequence.tokens = list(event.tokens)
        sequence.tables = [list(table) for table in event.blocks]
        sequence.preempted = False
        sequence.cells = [
            Cell((sequence.namespace, event.tokens[: row + 1]), "adopted")
            for row in range(len(event.tokens))
        ]
        sequence.steps = [0] * len(event.tokens)
        for group, table in enumerate(event.blocks):
            for index, block in enumerate(table):
                if block == NO_BLOCK:
                    continue
                namespace, tokens = self.published[group, block]
                asked = event.tokens[: (index + 1) * size]
                assert namespace == sequence.namespace
                assert tokens[: len(asked)] == asked, "adopted a block of another prefix"
        for group in range(len(self.geometry.groups)):
            if reach := self.reach(group):
                sequence.starts[group] = max(0, sequence.offset - reach + 1)

    def reach(self, group: int) -> int:
        """Rows that a query needs of a group that forgets; 0 where it needs all."""
        spec = self.geometry.groups[group]
        return {"window": spec.window, "recurrent": 2}.get(spec.kind, 0)

    def _append(self, seq: int, step: int, tokens: list[int | None], purpose: str) -> None:
        sequence, size = self.sequences[seq], self.geometry.block_size
        assert step > self.written_step
        self.issued_step = max(self.issued_step, step)
        sequence.preempted = False
        begin, recurrent = sequence.offset, self.recurrent()
        for group in recurrent:
            self.check_state(seq, group, begin, self.pages_now())
            end = begin + len(tokens)
            assert begin % size == 0 or (begin // size == (end - 1) // size)
        assert not recurrent or purpose in ("prompt", "decode", "draft")
        for token in tokens:
            row = sequence.offset
            if purpose in ("prompt", "decode"):
                assert not sequence.speculative
                assert token is not None
                sequence.tokens.append(token)
            elif purpose == "pad":
                sequence.pads += 1
            else:
                sequence.speculative.append(token)
            if purpose in ("pad", "lookahead"):
                cell = Cell(None, purpose)
            else:
                cell = Cell(sequence.identity(row), purpose)
            sequence.cells.append(cell)
            sequence.steps.append(step)
            for group in self.groups():
                if group in recurrent and row < begin + len(tokens) - 1:
                    continue
                block = sequence.tables[group][row // size]
                tables = sum(other.tables[group].count(block) for other in self.sequences.values())
                assert block != NO_BLOCK
                assert tables == 1, f"block {block} is written and stands in {tables} tables"
                assert (group, block) not in self.published, "a published block is written"
                place = STATE if group in recurrent else row % size
                self._queue(step)[1].append(((group, block, place), cell))

    def recurrent(self) -> list[int]:
        return [at for at, spec in enumerate(self.geometry.groups) if spec.kind == "recurrent"]

    def check_state(self, seq: int, group: int, rows: int, pages: Any) -> None:
        """The slot that the next row reads holds the state behind `rows` rows."""
        mine = self.sequences[seq]
        if not rows:
            return
        block = mine.tables[group][(rows - 1) // self.geometry.block_size]
        cell = pages.get((group, block, STATE))
        assert cell is not None, f"sequence {seq} has no state in slot {block}"
        assert cell.identity == mine.identity(rows - 1), f"sequence {seq} has the state of {cell}"

    def _queue(self, step: int) -> tuple[list[Any], list[Any]]:
        return self.queued.setdefault(step, ([], []))

    def _appended(self, event: ev.Appended) -> None:
        sequence = self.sequences[event.seq]
        for group, blocks in enumerate(event.blocks):
            held = self.refs(group)
            for block in blocks:
                assert not held[block], f"block {block} was taken and is in use"
                assert (group, block) not in self.published
                held[block] += 1
            if group in self.recurrent():
                places = -(-(sequence.offset + event.rows) // self.geometry.block_size)
                assert len(blocks) == (places > len(sequence.tables[group]))
                holes = places - len(sequence.tables[group]) - len(blocks)
                sequence.tables[group] += [NO_BLOCK] * holes
            sequence.tables[group] += blocks
        tokens = [None] * event.rows if event.tokens is None else list(event.tokens)
        self._append(event.seq, event.step, tokens, event.purpose)  # type: ignore[arg-type]

    def _appendedeach(self, event: ev.AppendedEach) -> None:
        for place, seq in enumerate(event.seqs):
            token = None if event.tokens is None else event.tokens[place]
            self._append(seq, event.step, [token], event.purpose)

    def _stepwritten(self, event: ev.StepWritten) -> None:
        assert self.written_step < event.step <= self.issued_step
        self.written_step = event.step
        self.pages = self.pages_now(event.step)
        for step in [step for step in self.queued if step <= event.step]:
            del self.queued[step]
        for step in [step for step in self.pins if step <= event.step]:
            del self.pins[step]

    def pages_now(self, step_max: int | None = None) -> dict[tuple[int, int, int], Cell]:
        """The pages after all queued steps: in each, copies run before writes."""
        pages = dict(self.pages)
        for step in sorted(self.queued):
            if step_max is not None and step > step_max:
                break
            copies, writes = self.queued[step]
            for group, source, target, rows in copies:
                if isinstance(source, Cell):  # one row of a loaded block
                    pages[group, target, rows] = source
                    continue
                for row in [STATE] if group in self.recurrent() else range(rows):
                    pages[group, target, row] = pages.get(
                        (group, source, row), Cell(None, "garbage")
                    )
            pages.update(writes)
        return pages

    def _committed(self, event: ev.Committed) -> None:
        sequence = self.sequences[event.seq]
        for token in event.tokens:
            given = sequence.speculative.pop(0)
            assert given in (None, token)
            sequence.tokens.append(token)
            row = len(sequence.tokens) - 1
            sequence.cells[row].identity = sequence.identity(row)

    def _committedeach(self, event: ev.CommittedEach) -> None:
        for seq, token in zip(event.seqs, event.tokens, strict=True):
            self._committed(ev.Committed(seq, (token,)))

    def _cut(self, seq: int, rows: int) -> None:
        sequence, size = self.sequences[seq], self.geometry.block_size
        for _ in range(rows):
            self._unqueue(sequence.cells.pop(), sequence.steps.pop())
            if sequence.pads:
                sequence.pads -= 1
            elif sequence.speculative:
                sequence.speculative.pop()
            else:
                sequence.tokens.pop()
        for table in sequence.tables:
            del table[-(-sequence.offset // size) :]
        for group in range(len(self.geometry.groups)):
            reach = self.reach(group)
            needed = max(0, sequence.offset - reach + 1) if reach else 0
            assert sequence.starts[group] <= needed, "rows were lost that the next query reads"

    def _unqueue(self, cell: Cell, step: int) -> None:
        """A row that is taken back in the newest step may not be issued yet: then it never is.

        Where it was issued, its write comes before those of all later steps, which is the same to
        whoever takes the block then.
        """
        others = any(cell in other.cells for other in self.sequences.values())
        if step == self.issued_step and step in self.queued and not others:
            writes = self.queued[step][1]
            writes[:] = [write for write in writes if write[1] is not cell]

    def _clear(self, seq: int) -> None:
        sequence = self.sequences[seq]
        cells = list(zip(sequence.cells, sequence.steps, strict=True))
        sequence.clear()
        for cell, step in cells:
            self._unqueue(cell, step)

    def _trimmed(self, event: ev.Trimmed) -> None:
        assert 0 < event.rows <= self.sequences[event.seq].offset
        self._cut(event.seq, event.rows)

    def _rewound(self, event: ev.Rewound) -> None:
        sequence = self.sequences[event.seq]
        assert 0 < event.rows <= len(sequence.speculative)
        assert not sequence.pads
        self._cut(event.seq, event.rows)

    def _fronttrimmed(self, event: ev.FrontTrimmed) -> None:
        sequence, spec = self.sequences[event.seq], self.geometry.groups[event.group]
        size = self.geometry.block_size
        sequence.starts[event.group] += event.rows
        start = sequence.starts[event.group]
        safe = min(len(sequence.tokens), sequence.written(self.written_step))
        assert start <= max(0, safe - self.reach(event.group) + 1)
        for index in range(len(sequence.tables[event.group])):
            if index * size >= spec.sink and (index + 1) * size <= start:
                sequence.tables[event.group][index] = NO_BLOCK

    def _blockcopied(self, event: ev.BlockCopied) -> None:
        sequence, group = self.sequences[event.seq], event.group
        assert not self.refs(group)[event.target]
        assert (group, event.target) not in self.published
        assert sequence.tables[group][event.index] == event.source
        self.issued_step = max(self.issued_step, event.step)
        sequence.tables[group][event.index] = event.target
        self.pins.setdefault(event.step, []).append((group, event.source))
        self._queue(event.step)[0].append((group, event.source, event.target, event.rows))

    def _forked(self, event: ev.Forked) -> None:
        parent = self.sequences[event.seq]
        old = self.sequences.get(event.child)
        assert old is None or (not old.offset and old.namespace == parent.namespace)
        child = ModelSequence(parent.namespace, parent.groups)
        rows = len(parent.tokens)
        child.tokens, child.cells = list(parent.tokens), list(parent.cells[:rows])
        child.steps = list(parent.steps[:rows])
        child.starts = [min(start, rows) for start in parent.starts]
        blocks = -(-rows // self.geometry.block_size)
        child.tables = [list(table[:blocks]) for table in parent.tables]
        self.sequences[event.child] = child

    def _blockpublished(self, event: ev.BlockPublished) -> None:
        sequence, size = self.sequences[event.seq], self.geometry.block_size
        end = (event.index + 1) * size
        assert end <= min(len(sequence.tokens), sequence.written(self.written_step))
        assert sequence.tables[event.group][event.index] == event.block
        assert (event.group, event.block) not in self.published
        self.published[event.group, event.block] = sequence.identity(end - 1)

    def _blockstored(self, event: ev.BlockStored) -> None:
        assert (event.group, event.block) in self.published

    def _blockloaded(self, event: ev.BlockLoaded) -> None:
        """A load is taken for the rows of its claim: what a file really holds is the store's."""
        group, block, size = event.group, event.block, self.geometry.block_size
        assert self.geometry.groups[group].kind == "full"
        assert not self.refs(group)[block], "a held block was loaded over"
        assert (group, block) not in self.published
        before = self.entry_tokens(event.parent)
        namespace = self.sequences[event.seq].namespace
        if before is not None:
            assert before[0] == namespace
        tokens = (*(before[1] if before else ()), *event.tokens)
        assert len(event.tokens) == size
        self.published[group, block] = namespace, tokens
        self.issued_step = max(self.issued_step, event.step)
        first = len(tokens) - size
        for row in range(size):
            cell = Cell((namespace, tokens[: first + row + 1]), "loaded")
            self._queue(event.step)[0].append((group, cell, block, row))

    def entry_tokens(self, number: int) -> tuple[Namespace, tuple[int, ...]] | None:
        """Namespace and all tokens of an index entry, by the state's own index."""
        if not number:
            return None
        entry, tokens = self.entries[number], list[int]()
        while True:
            tokens[:0] = unpack(entry.tokens)
            if not entry.parent:
                return entry.namespace, tuple(tokens)
            entry = self.entries[entry.parent]

    def _blockevicted(self, event: ev.BlockEvicted) -> None:
        assert not self.refs(event.group)[event.block], "a held block was evicted"
        del self.published[event.group, event.block]

    def _reset(self, event: ev.Reset) -> None:
        self._clear(event.seq)
        self.sequences[event.seq].preempted = False

    def _preempted(self, event: ev.Preempted) -> None:
        self._clear(event.seq)
        self.sequences[event.seq].preempted = True

    def _closed(self, event: ev.Closed) -> None:
        self._clear(event.seq)
        del self.sequences[event.seq]

    def _poolreset(self, _event: ev.PoolReset) -> None:
        for sequence in self.sequences.values():
            sequence.clear()
            sequence.preempted = True
        self.published.clear()
        self.pages.clear()
        self.queued.clear()
        self.pins.clear()
        self.written_step = self.issued_step

    def cached(self, group: int) -> set[int]:
        """Blocks of a group that are published and in no table and not pinned."""
        return {block for at, block in self.published if at == group} - set(self.refs(group))

    def findable_rows(self, namespace: Namespace, tokens: tuple[int, ...], limit: int) -> int:
        """The longest shareable prefix of `tokens`, at most `limit` rows, by brute force."""
        if any(spec.kind == "opaque" for spec in self.geometry.groups):
            return 0
        size = self.geometry.block_size
        for count in range(len(tokens) // size, 0, -1):
            rows = min(count * size, limit)
            if rows % size and self.recurrent():
                continue
            if rows > (count - 1) * size and self._findable(namespace, tokens, count, rows):
                return rows
        return 0

    def _findable(
        self, namespace: Namespace, tokens: tuple[int, ...], count: int, rows: int
    ) -> bool:
        size = self.geometry.block_size
        known = set(self.published.values())
        above = tokens[: count * size]
        if not any(at == namespace and have[: len(above)] == above for at, have in known):
            return False
        for group, spec in enumerate(self.geometry.groups):
            for index in range(count):
                first, end = index * size, (index + 1) * size
                reach = self.reach(group)
                outside = end <= max(0, rows - reach + 1) and first >= min(spec.sink, rows)
                if reach and outside:
                    continue
                identity = (namespace, tokens[:end])
                if not any(
                    at == group and have == identity for (at, _), have in self.published.items()
                ):
                    return False
        return True
