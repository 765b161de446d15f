"""The live guard: a step whose cache is found wrong while the server runs, and what is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import structlog
from msgspec import structs

from kernel.batch import Batch, StepResult
from kernel.fake import FakeClock, FakeKernel
from replay.run import FOLD, PLAN, Options
from server.engine import Engine
from server.http.app import create_app
from server.live_guard import MODES, LiveGuard, Wrong
from server.loop import Parts
from server.policy import Policy
from server.settings import Settings, SettingsError, load_settings
from server.submission import EngineStopped, Submission
from server.view import StepPlan
from statemachine import invariants
from statemachine.geometry import Geometry
from statemachine.records import (
    FlushRequested,
    Parameters,
    RequestCancelled,
    ShadowFinding,
    StepDone,
    TapeEnded,
)
from statemachine.state import NO_ENTRY

from .fake_engine import byte_tokenizer
from .faults import runner
from .faults.catalogue import ALL, BY_NAME
from .faults.fault import Fault, Witness
from .faults.loads import FAKE, PADDED
from .http_server import WAIT_S, live_server
from .sim import POLICY, SMALL, TIGHT, Inbox, MemoryCapture, Sim, answer_alone, header, prompts
from .tampering import outcome_of

Lie = Callable[[Batch, StepResult], StepResult]

PROMPT = tuple(range(1, 19))
OTHER = tuple(range(40, 31, -1))
AHEAD = structs.replace(POLICY, lookahead=True)
POLICIES = pytest.mark.parametrize("policy", [POLICY, AHEAD], ids=["alone", "lookahead"])
GUESSING = structs.replace(AHEAD, draft_tokens=3, lookup_ngram=2)


class Lying(FakeKernel):
    """A kernel that reports something else than it did, at some steps."""

    def __init__(self, geometry: Geometry, lies: Mapping[int, Lie]) -> None:
        super().__init__(geometry)
        self.lies = lies

    def collect(self, ticket: Any) -> StepResult:
        result = super().collect(ticket)
        lie = self.lies.get(ticket.batch.step)
        return result if lie is None else lie(ticket.batch, result)


class Guarded(Sim):
    """A simulation whose engine acts on divergences."""

    def __init__(
        self,
        mode: str,
        lies: Mapping[int, Lie] | None = None,
        policy: Policy = POLICY,
        geometry: Geometry = SMALL,
    ) -> None:
        self.kernel = Lying(geometry, lies or {})
        self.capture = MemoryCapture()
        self.policy = policy
        head = header(geometry, policy)
        parts = Parts(self.kernel, policy, self.capture, head, on_divergence=mode)
        self.engine = Engine(lambda: parts, clock=FakeClock())
        self.engine.open()
        self.inboxes = {}


def row_of(seq: int, position: int, count: int = 1) -> Lie:
    """The shadow found this row of this sequence wrong, and as many in all."""

    def lie(batch: Batch, result: StepResult) -> StepResult:
        (table,) = next(p.sequence.tables for p in batch.pieces if p.sequence.id == seq)
        found = ShadowFinding(seq, 0, position, table[position // SMALL.block_size], 7, 8)
        shadow = structs.replace(result.shadow, found=count, findings=(found,))
        return structs.replace(result, shadow=shadow)

    return lie


def start_of(seq: int, add: int) -> Lie:
    """A sequence's rows went to other positions."""

    def lie(batch: Batch, result: StepResult) -> StepResult:
        place = [piece.sequence.id for piece in batch.pieces].index(seq)
        starts = list(result.observation.starts)
        starts[place] += add
        seen = structs.replace(result.observation, starts=tuple(starts))
        return structs.replace(result, observation=seen)

    return lie


def other_uses(**fields: Any) -> Lie:
    """Layers used their caches otherwise."""

    def lie(batch: Batch, result: StepResult) -> StepResult:
        seen = structs.replace(result.observation, **fields)
        return structs.replace(result, observation=seen)

    return lie


def without_rows(kinds: Mapping[str, int]) -> dict[str, int]:
    return {kind: count for kind, count in kinds.items() if count}


def published(sim: Sim) -> set[int]:
    """Blocks that somebody else could find."""
    blocks = sim.engine.view.state.groups[0].blocks
    return {number for number, block in blocks.items() if block.entry != NO_ENTRY}


def blocks_of(sim: Sim, seq: int) -> tuple[int, ...]:
    (table,) = sim.engine.view.state.sequences[seq].tables
    return table


