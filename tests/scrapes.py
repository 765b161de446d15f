"""Scrapes: what metrics expose of an engine, as numbers by their names."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from server.http.app import ROUTES
from server.http.metrics import Metrics

PROMPT = tuple(range(1, 19))


def exposed(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by its name and its labels but for the model's."""
    body, _ = metrics.exposition("text/plain")
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            if not family.name.startswith("process_"):
                assert sample.labels.pop("model_name") == "models/tiny"
                found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def plain(metrics: Metrics) -> dict[str, float]:
    """Samples without labels, less the prefix."""
    found = exposed(metrics)
    return {
        name.removeprefix("mlxtape_"): value
        for (name, labels), value in found.items()
        if not labels
    }


def of(engine: Any) -> Metrics:
    return Metrics(engine, "models/tiny", ROUTES)


def labelled(metrics: Metrics, name: str) -> dict[str, float]:
    """A family's samples by the value of its one label."""
    found = exposed(metrics)
    return {labels[0][1]: value for (n, labels), value in found.items() if n == f"mlxtape_{name}"}
