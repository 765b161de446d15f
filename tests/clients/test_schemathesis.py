"""schemathesis, as pip installs it, against our own OpenAPI document."""

from __future__ import annotations

from pathlib import Path

from tests.real_server import Served

from .environments import bin_of, run_client

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"


def test_nothing_that_schemathesis_sends_gives_a_5xx_or_an_undocumented_status(
    served: Served, tmp_path: Path
) -> None:
    command = [str(bin_of("schemathesis") / "st"), "run", served.server.url + "/openapi.json"]
    options = ["--max-examples", "15", "--checks", CHECKS, "--seed", "1", "--no-color"]
    out = run_client([*command, *options, "--request-timeout", "60"], 900.0, HOME=str(tmp_path))
    assert " passed" in out
    served.idle()