def truthful(sim: Sim) -> list[Any]:
    """The tape, without what its kernel's lies say of rows in the pages."""
    return [
        structs.replace(it, shadow=structs.replace(it.shadow, found=0, findings=()))
        if isinstance(it, StepDone)
        else it
        for it in sim.capture.records
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", [POLICY, AHEAD, GUESSING], ids=["alone", "lookahead", "drafts"])
def test_a_clean_run_counts_nothing_and_ends_nobody(mode: str, policy: Policy) -> None:
    sim = Guarded(mode, {}, policy, TIGHT)
    for prompt in prompts(30, seed=5):
        sim.submit(prompt)
    sim.run()
    counters = sim.engine.counters
    assert counters.preemptions > 0
    assert counters.divergences == {"observation": 0, "content": 0}
    assert {inbox.reason for inbox in sim.inboxes.values()} == {"length"}
    assert sim.records(FlushRequested) == sim.records(RequestCancelled) == []


def _seen_by_fold() -> list[Any]:
    """Faults that a replay finds by what the caches saw or what the pages held, without a model."""
    return [
        pytest.param(fault, id=fault.name)
        for fault in ALL
        if fault.load.kernel == FAKE and fault.depth == FOLD and fault.kind != FOLD
        if fault.kind in ("observation", "content")
    ]


@pytest.mark.parametrize("fault", _seen_by_fold())
def test_the_guard_finds_a_fault_where_replay_does(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, tuple[Wrong, ...]]] = []
    act = LiveGuard.act

    def noted(self: LiveGuard, view: Any, plan: StepPlan, wrong: Any, at: Any) -> Any:
        seen.append((plan.step, wrong))
        return act(self, view, plan, wrong, at)

    monkeypatch.setattr(LiveGuard, "act", noted)
    tape = tmp_path / "fault.log"
    runner.record(fault.load, tape, fault, Witness())
    found = runner.replay(fault.load, tape, FOLD)
    assert found is not None
    step, wrong = seen[0]
    # Of a draft model's pool both name its own step.
    expected = found.step if found.draft_step < 0 else found.draft_step
    assert (step, found.kind in {it.kind for it in wrong}) == (expected, True)


def test_warn_counts_every_wrong_step_and_answers_as_if_nothing_were() -> None:
    fault = BY_NAME["S1"]
    witness = Witness()
    with structlog.testing.capture_logs() as logs, fault.active(witness):
        sim = Guarded("warn", {}, PADDED.policy, PADDED.geometry)
        witness.step = 1
        inbox = sim.submit(range(1, 38), 6)
        sim.run()
    assert (inbox.reason, len(inbox.tokens)) == ("length", 6)
    wrong = [record for record in sim.records(StepDone) if record.observation.starts > (0,)]
    assert len(wrong) == 5
    assert sim.engine.counters.divergences == {"observation": 5, "content": 5}
    lines = [line for line in logs if line["event"] == "divergence"]
    said = [(line["step"], line["kind"], line["request"]) for line in lines]
    assert said == [(2, "observation", 0), (2, "content", 0), (2, "content", None)]
    assert lines[0] == {
        "event": "divergence",
        "log_level": "error",
        "kind": "observation",
        "step": 2,
        "request": 0,
        "id": "",
        "what": "the caches saw start 64, where the state has 37",
        "tape_bytes": 0,
        "action": "warn",
    }


def three(sim: Sim) -> tuple[Inbox, Inbox, Inbox]:
    """Two requests that share a prompt, of which the second adopts, and one of its own."""
    first = sim.submit(PROMPT, 24)
    for _ in range(3):
        sim.step()
    return first, sim.submit((*PROMPT, 50, 51), 24), sim.submit(OTHER, 24)


@POLICIES
def test_abort_ends_the_wrong_request_and_those_that_share_its_wrong_row(policy: Policy) -> None:
    sim = Guarded("abort-request", {9: row_of(0, 2)}, policy)
    first, sharing, other = three(sim)
    while sim.next_step < 9:
        sim.step()
    shared = set(blocks_of(sim, 0)) & set(blocks_of(sim, 1))
    assert len(shared) == 4
    assert shared <= published(sim)
    sim.run()
    assert sim.engine.counters.divergences == {"observation": 0, "content": 1}
    said = (
        "the cache of this request was found wrong at step 9, so its answer was given up: "
        "send it again"
    )
    assert [(inbox.reason, inbox.error) for inbox in (first, sharing)] == [("error", said)] * 2
    assert (other.reason, other.tokens) == ("length", answer_alone(OTHER, 24))
    cancels = [(it.request, it.reason) for it in sim.records(RequestCancelled)]
    assert cancels == [(0, "diverged"), (1, "diverged")]
    assert [it.reason for it in sim.records(FlushRequested)] == ["diverged"]
    assert sim.engine.counters.ends == {"stop": 0, "length": 1, "abort": 0, "error": 2}


