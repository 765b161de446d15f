"""P02, P04, P06, P08, P09: hits and pads over real forwards: rows, offsets and answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from replay.reader import Tape
from statemachine.events import PrefixAdopted
from statemachine.geometry import Geometry, Group
from statemachine.records import StepPlanned

from ..faults.loads import TINY, Request
from ..faults.runner import record
from . import asking

P = tuple(range(1, 60))
OWN = tuple(range(60, 90))
COHORT = structs.replace(asking.POLICY, prefill_cohort=True, prefix_cache=False)


def pool(block_size: int, num_blocks: int) -> Geometry:
    return Geometry(block_size, (Group(num_blocks=num_blocks),))


def adoptions(tape: Path) -> dict[int, PrefixAdopted]:
    found = [e for it in Tape(str(tape)) if isinstance(it, StepPlanned) for e in it.events]
    return {event.seq: event for event in found if isinstance(event, PrefixAdopted)}


@pytest.mark.parametrize(
    ("geometry", "prompts", "adopted"),
    [
        pytest.param(pool(4, 16), (P[:20], P[:12] + OWN[:4]), (12,), id="p02"),
        pytest.param(pool(16, 6), (P[:32], P[:32]), (31,), id="p06-32"),
        pytest.param(pool(16, 6), (P[:33], P[:33]), (32,), id="p06-33"),
        pytest.param(pool(16, 6), (P[:48], P[:48]), (47,), id="p06-48"),
        pytest.param(pool(4, 8), (P[:8], P[:8], P[:12]), (7, 8), id="p08"),
        pytest.param(pool(16, 8), (P[:40], P[:37] + OWN[:8]), (32,), id="p09"),
    ],
)
def test_a_hit_reads_the_rows_it_took_and_no_others_and_answers_as_cold(
    geometry: Geometry,
    prompts: tuple[tuple[int, ...], ...],
    adopted: tuple[int, ...],
    tmp_path: Path,
    capsys: Any,
) -> None:
    tape = tmp_path / "tape.log"
    requests = tuple(Request(it, 3, at=1 + 10 * number) for number, it in enumerate(prompts))
    played = record(asking.load(TINY, requests, geometry=geometry), tape)
    taken = adoptions(tape)
    assert tuple(len(event.tokens) for event in taken.values()) == adopted
    for seq, event in taken.items():
        assert len(event.blocks[0]) == geometry.blocks_for(len(event.tokens))
        first = next(it for it in asking.pieces(tape) if it.sequence == seq)
        rows = len(prompts[seq])
        assert (first.start, first.visible, first.offset_after) == (len(event.tokens), rows, rows)
    for request, answer in zip(requests, played.answers, strict=True):
        assert answer == asking.dense(TINY, request.tokens, 3)
    for depth in ("fold", "plan"):
        assert asking.replayed(tape, TINY, depth, capsys)[0] == 0


def test_p02_a_taker_beside_its_donor_holds_three_blocks_of_five(
    tmp_path: Path, capsys: Any
) -> None:
    """While the donor still decodes over all of its own."""
    tape = tmp_path / "tape.log"
    donor, taker = Request(P[:20], 8), Request((*P[:12], 88), 6, at=3)
    played = record(asking.load(TINY, (donor, taker), geometry=pool(4, 16)), tape)
    assert [len(event.blocks[0]) for event in adoptions(tape).values()] == [3]
    seen = [(it.start, it.visible) for it in asking.pieces(tape) if it.sequence == 1]
    assert seen == [(12 + n, 13 + n) for n in range(6)]
    assert played.answers[0] == asking.dense(TINY, donor.tokens, 8)
    assert played.answers[1] == asking.dense(TINY, taker.tokens, 6)
    assert asking.replayed(tape, TINY, "plan", capsys)[0] == 0


def test_p04_prompts_of_5_and_2_that_were_padded_together_go_on_at_5_and_2(
    tmp_path: Path, capsys: Any
) -> None:
    """Pads stand behind a prompt here, never before it, and are gone before the next row."""
    tape = tmp_path / "tape.log"
    both = (Request(P[:5], 3), Request(OWN[:2], 3))
    played = record(asking.load(TINY, both, COHORT, geometry=pool(4, 8)), tape)
    seen = {(it.step, it.sequence): it for it in asking.pieces(tape)}
    assert [(seen[1, seq].rows, seen[1, seq].offset_after) for seq in (0, 1)] == [(5, 5), (5, 2)]
    assert [(seen[2, seq].start, seen[2, seq].visible) for seq in (0, 1)] == [(5, 6), (2, 3)]
    for request, answer in zip(both, played.answers, strict=True):
        assert answer == asking.dense(TINY, request.tokens, 3)
    assert asking.replayed(tape, TINY, "plan", capsys)[0] == 0
