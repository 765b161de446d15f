"""`replay minimize`: faults among 200 requests come down to a few, and what is left is a tape."""

from __future__ import annotations

import functools
import io
import random
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zstandard
from attrs import frozen
from msgspec import structs

from replay.cli import main
from replay.errors import Unusable
from replay.fold import EACH_EVENT, Fold
from replay.judge import first_divergence, sameness
from replay.minimize import MinimizeReport, Size, as_text, minimize
from replay.project import Projection
from replay.reader import Tape
from replay.run import FOLD, PLAN, Options, checker_for, replay
from replay.search import fewest
from replay.subset import Kept, Refused, Wrong
from replay.survey import survey
from server.policy import Policy
from statemachine.codec import TapeEncoder
from statemachine.events import Appended, BlockCopied, BlockPublished, PrefixAdopted
from statemachine.geometry import Geometry, Group
from statemachine.records import (
    Checkpoint,
    Header,
    Record,
    RequestArrived,
    ShadowFinding,
    ShadowReport,
    StepDone,
    StepPlanned,
    StepTimed,
)
from statemachine.tags import sequence_tags

from .faults import loads
from .faults.catalogue import ALL, BY_NAME
from .faults.fault import Fault, Witness
from .faults.loads import FAKE, Load
from .faults.runner import record
from .planting import plant

SHALLOWEST = Options(depth="")
FEW = 3

PLANTED_IN_CI = ("S1", "S3-one-ahead", "pads-not-trimmed", "slot-off-by-one", "row-hidden")


def shrunk(fault: Fault, tape: Path, small: Path) -> MinimizeReport:
    """Minimize a tape, with a fault in that replay has too."""
    with fault.active(Witness()) if fault.stays else nullcontext():
        return minimize(str(tape), str(small), SHALLOWEST)


@frozen
class Shrunk:
    """A tape of 200 requests with a fault, the small one made of it, and what was said of that."""

    tape: Path
    small: Path
    report: MinimizeReport


@pytest.fixture(scope="module")
def shrunk_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Shrunk]:
    """By a fault's name; each is planted and minimized once."""

    @functools.cache
    def made(name: str) -> Shrunk:
        fault, folder = BY_NAME[name], tmp_path_factory.mktemp("shrunk")
        small = folder / "small.log"
        for share in (0.5, 0.0):  # in the tape's middle, where the fault shows there
            tape = folder / f"{name} {share}.log"
            plant(fault, tape, share=share)
            with suppress(Unusable):
                return Shrunk(tape, small, shrunk(fault, tape, small))
        raise AssertionError(f"{name} does not show among 200 requests")

    return made


@pytest.mark.parametrize("name", PLANTED_IN_CI)
def test_a_fault_among_200_requests_comes_down_to_three_at_most(
    name: str, shrunk_of: Callable[[str], Shrunk]
) -> None:
    found = shrunk_of(name)
    tape, small, report = found.tape, found.small, found.report
    assert report.before.requests == 200
    assert report.after.requests <= FEW
    assert report.after.bytes < report.before.bytes / 20
    was = replay(str(tape), Options(depth=report.depth)).divergence
    now = replay(str(small), Options(depth=report.depth)).divergence
    assert was is not None
    assert now is not None
    assert sameness(now, False) == sameness(was, False)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_faults_and_more_come_down_to_three_requests_out_of_200(
    shrunk_of: Callable[[str], Shrunk],
) -> None:
    few = []
    for fault in [it for it in ALL if it.load.kernel == FAKE and not it.load.segment_bytes][:24]:
        report = shrunk_of(fault.name).report
        assert report.after.requests <= report.before.requests
        if report.after.requests <= FEW and report.before.requests >= 100:
            few.append(fault.name)
    assert len(few) >= 20


@pytest.fixture
def small_of(tmp_path: Path) -> SimpleNamespace:
    """Tapes of faults' own loads, and the small ones made of them."""

    def made(name: str, short: bool = False) -> tuple[MinimizeReport, list[Record]]:
        fault, tape, small = BY_NAME[name], tmp_path / f"{name}.log", tmp_path / "small.log"
        record(fault.load, tape, fault, Witness())
        report = minimize(str(tape), str(small), SHALLOWEST, short=short)
        return report, list(Tape(str(small)))

    return SimpleNamespace(made=made, tape=tmp_path / "small.log")


