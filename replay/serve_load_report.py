"""Serve-load report: what `replay serve-load --json` prints."""

from __future__ import annotations

from msgspec import Struct

from .serve_load_compare import Difference
from .spread import Percentiles


class LoadCounts(Struct, frozen=True):
    """Requests. sent: to the server. same, different, failed, uncompared: what became of those.
    left: given up where the tape's client left. unsendable: not sent, for they ask for no answer
    (embeddings, scores) or have no prompt.
    """

    sent: int
    same: int
    different: int
    failed: int
    uncompared: int
    left: int
    unsendable: int


class Times(Struct, frozen=True):
    """Microseconds, as recorded and as measured, of answers that are whole on both sides."""

    recorded: Percentiles | None
    measured: Percentiles | None


class Throughput(Struct, frozen=True):
    """Answer tokens of all requests, and the seconds from the first arrival to the last end."""

    tokens: int
    seconds: float
    tokens_per_s: float | None


class ServeLoadReport(Struct, frozen=True, kw_only=True):
    """What `replay serve-load --json` prints.

    speed: of time; None where all was sent at once. compared_by: how many answers by tokens, text
    or counts. first: the difference whose request arrived first. failures: by kind; first_failure:
    the reason of the first. latency: to the first token, between two deliveries, to the end.
    recorded, measured: throughput; the recorded seconds leave idle time out, as the tape does.
    late: sent more than 50 ms behind their time, and the most of it in late_most_us.
    different_sampled: of the different, those that were drawn at a temperature. stopped: why the
    tape could not be followed to its end, "" if it was.
    """

    format: int = 1
    verdict: str
    exit_code: int
    path: str
    url: str
    model: str
    speed: float | None
    requests: LoadCounts
    compared_by: dict[str, int]
    first: Difference | None
    different_sampled: int
    failures: dict[str, int]
    first_failure: str
    latency: dict[str, Times]
    recorded: Throughput
    measured: Throughput
    in_flight_most: int
    late: int
    late_most_us: int
    stopped: str
    notes: tuple[str, ...]
