"""schemathesis, as pip installs it, against our own OpenAPI document.

Over a tiny model and a tiny pool: an answer that nobody limits ends soon.
"""

from __future__ import annotations

from pathlib import Path

from tests.real_server import serving, tiny_folder

from .environments import bin_of, run_client

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"
ENDLESS = "/events"


def test_nothing_that_schemathesis_sends_gives_a_5xx_or_an_undocumented_status(
    tmp_path: Path,
) -> None:
    with serving(tiny_folder(tmp_path / "tiny"), num_blocks=16) as served:
        command = [str(bin_of("schemathesis") / "st"), "run", served.server.url + "/openapi.json"]
        options = ["--max-examples", "15", "--checks", CHECKS, "--seed", "1", "--no-color"]
        options += ["--exclude-path", ENDLESS, "--request-timeout", "60"]
        out = run_client([*command, *options], tmp_path, 600.0)
        assert " passed" in out
        served.idle()