def test_the_report_says_exactly_how_much_it_shrank(small_of: SimpleNamespace) -> None:
    report, records = small_of.made("S1")
    assert report.before == Size(4, 6, 212, report.before.bytes)
    assert report.after == Size(1, 2, 65, small_of.tape.stat().st_size)
    assert sum(isinstance(it, RequestArrived) for it in records) == 1
    assert sum(isinstance(it, StepPlanned) for it in records) == 2
    assert not any(isinstance(it, StepTimed) for it in records)
    text = as_text(report)
    assert "1 of 4 requests still diverge (observation, step 2)" in text
    assert "requests             4           1" in text


def test_nothing_stands_on_the_small_tape_behind_what_diverges(small_of: SimpleNamespace) -> None:
    report, records = small_of.made("S1")
    assert isinstance(records[-1], StepDone)
    assert records[-1].step == report.step == 2


def test_steps_keep_their_numbers_and_the_wrong_value_is_the_recorded_one(
    small_of: SimpleNamespace,
) -> None:
    small_of.made("row-hidden")
    was = replay(str(small_of.tape.with_name("row-hidden.log")), Options()).divergence
    now = replay(str(small_of.tape), Options()).divergence
    assert was is not None
    assert now is not None
    assert (now.step, now.sequence, now.values) == (was.step, was.sequence, was.values)
    assert now.event == was.event


def test_a_tape_is_minimized_to_the_same_bytes_each_time(small_of: SimpleNamespace) -> None:
    small_of.made("wrong-victim")
    first = small_of.tape.read_bytes()
    small_of.made("wrong-victim")
    assert small_of.tape.read_bytes() == first


def test_the_donor_of_a_prefix_that_is_adopted_wrongly_stays(small_of: SimpleNamespace) -> None:
    _, records = small_of.made("S4")
    events = [event for it in records for event in getattr(it, "events", ())]
    (adopted,) = (it for it in events if isinstance(it, PrefixAdopted))
    donors = {it.seq for it in events if isinstance(it, BlockPublished)}
    assert donors
    assert adopted.seq not in donors


def test_who_wrote_the_row_that_stands_in_a_wrong_place_stays(tmp_path: Path) -> None:
    """A row of request 0 is found in a block that request 2 has now: the tape diverges without
    request 0 too, but only with it does it say what happened.
    """
    requests = tuple(loads.Request(loads.tokens(9, n), 4, at=1 + 10 * n) for n in range(4))
    policy = structs.replace(loads.POLICY, prefix_cache=False)
    tape, pool = tmp_path / "tape", Geometry(block_size=4, groups=(Group(num_blocks=12),))
    record(Load("blocks that are used again", requests, policy, pool), tape)
    fold, old = Fold(), dict[int, int]()
    step = 0
    for it in Tape(str(tape)):
        fold.feed(it)
        for seq, sequence in sorted(fold.state.sequences.items()):
            first, tag = sequence.tables[0][:1], sequence_tags(pool, sequence, 0, 1)
            if isinstance(it, StepPlanned) and seq == 0:
                old[first[0]] = tag[0]
            elif not step and isinstance(it, StepPlanned) and first and first[0] in old:
                finding = ShadowFinding(seq, 0, 0, first[0], tag[0], old[first[0]])
                step = it.step
    records = list(Tape(str(tape)))
    done = next(n for n, it in enumerate(records) if isinstance(it, StepDone) and it.step == step)
    shadow = ShadowReport(records[done].shadow.checked, 1, (finding,))
    records[done] = structs.replace(records[done], shadow=shadow)
    tape.write_bytes(TapeEncoder().encode(records))
    minimize(str(tape), str(tmp_path / "small"), SHALLOWEST)
    small = list(Tape(str(tmp_path / "small")))
    assert [it.request for it in small if isinstance(it, RequestArrived)] == [0, 2]


def test_a_wrong_digest_keeps_its_difference(small_of: SimpleNamespace) -> None:
    report, _records = small_of.made("S3")
    large = small_of.tape.with_name("S3.log")
    off = []
    for path in (large, small_of.tape):
        found = replay(str(path), Options()).divergence
        assert found is not None
        recorded, derived = (int(it, 16) for it in re.findall(r"\b[0-9a-f]{16}\b", found.summary))
        off.append((recorded - derived) % (1 << 64))
    assert off[0] == off[1] != 0
    assert report.after.rows > 0


