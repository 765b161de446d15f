"""`replay stat`: what a tape adds up to."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from msgspec import structs

from kernel.fake import Failure
from replay.cli import main
from replay.stat import StatReport, stat
from replay.tally import Slow
from statemachine.events import Appended, AppendedEach, BlockEvicted, Preempted, Rewound
from statemachine.geometry import Geometry, Group
from statemachine.records import Gap, Record, StepDone, StepPlanned, StepTimed

from .sim import POLICY, TIGHT, Sim, prompts
from .tampering import changed, first_step, write
from .tapes.golden import PATH as GOLDEN


def stat_of(folder: Path, records: list[Record]) -> StatReport:
    return stat(write(folder, records))


def _repeating(seq: int, position: int) -> int | None:
    """A text that guesses are right about, now and then."""
    return 1 + position % 2 if position // 6 % 2 else None


@functools.cache
def crowded() -> Sim:
    """Requests that wait, are preempted, share beginnings, look ahead, guess, and are cancelled."""
    policy = structs.replace(POLICY, lookahead=True, draft_tokens=3, lookup_ngram=1, prefill_tile=4)
    sim = Sim(TIGHT, policy, vocab_size=5, end_token=7, end_every=20, script=_repeating)
    actions = {
        1 + 2 * number: [lambda prompt=prompt: sim.submit(prompt, 24, end_tokens=(7,))]
        for number, prompt in enumerate(tuple(t % 5 for t in p) for p in prompts(10, seed=3))
    }
    actions[9].append(lambda: sim.engine.cancel(3))
    sim.run(actions)
    sim.engine.stop()
    return sim


def test_a_tape_of_every_kind_of_trouble_adds_up_to_these_figures() -> None:
    report = stat(str(GOLDEN))
    assert report.verdict == "10 requests, 36 steps, 370 rows; 2 steps FAILED"
    assert report.requests.ended == {"cancelled": 1, "error": 1, "length": 8}
    assert (report.prompt_tokens, report.answer_tokens) == (151, 105)
    assert (report.prefix.hit_rate, report.prefix.hits, report.prefix.admitted) == (0.2119, 4, 10)
    assert (report.prefix.published, report.prefix.evicted) == (72, 30)
    assert report.steps.failed == {"build": 1, "eval": 1}
    assert (report.steps.planned, report.steps.answered, report.steps.pool_resets) == (36, 34, 1)
    assert (report.pool[0].held_most, report.pool[0].step, report.pool[0].num_blocks) == (
        24,
        11,
        24,
    )
    assert report.rows.padding == 55


def test_its_figures_are_those_that_the_engine_told_its_clients(tmp_path: Path) -> None:
    sim = crowded()
    report = stat_of(tmp_path, sim.capture.records)
    inboxes = sim.inboxes.values()
    reasons = [inbox.reason for inbox in inboxes]
    told = [[update.cached_tokens for update in inbox.updates] for inbox in inboxes]
    adopted = sum(max(0, *cached) for cached in told)
    assert report.requests.ended == {reason: reasons.count(reason) for reason in set(reasons)}
    assert report.answer_tokens == sum(len(inbox.tokens) for inbox in inboxes)
    assert report.prefix.adopted_rows == adopted > 0
    assert report.requests.preemptions == sim.engine.status()["preemptions"] > 0


def test_its_rows_are_those_of_the_batches(tmp_path: Path) -> None:
    sim = crowded()
    rows = stat_of(tmp_path, sim.capture.records).rows
    batches = [sum(piece.rows for piece in batch.pieces) for batch in sim.kernel.batches]
    pads = sum(piece.pads for batch in sim.kernel.batches for piece in batch.pieces)
    pending = sum(piece.pending for batch in sim.kernel.batches for piece in batch.pieces)
    assert (rows.issued, rows.most) == (sum(batches), max(batches))
    assert (rows.padding, rows.lookahead) == (pads, pending)
    assert rows.issued == rows.prompt + rows.decode + rows.lookahead + rows.draft + rows.padding


def test_guesses_are_accepted_rejected_or_gone_with_their_request(tmp_path: Path) -> None:
    sim = crowded()
    report = stat_of(tmp_path, sim.capture.records)
    rows, rewound = report.rows, sum(event.rows for event in sim.events(Rewound))
    drafts = [event for event in sim.events(Appended) if event.purpose == "draft"]
    assert rows.guessed == sum(event.rows - 1 for event in drafts) > 0
    assert rows.rejected + rows.lookahead_rewound == rewound > 0
    assert rows.accepted > 0
    assert rows.accepted + rows.rejected == rows.guessed
    assert report.acceptance_rate == round(rows.accepted / rows.guessed, 4)


def test_a_request_waits_from_its_arrival_to_its_first_row(tmp_path: Path) -> None:
    sim = Sim(TIGHT, structs.replace(POLICY, max_running=1))
    for prompt in ((1, 2, 3), (4, 5, 6)):
        sim.submit(prompt, 4)
    sim.run()
    report = stat_of(tmp_path, sim.capture.records)
    # One step of prompt and three of decode each; the second starts when the first is gone.
    slow = Slow(
        1, "", steps=8, waited=4, prompt_tokens=3, answer_tokens=4, preempted=0, reason="length"
    )
    assert report.requests.slowest[0] == slow
    assert report.waiting_steps is not None
    assert (report.waiting_steps.median, report.waiting_steps.most) == (0, 4)
    assert (report.requests.running_most, report.requests.waiting_most) == (1, 2)


def test_rows_that_a_preemption_lost_are_counted_when_they_are_computed_again(
    tmp_path: Path,
) -> None:
    pool = Geometry(4, (Group(num_blocks=8),))
    sim = Sim(pool, structs.replace(POLICY, prefix_cache=False, watermark_blocks=0))
    for prompt in ((1,) * 12, (2,) * 12):
        sim.submit(prompt, 12)
    sim.run()
    report = stat_of(tmp_path, sim.capture.records)
    lost = [event.seq for event in sim.events(Preempted)]
    assert lost == [1]
    issued = [event for event in sim.events(Appended) if event.purpose == "prompt"]
    # Twelve prompt rows and four of its answer; the token sampled last was no row yet.
    assert sum(it.rows for it in issued) == 24 + 16
    assert report.rows.again == 16
    assert sim.events(AppendedEach), "nothing was decoded in columns"


def test_evictions_and_times_are_counted(tmp_path: Path) -> None:
    sim = crowded()
    report = stat_of(tmp_path, sim.capture.records)
    assert report.prefix.evicted == len(sim.events(BlockEvicted)) > 0
    timed = sim.records(StepTimed)
    longest = max(sum(it.parts_us.values()) for it in timed)
    assert report.step_us["whole"].count == len(timed)
    assert report.step_us["whole"].most == longest


def test_failed_steps_gaps_and_an_open_end_are_said(tmp_path: Path) -> None:
    sim = Sim(TIGHT, POLICY, fail={2: Failure("eval")})
    sim.submit((1, 2, 3), 4)
    sim.run()
    records = [it for it in sim.capture.records if not isinstance(it, StepTimed)]
    last = max(at for at, it in enumerate(records) if isinstance(it, StepPlanned))
    report = stat_of(tmp_path, [*records[: last + 1]])
    assert (report.steps.failed, report.steps.unanswered, report.torn) == ({"eval": 1}, 1, True)
    assert report.requests.live == 1
    start = records[1]
    report = stat_of(tmp_path, [*records, Gap(7, "full"), start])
    assert (report.gaps, report.records_lost) == (1, 7)


def test_counting_stops_where_a_tape_cannot_be_applied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = crowded().capture.records
    place = first_step(records, lambda it: isinstance(it, StepDone) and it.step == 9)
    path = write(tmp_path, changed(records, place, events=(Rewound(0, 99),)))
    assert main(["stat", path]) == 0
    assert "STOPPED COUNTING: at step 9 an event cannot be applied" in capsys.readouterr().out
    assert stat(path).steps.answered == 8


def test_columns_of_different_lengths_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = crowded().capture.records
    place = first_step(records, lambda it: isinstance(it, StepDone) and len(it.sampled) > 1)
    done = records[place]
    assert isinstance(done, StepDone)
    path = write(tmp_path, changed(records, place, tokens=done.tokens[:-1]))
    assert main(["stat", path]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"replay: step {done.step} says {len(done.sampled)} samples and ")


def test_json_says_what_the_report_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stat", str(GOLDEN), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["format"] == 1
    assert said["rows"]["issued"] == 370
    assert said["requests"]["ended"] == {"cancelled": 1, "error": 1, "length": 8}


def test_the_text_begins_with_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stat", str(GOLDEN)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "10 requests, 36 steps, 370 rows; 2 steps FAILED"
    assert "hit rate 21.2%: 32 of 151 prompt rows were computed before" in lines[4]
