"""Metrics: exact counts after a scripted load, in the words that vLLM uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import structs
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families

from kernel.fake import Failure, FakeKernel
from server.capture import CaptureWriter
from server.closing import Outcome
from server.counters import Counters, Histogram
from server.engine import Engine
from server.loop import Parts
from server.submission import Submission
from server.view import StepPlan, initial, receive
from server.waiting import Waiting
from statemachine.events import DRAFT, Appended, Preempted, Rewound
from statemachine.records import Parameters, RequestArrived, ShadowReport, StepDone

from .fake_engine import scripted
from .scrapes import PROMPT, labelled, of, plain
from .sim import POLICY, SMALL, TIGHT, Inbox, Sim, header, prompts

VLLM = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens"),
    *("generation_tokens", "request_success", "iteration_tokens_total"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds"),
    *("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
}
"""Names of vLLM 0.11 that mean here what they mean there."""


def test_a_scripted_load_is_counted_exactly() -> None:
    sim = Sim(policy=structs.replace(POLICY, prefill_chunk=64), end_token=None)
    sim.submit(PROMPT, 5)
    sim.run()  # 1 step of 18 rows, then 4 of 1
    sim.submit(PROMPT, 3)  # adopts 16 rows; 2 rows, then 2 steps of 1
    sim.run()
    given_up = sim.submit((*PROMPT, 60, 61), 30)  # adopts 16; 4 rows
    sim.step()
    metrics = of(sim.engine)
    now = plain(metrics)
    assert (now["num_requests_running"], now["num_requests_waiting"]) == (1, 0)
    assert now["kv_cache_usage_perc"] == 5 / 64
    sim.engine.cancel(2)
    sim.run()
    assert given_up.reason == "cancelled"
    now = plain(metrics)
    wanted = {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "engine_healthy": 1,
        "prefix_cache_queries_total": 18 + 18 + 20,
        "prefix_cache_hits_total": 0 + 16 + 16,
        "num_preemptions_total": 0,
        "prompt_tokens_total": 18 + 18 + 20,
        "generation_tokens_total": 5 + 3 + 1,
        "rewound_rows_total": 0,
        "shadow_findings_total": 0,
        "failed_steps_total": 0,
        "capture_bytes_total": 0,
        "capture_gaps_total": 0,
        "engine_steps_total": 5 + 3 + 1 + 1,  # the last one closes what was cancelled
        "iteration_tokens_total_count": 9,
        "iteration_tokens_total_sum": 18 + 4 + 2 + 2 + 4,
        "time_to_first_token_seconds_count": 3,
        "inter_token_latency_seconds_count": 4 + 2,
        "e2e_request_latency_seconds_count": 2,
        "request_queue_time_seconds_count": 3,
        "request_prefill_time_seconds_count": 3,
        "request_decode_time_seconds_count": 2,
    }
    assert {name: now[name] for name in wanted} == wanted
    ends = labelled(metrics, "request_success_total")
    assert ends == {"stop": 0, "length": 2, "abort": 1, "error": 0}
    assert labelled(metrics, "divergences_total") == {"observation": 0, "content": 0}
    steps = labelled(metrics, "iteration_tokens_total_bucket")
    assert [steps[bound] for bound in ("1.0", "8.0", "16.0", "32.0", "+Inf")] == [6, 8, 8, 9, 9]


def test_guesses_and_those_that_came_true_are_counted() -> None:
    # Of three guesses at positions 6 to 8 the last one is wrong, and of those behind it the first.
    small = FakeKernel(SMALL, script=lambda seq, at: 60 if at in (8, 9) else at % 4)
    sim = Sim(SMALL, structs.replace(POLICY, draft_tokens=3), draft=small, script=_in_turn)
    sim.submit((9, 8, 7, 6, 5), 7)
    sim.run()
    now = plain(of(sim.engine))
    drafts = [event.tokens for event in sim.events(Appended) if event.purpose == DRAFT]
    assert drafts == [(1, 2, 3, 60), (0, 60, 2), (1, 2)]
    assert now["spec_decode_num_draft_tokens_total"] == 3 + 2 + 1
    assert now["spec_decode_num_accepted_tokens_total"] == 2 + 0 + 1
    assert now["generation_tokens_total"] == 7


def _in_turn(seq: int, position: int) -> int:
    return position % 4


def test_rows_compared_taken_back_and_preempted_are_counted() -> None:
    ahead = structs.replace(POLICY, lookahead=True)
    sim = Sim(TIGHT, ahead, end_token=3, end_every=24)
    for prompt in prompts(24, seed=3):
        sim.submit(prompt, 24, end_tokens=(3,))
    sim.run()
    now = plain(of(sim.engine))
    rewound = sum(event.rows for event in sim.events(Rewound))
    preempted = len(sim.events(Preempted))
    checked = sum(record.shadow.checked for record in sim.records(StepDone))
    assert (now["rewound_rows_total"], now["num_preemptions_total"]) == (rewound, preempted)
    assert now["shadow_rows_checked_total"] == checked
    assert min(rewound, preempted, checked) > 0
    tokens = sum(len(inbox.tokens) for inbox in sim.inboxes.values())
    # A request that was preempted asks again and adopts again: only its first time counts.
    assert now["generation_tokens_total"] == tokens
    assert now["prompt_tokens_total"] == sum(len(prompt) for prompt in prompts(24, seed=3))
    assert now["prefix_cache_queries_total"] == now["prompt_tokens_total"]
    cached = sum(inbox.cached_tokens for inbox in sim.inboxes.values())
    assert now["prefix_cache_hits_total"] == cached


def test_a_step_that_fails_is_counted_and_those_it_ends_are_errors() -> None:
    sim = Sim(fail={2: Failure("build", 0)})
    inbox = sim.submit(PROMPT, 5)
    sim.run()
    assert inbox.reason == "error"
    assert plain(of(sim.engine))["failed_steps_total"] == 1
    assert labelled(of(sim.engine), "request_success_total")["error"] == 1


def test_without_a_prefix_cache_nothing_is_looked_up_in_it() -> None:
    sim = Sim(policy=structs.replace(POLICY, prefix_cache=False))
    sim.submit(PROMPT, 2)
    sim.run()
    now = plain(of(sim.engine))
    assert (now["prefix_cache_queries_total"], now["prefix_cache_hits_total"]) == (0, 0)


def test_bytes_on_tape_are_counted_over_all_segments(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    folder.mkdir()
    capture = CaptureWriter(folder, segment_bytes=2000)
    parts = Parts(FakeKernel(SMALL), POLICY, capture, header(SMALL, POLICY))
    engine = Engine(lambda: parts)
    engine.open()
    for seed in range(4):
        for prompt in prompts(4, seed):
            engine.submit(Submission(prompt, Parameters(6)), Inbox())
        while engine.step():
            pass
    counted = plain(of(engine))["capture_bytes_total"]
    assert counted == capture.bytes_written > capture.position
    engine.stop()


def _arrived(counters: Counters, request: int, at_s: float) -> Any:
    """A view with one request, and the counters that heard of it."""
    counters.arrived(request, at_s)
    return receive(initial(SMALL), RequestArrived(request, "", (1, 2, 3), Parameters(9)))


def test_latencies_run_from_submission_to_admission_to_tokens_to_the_end() -> None:
    times = iter([12.0, 13.0, 13.5, 15.0, 15.0])
    counters = Counters(lambda: next(times))
    view = _arrived(counters, 0, 10.0)
    admitting = StepPlan(1, (), (), view.state, POLICY, Waiting(), (0,), admitted=((0, 2),))
    counters.planned(view, admitting)
    for tokens in ((5,), (6,), (7, 8)):
        counters.done(view, (Outcome(0, tokens),), ShadowReport())
    counters.ended(0, "length")
    counters.ended(0, "error")
    sums = [
        counters.queue_s.sum,
        counters.prefill_s.sum,
        counters.first_token_s.sum,
        counters.between_tokens_s.sum,
        counters.decode_s.sum,
        counters.request_s.sum,
    ]
    assert sums == [2.0, 1.0, 3.0, 0.5 + 1.5, 2.0, 5.0]
    assert sum(counters.between_tokens_s.counts) == 2
    assert counters.ends == {"stop": 0, "length": 1, "abort": 0, "error": 0}


def test_a_value_at_a_buckets_bound_belongs_to_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 2.1):
        histogram.add(value)
    assert (histogram.counts, histogram.sum) == ([1, 2, 1], 6.6)


def test_names_are_unique_and_vllms_are_all_there() -> None:
    with scripted("x") as engine:
        body, _ = of(engine).exposition("")
    names = [family.name for family in text_string_to_metric_families(body.decode())]
    assert len(names) == len(set(names))
    ours = {name.removeprefix("mlxtape_") for name in names if not name.startswith("process_")}
    assert VLLM - ours == set()
    assert all(name.startswith(("mlxtape_", "process_")) for name in names)


def test_scrapers_get_the_format_that_they_ask_for() -> None:
    with scripted("x") as engine:
        metrics = of(engine)
        _, old = metrics.exposition("text/plain")
        body, new = metrics.exposition("application/openmetrics-text; version=1.0.0")
    assert old.startswith("text/plain; version=0.0.4")
    assert new.startswith("application/openmetrics-text; version=1.0.0")
    names = {family.name for family in open_families(body.decode())}
    assert "mlxtape_iteration_tokens_total" in names
