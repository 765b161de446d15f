"""locust, as pip installs it: a run at 32 clients."""

from __future__ import annotations

import csv
from pathlib import Path

from replay.cli import main as replay_command
from tests.real_server import serving, tiny_folder

from .environments import bin_of, run_client

FILE = Path(__file__).with_name("locustfile.py")
CLIENTS = 32


def test_a_run_of_locust_at_32_clients_completes_without_a_failure(tmp_path: Path) -> None:
    tape = tmp_path / "locust.tape"
    with serving(tiny_folder(tmp_path / "tiny"), capture=str(tape), num_blocks=512) as served:
        command = [str(bin_of("locust") / "locust"), "--headless", "-f", str(FILE)]
        load = ["-u", str(CLIENTS), "-r", str(CLIENTS), "-t", "20s", "--stop-timeout", "60"]
        out = ["--csv", str(tmp_path / "run"), "--only-summary", "-H", served.server.url]
        run_client([*command, *load, *out], tmp_path, MODEL=served.model)
        served.idle()
    with (tmp_path / "run_stats.csv").open() as file:
        total = {row["Name"]: row for row in csv.DictReader(file)}["Aggregated"]
    assert int(total["Request Count"]) >= CLIENTS
    assert int(total["Failure Count"]) == 0
    for depth in ("fold", "plan"):
        assert replay_command([str(tape), "--depth", depth]) == 0