@POLICIES
def test_nothing_of_a_wrong_request_is_found_again(policy: Policy) -> None:
    sim = Guarded("abort-request", {9: row_of(0, 2)}, policy)
    three(sim)
    while sim.next_step < 9:
        sim.step()
    wrong = set(blocks_of(sim, 0)) | set(blocks_of(sim, 1))
    while sim.next_step < 12:
        sim.step()
    assert published(sim) & wrong == set()
    sim.run()
    again = sim.submit(PROMPT, 4)
    sim.run()
    assert (again.cached_tokens, again.tokens) == (0, answer_alone(PROMPT, 4))


@POLICIES
def test_tokens_of_the_wrong_step_are_not_told_even_where_they_are_the_last(policy: Policy) -> None:
    sim = Guarded("abort-request", {3: start_of(0, 5)}, policy)
    inbox = sim.submit(OTHER, 3)  # sampled by steps 1, 2 and 3
    sim.run()
    assert (inbox.reason, len(inbox.tokens)) == ("error", 2)
    assert published(sim) == set()


def test_rows_before_the_first_wrong_one_stay_trusted() -> None:
    sim = Guarded("abort-request", {9: row_of(0, 17)})
    first, sharing, _ = three(sim)
    sim.run()
    assert (first.reason, sharing.reason) == ("error", "length")
    assert sharing.tokens == answer_alone((*PROMPT, 50, 51), 24)


def test_who_copied_a_wrong_block_in_a_step_in_flight_is_given_up_too() -> None:
    whole = tuple(range(1, 17))
    sim = Guarded("abort-request", {}, AHEAD)
    holder = sim.submit((*whole, 20, 21, 22, 23), 24)
    while sim.next_step < 6:
        sim.step()
    # The last block of its own prompt is copied by who is admitted by the plan of step 6, while
    # step 5, which is found wrong there, is in flight.
    sim.kernel.lies = {5: row_of(0, 13)}  # type: ignore[attr-defined]
    copying = sim.submit(whole, 24)
    sim.step()
    (batch,) = [batch for batch in sim.kernel.batches if batch.step == 6]
    assert [(it.seq, it.source) for it in batch.copies] == [
        (1, batch.pieces[0].sequence.tables[0][3])
    ]
    sim.run()
    assert (holder.reason, copying.reason) == ("error", "error")
    assert published(sim) == set()


@pytest.mark.parametrize(
    ("lie", "kind"),
    [
        (row_of(0, 2, count=20), "content"),
        (other_uses(updates=(1, 2)), "observation"),
        (other_uses(strangers=1), "observation"),
        (other_uses(starts=(1,)), "observation"),
    ],
)
def test_where_nobody_is_named_all_of_the_step_are_given_up(lie: Lie, kind: str) -> None:
    sim = Guarded("abort-request", {6: lie})
    asked = [sim.submit(prompt, 12) for prompt in (PROMPT, OTHER)]
    sim.run()
    assert [inbox.reason for inbox in asked] == ["error", "error"]
    assert without_rows(sim.engine.counters.divergences) == {kind: 1}


def test_rows_that_the_sanitizer_did_not_compare_are_a_divergence() -> None:
    def lie(batch: Batch, result: StepResult) -> StepResult:
        fewer = structs.replace(result.shadow, checked=result.shadow.checked - 1)
        return structs.replace(result, shadow=fewer)

    sim = Guarded("warn", {2: lie})
    sim.submit(OTHER, 4)
    with structlog.testing.capture_logs() as logs:
        sim.run()
    assert without_rows(sim.engine.counters.divergences) == {"content": 1}
    assert [line["what"] for line in logs] == [
        "9 rows in the pages were compared, where 10 are due"
    ]


