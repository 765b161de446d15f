"""Metrics as docs/metrics.md and the dashboard have them: names and labels that a scrape has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from .fake_engine import scripted
from .scrapes import of

DOCS = Path(__file__).parent.parent / "docs"


def families() -> list[Any]:
    with scripted("x") as engine:
        body, _ = of(engine).exposition("")
    found = text_string_to_metric_families(body.decode())
    return [family for family in found if not family.name.startswith("process_")]


def table() -> str:
    """The table of docs/metrics.md."""
    lines = ["| metric | type | labels | what it is |", "|---|---|---|---|"]
    extra = {
        "mlxtape_request_success": "finished_reason",
        "mlxtape_divergences": "class",
        "mlxtape_http_requests": "method, route, status",
    }
    for family in families():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = extra.get(family.name, "")
        lines.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |")
    return "\n".join(lines) + "\n"


def test_the_documented_table_is_what_a_scrape_says() -> None:
    assert table() in (DOCS / "metrics.md").read_text(encoding="utf-8")


def _expressions(panel: dict[str, Any]) -> Iterator[str]:
    for target in panel.get("targets", ()):
        yield target["expr"]
    for inner in panel.get("panels", ()):
        yield from _expressions(inner)


def test_every_expression_of_the_dashboard_uses_metrics_and_labels_that_exist() -> None:
    board = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    known = {"process_resident_memory_bytes", "process_cpu_seconds_total"}
    labels = {"le", "model_name", "finished_reason", "class", "method", "route", "status"}
    labels |= {"instance", "job"}  # Prometheus' own
    for family in families():
        parts = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
        known |= {family.name + part for part in parts.get(family.type, [""])}
    expressions = [it for panel in board["panels"] for it in _expressions(panel)]
    assert len(expressions) >= 20
    used: set[str] = set()
    for expression in expressions:
        metrics = set(re.findall(r"\b((?:mlxtape|process)_\w+)", expression))
        assert metrics, expression
        used |= metrics
        grouped = re.findall(r"by \(([^)]*)\)", expression)
        named = {it.strip() for names in grouped for it in names.split(",")}
        named |= set(re.findall(r"(\w+)\s*(?:=|!=|=~|!~)\s*\"", expression))
        assert named <= labels, expression
    assert used <= known
    bases = {re.sub("_(bucket|sum|count)$", "", name) for name in used}
    ours = {it.name + ("_total" if it.type == "counter" else "") for it in families()}
    assert ours - bases == set()


def test_the_dashboard_is_one_that_grafana_10_imports() -> None:
    board = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    assert (board["title"], board["schemaVersion"], board["id"]) == ("mlxtape", 39, None)
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(numbers) == len(set(numbers))
    (source,) = [it for it in board["templating"]["list"] if it["type"] == "datasource"]
    wanted = {"type": "prometheus", "uid": f"${{{source['name']}}}"}
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        assert panel["type"] in ("row", "stat", "timeseries")
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"] == wanted
            assert panel["description"]
            assert {target["refId"] for target in panel["targets"]} <= set("ABCDEF")


@pytest.mark.parametrize("name", ["route_metrics", "metrics", "counters"])
def test_no_metric_is_in_the_process_wide_registry(name: str) -> None:
    from prometheus_client import REGISTRY

    ours = [family.name for family in REGISTRY.collect() if family.name.startswith("mlxtape")]
    assert (name, ours) == (name, [])


if __name__ == "__main__":
    page = DOCS / "metrics.md"
    text = page.read_text(encoding="utf-8")
    begin = text.index("| metric |")
    end = text.index("\n\n", begin) + 1
    page.write_text(text[:begin] + table() + text[end:], encoding="utf-8")
