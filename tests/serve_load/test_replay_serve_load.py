"""`replay serve-load`: what is sent of a recorded load, and when."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from kernel.hf import read_tokenizer
from replay.export import export
from replay.reader import Tape
from replay.serve_load_client import Measured, body_of
from replay.serve_load_run import Exchange, Options, Run
from replay.serve_load_tape import Left, Load
from statemachine.events import Namespace
from statemachine.records import Parameters, RequestArrived

from ..sim import SMALL, Sim
from ..tampering import write
from ..tapes import golden
from ..tiny_models import byte_tokenizer
from .completions_server import Scripted, completions_server
from .recorded import TAPE, Printed, Recorded, say, told, told_by

FLIGHTS = str(golden.FLIGHTS)
CANCELLED, FAILED = 2, 3
"""Requests of golden.tape that did not end whole."""


def test_every_request_is_sent_once_as_it_was_in_the_order_of_arrival(run: Printed) -> None:
    recorded = Recorded(TAPE, {CANCELLED: told(hold=False)})
    with completions_server(recorded) as server:
        code, report = run(server, "--concurrency", "1", "--no-cancels")
    assert code == 0
    assert [recorded.request_of(body) for body in server.bodies] == list(range(10))
    assert server.bodies[1] == {
        "model": "test-model",
        "prompt": [46, 12, 4, 17, 63, 27, 33, 55, 17],
        "max_tokens": 12,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": 1,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    assert report["requests"] == {
        "sent": 10, "same": 10, "different": 0, "failed": 0, "uncompared": 0, "left": 0,
        "unsendable": 0,
    }  # fmt: skip
    assert report["compared_by"] == {"tokens": 10}
    assert report["verdict"] == "SAME: 10 of 10 answers the same by tokens"
    assert (report["recorded"]["tokens"], report["measured"]["tokens"]) == (105, 105)


def test_all_parameters_of_a_request_are_in_its_body() -> None:
    parameters = Parameters(
        9, 0.5, 0.9, 40, 0.1, 2**64 - 1, (7, 8), ("END",), -3, 0.25, -0.5, 1.25, ((5, -1.5),), "", 9
    )
    arrived = RequestArrived(0, "x", (1, 2), parameters, Namespace(salt="mine"))
    plain = {
        "model": "m", "prompt": [1, 2], "max_tokens": 9, "temperature": 0.5, "top_p": 0.9,
        "seed": -1, "frequency_penalty": 0.25, "presence_penalty": -0.5, "stream": True,
        "stream_options": {"include_usage": True}, "stop": ["END"], "logit_bias": {"5": -1.5},
        "logprobs": 5,
    }  # fmt: skip
    assert body_of(arrived, "m", None, openai_only=True) == plain
    assert body_of(arrived, "m", None, openai_only=False) == plain | {
        "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.25, "return_token_ids": True,
        "stop_token_ids": [7, 8], "priority": -3, "cache_salt": "mine",
    }  # fmt: skip
    assert body_of(arrived, "m", "text", openai_only=True) == plain | {"prompt": "text"}


def test_prompts_are_sent_as_the_text_that_makes_their_tokens(
    run: Printed, tokenizer_folder: Path
) -> None:
    tokenizer, _ = read_tokenizer(tokenizer_folder)
    arrivals, _ = told_by(TAPE)
    with completions_server(lambda _: Scripted(completion_tokens=0)) as server:
        folder = str(tokenizer_folder)
        _, report = run(server, "--detokenize", folder, "--no-cancels", "--concurrency", "1")
    sent = [tuple(tokenizer.encode(body["prompt"])) for body in server.bodies]
    assert sent == [it.arrived.tokens for it in arrivals.values()]
    assert "<|im_end|>" in "".join(body["prompt"] for body in server.bodies)
    assert not [note for note in report["notes"] if "cannot be said as text" in note]


def test_prompts_that_no_text_makes_are_counted(
    run: Printed, tokenizer_folder: Path, tmp_path: Path
) -> None:
    sim = Sim(SMALL)
    sim.submit((40, 41), 2)
    sim.submit((byte_tokenizer().encode("\xe9").ids[0],) * 2, 2)  # half of a character, twice
    sim.run()
    sim.engine.stop()
    tape = write(tmp_path, sim.capture.records)
    with completions_server(lambda _: Scripted(completion_tokens=0)) as server:
        _, report = run(server, "--detokenize", str(tokenizer_folder), tape=tape)
    assert (
        "1 prompt cannot be said as text: that text makes other tokens, so the answers may differ"
        in report["notes"]
    )


@pytest.mark.parametrize(("given", "sent"), [(["--api-key", "a"], "Bearer a"), ([], "Bearer b")])
def test_the_key_is_sent(
    run: Printed, monkeypatch: pytest.MonkeyPatch, given: list[str], sent: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "b")
    with completions_server(Recorded(TAPE), key=sent.removeprefix("Bearer ")) as server:
        assert run(server, *given)[0] == 0
    assert set(server.keys) == {sent}


def test_the_model_is_the_servers_first_or_the_given_one(run: Printed) -> None:
    with completions_server(Recorded(TAPE), models=("one", "two")) as server:
        assert run(server)[1]["model"] == "one"
        assert {body["model"] for body in server.bodies} == {"one"}
        server.bodies.clear()
        assert run(server, "--model", "two")[1]["model"] == "two"
        assert {body["model"] for body in server.bodies} == {"two"}


def test_requests_arrive_when_the_trace_for_load_generators_says_so(tmp_path: Path) -> None:
    for tape in (TAPE, FLIGHTS):
        export(tape, "mooncake", str(tmp_path / "load.jsonl"))
        lines = (tmp_path / "load.jsonl").read_text().splitlines()
        arrivals, _ = told_by(tape)
        times = [it.at_us // 1000 for it in arrivals.values()]
        assert times == [json.loads(line)["timestamp"] for line in lines]
    # The step before the one at 48 failed, and took as long as the others.
    assert [it.at_us for it in told_by(TAPE)[0].values()] == list(range(0, 80_000, 8000))


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only where somebody sleeps."""

    now_s = 100.0

    def time(self) -> float:
        return self.now_s