@POLICIES
def test_the_tape_of_an_abort_replays_at_plan(policy: Policy, tmp_path: Path) -> None:
    sim = Guarded("abort-request", {9: row_of(0, 2)}, policy)
    three(sim)
    sim.run()
    sim.engine.stop()
    assert isinstance(sim.capture.records[-1], TapeEnded)
    assert outcome_of(tmp_path, sim.capture.records, depth=PLAN).divergence is not None
    assert outcome_of(tmp_path, truthful(sim), depth=PLAN).exit_code == 0


@contextmanager
def threaded(mode: str, lies: Mapping[int, Lie]) -> Iterator[tuple[Engine, MemoryCapture]]:
    capture = MemoryCapture()
    parts = Parts(Lying(SMALL, lies), AHEAD, capture, header(SMALL, AHEAD), on_divergence=mode)
    engine = Engine(lambda: parts)
    engine.start()
    try:
        yield engine, capture
    finally:
        engine.stop(WAIT_S)


def test_stop_ends_the_engine_everybody_hears_why_and_the_tape_ends_in_order(
    tmp_path: Path,
) -> None:
    with threaded("stop", {5: row_of(0, 2)}) as (engine, capture):
        inboxes = [Inbox(), Inbox()]
        for inbox, prompt in zip(inboxes, (PROMPT, OTHER), strict=True):
            engine.submit(Submission(prompt, Parameters(40)), inbox)
        assert engine._done.wait(WAIT_S)
        assert not engine.healthy
        with pytest.raises(EngineStopped):
            engine.submit(Submission(PROMPT, Parameters(4)), Inbox())
    why = "position 2, in block 0 of group 0, holds another row than it should"
    assert inboxes[0].error.startswith("the cache of this request was found wrong at step 5")
    stopped = "the engine stopped: its cache was found wrong at step 5 for request 0: "
    assert (inboxes[1].reason, inboxes[1].error) == ("error", stopped + why)
    assert (capture.closed, type(capture.records[-1])) == (True, TapeEnded)
    assert engine.status()["held"] == 0
    invariants.check_all(engine.view.state)


def test_after_stop_every_route_that_asks_the_engine_says_503() -> None:
    with threaded("stop", {3: row_of(0, 2)}) as (engine, _):
        settings = Settings(grace_s=0.0)
        app = create_app(engine, byte_tokenizer(), "models/tiny", settings)
        with live_server(app, settings) as server, httpx.Client(base_url=server.url) as client:
            body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 16}
            first = client.post("/v1/chat/completions", json=body)
            assert engine._done.wait(WAIT_S)
            later = client.post("/v1/chat/completions", json=body)
            health = client.get("/health")
    assert [answer.status_code for answer in (first, later, health)] == [500, 503, 503]
    assert first.json()["error"]["message"].startswith("the cache of this request was found wrong")


def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="one of warn, abort-request, stop, not 'panic'"):
        LiveGuard(SMALL, mode="panic")


def test_the_setting_is_one_of_three() -> None:
    known = "on_divergence must be warn, abort-request or stop, not panic"
    with pytest.raises(SettingsError, match=known):
        load_settings({"on_divergence": "panic"}, {})
    assert Settings().on_divergence == "warn"


def test_a_real_model_with_a_known_bug_answers_with_an_error_and_not_with_what_it_made_up(
    tmp_path: Path,
) -> None:
    # Not above: these load MLX, which must come after its BLAS.
    from .real_server import serving, tiny_folder

    fault, witness = BY_NAME["S1"], Witness()
    folder, tape = tiny_folder(tmp_path / "tiny"), tmp_path / "capture.log"
    chosen = {"prefill_tile": 32, "num_blocks": 64, "capture": str(tape)}
    with (
        serving(folder, on_divergence="abort-request", **chosen) as served,
        fault.active(witness),
    ):
        witness.step = 1
        with pytest.raises(openai.InternalServerError, match="was found wrong at step 2"):
            served.ask("a question of some words", max_tokens=8)
        witness.step = 0
        status = served.until(lambda now: now["held"] == 0 and now["divergences"] == 4)
        metrics = httpx.get(served.server.url + "/metrics").text
    # The step in which it was found, and the one that was in flight behind it; both classes each.
    assert (status["divergences"], status["cached"]) == (4, 0)
    name = f'model_name="{folder}"'
    assert f'mlxtape_divergences_total{{class="observation",{name}}} 2.0' in metrics
    assert f'mlxtape_request_success_total{{finished_reason="error",{name}}} 1.0' in metrics
    assert runner.run_replay(str(tape), Options(FOLD)).divergence is not None
