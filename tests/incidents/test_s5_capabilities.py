"""S5: a family that cannot take pad rows back declines padding, by its capability."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from replay.reader import Tape
from server.build import build_engine, suited
from server.policy import Policy
from server.settings import Settings, SettingsError
from statemachine.events import PAD, Appended, Trimmed
from statemachine.geometry import WINDOW, Group
from statemachine.records import Header, StepDone, StepFailed, StepPlanned

from ..faults import loads, real
from ..faults.fault import Witness
from ..faults.loads import EXAONE4, MAMBA, TINY, Load, Request
from ..faults.model_owned import FAULTS, POLICY, in_a_row
from ..faults.runner import record, replay, run
from . import asking
from .asking import flips

OPAQUE = "deepseek_v41"
"""An architecture that nothing but its own caches can serve."""
REASONS = {
    OPAQUE: "pad rows cannot be taken back out of the model's own caches",
    MAMBA: "recurrent state: what pad rows do to it cannot be taken back",
}

PADDED = structs.replace(POLICY, prefill_tile=8)
GREEDY = Policy(
    max_running=32, prefix_cache=True, lookahead=True, draft_tokens=4, max_batch_tokens=64
)


def _flags(*groups: Group) -> dict[str, bool | int | str]:
    from kernel.families import capabilities_of

    return capabilities_of(groups).as_flags()


def _events(tape: Path, kind: type[Any]) -> list[Any]:
    """All events of a kind, whichever record has them."""
    steps = [item for item in Tape(str(tape)) if isinstance(item, StepPlanned | StepDone)]
    return [event for item in steps for event in item.events if isinstance(event, kind)]


@pytest.mark.parametrize("setting", [{"prefill_tile": 32}, {"prefill_cohort": True}])
@pytest.mark.parametrize("kernel", [OPAQUE, MAMBA])
def test_padding_that_somebody_asks_for_is_refused_at_the_start_with_the_reason(
    kernel: str, setting: dict[str, Any]
) -> None:
    with pytest.raises(SettingsError) as caught:
        build_engine(Settings(model=real.path_of(kernel), **setting))
    assert str(caught.value) == (
        f"{REASONS[kernel]}: leave prefill_tile at 1 and prefill_cohort off"
    )


def test_a_pool_that_somebody_sizes_is_refused_where_there_are_no_pages() -> None:
    for setting in ({"num_blocks": 64}, {"kv_memory": 2**20}):
        with pytest.raises(SettingsError, match="there is no pool, so leave num_blocks"):
            build_engine(Settings(model=real.path_of(OPAQUE), **setting))


def test_capabilities_alone_decide_what_a_policy_may_do() -> None:
    paged = _flags(Group(num_blocks=4), Group(WINDOW, 4, 8))
    opaque = _flags(Group("opaque"))
    padded = structs.replace(GREEDY, prefill_tile=32, prefill_cohort=True)
    assert suited(padded, paged) == padded
    assert suited(GREEDY, opaque) == structs.replace(
        GREEDY, max_running=1, prefix_cache=False, lookahead=False, draft_tokens=0
    )
    for name, changes in {
        "batch": {"max_running": 1},
        "share": {"prefix_cache": False},
        "rewind": {"lookahead": False, "draft_tokens": 0},
    }.items():
        assert suited(padded, paged | {name: False}) == structs.replace(padded, **changes)
    with pytest.raises(SettingsError, match="leave prefill_tile at 1"):
        suited(padded, paged | {"pad": False})


@pytest.mark.parametrize("kernel", [TINY, OPAQUE, MAMBA])
def test_the_header_says_what_the_model_cannot_do_and_the_policy_follows(
    kernel: str, tmp_path: Path
) -> None:
    tape = tmp_path / "tape.log"
    engine, _ = build_engine(
        Settings(model=real.path_of(kernel), capture=str(tape), max_batch_tokens=64)
    )
    engine.stop()
    header = next(item for item in Tape(str(tape)) if isinstance(item, Header))
    able = [header.capabilities[name] for name in ("batch", "pad", "rewind", "share")]
    held = (header.policy["max_running"], header.policy["prefix_cache"], header.sanitize)
    assert (able, held) == {
        TINY: ([True] * 4, (32, True, "edges")),
        OPAQUE: ([False] * 4, (1, False, "off")),
        MAMBA: ([True, False, False, True], (32, True, "edges")),
    }[kernel]
    assert header.capabilities.get("pad_reason") == REASONS.get(kernel)


def test_a_paged_family_is_padded_and_its_pads_are_trimmed(tmp_path: Path) -> None:
    tape = tmp_path / "tape.log"
    load = Load("padded", in_a_row(TINY).requests, PADDED, loads.POOL, kernel=TINY)
    played = record(load, tape)
    pads = [event.rows for event in _events(tape, Appended) if event.purpose == PAD]
    assert pads == [3, 5]
    assert [it.rows for it in _events(tape, Trimmed)] == [3, 5]
    for request, answer in zip(load.requests, played.answers, strict=True):
        assert flips(TINY, request.tokens, answer) == 0


def test_pads_that_reach_the_model_all_the_same_fail_their_request_and_no_other(
    tmp_path: Path,
) -> None:
    tape = tmp_path / "tape.log"
    asked = (Request(loads.tokens(13, 1), 5), Request(loads.tokens(16, 2), 5))
    load = Load("padded past its policy", asked, PADDED, kernel=EXAONE4)
    played = record(load, tape)
    assert played.reasons == ("error", "length")
    (failed,) = [item for item in Tape(str(tape)) if isinstance(item, StepFailed)]
    assert (failed.stage, failed.blamed) == ("build", (0,))
    assert "3 pad rows could not be taken back out of the model's own caches" in failed.error
    assert flips(EXAONE4, asked[1].tokens, played.answers[1]) == 0
    assert [replay(load, tape, depth) for depth in ("fold", "plan", "forward", "reference")] == (
        [None] * 4
    )


def test_with_the_fault_in_replay_names_the_first_row_behind_the_pads(
    tmp_path: Path, capsys: Any
) -> None:
    fault = next(it for it in FAULTS.faults if it.name == "S5")
    assert run(fault, tmp_path).holds
    tape, witness = tmp_path / "again.log", Witness()
    played = record(fault.load, tape, fault, witness)
    assert all(reason == "length" for reason in played.reasons), "it went unnoticed"
    code, report = asking.replayed(tape, EXAONE4, "fold", capsys)
    found = report["divergence"]
    assert code == 1
    assert (found["class"], found["step"], found["sequence"]) == ("observation", 2, 0)
    assert "the caches saw start 24, where the state has 21" in found["summary"]
    # The state did its part: what it trims, the caches keep.
    assert [it.rows for it in _events(tape, Trimmed)] == [3, 5]
