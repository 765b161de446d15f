"""Known bugs, put back one by one: replay finds each at its first wrong event, and nothing else.

That runs without a bug are clean, at random, is test_simulation.py's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from msgspec import structs

from replay.run import FORWARD, PLAN, REFERENCE
from statemachine.geometry import Group

from .faults import loads, runner
from .faults.catalogue import ALL, BY_NAME
from .faults.fault import Fault, Witness, replaced
from .faults.loads import FAKE, SMOLLM2, VOCAB, Load
from .faults.runner import record, replay, run

TORN_IN = re.compile(
    "has no attribute|has no field|positional argument|keyword argument|not subscriptable"
    "|not iterable|not callable|unsupported operand|unhashable|is not defined"
)
"""What Python says where a fault does not fit the code that it was put into."""


def _marked(fault: Fault) -> Any:
    marks = [pytest.mark.model] if fault.load.kernel == SMOLLM2 else []
    return pytest.param(fault, id=fault.name, marks=marks)


def test_every_fault_has_its_own_name_and_the_incidents_are_among_them() -> None:
    assert len(BY_NAME) == len(ALL)
    whole = {name.partition("-")[0] for name in BY_NAME}
    assert {f"S{number}" for number in range(1, 15)} <= whole
    assert len(ALL) >= 100


@pytest.mark.parametrize("fault", [_marked(fault) for fault in ALL])
def test_replay_finds_the_fault_at_its_first_wrong_event(fault: Fault, tmp_path: Path) -> None:
    result = run(fault, tmp_path)
    found = result.divergence
    assert result.first is not None, "the fault never did anything"
    assert found is not None, f"nothing found at {fault.depth}"
    assert found.kind == fault.kind
    assert result.at_first, f"{result.first} was found as {found}"
    said = runner.text_of(found)
    assert [word for word in fault.says if word not in said] == []
    assert not TORN_IN.search(result.played.failure + result.played.error + said)


@pytest.mark.model
@pytest.mark.parametrize(
    "load",
    {fault.load.name + fault.load.kernel: fault.load for fault in ALL}.values(),
    ids=lambda load: f"{load.name}, {load.kernel}",
)
def test_a_load_without_its_fault_is_clean_at_every_depth(load: Load, tmp_path: Path) -> None:
    tape = tmp_path / "clean.log"
    played = record(load, tape)
    assert played.error == ""
    assert None not in played.reasons
    depths = (PLAN,) if load.kernel == FAKE else (PLAN, FORWARD, REFERENCE)
    assert {depth: replay(load, tape, depth) for depth in depths} == dict.fromkeys(depths)


def test_a_fault_is_taken_out_again_wherever_it_was_put_in() -> None:
    import kernel.fake
    import kernel.metadata
    import server.closing
    import server.scheduler
    from statemachine import transitions
    from statemachine.events import Trimmed

    def places() -> list[object]:
        return [
            kernel.fake.build,
            kernel.metadata.build,
            server.scheduler.close_step,
            server.closing.close_step,
            transitions.HANDLERS[Trimmed],
        ]

    before = places()
    with (
        replaced("kernel.metadata:build", lambda original: lambda *_: None),
        replaced("server.closing:close_step", lambda original: lambda *_: None),
        replaced("statemachine.transitions:trimmed", lambda original: lambda *_: None),
    ):
        assert not any(now is old for now, old in zip(places(), before, strict=True))
    assert places() == before


def test_a_witness_keeps_the_first_difference_and_none_from_before_the_first_step() -> None:
    witness = Witness()
    witness.note(1)
    assert witness.first is None
    witness.step = 3
    witness.note(2)
    witness.step = 4
    witness.note(5)
    assert witness.first is not None
    assert (witness.first.step, witness.first.sequence) == (3, 2)


@pytest.mark.parametrize("name", ["slot-off-by-one", "shared-block-written"])
def test_wrong_contents_are_found_with_edges_and_not_without_tags(
    name: str, tmp_path: Path
) -> None:
    fault = BY_NAME[name]
    for mode, holds in (("full", True), ("edges", True), ("off", False)):
        folder = tmp_path / mode
        folder.mkdir()
        result = run(evolve(fault, load=evolve(fault.load, sanitize=mode)), folder)
        assert result.holds is holds, mode


def test_the_documentation_lists_every_fault_with_its_depth_and_class() -> None:
    page = (Path(__file__).parent.parent / "docs" / "faults.md").read_text()
    listed = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    rows = {name.removeprefix("| "): (depth, kind) for name, _, depth, kind in listed[1:]}
    assert list(rows) == [fault.name for fault in ALL]
    exact = sum(not fault.late_steps for fault in ALL)
    assert f"There are {len(ALL)} faults; {exact} of them are found at the first" in page
    for fault in ALL:
        late = f", {fault.late_steps} step late" if fault.late_steps else ""
        assert rows[fault.name] == (fault.depth + late, f"{fault.kind} |")


def test_the_same_requests_give_the_same_answers_with_and_without_failures(tmp_path: Path) -> None:
    calm = record(loads.MIXED, tmp_path / "calm.log")
    for load in (loads.BUILD_FAILS, loads.EVAL_FAILS):
        stormy = record(load, tmp_path / f"{load.name}.log")
        assert stormy.failed_steps >= 1
        assert stormy.answers == calm.answers
    roomy = evolve(
        loads.TIGHT, geometry=structs.replace(loads.TIGHT.geometry, groups=(Group(num_blocks=99),))
    )
    tight = record(loads.TIGHT, tmp_path / "tight.log")
    assert tight.preemptions >= 1
    assert tight.answers == record(roomy, tmp_path / "roomy.log").answers
    assert all(token < VOCAB for answer in calm.answers for token in answer)


SEEN_WITH_THE_BUG_IN = {
    "salt-ignored": "another namespace",
    "version-ignored": "another namespace",
    "other-token-kept": "does not hold its request's token",
    "answer-forgotten": "not sampled where its text ends",
    "one-token-more": "goes on, and came to its end",
    "end-token-missed": "goes on, and came to its end",
    "tokens-reordered": "does not hold its request's token",
    "prompt-cut": "not sampled where its text ends",
    "resumed-one-short": "not sampled where its text ends",
    "S4": "nothing can be planned for what is live",
}


@pytest.mark.parametrize("name", SEEN_WITH_THE_BUG_IN)
def test_a_bug_that_the_replaying_code_has_too_is_seen_where_it_shows_in_an_answer(
    name: str, tmp_path: Path
) -> None:
    fault = BY_NAME[name]
    tape = tmp_path / "capture.log"
    record(fault.load, tape, fault, Witness())
    with fault.active(Witness()):
        found = replay(fault.load, tape, PLAN)
    assert found is not None
    assert SEEN_WITH_THE_BUG_IN[name] in found.summary
