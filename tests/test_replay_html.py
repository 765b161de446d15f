"""The page of `replay html`: what goes into it, and what must never be in it. Its lanes:
test_replay_html_lanes.py. In a browser: test_replay_html_page.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from replay import html, run
from replay.cli import main
from replay.following import Following
from replay.history import COLUMNS, FAILED, LOST, UNANSWERED, History
from replay.html import HtmlReport
from replay.page_data import PageData
from replay.page_report import hide_tokens
from replay.reader import Tape
from replay.run import CLEAN, DIVERGED, TORN, UNUSABLE
from statemachine import events as ev
from statemachine.records import (
    Gap,
    RequestArrived,
    StepDone,
    StepPlanned,
)

from .html_pages import history_of, made, numbers, told
from .sim import Sim
from .tampering import changed, first_step, write
from .tapes import golden

TOKEN = 918_273_645
"""A token id that nothing else in a page looks like."""


def test_the_page_begins_with_the_verdict_of_replay_in_the_same_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for tape, code in ((golden.FLIGHTS, CLEAN), (golden.DIVERGED, DIVERGED)):
        assert main([str(tape), "--json"]) == code
        verdict = json.loads(capsys.readouterr().out)["verdict"]
        found, page = made(tape, tmp_path)
        assert found == code
        assert capsys.readouterr().out.splitlines()[0] == verdict
        assert f"<h1>{verdict}</h1>" in page


def test_the_plan_depth_finds_what_only_the_scheduler_can(tmp_path: Path) -> None:
    records = golden.records()
    place = first_step(records, lambda it: isinstance(it, RequestArrived) and it.request == 4)
    more = structs.replace(records[place].parameters, max_tokens=3)  # type: ignore[union-attr]
    tape = write(tmp_path, changed(records, place, parameters=more))
    assert made(tape, tmp_path)[0] == CLEAN
    code, page = made(tape, tmp_path, "--depth", "plan")
    assert code == DIVERGED
    assert told(page)[0]["divergence"]["kind"] == "plan"


def test_a_torn_tape_makes_a_page_and_exit_code_3(tmp_path: Path) -> None:
    torn = tmp_path / "torn.tape"
    torn.write_bytes(golden.FLIGHTS.read_bytes()[:-3])
    code, page = made(torn, tmp_path)
    assert code == TORN
    assert '<header class="verdict torn">' in page


def test_a_page_of_a_tape_that_grows_draws_the_steps_that_its_verdict_has_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = golden.FLIGHTS.read_bytes()
    tape = tmp_path / "growing.tape"
    tape.write_bytes(whole[: len(whole) // 2])
    assert main([str(tape)]) == TORN
    verdict = capsys.readouterr().out.splitlines()[0]
    steps = len([it for it in Tape(str(tape)) if isinstance(it, StepPlanned)])
    judged = run.outcome_of

    def grown(*given: Any) -> run.Outcome:
        tape.write_bytes(whole)
        return judged(*given)

    monkeypatch.setattr(run, "outcome_of", grown)
    code, page = made(tape, tmp_path)
    assert code == TORN
    assert f"<h1>{verdict}</h1>" in page
    assert len(numbers(page, "step.step")) == steps == 18


def test_what_stands_behind_a_divergence_is_drawn_too(tmp_path: Path) -> None:
    steps = [it.step for it in Tape(str(golden.DIVERGED)) if isinstance(it, StepPlanned)]
    code, page = made(golden.DIVERGED, tmp_path)
    assert code == DIVERGED
    assert told(page)[0]["divergence"]["step"] < steps[-1]
    assert numbers(page, "step.step") == steps


def test_the_pool_of_each_step_is_what_the_state_holds_after_its_plan(tmp_path: Path) -> None:
    records = golden.flights()
    following, held, cached = Following(), [], []
    for record in records:
        following.feed(record)
        if isinstance(record, StepPlanned):
            held.append([following.state.held_blocks(group) for group in (0, 1)])
            cached.append([following.state.cached_blocks(group) for group in (0, 1)])
    _, page = made(write(tmp_path, records), tmp_path)
    for group in (0, 1):
        assert numbers(page, f"step.held_{group}") == [it[group] for it in held]
        assert numbers(page, f"step.cached_{group}") == [it[group] for it in cached]
    assert [it["blocks"] for it in told(page)[0]["groups"]] == [14, 20]


def test_the_batch_of_each_step_is_counted_by_purpose_from_its_events(tmp_path: Path) -> None:
    records = golden.flights()
    _, page = made(write(tmp_path, records), tmp_path)
    planned = [it for it in records if isinstance(it, StepPlanned)]
    assert numbers(page, "step.step") == [it.step for it in planned]
    total = 0
    for purpose in ev.PURPOSES:
        rows = [
            sum(
                len(event.seqs) if isinstance(event, ev.AppendedEach) else event.rows
                for event in it.events
                if isinstance(event, ev.Appended | ev.AppendedEach) and event.purpose == purpose
            )
            for it in planned
        ]
        assert numbers(page, f"step.{purpose}") == rows
        assert sum(rows) > 0
        total += sum(rows)
    assert f"{total} rows agree" in page


def test_steps_that_failed_and_that_lost_the_pages_are_flagged() -> None:
    history = history_of(golden.records())
    flags = dict(zip(history.columns["step"], history.columns["flags"], strict=True))
    assert {step: flag for step, flag in flags.items() if flag} == {12: FAILED, 20: FAILED | LOST}
    assert [(it.place, it.stage) for it in history.failures] == [(11, "build"), (19, "eval")]


def test_a_last_step_without_an_answer_is_flagged_only_at_the_end_of_the_tape() -> None:
    records = golden.flights()
    last = max(at for at, it in enumerate(records) if isinstance(it, StepPlanned))
    history = history_of(records[: last + 1])
    assert history.columns["flags"][-1] == UNANSWERED
    stopped = History(until=20)
    for record in records:
        stopped.feed(record)
    stopped.finish()
    assert UNANSWERED not in stopped.columns["flags"]
    assert stopped.columns["step"][19] == 20
    assert stopped.steps == 21  # with lookahead step 21 was planned before step 20 was answered


def test_a_step_behind_missing_records_says_so(tmp_path: Path) -> None:
    records = golden.flights()
    at = first_step(records, lambda it: isinstance(it, StepPlanned) and it.step == 4)
    history = history_of([*records[:at], Gap(3, "full"), records[at]])
    assert history.columns["flags"][-1] & 8


def secret_tape(tmp_path: Path) -> str:
    """A tape whose divergence at the plan depth shows events with token ids near TOKEN."""
    sim = Sim()
    sim.submit([TOKEN + number for number in range(5)], 4)
    sim.run()
    sim.engine.stop()
    records = sim.capture.records
    at = first_step(records, lambda it: isinstance(it, RequestArrived))
    others = tuple(TOKEN + 10 + number for number in range(5))
    return write(tmp_path, changed(records, at, tokens=others))


@pytest.mark.parametrize(("depth", "code"), [("fold", CLEAN), ("plan", DIVERGED)])
def test_no_token_id_is_in_a_page_unless_it_was_asked_for(
    tmp_path: Path, depth: str, code: int
) -> None:
    found, page = made(secret_tape(tmp_path), tmp_path, "--depth", depth)
    assert found == code
    description, body = told(page)
    assert str(TOKEN)[:7] not in page + json.dumps(description)
    for number in range(15):
        assert (TOKEN + number).to_bytes(4, "little") not in body
        assert (2 * (TOKEN + number)).to_bytes(4, "little") not in body


def test_with_tokens_the_page_shows_what_the_scheduler_would_have_appended(
    tmp_path: Path,
) -> None:
    _, page = made(secret_tape(tmp_path), tmp_path, "--depth", "plan", "--tokens")
    assert str(TOKEN) in page


def test_sentences_lose_their_token_ids_and_nothing_else() -> None:
    text = "sequence 3: a draft row of token 12 was committed as 99, at step 7"
    hidden = "sequence 3: a draft row of token (hidden) was committed as another, at step 7"
    assert hide_tokens(text) == hidden
    assert hide_tokens("tokens (1, 2, 3) of 4 rows") == "tokens (hidden) of 4 rows"
    assert hide_tokens("3 tokens for 4 rows") == "3 tokens for 4 rows"


def test_a_salt_is_not_in_the_page(tmp_path: Path) -> None:
    sim = Sim()
    sim.submit([1, 2, 3], 2, namespace=ev.Namespace("tuned", 1, "s4lt-of-a-customer"))
    sim.run()
    sim.engine.stop()
    records = sim.capture.records
    at = first_step(records, lambda it: isinstance(it, StepDone) and it.step == 1)
    code, page = made(write(tmp_path, changed(records, at, offsets=(99,))), tmp_path)
    assert code == DIVERGED
    assert "tuned" in page
    assert "s4lt" not in page + json.dumps(told(page)[0])


def test_the_page_allows_itself_nothing_but_its_own_script_and_style(tmp_path: Path) -> None:
    _, page = made(golden.FLIGHTS, tmp_path)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert re.sub(r"sha256-[\w+/=]{44}", "HASH", policy.replace("&#39;", "'")) == (
        "default-src 'none'; script-src 'HASH'; style-src 'HASH'; base-uri 'none'; "
        "form-action 'none'"
    )
    assert "://" not in page


def test_columns_of_any_size_and_sign_come_out_as_they_went_in() -> None:
    given = {
        "none": [],
        "small": [0, 1, -1, 127, -128],
        "middle": [40_000, 0, 40_000],
        "wide": [1 << 31, 0, -(1 << 31)],
        "widest": [1 << 50, -(1 << 50), 7],
    }
    data = PageData()
    for name, values in given.items():
        data.add(name, values)
    page = f'id="data">{data.text({"more": 1})}</script>'
    assert {name: numbers(page, name) for name in given} == given
    assert [width for width, _ in told(page)[0]["columns"].values()] == [1, 2, 4, 8, 8]


def test_the_json_report_names_what_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, page = made(golden.FLIGHTS, tmp_path, "--json", "--until", "20")
    report = msgspec.json.decode(capsys.readouterr().out, type=HtmlReport)
    assert code == report.exit_code == CLEAN
    assert report.bytes == len(page.encode())
    assert (report.format, report.depth, report.steps) == (1, "fold", 21)
    assert report.requests == told(page)[0]["columns"]["lane.request"][1]


def test_a_page_is_the_same_each_time(tmp_path: Path) -> None:
    assert made(golden.FLIGHTS, tmp_path) == made(golden.FLIGHTS, tmp_path)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("tape", "is the tape itself, which is never changed: give another name"),
        (".", "is a folder: give the name of a file, like ./report.html"),
        ("no/where.html", "no/where.html cannot be written: its folder does not exist"),
    ],
)
def test_a_page_that_cannot_be_written_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    output: str,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tape").write_bytes(golden.FLIGHTS.read_bytes())
    assert main(["html", "tape", "-o", output]) == UNUSABLE
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert Path("tape").read_bytes() == golden.FLIGHTS.read_bytes()
    assert sorted(it.name for it in tmp_path.iterdir()) == ["tape"]


def test_a_tape_with_more_steps_than_a_page_takes_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("replay.history.STEPS_MAX", 10)
    output = tmp_path / "report.html"
    assert main(["html", str(golden.FLIGHTS), "-o", str(output)]) == UNUSABLE
    assert "more than 10 steps, too many for one page" in capsys.readouterr().err
    assert not output.exists()


def test_a_diverged_tape_that_is_damaged_later_on_still_makes_a_page(tmp_path: Path) -> None:
    whole = golden.DIVERGED.read_bytes()
    damaged = tmp_path / "damaged.tape"
    at = len(whole) * 3 // 4
    damaged.write_bytes(whole[:at] + bytes(len(whole) - at))
    code, page = made(damaged, tmp_path)
    assert code == DIVERGED
    assert "the charts end where the tape cannot be read on" in page
    steps = len(numbers(page, "step.step"))
    assert 0 < steps < len(history_of(golden.diverged()[0]).columns["step"])


def test_where_events_cannot_be_applied_the_pool_is_unknown_from_there_on(tmp_path: Path) -> None:
    records = golden.records()
    at = first_step(records, lambda it: isinstance(it, StepPlanned) and it.step == 6)
    events = (*records[at].events, ev.Rewound(9999, 1))  # type: ignore[union-attr]
    _, page = made(write(tmp_path, changed(records, at, events=events)), tmp_path)
    description = told(page)[0]
    assert description["broken_at"] == 5
    assert "sequence 9999" in description["broken"]
    held = numbers(page, "step.held_0")
    assert min(held[:5]) >= 0
    assert set(held[5:]) == {-1}
    assert (
        len(held)
        == len(numbers(page, "step.decode"))
        == sum(isinstance(it, StepPlanned) for it in records)
    )


def test_every_column_has_a_value_for_every_step() -> None:
    history = history_of(golden.flights())
    lengths = {name: len(values) for name, values in history.columns.items()}
    names = {*COLUMNS, "held_0", "cached_0", "held_1", "cached_1"}
    assert lengths == dict.fromkeys(names, history.steps)


def test_a_tape_without_a_step_says_that_there_is_nothing_to_draw(tmp_path: Path) -> None:
    records = [it for it in golden.flights() if not hasattr(it, "step") or it.step == 0]
    code, page = made(write(tmp_path, records), tmp_path)
    assert code == CLEAN
    assert "no step was compared" in page
    assert numbers(page, "step.step") == []


def test_the_parts_of_the_page_are_found_where_the_package_is(tmp_path: Path) -> None:
    folder = Path(html.__file__).parent / "page"
    assert {it.name for it in folder.iterdir()} == {*html.SCRIPTS, html.STYLE, html.TEMPLATE}
