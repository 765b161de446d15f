"""`replay diff`: the first place where two runs answer otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from replay.cli import main
from replay.diff import DiffReport, diff
from server.policy import Policy
from statemachine.records import Record, RequestArrived, StepDone, StepPlanned

from .sim import POLICY, TIGHT, Sim, prompts
from .tampering import write

Script = Callable[[int, int], int | None]
CHUNKS = structs.replace(POLICY, prefill_chunk=4, lookahead=True, max_running=3)


def run(
    script: Script | None = None,
    policy: Policy = POLICY,
    given: tuple[tuple[int, ...], ...] = tuple(prompts(6, seed=3)),
    max_tokens: int = 10,
) -> list[Record]:
    sim = Sim(TIGHT, policy, script=script, end_token=70, end_every=1000)
    for prompt in given:
        sim.submit(prompt, max_tokens, end_tokens=(70,))
    sim.run()
    sim.engine.stop()
    return sim.capture.records


def named(records: list[Record], name: Callable[[RequestArrived], str]) -> list[Record]:
    """The records, with external ids."""
    return [
        structs.replace(it, external_id=name(it)) if isinstance(it, RequestArrived) else it
        for it in records
    ]


def compared(folder: Path, good: list[Record], bad: list[Record], **options: bool) -> DiffReport:
    (folder / "good").mkdir(exist_ok=True)
    (folder / "bad").mkdir(exist_ok=True)
    return diff(write(folder / "good", good), write(folder / "bad", bad), **options)


def another(seq: int, place: int) -> Script:
    """A model that says 71 at one place of one answer, and never again what it said before."""
    prompt = len(prompts(6, seed=3)[seq])
    return lambda asked, position: 71 if (asked, position) == (seq, prompt + place) else None


def test_another_policy_makes_other_batches_and_the_same_answers(tmp_path: Path) -> None:
    report = compared(tmp_path, run(), run(policy=CHUNKS))
    assert (report.same, report.exit_code, report.first) == (True, 0, None)
    assert report.verdict.startswith("SAME: 6 requests, ")
    assert (report.matched, report.matched_by_id) == (6, 0)
    assert report.tokens > 20


def test_the_first_other_token_is_named_with_what_stands_around_it(tmp_path: Path) -> None:
    good, bad = run(), run(another(2, 3))
    report = compared(tmp_path, good, bad)
    first = report.first
    assert first is not None
    assert (report.exit_code, first.kind, first.place) == (1, "token", 3)
    assert (first.good.request, first.bad.request) == (2, 2)
    assert first.position == len(prompts(6, seed=3)[2]) + 3
    assert (first.bad.token, first.good.before) == (71, first.bad.before)
    sampled = {
        (step.step, token): logit
        for step in good
        if isinstance(step, StepDone)
        for token, logit in zip(step.tokens, step.logits, strict=True)
    }
    assert first.good.token is not None
    assert sampled[first.good.step, first.good.token] == first.good.logit
    assert report.differing == {"token": 1}


def test_of_several_the_one_at_the_earliest_step_comes_first(tmp_path: Path) -> None:
    def several(seq: int, position: int) -> int | None:
        return another(1, 1)(seq, position) or another(0, 8)(seq, position)

    report = compared(tmp_path, run(), run(several))
    assert report.first is not None
    assert report.differing == {"token": 2}
    assert [report.first.place, report.others[0].place] == [1, 8]
    assert report.first.good.step < report.others[0].good.step


def test_requests_are_known_again_by_prompt_whatever_their_order(tmp_path: Path) -> None:
    given = tuple(prompts(6, seed=3))
    report = compared(tmp_path, run(), run(given=given[::-1]))
    assert (report.same, report.matched) == (True, 6)


def test_equal_prompts_are_matched_in_order_of_arrival(tmp_path: Path) -> None:
    twice = ((1, 2, 3), (1, 2, 3))
    # It ends first there, and is still the second.
    bad = run(lambda seq, position: 70 if (seq, position) == (1, 5) else None, given=twice)
    report = compared(tmp_path, run(given=twice), bad)
    assert report.first is not None
    assert (report.matched, report.first.good.request, report.differing) == (2, 1, {"token": 1})


def test_external_ids_that_both_runs_have_win_over_prompts(tmp_path: Path) -> None:
    given = ((1, 2, 3), (4, 5, 6))
    good = named(run(given=given), lambda it: "ab"[it.request])
    bad = named(run(given=given), lambda it: "ba"[it.request])
    report = compared(tmp_path, good, bad)
    assert (report.matched_by_id, report.differing) == (2, {"prompt": 2})
    report = compared(tmp_path, good, named(bad, lambda it: f"{it.request}"))
    assert (report.same, report.matched_by_id, report.matched) == (True, 0, 2)


def test_the_same_request_with_other_parameters_is_said(tmp_path: Path) -> None:
    given = ((1, 2, 3),)
    good, bad = run(given=given, max_tokens=4), run(given=given, max_tokens=6)
    with_id = [named(records, lambda _: "x") for records in (good, bad)]
    report = compared(tmp_path, *with_id)
    assert report.first is not None
    assert (report.first.kind, report.first.place) == ("length", 4)
    assert (report.first.good.answer_tokens, report.first.bad.answer_tokens) == (4, 6)
    assert (report.first.good.token, report.first.bad.token is None) == (None, False)


def seeded(records: list[Record], by: int, **parameters: float) -> list[Record]:
    """The records, each request with a seed of its own, as a server draws them."""
    return [
        structs.replace(
            it, parameters=structs.replace(it.parameters, seed=it.request + by, **parameters)
        )
        if isinstance(it, RequestArrived)
        else it
        for it in records
    ]


def test_seeds_that_decide_nothing_do_not_tell_requests_apart(tmp_path: Path) -> None:
    good, bad = seeded(run(), 100), seeded(run(), 200)
    report = compared(tmp_path, good, bad)
    assert (report.same, report.matched, report.matched_by_id) == (True, 6, 0)
    ids = [named(it, lambda arrived: str(arrived.request)) for it in (good, bad)]
    assert (compared(tmp_path, *ids).same, compared(tmp_path, *ids).matched_by_id) == (True, 6)


def test_seeds_of_drawn_answers_are_among_the_parameters(tmp_path: Path) -> None:
    runs = [
        named(seeded(run(), by, temperature=1.0), lambda arrived: str(arrived.request))
        for by in (100, 200)
    ]
    assert compared(tmp_path, *runs).differing == {"parameters": 6}


def test_a_run_without_some_requests_is_another_run(tmp_path: Path) -> None:
    report = compared(tmp_path, run(), run(given=tuple(prompts(6, seed=3)[:4])))
    assert (report.exit_code, report.only_good, report.only_bad, report.matched) == (1, 2, 0, 4)
    assert "2 requests only in the good run and 0 requests only in the bad one" in report.verdict


def test_an_answer_that_the_tape_cuts_short_is_compared_up_to_there(tmp_path: Path) -> None:
    good = run()
    places = [at for at, it in enumerate(good) if isinstance(it, StepPlanned)]
    report = compared(tmp_path, good, good[: places[4]])
    assert (report.same, report.matched) == (True, 6)
    assert report.tokens < compared(tmp_path, good, good).tokens


def test_the_first_other_batch_is_named_when_it_is_asked_for(tmp_path: Path) -> None:
    report = compared(tmp_path, run(), run(policy=CHUNKS), schedule=True)
    assert (report.exit_code, report.first) == (1, None)
    assert report.schedule is not None
    assert (report.schedule.step, report.schedule.place) == (1, 0)
    prompt = len(prompts(6, seed=3)[0])
    assert report.schedule.good.startswith(f"{min(prompt, 16)} prompt rows of request 0")
    assert report.schedule.bad.startswith("4 prompt rows of request 0")
    assert compared(tmp_path, run(), run(), schedule=True).schedule_same is True


def test_runs_of_different_loads_are_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    mine, other = write(tmp_path, run()), write(tmp_path / "other", run(given=((9, 9, 9),)))
    assert main(["diff", mine, other]) == 2
    assert "runs of different loads, and cannot be compared" in capsys.readouterr().err
    assert main(["diff", "-", "-"]) == 2
    assert "only one of the two tapes can come from standard input" in capsys.readouterr().err


def test_the_report_is_there_for_people_and_for_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad").mkdir()
    paths = [write(tmp_path, run()), write(tmp_path / "bad", run(another(2, 3)))]
    assert main(["diff", *paths]) == 1
    said = capsys.readouterr().out
    assert said.startswith("DIFFERENT: request 2 has token ")
    assert "and 71 in the bad one" in said.splitlines()[0]
    assert main(["diff", *paths, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["format"], report["first"]["bad"]["token"]) == (1, 71)
