"""`replay serve-load`: a recorded load on real sockets, its times, cancels and differences."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kernel.hf import read_tokenizer
from replay import schema
from replay.cli import main
from replay.export import export
from replay.reader import Tape
from replay.serve_load_client import Failed, Measured, body_of, events
from replay.serve_load_compare import NOTHING, compare, first_difference
from replay.serve_load_run import Exchange, Options, Run
from replay.serve_load_tape import Arrival, Ended, Left, Load, Lost
from statemachine.events import Namespace
from statemachine.records import Gap, Parameters, RequestArrived

from .completions_server import CompletionsServer, Scripted, completions_server
from .faults import loads
from .faults.runner import record as play
from .http_server import LiveServer
from .real_server import serving, tiny_folder
from .sim import SMALL, Sim, prompts
from .tampering import changed, write
from .tapes import golden
from .tiny_models import byte_tokenizer

ROOT = Path(__file__).parent.parent
TAPE = str(golden.PATH)
FLIGHTS = str(golden.FLIGHTS)
CANCELLED, FAILED = 2, 3
"""Requests of golden.tape that did not end whole."""

Told = tuple[dict[int, Arrival], dict[int, Ended]]
Printed = Callable[..., tuple[int, Any]]


def told_by(path: str) -> Told:
    """A tape's arrivals and endings."""
    arrivals: dict[int, Arrival] = {}
    endings: dict[int, Ended] = {}
    for it in Load(path, Tape(path)):
        if isinstance(it, Arrival):
            arrivals[it.arrived.request] = it
        elif isinstance(it, Ended):
            endings[it.request] = it
    return arrivals, endings


class Recorded:
    """Answers as a tape has it; `changes` says otherwise for some requests."""

    def __init__(
        self, path: str, changes: dict[int, Callable[[Scripted], Scripted]] | None = None
    ) -> None:
        self.arrivals, self.endings = told_by(path)
        self.changes = changes or {}
        self.text: Callable[[int], str] = lambda token: f"<{token}>"
        self.tells_tokens = True

    def request_of(self, body: dict[str, Any]) -> int:
        """Prompt, seed and length name a request."""
        (found,) = (
            request
            for request, it in self.arrivals.items()
            if (list(it.arrived.tokens), it.arrived.parameters.seed)
            == (body["prompt"], body["seed"])
            and it.arrived.parameters.max_tokens == body["max_tokens"]
        )
        return found

    def __call__(self, body: dict[str, Any]) -> Scripted:
        request = self.request_of(body)
        ended = self.endings[request]
        scripted = Scripted(
            [(self.text(it), [it] if self.tells_tokens else None) for it in ended.tokens],
            ended.reason if ended.reason in ("stop", "length") else "length",
            len(self.arrivals[request].arrived.tokens),
            len(ended.tokens),
            hold=ended.reason == "cancelled",
        )
        change = self.changes.get(request)
        return scripted if change is None else change(scripted)


def say(*tokens: int) -> Callable[[Scripted], Scripted]:
    """Another answer."""

    def change(scripted: Scripted) -> Scripted:
        scripted.pieces = [(f"<{token}>", [token]) for token in tokens]
        scripted.completion_tokens = len(tokens)
        scripted.hold = False
        return scripted

    return change


def told(**fields: Any) -> Callable[[Scripted], Scripted]:
    """The same answer with other fields."""

    def change(scripted: Scripted) -> Scripted:
        for name, value in fields.items():
            setattr(scripted, name, value)
        return scripted

    return change


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Printed:
    """Runs the command with --json against a server: exit code and report."""

    def command(
        server: CompletionsServer | LiveServer, *arguments: str, tape: str = TAPE
    ) -> tuple[int, Any]:
        code = main(["serve-load", tape, server.url, "--json", *arguments])
        printed = capsys.readouterr().out.splitlines()  # between lines of a server's log
        (report,) = (line for line in printed if line.startswith('{"format"'))
        return code, json.loads(report)

    return command


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


# What is sent


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


# When it is sent


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


# What is compared


def test_the_first_answer_with_another_token_is_named(run: Printed) -> None:
    changes = {6: say(1), 4: say(61, 59, 20, 17, 32, 7, 36, 58, 51, 46, 2, 55)}
    with completions_server(Recorded(TAPE, changes)) as server:
        code, report = run(server)
    assert code == 1
    assert report["first"] == {
        "request": 4, "external_id": "", "by": "tokens", "place": 3,
        "recorded": "16 32 7 36 58 51 46 2", "measured": "17 32 7 36 58 51 46 2", "sampled": False,
    }  # fmt: skip
    assert report["verdict"] == (
        "DIFFERENT: request 4 differs from token 3 on: 17 32 7 36 58 51 46 2, on tape "
        "16 32 7 36 58 51 46 2 (8 of 10 answers the same by tokens)"
    )
    assert (report["requests"]["same"], report["requests"]["different"]) == (8, 2)