def test_short_begins_at_a_checkpoint_right_before_the_divergence(
    small_of: SimpleNamespace,
) -> None:
    whole, _ = small_of.made("row-hidden")
    report, records = small_of.made("row-hidden", short=True)
    assert whole.after.steps > report.after.steps == 1
    assert isinstance(records[1], Checkpoint)
    assert records[1].step == report.step - 1
    assert any("`replay test` cannot run" in note for note in report.notes)


def every_kind_of_load() -> list[Load]:
    """One of each feature: chunks, prefixes, windows, drafts, lookahead, forks, failures."""
    return [
        loads.MIXED, loads.REPEATS, loads.TIGHT, loads.EVAL_FAILS, loads.BUILD_FAILS,
        loads.WINDOWS, loads.EVICTS, loads.AHEAD, loads.AHEAD_EVAL_FAILS, loads.AHEAD_WINDOWS,
        loads.AHEAD_TIGHT, loads.DRAFTS, loads.BOTH, loads.DRAFTS_WINDOWS, loads.FORKS,
        loads.AHEAD_FORKS, loads.FLUSHED, loads.PADDED, loads.CANCELS,
    ]  # fmt: skip


@pytest.mark.parametrize("load", every_kind_of_load(), ids=lambda load: load.name)
def test_any_requests_of_a_clean_tape_with_those_they_depend_on_are_a_clean_tape(
    load: Load, tmp_path: Path
) -> None:
    tape = tmp_path / "tape.log"
    record(load, tape)
    records = list(Tape(str(tape)))
    about = survey(records, Options(depth=FOLD), checker_for, lambda: 0)
    assert about.found is None
    wrong = Wrong(len(records), -1, lost=frozenset(_lost(records)))
    generator = random.Random(load.name)
    for _ in range(8):
        some = generator.sample(sorted(about.requests), generator.randint(1, 3))
        kept = about.with_dependencies(some)
        made = list(Projection(Kept(kept), wrong).records(records))
        assert {it.request for it in made if isinstance(it, RequestArrived)} == kept
        assert first_divergence(made, Options(depth=FOLD), checker_for, EACH_EVENT) is None
        assert rows_of(made, kept) == rows_of(records, kept) != {}
        TapeEncoder().encode(made)


def _lost(records: list[Record]) -> list[int]:
    return [it.step for it in records if getattr(it, "stage", "") == "eval"]


def rows_of(records: list[Record], seqs: frozenset[int]) -> dict[tuple[int, int], int]:
    """Offsets that were recorded for some sequences, by step and sequence."""
    found, batches = {}, dict[int, list[int]]()
    for it in records:
        if isinstance(it, StepPlanned):
            order: list[int] = []
            for event in it.events:
                each = getattr(event, "seqs", None) or (getattr(event, "seq", -1),)
                rows = type(event).__name__ in ("Appended", "AppendedEach")
                order += [seq for seq in each if rows and order[-1:] != [seq]]
            batches[it.step] = order
        elif isinstance(it, StepDone):
            for seq, offset in zip(batches[it.step], it.offsets, strict=True):
                if seq in seqs:
                    found[it.step, seq] = offset
    return found


def test_an_adoption_without_its_donor_is_refused(tmp_path: Path) -> None:
    tape = tmp_path / "tape.log"
    record(loads.REPEATS, tape)
    records = list(Tape(str(tape)))
    with pytest.raises(Refused, match="not published"):
        list(Projection(Kept(frozenset({1})), Wrong(len(records), -1)).records(records))


def test_blocks_are_renamed_where_a_smaller_run_could_not_have_reached_them(
    tmp_path: Path,
) -> None:
    """The pool of 200 requests has grown by more blocks than an event may skip."""
    geometry = Geometry(block_size=1, groups=(Group(num_blocks=4000),))
    policy = Policy(max_batch_tokens=256, context_tokens=128, max_running=64)
    requests = tuple(loads.Request(loads.tokens(60, n), 4) for n in range(30))
    load = Load("many blocks", requests, policy, geometry)
    tape = tmp_path / "tape.log"
    record(load, tape)
    records = list(Tape(str(tape)))
    taken = [
        block
        for it in records
        for event in getattr(it, "events", ())
        if isinstance(event, Appended) and event.seq == 29
        for block in event.blocks[0]
    ]
    assert min(taken) > 1024
    made = list(Projection(Kept(frozenset({29})), Wrong(len(records), -1)).records(records))
    assert first_divergence(made, Options(), checker_for, EACH_EVENT) is None
    here = [
        block
        for it in made
        for event in getattr(it, "events", ())
        if isinstance(event, Appended)
        for block in event.blocks[0]
    ]
    assert len(here) == len(taken)
    assert max(here) < min(taken)


