"""Random loads hold what simulation_check.py asks of them; what that asks can be seen to fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve
from msgspec import structs

from kernel.fake import Failure
from server.policy import Policy
from server.submission import LENGTH, STOP, Update
from statemachine import invariants
from statemachine.errors import InvariantBroken
from statemachine.events import Namespace
from statemachine.geometry import Geometry, Group, has_state
from statemachine.records import Parameters
from statemachine.state import State

from . import simulation_check
from .faults import loads
from .faults.fault import replaced
from .sim import Sim, answer_alone, prompts
from .simulation import check, explain, failure_of, happened
from .simulation_alone import alone
from .simulation_check import READS, Invariants, check_load, spent
from .simulation_disk import HALF, NONE, STUCK
from .simulation_load import Load, Request, literal
from .simulation_minimize import minimise
from .simulation_random import random_load, roomy

RUNS = 120
ENDED = (STOP, LENGTH)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"lookahead": False, "draft_tokens": 0},
    {"lookahead": True, "draft_tokens": 0},
    {"lookahead": False, "draft_tokens": 3, "lookup_ngram": 1},
    {"lookahead": True, "draft_tokens": 3, "lookup_ngram": 1},
)
NAMES = {
    "Load": Load,
    "Request": Request,
    "Policy": Policy,
    "Geometry": Geometry,
    "Group": Group,
    "Namespace": Namespace,
    "Failure": Failure,
    "Parameters": Parameters,
}
"""What a literal needs."""


@pytest.mark.slow
def test_random_loads_are_clean_and_have_everything_in_them() -> None:
    had = Counter[str]()
    for seed in range(RUNS):
        had.update(happened(check(seed)))
    # A run says nothing of what did not happen in it.
    often = (
        "lookahead",
        "drafts",
        "accepted drafts",
        "preemption",
        "failed step",
        "cancel",
        "fork",
    )
    for name in (
        *often,
        "read answers",
        "scores",
        "log-probabilities",
        "embeddings",
        "adopted prefix",
        "copied block",
        "rewound rows",
        "stop string",
        "refusal",
    ):
        assert had[name] > RUNS // 10, name
    for name in ("full disk", "lost client", "flush", "window", "engine stopped", "priority"):
        assert had[name] >= 2, name
    for name in ("draft model", "draft model trims", "draft model adopts", "draft model fails"):
        assert had[name] >= 2, name


def test_a_seed_is_the_same_load_every_time_and_another_seed_another_one() -> None:
    assert random_load(7) == random_load(7)
    assert random_load(7).requests != random_load(8).requests


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_a_load_is_printed_as_python_that_makes_it_again(seed: int) -> None:
    load = random_load(seed)
    assert eval(literal(load), NAMES) == load


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_answer_worked_out_alone_is_what_the_scheduler_answers_one_request(seed: int) -> None:
    compared = 0
    for request in random_load(seed).requests:
        if request.stop or len(request.tokens) > 60:
            continue
        load = evolve(loads.MIXED, requests=(request,), policy=Policy(context_tokens=64))
        compared += 1
        expected, _ = alone(load, request)
        assert expected == answer_alone(
            request.tokens,
            geometry=load.geometry,
            namespace=request.namespace,
            **structs.asdict(request.parameters),
        )
    assert compared > 5


def _ended(load: Load) -> tuple[dict[int, tuple[int, ...]], list[str]]:
    """Answers of the requests that ended by themselves, and what the run had in it."""
    played = check_load(load, every_event=False)
    by_number = enumerate(zip(played.answers, played.reasons, strict=True))
    return {number: answer for number, (answer, why) in by_number if why in ENDED}, happened(played)


@pytest.mark.parametrize("seed", range(12))
def test_lookahead_and_drafts_change_no_answer(seed: int) -> None:
    load = random_load(seed)
    policies = [structs.replace(load.policy, **changes) for changes in SETTINGS]
    if has_state(load.geometry):
        policies = [structs.replace(policy, lookahead=False) for policy in policies]
    pool = roomy(load.geometry, policies[-1])
    runs = [_ended(evolve(load, policy=policy, geometry=pool)) for policy in policies]
    plain, _ = runs[0]
    for (answers, had), policy in zip(runs, policies, strict=True):
        both = sorted(plain.keys() & answers.keys())
        assert [answers[number] for number in both] == [plain[number] for number in both]
        assert "lookahead" not in had or policy.lookahead
        assert "drafts" not in had or policy.draft_tokens


@pytest.mark.parametrize("how", [NONE, HALF, STUCK])
@pytest.mark.parametrize("first", [0, 1, 5])
def test_a_tape_with_a_gap_replays_and_no_answer_is_lost(how: str, first: int) -> None:
    calm = check_load(loads.MIXED)
    load = evolve(loads.MIXED, full_disk=dict.fromkeys(range(first, first + 3), how))
    played = check_load(load)
    assert played.lost_records > 0
    assert played.answers == calm.answers


def test_bounds_are_not_out_of_reach() -> None:
    closest = 0.0
    for seed in range(8):
        load = random_load(seed)
        played = check_load(load, every_event=False)
        for number, reason in enumerate(played.reasons):
            if reason in ENDED:
                taken, most = spent(load, played, number)
                closest = max(closest, taken / most)
    assert 0.4 < closest <= 1


# What is put in below must each be found, and as what it is.


def _told_twice(original: Any) -> Any:
    def tell(self: Any, update: Update) -> None:
        sink = self._sinks.get(update.request)
        original(self, update)
        if sink is not None and update.finish_reason is not None:
            sink(structs.replace(update, tokens=()))

    return tell


def _leaks_when_cancelled(original: Any) -> Any:
    def cancelled(view: Any, request: int) -> Any:
        return structs.replace(original(view, request), closing=view.closing)

    return cancelled


def _forgets_nobody(original: Any) -> Any:
    return lambda self, request: None


def _sees_no_stop(original: Any) -> Any:
    return lambda self, request, token: False


def _seeds_alike(original: Any) -> Any:
    def draw(self: Any, piece: Any, *rest: Any) -> Any:
        parameters = piece.parameters and structs.replace(piece.parameters, seed=0)
        return original(self, structs.replace(piece, parameters=parameters), *rest)

    return draw


def _one_row_a_step(original: Any) -> Any:
    def share(policy: Any, rows_left: int, needs: list[int]) -> list[tuple[int, int]]:
        return [(1, 0)] if needs and rows_left else []

    return share


def _never_preempts(original: Any) -> Any:
    def make_room(self: Any) -> None:
        raise ValueError("no room")

    return make_room


def _loses_a_record(original: Any) -> Any:
    return lambda self, records: original(self, records[1:] if len(records) > 3 else records)


PLANTED: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "told twice": ("server.clients:Clients.tell", _told_twice, "updates"),
    "leaks when cancelled": ("server.view:_cancelled", _leaks_when_cancelled, "replay: fold"),
    "forgets nobody": ("server.clients:Clients._forget", _forgets_nobody, "left over"),
    "sees no stop string": ("server.clients:Clients.stopped", _sees_no_stop, "answer"),
    "draws with one seed": ("kernel.fake:FakeKernel._draw", _seeds_alike, "answer"),
    "one prompt row a step": ("server.sharing:share", _one_row_a_step, "liveness"),
    "fails to make room": ("server.draft:Draft.make_room", _never_preempts, "replay: plan"),
    "loses a record": ("server.capture:CaptureWriter._put", _loses_a_record, "replay: fold"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_put_wrong_is_found_by_random_loads_as_what_it_is(name: str) -> None:
    target, make, kind = PLANTED[name]
    found: list[str | None] = []
    with replaced(target, make):
        while kind not in found and len(found) < 30:
            found.append(failure_of(random_load(len(found))))
    assert kind in found


def test_a_failing_load_is_minimised_to_a_literal_that_fails_in_the_same_way() -> None:
    target, make, kind = PLANTED["leaks when cancelled"]
    with replaced(target, make):
        load = random_load(41)
        assert len(load.requests) > 20
        small = minimise(load, failure_of)
        again = eval(literal(small), NAMES)
        assert failure_of(again) == kind
        said = explain(load, ValueError("blocks are held"))
    assert failure_of(again) is None
    assert literal(small) in said
    assert load.name in said
    assert small.requests == (Request((1,), 2, cancel_at=2),)
    assert (small.policy, small.fail, small.flush_at) == (Policy(), {}, ())


def test_a_load_that_does_not_fail_is_not_minimised() -> None:
    with pytest.raises(ValueError, match="does not fail"):
        minimise(loads.MIXED, failure_of)


def _a_state() -> State:
    sim = Sim()
    for prompt in prompts(6):
        sim.submit(prompt, 8)
    for _ in range(4):
        sim.step()
    return sim.engine.view.state


def test_a_predicate_reads_no_part_of_the_state_that_it_is_not_said_to() -> None:
    state = _a_state()
    constant = {"geometry", "digest"}
    predicates = {it.__name__: it for it in invariants.ALL}
    for name, parts in READS.items():
        seen = _Seen(state)
        assert list(predicates[name](seen)) == []  # type: ignore[arg-type]
        assert seen.names - constant <= set(parts), name
    assert set(READS) == set(predicates) - {"digest_is_kept"}


class _Seen:
    """A state that notes which of its parts are looked at, by its own methods too."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        method = getattr(State, name, None)
        if name not in State.__struct_fields__ and callable(method):
            return lambda *given: method(self, *given)
        self.names.add(name)
        return getattr(self._state, name)


def test_invariants_that_were_asked_before_are_asked_again_where_something_changed() -> None:
    state = _a_state()
    ask = Invariants()
    ask(state)
    ask(state)
    sequence = state.sequences[0]
    broken = structs.replace(
        state, sequences=state.sequences.set(0, structs.replace(sequence, pads=3))
    )
    with pytest.raises(InvariantBroken, match="tables_cover_the_offset"):
        ask(broken)
    with pytest.raises(InvariantBroken, match="digest_is_kept"):
        ask(structs.replace(state, digest=state.digest ^ 1))


def test_thorough_runs_ask_all_invariants_after_every_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Counter[bool]()
    real = Invariants.__call__

    def count(self: Invariants, state: State) -> None:
        asked[every_event] += 1
        real(self, state)

    monkeypatch.setattr(simulation_check.Invariants, "__call__", count)
    for every_event in (True, False):
        events = Counter[bool]()
        played = check_load(loads.MIXED, every_event=every_event)
        events[every_event] += played.steps
    assert asked[False] == played.steps
    assert asked[True] > 3 * asked[False]