def test_texts_are_compared_where_the_server_tells_no_tokens(
    run: Printed, tokenizer_folder: Path
) -> None:
    tokenizer, _ = read_tokenizer(tokenizer_folder)
    recorded = Recorded(TAPE)
    recorded.tells_tokens, recorded.text = False, lambda token: tokenizer.decode([token])
    with completions_server(recorded) as server:
        code, report = run(server, "--tokenizer", str(tokenizer_folder))
        assert (code, report["compared_by"]) == (0, {"text": 10})
        recorded.changes[7] = told(pieces=[("P\u2028", None)])
        code, report = run(server, "--tokenizer", str(tokenizer_folder))
    text = tokenizer.decode(recorded.endings[7].tokens)
    assert text[0] == "N"
    assert (code, report["first"]["request"], report["first"]["place"]) == (1, 7, 0)
    assert report["first"]["measured"] == repr("P\u2028")
    assert report["first"]["recorded"] == repr(text)


def test_counts_are_compared_where_nothing_else_is_known(run: Printed) -> None:
    recorded = Recorded(TAPE)
    recorded.tells_tokens = False
    with completions_server(recorded) as server:
        code, report = run(server)
        assert (code, report["compared_by"]) == (0, {"counts": 8})
        assert report["requests"]["uncompared"] == 2
        assert [note for note in report["notes"] if note.startswith("by counts: the server tells")]
        recorded.changes[5] = told(completion_tokens=11)
        code, report = run(server)
    assert code == 1
    assert report["verdict"] == (
        "DIFFERENT: request 5 has 11 tokens, 12 tokens on tape (7 of 10 answers the same by counts)"
    )


def test_another_reason_to_end_is_a_difference(run: Printed) -> None:
    with completions_server(Recorded(TAPE, {0: told(finish_reason="stop")})) as server:
        code, report = run(server)
    assert code == 1
    assert report["verdict"].startswith("DIFFERENT: request 0 ended by stop, by length on tape (")


def test_an_end_token_may_be_counted_by_the_server_or_not() -> None:
    arrived = RequestArrived(0, "", (1,), Parameters(9, end_tokens=(5,)))
    for by_token, counted, same in (
        (True, 2, True), (True, 3, True), (True, 4, False), (False, 3, False), (False, 2, True)
    ):  # fmt: skip
        ended = Ended(0, (8, 9), "stop", by_token, None)
        measured = Measured(finish_reason="stop", completion_tokens=counted)
        found = compare(arrived, ended, measured, None)
        assert (found.by, found.difference is None) == ("counts", same)
    told_too = Measured(finish_reason="stop", tokens=[8, 9, 5])
    assert compare(arrived, Ended(0, (8, 9), "stop", True, None), told_too, None).difference is None


def test_nothing_is_compared_where_a_grammar_was_not_sent() -> None:
    arrived = RequestArrived(0, "", (1,), Parameters(9, grammar="digits"))
    ended = Ended(0, (8,), "stop", False, None)
    assert compare(arrived, ended, Measured(tokens=[9]), None) == NOTHING


@pytest.mark.parametrize(
    ("recorded", "measured", "whole", "place"),
    [
        ("abc", "abc", (True, True), -1),
        ("abc", "abd", (False, False), 2),
        ("abc", "ab", (True, True), 2),
        ("abc", "ab", (True, False), -1),
        ("abc", "ab", (False, True), 2),
        ("ab", "abc", (True, True), 2),
        ("ab", "abc", (False, True), -1),
        ("ab", "abc", (True, False), 2),
        ("", "abc", (False, False), -1),
    ],
)
def test_a_side_that_was_cut_may_be_shorter(
    recorded: str, measured: str, whole: tuple[bool, bool], place: int
) -> None:
    assert first_difference(recorded, measured, whole) == place


# Times


def test_recorded_times_are_those_of_the_steps(run: Printed) -> None:
    with completions_server(Recorded(TAPE)) as server:
        latency = run(server)[1]["latency"]
    # Steps of 4 ms each; eight whole answers of twelve tokens.
    first = latency["first_token"]["recorded"]
    assert (first["count"], first["median"], first["p99"]) == (8, 8000, 16000)
    gaps = latency["inter_token"]["recorded"]
    assert (gaps["count"], gaps["median"], gaps["most"]) == (88, 4000, 36000)
    whole = latency["whole"]["recorded"]
    assert (whole["count"], whole["median"], whole["most"]) == (8, 60000, 80000)
    for name, count in (("first_token", 8), ("inter_token", 88), ("whole", 8)):
        assert latency[name]["measured"]["count"] == count