def test_delta_debugging_finds_a_set_of_which_no_single_one_can_go() -> None:
    tried = []

    def holds(some: frozenset[int]) -> bool:
        tried.append(some)
        return {3, 77} <= some

    assert fewest(frozenset(range(100)), frozenset(), holds) == {3, 77}
    assert len(tried) < 60
    assert fewest(frozenset(range(9)), frozenset({5}), lambda some: True) == {5}
    assert fewest(frozenset({4}), frozenset(), lambda some: True) == {4}


@pytest.fixture
def tape(tmp_path: Path) -> Path:
    """A tape that diverges by S1."""
    path = tmp_path / "capture.log"
    record(BY_NAME["S1"].load, path, BY_NAME["S1"], Witness())
    return path


def test_compressed_tapes_folders_and_standard_input_are_minimized_alike(
    tape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packed, folder = tmp_path / "capture.zst", tmp_path / "captures"
    packed.write_bytes(zstandard.compress(tape.read_bytes()))
    folder.mkdir()
    (folder / "000001-00000.tape").write_bytes(tape.read_bytes())
    stdin = SimpleNamespace(buffer=io.BytesIO(tape.read_bytes()))
    monkeypatch.setattr(sys, "stdin", stdin)
    made = []
    for number, source in enumerate((tape, packed, folder, "-")):
        small = tmp_path / f"small {number}"
        assert main(["minimize", str(source), "-o", str(small)]) == 0
        made.append(small.read_bytes())
    assert made[0] == made[1] == made[2] == made[3]
    assert "1 of 4 requests still diverge" in capsys.readouterr().out


def test_a_small_tape_can_be_read_by_its_owner_only(tape: Path, tmp_path: Path) -> None:
    minimize(str(tape), str(tmp_path / "small"), SHALLOWEST)
    assert (tmp_path / "small").stat().st_mode & 0o777 == 0o600


def test_json_has_the_report(
    tape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["minimize", str(tape), "-o", str(tmp_path / "small"), "--json"]) == 0
    report = msgspec.json.decode(capsys.readouterr().out, type=MinimizeReport)
    assert (report.format, report.depth, report.diverges) == (1, "fold", "observation")


def test_what_cannot_be_minimized_is_said_in_one_sentence_with_exit_2(
    tape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clean, redacted, out = tmp_path / "clean", tmp_path / "redacted", str(tmp_path / "small")
    record(loads.MIXED, clean)
    header, *rest = Tape(str(tape))
    assert isinstance(header, Header)
    redacted.write_bytes(TapeEncoder().encode([structs.replace(header, redacted=True), *rest]))
    for arguments, said in (
        ([str(clean), "-o", out], "does not diverge at depth fold or plan: there is nothing to"),
        ([str(clean), "-o", out, "--depth", "fold"], "does not diverge at depth fold"),
        ([str(redacted), "-o", out], "the tape is redacted"),
        ([str(tape), "-o", str(tape)], "is the tape itself, which is never changed"),
        ([str(tape), "-o", str(tmp_path)], "is a folder"),
        ([str(tape), "-o", str(tmp_path / "no" / "small")], "cannot be written"),
        ([str(tmp_path / "none"), "-o", out], "does not exist"),
    ):
        assert main(["minimize", *arguments]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
        assert "Traceback" not in error


def test_a_depth_that_is_asked_for_is_the_one_that_is_judged(tape: Path, tmp_path: Path) -> None:
    report = minimize(str(tape), str(tmp_path / "small"), Options(depth=PLAN))
    assert (report.depth, report.diverges) == (PLAN, "observation")


def test_copies_stay_with_the_block_that_they_were_made_of(small_of: SimpleNamespace) -> None:
    report, records = small_of.made("shared-block-written")
    events = [event for it in records for event in getattr(it, "events", ())]
    published = {it.block for it in events if isinstance(it, BlockPublished)}
    for it in events:
        if isinstance(it, BlockCopied):
            assert it.source in published
    assert report.how.startswith("the recorded steps")
