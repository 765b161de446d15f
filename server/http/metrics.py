"""Metrics: what an engine counted, as Prometheus reads it, by vLLM's names under a prefix of ours.

Owns the names, their help texts and the table that fills them at a scrape. Counts nothing but
responses: the engine's thread counts, in plain numbers (counters.py), and a scrape only reads them,
so it waits for nobody and nobody waits for it. No label comes from a client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from statemachine.state import State

from ..counters import Counters, Histogram
from ..submission import EngineApi
from ..view import View
from .request_id import DISCONNECTED

PREFIX = "mlxtape_"
MODEL = "model_name"
OTHER = "other"
METHODS = ("GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH")

GAUGES: tuple[tuple[str, str, Callable[[View], float]], ...] = (
    ("num_requests_running", "Requests in the running batch.", lambda view: len(view.running)),
    ("num_requests_waiting", "Requests in the queue.", lambda view: len(view.waiting)),
    (
        "kv_cache_usage_perc",
        "Share of the pool's blocks that requests hold, 0 to 1; cached blocks count as free.",
        lambda view: _held(view.state),
    ),
)
COUNTERS: tuple[tuple[str, str, Callable[[Counters], float]], ...] = (
    (
        "prefix_cache_queries",
        "Prompt tokens that were looked up in the prefix cache, at a request's first admission.",
        lambda it: it.prefix_queries,
    ),
    (
        "prefix_cache_hits",
        "Prompt tokens that were found there, and not computed.",
        lambda it: it.prefix_hits,
    ),
    (
        "num_preemptions",
        "Requests that gave their blocks up and went back into the queue.",
        lambda it: it.preemptions,
    ),
    (
        "prompt_tokens",
        "Tokens of prompts, cached ones too, counted with the first token of the answer.",
        lambda it: it.prompt_tokens,
    ),
    ("generation_tokens", "Tokens of answers.", lambda it: it.generation_tokens),
    (
        "spec_decode_num_draft_tokens",
        "Guesses that were verified, of a draft model or looked up in the text.",
        lambda it: it.guessed_tokens,
    ),
    (
        "spec_decode_num_accepted_tokens",
        "Guesses that came true.",
        lambda it: it.accepted_tokens,
    ),
    (
        "rewound_rows",
        "Rows computed on the chance that were taken back: wrong guesses, steps ahead of an end.",
        lambda it: it.rewound_rows,
    ),
    (
        "shadow_rows_checked",
        "Rows of the pages whose tags were compared with what should be there.",
        lambda it: it.shadow_checked,
    ),
    (
        "shadow_findings",
        "Rows of the pages that held another row than they should. Should stay 0.",
        lambda it: it.shadow_found,
    ),
    (
        "kept_blocks_stored",
        "Blocks that were written to the prefix store.",
        lambda it: it.kept.stored,
    ),
    (
        "kept_blocks_loaded",
        "Blocks whose rows came out of the prefix store, and were not computed.",
        lambda it: it.kept.loaded,
    ),
    (
        "kept_blocks_ignored",
        "Files of the prefix store that failed a check, and were taken away.",
        lambda it: it.kept.ignored,
    ),
    (
        "kept_blocks_dropped",
        "Blocks that were not kept: the disk was full or slow, or their rows were not theirs.",
        lambda it: it.kept.dropped,
    ),
    ("engine_steps", "Steps that succeeded.", lambda it: it.steps),
    ("failed_steps", "Steps that raised.", lambda it: it.failed_steps),
    ("capture_bytes", "Bytes written to the tape.", lambda it: it.capture_bytes),
    (
        "capture_gaps",
        "How often records were lost, for the disk was full. Should stay 0.",
        lambda it: it.capture_gaps,
    ),
)
HISTOGRAMS: tuple[tuple[str, str, Callable[[Counters], Histogram]], ...] = (
    ("iteration_tokens_total", "Rows of one step, pads left out.", lambda it: it.step_tokens),
    (
        "time_to_first_token_seconds",
        "From a request's submission to its first token.",
        lambda it: it.first_token_s,
    ),
    (
        "inter_token_latency_seconds",
        "Between a request's news of tokens; guesses that came true come together.",
        lambda it: it.between_tokens_s,
    ),
    (
        "e2e_request_latency_seconds",
        "From submission to the end, of requests that ended by stop or length.",
        lambda it: it.request_s,
    ),
    (
        "request_queue_time_seconds",
        "From submission to the first admission.",
        lambda it: it.queue_s,
    ),
    (
        "request_prefill_time_seconds",
        "From the first admission to the first token.",
        lambda it: it.prefill_s,
    ),
    (
        "request_decode_time_seconds",
        "From the first token to the last, of requests that ended by stop or length.",
        lambda it: it.decode_s,
    ),
)


def _held(state: State) -> float:
    groups = state.paged_groups()
    blocks = sum(state.geometry.groups[group].num_blocks for group in groups)
    return sum(state.held_blocks(group) for group in groups) / blocks if blocks else 0.0


class Metrics(Collector):
    """All metrics of one application, in a registry of its own."""

    def __init__(self, engine: EngineApi, model_name: str, routes: Iterable[BaseRoute]) -> None:
        self._engine = engine
        self._model = model_name
        self._routes = [route for route in routes if isinstance(route, Route)]
        self._responses: Counter[tuple[str, str, str]] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics in the format that a scraper accepts, and its content type."""
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type

    def collect(self) -> Iterator[Metric]:
        """The families, as the registry asks for them."""
        view, counters = self._engine.view, self._engine.counters
        labels, values = [MODEL], [self._model]
        for name, text, read in GAUGES:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=labels)
            gauge.add_metric(values, read(view))
            yield gauge
        healthy = GaugeMetricFamily(
            PREFIX + "engine_healthy", "1 where requests are taken, else 0.", labels=labels
        )
        healthy.add_metric(values, int(self._engine.healthy))
        yield healthy
        for name, text, counted in COUNTERS:
            yield self._counter(name, text, [], [((), counted(counters))])
        ends = [((reason,), count) for reason, count in counters.ends.items()]
        yield self._counter(
            "request_success", "Requests that ended, by how.", ["finished_reason"], ends
        )
        found = [((kind,), count) for kind, count in counters.divergences.items()]
        yield self._counter(
            "divergences",
            "Steps whose caches were found wrong while serving, by class. Should stay 0.",
            ["class"],
            found,
        )
        yield self._counter(
            "http_requests",
            "Requests over HTTP that are over, by method, route and status.",
            ["method", "route", "status"],
            sorted(self._responses.items()),
        )
        for name, text, kept in HISTOGRAMS:
            yield self._histogram(name, text, kept(counters))

    def _counter(
        self, name: str, text: str, labels: list[str], values: Iterable[tuple[Any, float]]
    ) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=[MODEL, *labels])
        for label, value in values:
            family.add_metric([self._model, *label], value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=[MODEL])
        bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
        # One copy, so that the count is the last bucket's whatever is added meanwhile.
        buckets = list(zip(bounds, accumulate(list(histogram.counts)), strict=True))
        family.add_metric([self._model], buckets=buckets, sum_value=histogram.sum)
        return family

    def responded(self, scope: Scope, status: int) -> None:
        """A response is over, or its client had gone before it began."""
        method = scope["method"] if scope["method"] in METHODS else OTHER
        self._responses[method, self._route(scope), str(status)] += 1

    def _route(self, scope: Scope) -> str:
        """The route's path as the table of routes has it; never what the client asked for."""
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                return route.path_format
        return OTHER


class Counted:
    """ASGI application around another: counts its responses."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = DISCONNECTED

        async def seen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, seen)
        finally:
            self._metrics.responded(scope, status)