def test_a_tape_without_times_has_no_recorded_latency(run: Printed, tmp_path: Path) -> None:
    records = [it for it in Tape(TAPE) if type(it).__name__ != "StepTimed"]
    with completions_server(Recorded(TAPE)) as server:
        code, report = run(server, tape=write(tmp_path, records))
    assert code == 0
    assert [times["recorded"] for times in report["latency"].values()] == [None] * 3
    assert report["notes"] == [
        "the tape has no step times: a step counts as 1 ms, and no latency is recorded"
    ]


# What goes wrong


def test_refused_requests_are_counted_and_the_others_compared(run: Printed) -> None:
    refused = told(status=400, message="Too long.")
    with completions_server(Recorded(TAPE, {1: refused, 8: refused})) as server:
        code, report = run(server)
    assert code == 1
    assert report["failures"] == {"HTTP 400": 2}
    assert report["first_failure"] == "request 1: status 400: Too long."
    assert report["verdict"] == (
        "FAILED: 2 of 10 requests, request 1: status 400: Too long. "
        "(8 of 10 answers the same by tokens)"
    )


def test_a_stream_that_stops_early_is_a_failure(run: Printed) -> None:
    with completions_server(Recorded(TAPE, {1: told(broken=True)})) as server:
        code, report = run(server)
    assert (code, report["failures"]) == (1, {"stream": 1})
    assert report["first_failure"] == "request 1: the stream stopped before its end"


def test_where_all_are_refused_it_says_what_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    with completions_server(lambda _: Scripted(status=422, message="a list?")) as server:
        assert main(["serve-load", TAPE, server.url]) == 1
    assert "none was taken: --detokenize FOLDER sends text" in capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence of a run that could not be."""
    assert main(["serve-load", *arguments]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    return said.err


def test_no_server_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        said = refusal(capsys, TAPE, url)
    assert said.startswith(f"replay: no server answers at {url}/v1 (")
    assert said.endswith("): start one, or check the address\n")
    assert "is no server's address: write it as http://HOST:PORT" in refusal(capsys, TAPE, "here")


def test_a_server_that_takes_no_request_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with completions_server(lambda _: Scripted(status=404, message="No such model.")) as server:
        said = refusal(capsys, TAPE, server.url)
        assert said == (
            f"replay: {server.url}/v1/completions answers 404, so no request can be sent: No such "
            "model.\n"
        )
    with completions_server(Recorded(TAPE), key="k") as server:
        assert "the server refuses the key (401)" in refusal(capsys, TAPE, server.url)
    with completions_server(Recorded(TAPE), models=()) as server:
        assert "names no model (status 200)" in refusal(capsys, TAPE, server.url)


def test_a_redacted_tape_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tape = write(tmp_path, changed(list(Tape(TAPE)), 0, redacted=True))
    with completions_server(Recorded(TAPE)) as server:
        said = refusal(capsys, tape, server.url)
    assert "is redacted: tags stand in it where the prompts' tokens were" in said
    assert server.bodies == []


def test_a_tape_without_requests_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tape = write(tmp_path, list(Tape(TAPE))[:2])
    with completions_server(Recorded(TAPE)) as server:
        assert "holds no request that asks for an answer" in refusal(capsys, tape, server.url)


def test_without_httpx_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    said = refusal(capsys, TAPE, "http://127.0.0.1:1")
    assert said == (
        "replay: serve-load needs httpx, which is not installed: pip install 'mlxtape[load]'\n"
    )


def test_the_command_can_be_looked_up_without_httpx_and_without_mlx() -> None:
    program = (
        "import sys; sys.modules.update(httpx=None, mlx=None)\n"
        "import replay.serve_load, replay.schema; print(len(replay.schema.reports()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


# Tapes from the middle, and long ones


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


# The stream


def test_events_are_the_same_wherever_the_reads_fall() -> None:
    data = (
        "data: a\u2028\x85b\r\n\r\n: comment\n\ndata: 1\ndata:2\n\nevent: x\ndata: [DONE]".encode()
    )

    async def read(size: int) -> list[bytes]:
        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(data), size):
                yield data[at : at + size]

        return [it async for it in events(pieces())]

    for size in range(1, len(data) + 1):
        assert asyncio.run(read(size)) == ["a\u2028\x85b".encode(), b"1\n2", b"[DONE]"]


def test_an_endless_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.serve_load_client.ANSWER_BYTES", 1 << 20)

    async def read() -> None:
        async def pieces() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * 4096

        async for _ in events(pieces()):
            raise AssertionError("there is no event in it")

    with pytest.raises(Failed, match="longer than 1 MiB"):
        asyncio.run(read())


def test_the_report_is_what_the_schema_says(run: Printed) -> None:
    published = json.loads(schema.PATH.read_text(encoding="utf-8"))
    with completions_server(Recorded(TAPE, {4: say(1)})) as server:
        _, report = run(server)
    jsonschema.validate(
        report, published["$defs"]["ServeLoadReport"] | {"$defs": published["$defs"]}
    )
    assert list(published["$defs"]["ServeLoadReport"]["properties"]) == list(report)


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
