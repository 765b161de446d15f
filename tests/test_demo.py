"""What the demo goes by: where a fault must show, and what a stream's client has read."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from .demo import DemoError, _read_stream, first_row_after_pads
from .faults import loads
from .faults.catalogue import BY_NAME
from .faults.fault import Witness
from .faults.runner import record


def test_the_demo_expects_the_fault_where_its_witness_saw_it_begin(tmp_path: Path) -> None:
    witness, tape = Witness(), tmp_path / "tape.log"
    record(loads.PADDED, tape, BY_NAME["S1"], witness)
    assert witness.first is not None
    step, sequences = first_row_after_pads(tape)
    assert step == witness.first.step
    assert sequences == {1, 2, 3}  # the prompt of 32 tokens needs no pads


def test_a_capture_without_pads_cannot_show_the_fault(tmp_path: Path) -> None:
    tape = tmp_path / "tape.log"
    record(loads.MIXED, tape)
    with pytest.raises(DemoError, match=r"no prefill on tape.log was padded"):
        first_row_after_pads(tape)


@pytest.mark.parametrize(("pieces_max", "text"), [(None, "abcd"), (2, "ab")])
def test_a_client_that_leaves_has_read_the_first_pieces(pieces_max: int | None, text: str) -> None:
    chunks = ["", *"abcd"]
    lines = [f'data: {{"choices":[{{"delta":{{"content":"{it}"}}}}]}}\n\n' for it in chunks]
    reply = httpx.Response(200, text="".join([*lines, ": comment\n\n", "data: [DONE]\n\n"]))
    assert _read_stream(reply, pieces_max) == text