@pytest.mark.parametrize("speed", [1.0, 4.0, None])
def test_each_request_is_sent_at_its_time(
    monkeypatch: pytest.MonkeyPatch, speed: float | None
) -> None:
    loop, real_sleep, sent = VirtualLoop(), asyncio.sleep, dict[int, float]()
    recorded = Recorded(TAPE)

    async def sleep(seconds: float) -> None:
        loop.now_s += seconds
        await real_sleep(0)

    class Client:
        async def complete(self, content: bytes, measured: Measured) -> None:
            sent[recorded.request_of(json.loads(content))] = loop.now_s
            measured.finish_reason = "length"

    monkeypatch.setattr("replay.serve_load_run.asyncio.sleep", sleep)
    load = Load(TAPE, Tape(TAPE))
    client: Any = Client()
    try:
        tally = loop.run_until_complete(Run(client, load, Options("m", speed)).run())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
    pace = 1e-6 / speed if speed else 0.0
    due = {request: 100.0 + it.at_us * pace for request, it in recorded.arrivals.items()}
    assert sent == pytest.approx(due, abs=1e-9)
    assert tally.late == 0


@pytest.mark.parametrize(("speed", "due_s"), [(1.0, 50.25), (4.0, 50.0625), (None, 50.25)])
def test_a_client_leaves_as_long_after_it_was_sent_as_on_tape(
    speed: float | None, due_s: float
) -> None:
    async def left() -> float | None:
        client: Any = None
        run = Run(client, Load(TAPE, ()), Options("m", speed))
        arrived = RequestArrived(7, "", (1,), Parameters(1))
        it = Exchange(0, arrived, 1_000_000, b"", Measured(), sent_s=50.0)
        run._live[7] = it
        run._leave(Left(7, 1_250_000))
        return it.leave_s

    assert asyncio.run(left()) == due_s


def test_a_client_that_left_leaves_again_and_its_answer_is_compared_as_far_as_it_went(
    run: Printed,
) -> None:
    recorded = Recorded(TAPE)
    with completions_server(recorded) as server:
        code, report = run(server)
    assert code == 0
    assert report["requests"]["left"] == 1
    assert [recorded.request_of(body) for body in server.left] == [CANCELLED]


def test_without_cancels_nobody_leaves_and_what_the_tape_has_is_compared(run: Printed) -> None:
    longer = say(19, 54, 46, 20, 1, 2, 3)
    with completions_server(Recorded(TAPE, {CANCELLED: longer})) as server:
        code, report = run(server, "--no-cancels")
    assert (code, report["requests"]["left"], report["requests"]["same"]) == (0, 0, 10)
    assert server.left == []
    with completions_server(Recorded(TAPE, {CANCELLED: say(19, 54, 46, 21, 1)})) as server:
        code, report = run(server, "--no-cancels")
    assert (code, report["first"]["request"], report["first"]["place"]) == (1, CANCELLED, 3)


def test_no_more_are_in_flight_than_allowed(run: Printed) -> None:
    recorded, pair = Recorded(TAPE), threading.Barrier(2, timeout=20.0)

    def answer(body: dict[str, Any]) -> Scripted:
        pair.wait()  # nobody is answered before another one came
        return recorded(body)

    with completions_server(answer) as server:
        arguments = ("--speed", "max", "--concurrency", "2", "--no-cancels")
        recorded.changes[CANCELLED] = told(hold=False)
        code, report = run(server, *arguments)
    assert code == 0
    assert report["in_flight_most"] == 2
    assert server.in_flight_most == 2
    assert report["speed"] is None
