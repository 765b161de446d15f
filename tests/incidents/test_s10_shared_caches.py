"""S10: one model over its own caches has one engine, and clients of it come one after the other."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from kernel.errors import ModelError
from kernel.fake import FakeClock
from replay.reader import Tape
from replay.subset import batch_of
from server.engine import Engine
from server.submission import Submission, Update
from statemachine.events import Forked
from statemachine.records import Parameters, StepDone, StepPlanned

from ..faults import loads, real
from ..faults.fault import Witness
from ..faults.loads import EXAONE4, LONGCAT, MAMBA, Load, Request
from ..faults.model_owned import FAULTS, POLICY
from ..faults.runner import record
from ..real_server import Served, serving, text_of
from . import asking
from .asking import flips
from .fingerprints import by_request

DEPTHS = ("fold", "plan", "forward", "reference")


def _at_once(kernel: str) -> Load:
    """Three clients in the same moment."""
    asked = tuple(Request(loads.tokens(9 + 6 * n, n), 5) for n in range(3))
    return Load("three at once", asked, POLICY, kernel=kernel)


@pytest.mark.parametrize("kernel", [EXAONE4, MAMBA, LONGCAT])
def test_clients_at_once_come_one_after_the_other_each_from_position_0(
    kernel: str, tmp_path: Path, capsys: Any
) -> None:
    load, tape = _at_once(kernel), tmp_path / "tape.log"
    played = record(load, tape)
    for number, request in enumerate(load.requests):
        alone = tmp_path / f"{number}.log"
        record(evolve(load, requests=(request,)), alone)
        assert by_request(tape)[number] == by_request(alone)[0]
        assert flips(kernel, request.tokens, played.answers[number]) == 0
    steps = [batch_of(item.events)[0] for item in Tape(str(tape)) if isinstance(item, StepPlanned)]
    whose = [seqs[0] for seqs in steps if seqs]
    assert whose == sorted(whose), "steps of two sequences are mixed"
    assert max(len(seqs) for seqs in steps) == 1
    starts = [item.observation.starts for item in Tape(str(tape)) if isinstance(item, StepDone)]
    first = {seq: starts[at][0] for at, (seq, *_) in reversed(list(enumerate(filter(None, steps))))}
    assert first == {0: 0, 1: 0, 2: 0}
    codes = {depth: asking.replayed(tape, kernel, depth, capsys)[0] for depth in DEPTHS}
    assert codes == dict.fromkeys(DEPTHS, 0)


class _Client:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.over = False

    def __call__(self, update: Update) -> None:
        self.tokens.extend(update.tokens)
        self.over = self.over or update.finish_reason is not None


def _engine(load: Load, tape: Path) -> Engine:
    from server.capture import CaptureWriter

    return Engine(lambda: real.parts(load)(CaptureWriter(tape)), clock=FakeClock())


def _ask(engine: Engine, request: Request) -> tuple[int, ...]:
    client = _Client()
    engine.submit(Submission(request.tokens, Parameters(request.max_tokens)), client)
    for _ in range(100):
        if client.over:
            return tuple(client.tokens)
        engine.step()
    raise AssertionError("the request does not end")


def test_a_second_engine_over_a_model_in_use_is_refused_and_the_first_is_not_disturbed(
    tmp_path: Path,
) -> None:
    load = _at_once(EXAONE4)
    first, second = (_engine(load, tmp_path / f"{n}.log") for n in range(2))
    first.open()
    client = _Client()
    prompt = load.requests[2].tokens
    first.submit(Submission(prompt, Parameters(5)), client)
    for _ in range(4):
        first.step()
    assert 1 <= len(client.tokens) < 5, "it is to be in the middle of its answer"
    with pytest.raises(ModelError) as caught:
        second.open()
    assert str(caught.value) == (
        "this model keeps the state of its sequence, and another kernel runs it already: load it a "
        "second time, or stop the other engine first"
    )
    while not client.over:
        first.step()
    assert flips(EXAONE4, prompt, tuple(client.tokens)) == 0
    first.stop()


def test_a_model_is_free_for_another_engine_once_its_own_has_stopped(tmp_path: Path) -> None:
    load = _at_once(EXAONE4)
    answers = []
    for number in range(2):
        engine = _engine(load, tmp_path / f"{number}.log")
        engine.open()
        answers.append(_ask(engine, load.requests[1]))
        engine.stop()
    assert answers[0] == answers[1]
    assert flips(EXAONE4, load.requests[1].tokens, answers[0]) == 0


def test_copies_of_a_request_share_no_rows_over_a_models_own_caches(
    tmp_path: Path, capsys: Any
) -> None:
    load, tape = _at_once(EXAONE4), tmp_path / "tape.log"
    engine, clients = _engine(load, tape), [_Client(), _Client()]
    engine.open()
    prompt = load.requests[2].tokens
    parent = engine.submit(Submission(prompt, Parameters(5)), clients[0])
    engine.submit(Submission(prompt, Parameters(5), parent=parent), clients[1])
    for _ in range(100):
        engine.step()
    engine.stop()
    assert clients[0].over
    assert clients[1].tokens == clients[0].tokens
    assert flips(EXAONE4, prompt, tuple(clients[0].tokens)) == 0
    planned = [item for item in Tape(str(tape)) if isinstance(item, StepPlanned)]
    assert not [it for item in planned for it in item.events if isinstance(it, Forked)]
    codes = {depth: asking.replayed(tape, EXAONE4, depth, capsys)[0] for depth in DEPTHS}
    assert codes == dict.fromkeys(DEPTHS, 0)


QUESTIONS = ("abc", "what is the capital", "a longer question about nothing much", "z")


def _all_at_once(served: Served) -> list[str]:
    answers = [""] * len(QUESTIONS)

    def ask(number: int) -> None:
        answers[number] = text_of(served.ask(QUESTIONS[number]))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(QUESTIONS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.mark.parametrize("kernel", [EXAONE4, "gpt_oss", MAMBA])
def test_a_served_folder_answers_clients_at_once_as_it_answers_each_alone(
    kernel: str, tmp_path: Path, capsys: Any
) -> None:
    tape = tmp_path / "tape.log"
    with serving(real.path_of(kernel), capture=str(tape)) as served:
        alone = [text_of(served.ask(question)) for question in QUESTIONS]
        assert all(alone)
        assert len(set(alone)) == len(alone)
        assert _all_at_once(served) == alone
        served.idle()
    codes = {depth: asking.replayed(tape, kernel, depth, capsys)[0] for depth in DEPTHS}
    assert codes == dict.fromkeys(DEPTHS, 0)


def test_with_the_fault_in_replay_names_the_step_in_which_the_other_rows_are_there(
    tmp_path: Path, capsys: Any
) -> None:
    fault = next(it for it in FAULTS.faults if it.name == "S10")
    tape, witness = tmp_path / "tape.log", Witness()
    played = record(fault.load, tape, fault, witness)
    assert played.reasons == ("length", "length"), "the engine itself noticed"
    code, report = asking.replayed(tape, EXAONE4, "fold", capsys)
    found = report["divergence"]
    assert code == 1
    assert (found["class"], found["step"], found["sequence"]) == ("observation", 5, 0)
    assert found["summary"] == "sequence 0: the caches saw start 27, where the state has 23"
    assert witness.first is not None
    assert (witness.first.step, witness.first.sequence) == (5, 0)
