"""`replay serve-load`: tapes that begin in the middle, have gaps, are long, or are our server's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replay.reader import Tape
from replay.serve_load_tape import Ended, Load, Lost
from statemachine.records import Gap, RequestArrived

from ..faults import loads
from ..faults.runner import record as play
from ..real_server import serving, tiny_folder
from ..sim import SMALL, Sim, prompts
from .completions_server import completions_server
from .recorded import Printed, Recorded, told_by


def test_requests_from_before_the_tape_are_sent_and_compared_whole(
    run: Printed, tmp_path: Path
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "part"
    play(loads.SEGMENTS, whole)
    folder.mkdir()
    for file in sorted(whole.iterdir())[1:]:
        (folder / file.name).write_bytes(file.read_bytes())
    _, endings = told_by(str(whole))
    recorded = Recorded(str(folder))
    carried = [request for request, it in recorded.arrivals.items() if it.carried]
    assert len(carried) > 1
    for request in carried:
        assert recorded.endings[request].tokens == endings[request].tokens
        assert recorded.endings[request].times is None
    with completions_server(recorded) as server:
        code, report = run(server, tape=str(folder))
    assert (code, report["requests"]["same"]) == (0, len(recorded.arrivals))


def test_requests_that_ended_in_a_gap_are_lost_and_those_behind_it_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "tape"
    play(loads.SEGMENTS, folder)
    records = list(Tape(str(folder)))
    points = [at for at, it in enumerate(records) if type(it).__name__ == "Checkpoint"]
    first, last = points[1], points[-1]
    kept: Any = records[last]
    live = {it.arrived.request for it in kept.requests}
    cut = [*records[:first], Gap(last - first, "disk full"), *records[last:]]
    before = {it.request for it in records[:first] if isinstance(it, RequestArrived)}
    load = Load("tape", [it for it in cut if type(it).__name__ != "Header" or it is cut[0]])
    items = [it for it in load if it is not None]
    assert [it.request for it in items if isinstance(it, Lost)] == sorted(before - live)
    assert before - live
    assert {it.request for it in items if isinstance(it, Ended)} >= live


def test_memory_is_that_of_live_requests_only(tmp_path: Path) -> None:
    sim = Sim(SMALL)
    actions = {
        1 + 6 * number: [lambda prompt=prompt: sim.submit(prompt, 8)]
        for number, prompt in enumerate(prompts(40, seed=4))
    }
    sim.run(actions)
    sim.engine.stop()
    load, most = Load("tape", sim.capture.records), 0
    for _ in load:
        most = max(most, len(load._ends_us), len(load._since), len(load._held))
    assert sim.next_step > 200
    assert most < 24
    assert not load._since
    assert not load._arrived_us


def test_our_own_server_says_again_what_it_said(run: Printed, tmp_path: Path) -> None:
    folder, tape = tiny_folder(tmp_path / "tiny"), str(tmp_path / "capture.log")
    with serving(folder, capture=tape) as served:
        for number in range(4):
            served.ask(
                f"say {number}", max_tokens=12, temperature=number % 2, seed=2**64 - number - 1
            )
        served.ask("stop", max_tokens=400, stop=["e"])
    for more in (["--tokenizer", str(folder)], ["--detokenize", str(folder), "--openai-only"]):
        with serving(folder) as served:
            code, report = run(
                served.server, "--speed", "max", "--concurrency", "1", *more, tape=tape
            )
        assert (code, report["compared_by"], report["notes"]) == (0, {"text": 5}, [])
        assert report["model"] == str(folder)
