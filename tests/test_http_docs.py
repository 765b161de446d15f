"""docs/http.md names every route and every field, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from server.http.app import ROUTES
from server.http.wire_chat import ChatRequest
from server.http.wire_completions import CompletionRequest

DOCUMENT = (Path(__file__).parent.parent / "docs" / "http.md").read_text()


def test_the_table_of_paths_has_all_routes() -> None:
    named = set(re.findall(r"`(?:GET|POST) (/\S*?)`", DOCUMENT))
    there = {route.path.replace("{name:path}", "NAME") for route in ROUTES}
    assert named == there


def test_the_table_of_fields_has_all_fields_of_both_bodies() -> None:
    table = DOCUMENT.split("| field |")[1].split("\n\n")[0]
    first = [line.split("|")[1] for line in table.splitlines()[2:]]
    named = {name for cell in first for name in re.findall(r"`(\w+)`", cell)}
    there = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert named == there
