"""replay redact: a tape without what users said, that says all else, right or wrong, as before."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from msgspec import structs

from replay.errors import Unusable
from replay.reader import Tape
from replay.redact import redact
from replay.run import CLEAN, DIVERGED, PLAN, TORN, Options, replay
from server.redaction.pseudonyms import Pseudonyms
from statemachine import events as ev
from statemachine import records as rec
from statemachine.codec import decode_state
from statemachine.digest import recompute
from statemachine.invariants import check_all
from statemachine.records import Checkpoint, Gap, Header, StepDone

from .faults.catalogue import ALL
from .faults.fault import Fault
from .faults.loads import DRAFTS, FAKE
from .faults.runner import record as play
from .follow import AHEAD, GUESSING, random_load
from .following_tapes import segments_in
from .redacting import KEY, both, essence, written
from .sim import POLICY
from .tampering import changed, first_step
from .tapes import golden


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("policy", [POLICY, AHEAD, GUESSING], ids=["plain", "ahead", "guessing"])
def test_random_loads_fold_and_plan_as_before(tmp_path: Path, seed: int, policy: Any) -> None:
    settings = {"lookahead": policy.lookahead, "draft_tokens": policy.draft_tokens}
    sim, _ = random_load(seed, **settings, lookup_ngram=policy.lookup_ngram)
    before, after = both(written(tmp_path / "tape", sim.capture.records), tmp_path / "out")
    assert before.exit_code in (CLEAN, TORN)
    assert essence(before) == essence(after)


FAKE_ALONE = [it for it in ALL if it.load.kernel == FAKE and not it.load.draft]
"""Faults of one model's cache: guesses of a draft model are not redacted."""


@pytest.mark.parametrize("fault", FAKE_ALONE, ids=lambda fault: fault.name)
def test_each_fault_is_found_at_the_same_place_of_the_redacted_tape(
    tmp_path: Path, fault: Fault
) -> None:
    tape = tmp_path / "tape"
    play(fault.load, tape, fault)
    before, after = both(tape, tmp_path / "out", fault.depth)
    assert before.exit_code == DIVERGED
    assert essence(before)[:2] == essence(after)[:2]
    hints = [[it for it in outcome.notes if "row that stands" in it] for outcome in (before, after)]
    assert hints[0] == hints[1]


def test_a_tape_of_a_draft_model_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    play(evolve(DRAFTS, draft=3, draft_blocks=50), tmp_path / "tape")
    with pytest.raises(Unusable, match="give away a tape of a server without --draft-model"):
        redact(str(tmp_path / "tape"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_golden_tapes_are_told_apart_as_before(tmp_path: Path) -> None:
    for number, path in enumerate((golden.PATH, golden.FLIGHTS, golden.DIVERGED)):
        before, after = both(path, tmp_path / f"{number}.log")
        assert essence(before) == essence(after)
        assert replay(str(tmp_path / f"{number}.log"), Options()).exit_code == before.exit_code


@pytest.mark.parametrize("kind", [rec.StepPlanned, StepDone, Checkpoint])
def test_a_digest_that_was_wrong_is_wrong_as_before(tmp_path: Path, kind: type) -> None:
    folder = segments_in(tmp_path)
    tape = [*Tape(str(folder))]
    tape = [it for at, it in enumerate(tape) if not at or not isinstance(it, Header)]
    place = first_step(tape, lambda it: isinstance(it, kind) and getattr(it, "step", 0) > 3)
    record: Any = tape[place]
    wrong = written(tmp_path / "wrong", changed(tape, place, digest=record.digest ^ 5))
    before, after = both(wrong, tmp_path / "out", "fold")
    assert before.exit_code == DIVERGED
    assert essence(before) == essence(after)


def test_a_checkpoint_of_another_state_is_another_one_as_before(tmp_path: Path) -> None:
    folder = segments_in(tmp_path)
    tape = [it for at, it in enumerate(Tape(str(folder))) if not at or not isinstance(it, Header)]
    first, other = [at for at, it in enumerate(tape) if isinstance(it, Checkpoint)][2:4]
    state: Any = tape[other]
    wrong = changed(tape, first, state=state.state, digest=state.digest)
    before, after = both(written(tmp_path / "wrong", wrong), tmp_path / "out", "fold")
    assert before.divergence is not None
    assert before.divergence.record == "Checkpoint"
    assert essence(before) == essence(after)


@pytest.mark.parametrize("kind", [ev.BlockPublished, ev.BlockEvicted])
def test_a_key_that_was_wrong_is_wrong_as_before(tmp_path: Path, kind: type) -> None:
    tape = [*Tape(str(golden.PATH))]
    for place, record in enumerate(tape):
        events = list(getattr(record, "events", ()))
        at = next((at for at, it in enumerate(events) if isinstance(it, kind)), None)
        if at is not None:
            events[at] = structs.replace(events[at], key=events[at].key ^ 1)
            tape = changed(tape, place, events=tuple(events))
            break
    before, after = both(written(tmp_path / "wrong", tape), tmp_path / "out", "fold")
    assert before.divergence is not None
    assert before.divergence.event_index == at
    assert essence(before) == essence(after)


def test_what_stands_behind_a_gap_is_redacted_from_its_checkpoint_on(tmp_path: Path) -> None:
    folder = segments_in(tmp_path)
    tape = [*Tape(str(folder))]
    tape = [it for at, it in enumerate(tape) if not at or not isinstance(it, Header)]
    places = [at for at, it in enumerate(tape) if isinstance(it, Checkpoint)]
    lossy = [*tape[: places[2] - 3], Gap(3, "full"), *tape[places[3] :]]
    before, after = both(written(tmp_path / "lossy", lossy), tmp_path / "out")
    assert before.counts.gaps == 1
    assert (before.exit_code, essence(before)) == (CLEAN, essence(after))


def test_checkpoints_of_a_redacted_tape_are_states_that_a_replay_can_start_from(
    tmp_path: Path,
) -> None:
    folder = segments_in(tmp_path)
    out = tmp_path / "out"
    redact(str(folder), str(out), KEY)
    states = [decode_state(it.state) for it in Tape(str(out)) if isinstance(it, Checkpoint)]
    assert len(states) > 4
    for state in states:
        check_all(state)
        assert recompute(state) == state.digest
    step = states[3].issued_step
    later = replay(str(out), Options(depth=PLAN, start=step + 1))
    assert (later.exit_code, later.started_after) == (CLEAN, step)


def test_a_tape_that_was_cut_is_redacted_to_where_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "torn"
    path.write_bytes(golden.PATH.read_bytes()[:5000])
    before, after = both(path, tmp_path / "out")
    assert (before.exit_code, after.exit_code) == (TORN, TORN)
    assert before.counts == after.counts


def test_prompts_of_pairs_share_no_more_than_their_prefix() -> None:
    names = Pseudonyms(KEY, repeats=False)
    rows = [names.rows(1, 1, (7,) * length) for length in range(6)]
    for short, long in pairwise(rows):
        assert long[: len(short)] == short
        assert len(set(long)) == len(long)
