"""Shadow tags: what is found, and that nothing is found where all is right."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from msgspec import structs

from kernel import expected as expected_module
from kernel import shadow as shadow_module
from kernel.batch import Batch, Piece
from kernel.metadata import StepMetadata, build
from kernel.shadow import EDGES, FULL, MODES, OFF, Shadow
from statemachine.events import BlockCopied
from statemachine.geometry import Geometry, Group
from statemachine.records import ShadowReport
from statemachine.tags import PAD, UNWRITTEN, sequence_tags

from .paged import Book, random_tokens

GEOMETRY = Geometry(block_size=4, groups=(Group(num_blocks=64),), identity="shadow")
BOTH = pytest.mark.parametrize("mode", [EDGES, FULL])


class Steps:
    """Steps through a shadow; `twist` changes the metadata that the kernel would use."""

    def __init__(self, mode: str, geometry: Geometry = GEOMETRY) -> None:
        self.geometry = geometry
        self.book = Book(geometry)
        self.shadow = Shadow(geometry, mode)
        self._step = 0

    def run(
        self,
        *pieces: Piece,
        copies: tuple[BlockCopied, ...] = (),
        twist: Callable[[StepMetadata], StepMetadata] = lambda metadata: metadata,
    ) -> ShadowReport:
        self._step += 1
        batch = Batch(self._step, pieces, copies)
        self.shadow.copy_blocks(copies)
        return self.shadow.apply(batch, twist(build(batch, self.geometry)))


@BOTH
def test_nothing_is_found_in_prefill_chunks_decode_pads_and_neighbours(mode: str) -> None:
    steps = Steps(mode)
    tokens = random_tokens(0, 40)
    reports = [
        steps.run(steps.book.append(0, tokens[:9])),
        steps.run(steps.book.append(0, tokens[9:17], pads=3), steps.book.append(1, tokens[:5])),
    ]
    steps.book.trim_pads(0)
    for token in tokens[17:]:
        reports.append(steps.run(steps.book.append(1, [token]), steps.book.append(0, [token])))
    assert [report.found for report in reports] == [0] * 25
    assert all(report.checked for report in reports)


def test_full_mode_compares_every_row_that_is_read() -> None:
    steps = Steps(FULL)
    steps.run(steps.book.append(0, random_tokens(0, 9)))
    report = steps.run(steps.book.append(0, [5]), steps.book.append(1, [1, 2, 3]))
    assert report.checked == 10 + 3


def test_edges_compare_the_row_before_the_last_row_and_new_blocks() -> None:
    steps = Steps(EDGES)
    steps.run(steps.book.append(0, random_tokens(0, 7)))
    assert steps.run(steps.book.append(0, [5])).checked == 2
    assert steps.run(steps.book.append(0, [5])).checked == 3


def test_off_compares_nothing_and_tags_nothing() -> None:
    steps = Steps(OFF)
    assert steps.run(steps.book.append(0, [1, 2])) == ShadowReport()
    assert not steps.shadow.tags[0].any()


@BOTH
def test_a_foreign_row_is_found(mode: str) -> None:
    """Two sequences take the same block: the later write wins."""
    steps = Steps(mode)
    steps.run(steps.book.append(0, [1, 2, 3]))
    other = steps.book.append(1, [7, 8, 9])
    stolen = structs.replace(other.sequence, tables=steps.book.sequences[0].tables)
    steps.run(structs.replace(other, sequence=stolen))
    report = steps.run(steps.book.append(0, [4]))
    assert report.found == (1 if mode == EDGES else 3)
    finding = report.findings[-1]
    block = steps.book.sequences[0].tables[0][0]
    assert (finding.seq, finding.position, finding.block) == (0, 2, block)
    assert finding.expected == sequence_tags(GEOMETRY, steps.book.sequences[0], 2, 3)[0]
    assert finding.found == sequence_tags(GEOMETRY, stolen, 2, 3)[0]


@BOTH
def test_a_write_of_a_neighbour_in_the_same_step_is_found(mode: str) -> None:
    steps = Steps(mode)
    mine = steps.book.append(0, [1])
    other = steps.book.append(1, [2])
    stolen = structs.replace(other.sequence, tables=mine.sequence.tables)
    report = steps.run(mine, structs.replace(other, sequence=stolen))
    assert [finding.seq for finding in report.findings] == [0] * report.found
    assert report.found == (2 if mode == EDGES else 1)


@BOTH
def test_a_stale_block_is_found(mode: str) -> None:
    """A block that an earlier owner filled stands in a new table as if it were adopted."""
    steps = Steps(mode)
    steps.run(steps.book.append(0, [1, 2, 3, 4, 5]))
    fresh = steps.book.append(1, [9, 8, 7, 6, 5])
    table = (steps.book.sequences[0].tables[0][0], fresh.sequence.tables[0][1])
    wrong = structs.replace(fresh.sequence, tables=(table,))
    report = steps.run(Piece(wrong, (5,)))
    assert report.found == (2 if mode == EDGES else 4)
    assert {finding.position for finding in report.findings} >= {3}


@BOTH
def test_a_table_used_that_is_not_the_sequences_is_found(mode: str) -> None:
    """The tables are the step's, the expectation the sequence's."""
    steps = Steps(mode)
    steps.run(steps.book.append(0, random_tokens(0, 10)), steps.book.append(1, [1, 2, 3, 4, 5]))
    foreign = steps.book.sequences[1].tables[0][0]

    def twist(metadata: StepMetadata) -> StepMetadata:
        metadata.tables[0][0, 0] = foreign
        return metadata

    report = steps.run(steps.book.append(0, [1]), twist=twist)
    assert report.found == (1 if mode == EDGES else 4)
    assert {finding.block for finding in report.findings} == {foreign}


@BOTH
def test_a_pad_row_left_visible_is_found(mode: str) -> None:
    """S1: the pool is trimmed, the offset is not."""
    steps = Steps(mode)
    steps.run(steps.book.append(0, [1], pads=2))
    steps.book.sequences[0] = structs.replace(steps.book.sequences[0], pads=0)

    def twist(metadata: StepMetadata) -> StepMetadata:
        metadata.positions[:] = 3
        metadata.until[:] = 4
        metadata.slots[:] = metadata.slots_of(0, np.array([0]), np.array([3]))
        return metadata

    report = steps.run(steps.book.append(0, [4]), twist=twist)
    found = {finding.position: (finding.expected, finding.found) for finding in report.findings}
    assert found[2] == (UNWRITTEN, PAD)
    assert set(found) == ({2, 3} if mode == EDGES else {1, 2, 3})


@BOTH
def test_an_unwritten_row_is_found(mode: str) -> None:
    """Rows adopted that were never computed."""
    steps = Steps(mode)
    piece = steps.book.append(0, [1, 2, 3, 4, 5, 6])
    report = steps.run(structs.replace(piece, tokens=(6,)))
    assert report.found == (2 if mode == EDGES else 5)
    assert {finding.found for finding in report.findings} == {UNWRITTEN}


@BOTH
def test_a_copied_block_carries_its_tags_and_the_copy_comes_first(mode: str) -> None:
    steps = Steps(mode)
    steps.run(steps.book.append(0, [1, 2, 3]))
    (source,) = steps.book.sequences[0].tables[0]
    target = next(block for block in range(64) if block != source)
    child = structs.replace(steps.book.sequences[0], id=1, tables=((target,),))
    steps.book.sequences[1] = child
    copied = BlockCopied(1, 2, 0, 0, source, target, 3)
    report = steps.run(steps.book.append(0, [4]), steps.book.append(1, [9]), copies=(copied,))
    assert report.found == 0
    assert steps.run(steps.book.append(1, [4])).found == 0


def test_a_window_group_is_compared_only_where_it_is_read() -> None:
    groups = (Group(num_blocks=64), Group("window", 64, window=5))
    steps = Steps(FULL, Geometry(block_size=4, groups=groups))
    for token in random_tokens(3, 30):
        report = steps.run(steps.book.append(0, [token]))
        assert report.found == 0
        steps.book.front_trim(0)
    assert report.checked == 30 + 5


def test_at_most_sixteen_findings_are_kept_and_all_are_counted() -> None:
    steps = Steps(FULL)
    piece = steps.book.append(0, random_tokens(0, 40))
    report = steps.run(structs.replace(piece, tokens=(1,)))
    assert report.found == 39
    assert len(report.findings) == 16


def test_after_a_reset_every_row_is_unwritten() -> None:
    steps = Steps(EDGES)
    steps.run(steps.book.append(0, [1, 2, 3]))
    steps.shadow.reset()
    assert steps.run(steps.book.append(0, [4])).found == 1


def test_tables_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow_module, "SEQUENCES_MAX", 5)
    steps = Steps(EDGES)
    for seq in range(12):
        assert steps.run(steps.book.append(seq, [1])).found == 0
    assert len(steps.shadow._tables) == 5


@pytest.mark.parametrize("cached", [1, 1 << 16])
def test_expected_tags_of_full_blocks_do_not_go_stale(
    cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same sequence id, taken back and grown with other tokens."""
    monkeypatch.setattr(expected_module, "BLOCKS_MAX", cached)
    steps = Steps(FULL)
    for base in (1, 30, 1):
        steps.book.open(0)
        for token in range(base, base + 10):
            assert steps.run(steps.book.append(0, [token])).found == 0


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="sanitize must be one of edges, full, off, not 'some'"):
        Shadow(GEOMETRY, "some")
    assert MODES == (EDGES, FULL, OFF)
