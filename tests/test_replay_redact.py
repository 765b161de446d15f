"""replay redact: a tape without what users said, that says all else, right or wrong, as before."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from attrs import evolve
from msgspec import structs

from replay import schema
from replay.cli import main
from replay.errors import Unusable
from replay.reader import Tape
from replay.redact import redact
from replay.run import CLEAN, DIVERGED, PLAN, TORN, UNUSABLE, Options, Outcome, replay
from server.redaction.pseudonyms import Pseudonyms, without_folders
from statemachine import events as ev
from statemachine import records as rec
from statemachine.codec import TapeEncoder, decode_state
from statemachine.digest import recompute
from statemachine.events import Namespace
from statemachine.geometry import Geometry, Group
from statemachine.invariants import check_all
from statemachine.records import Checkpoint, Gap, Header, Record, RequestArrived, StepDone
from statemachine.state import new_state
from statemachine.tags import root_key

from .faults.catalogue import ALL
from .faults.fault import Fault
from .faults.loads import DRAFTS, FAKE
from .faults.runner import record as play
from .follow import AHEAD, GUESSING, Letters, random_load
from .sim import POLICY, SMALL, Sim
from .tampering import changed, first_step
from .tapes import golden
from .test_replay_follow import segments_in

KEY = b"a key for the tests"
MANY = 1_000_000
"""Tokens of this vocabulary are no counts, positions or ids."""


def written(path: Path, records: Sequence[Record]) -> Path:
    path.write_bytes(TapeEncoder().encode(records))
    return path


def both(path: Path, out: Path, depth: str = PLAN, **options: Any) -> tuple[Outcome, Outcome]:
    """What a replay says of a tape and of the same tape redacted."""
    redact(str(path), str(out), KEY, **options)
    before, after = (replay(str(it), Options(depth=depth)) for it in (path, out))
    return before, after


def essence(outcome: Outcome) -> tuple[object, ...]:
    found = outcome.divergence
    what = None
    if found is not None:
        what = (
            found.kind, found.step, found.record, found.event_index, found.sequence, found.group,
            found.block, found.position, [it.name for it in found.values],
        )  # fmt: skip
    return outcome.exit_code, what, outcome.counts


def private(sim_options: dict[str, Any]) -> Sim:
    """A load of people who say what nobody else may know."""
    policy = structs.replace(POLICY, context_tokens=96, **sim_options)
    geometry = Geometry(4, (Group(num_blocks=40), Group("window", num_blocks=40, window=8)))
    sim = Sim(geometry, policy, vocab_size=MANY, decoder=Letters)
    stem = tuple(range(3_000_000, 3_000_011))
    spaces = [Namespace("llama-for-alice", 3, "alice-salt"), Namespace(), Namespace()]
    for number, space in enumerate(spaces * 3):
        prompt = (*stem, *range(2_000_000 + 100 * number, 2_000_000 + 100 * number + 9))
        sim.submit(
            (*prompt, 777_777, 777_777), 9, namespace=space, end_tokens=(888_888, 777_777),
            stop=("the secret word",) if number % 2 else (),
            logit_bias=((999_999, -5.0),), grammar='{"regex": "hidden"}', seed=number,
        )  # fmt: skip
    sim.run()
    sim.engine.stop()
    return sim


def numbers_in(value: Any) -> Iterator[int]:
    """All whole numbers, and those in packed bytes, of a record, that tokens may show in."""
    if isinstance(value, rec.Observation):
        return  # lengths, and hashes of block ids
    if isinstance(value, Checkpoint):
        yield from numbers_in(msgspec.to_builtins(value.requests))
        state = decode_state(value.state)
        for sequence in state.sequences.values():
            yield from (*sequence.tokens, *sequence.keys, sequence.root)
            yield from (row.token for row in sequence.speculative)
        for entry in state.entries.values():
            yield entry.key
            yield from msgspec.convert(memoryview(entry.tokens).cast("Q").tolist(), list[int])
        yield from (value.digest, *state.by_key)
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from numbers_in(getattr(value, name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from numbers_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from numbers_in(item)
    elif isinstance(value, int):
        yield value


@pytest.mark.parametrize(
    ("policy", "middle"),
    [
        ({"lookahead": True}, False),
        ({}, True),
        ({"draft_tokens": 3, "lookup_ngram": 2}, False),
        ({"draft_tokens": 3, "lookup_ngram": 2}, True),
    ],
)
def test_no_token_key_digest_score_or_text_of_a_tape_is_left(
    tmp_path: Path, policy: dict[str, Any], middle: bool
) -> None:
    sim = private(policy)
    records = [structs.replace(sim.capture.records[0], model="/home/alice/model")]
    records += sim.capture.records[1:]
    if middle:
        records = with_checkpoint(records)
    path = written(tmp_path / "tape.log", records)
    before, after = both(path, tmp_path / "out.log")
    assert essence(before) == essence(after)
    assert before.exit_code == CLEAN
    told = {it for record in records for it in numbers_in(record) if it > 500_000}
    left = {it for record in Tape(str(tmp_path / "out.log")) for it in numbers_in(record)}
    assert {3_000_005, 777_777, 888_888, 999_999} <= told
    assert len(told) > 200
    geometry = sim.engine.view.state.geometry
    same = {root_key(geometry, Namespace()), new_state(geometry).digest}
    assert told & left <= same
    data = (tmp_path / "out.log").read_bytes()
    for text in (b"alice", b"secret word", b"hidden", b"llama"):
        assert text in path.read_bytes()
        assert text not in data
    done = [it for it in Tape(str(tmp_path / "out.log")) if isinstance(it, StepDone)]
    assert {it for record in done for it in (*record.logits, *record.margins)} == {0.0}


def with_checkpoint(records: list[Record]) -> list[Record]:
    """The second half of a tape: a header, a checkpoint of the state there, and what follows."""
    from replay.plan import Planner
    from server.view import checkpoint

    planner = Planner()
    place = 0
    for at, record in enumerate(records):
        planner.feed(record)
        view = planner.view
        if at > len(records) // 2 and isinstance(record, StepDone) and view and not view.flights:
            place = at
            break
    assert planner.view is not None
    assert place, "the load has a moment without a step in flight"
    assert planner.view.state.sequences
    assert planner.view.state.entries
    return [records[0], checkpoint(planner.view), *records[place + 1 :]]


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


def arrivals(path: Path) -> list[tuple[int, ...]]:
    return [it.tokens for it in Tape(str(path)) if isinstance(it, RequestArrived)]


def test_the_same_prefix_has_the_same_rows_and_a_token_never_the_same_number(
    tmp_path: Path,
) -> None:
    sim = Sim(SMALL, POLICY)
    prompts = [(5, 5, 5, 5, 6, 7), (5, 5, 5, 5, 6, 8, 5), (6, 5, 5, 5, 6, 7)]
    for prompt in prompts:
        sim.submit(prompt, 3)
    sim.submit(prompts[0], 3, namespace=Namespace(salt="x"))
    sim.run()
    sim.engine.stop()
    path = written(tmp_path / "tape", sim.capture.records)
    redact(str(path), str(tmp_path / "out"), KEY)
    first, second, third, salted = arrivals(tmp_path / "out")
    assert first[:5] == second[:5]
    everything = [*first, *second[5:], *third, *salted]
    assert len(set(everything)) == len(everything) == 6 + 2 + 6 + 6
    redact(str(path), str(tmp_path / "open"), KEY)
    assert (tmp_path / "open").read_bytes() == (tmp_path / "out").read_bytes()
    for name, key in (("other", b"another key"), ("secret", None)):
        redact(str(path), str(tmp_path / name), key)
        assert {*everything}.isdisjoint(it for row in arrivals(tmp_path / name) for it in row)


def test_equal_tokens_stay_equal_where_drafts_are_looked_up_unless_they_must_not(
    tmp_path: Path,
) -> None:
    report = redact(str(golden.FLIGHTS), str(tmp_path / "out"), KEY)
    assert (report.repeats, report.depth, report.verdict.split(":")[0]) == (
        True, PLAN, "CLEAN at depth plan",
    )  # fmt: skip
    tokens = {it for row in arrivals(tmp_path / "out") for it in row}
    assert len(tokens) == len({it for row in arrivals(golden.FLIGHTS) for it in row})
    hidden = redact(str(golden.FLIGHTS), str(tmp_path / "hidden"), KEY, hide_repeats=True)
    assert (hidden.repeats, hidden.depth, hidden.diverged) == (False, "fold", False)
    assert "does not plan" in hidden.notes[0]
    for row in arrivals(tmp_path / "hidden"):
        assert len(set(row)) == len(row)


def test_a_tape_that_was_cut_is_redacted_to_where_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "torn"
    path.write_bytes(golden.PATH.read_bytes()[:5000])
    before, after = both(path, tmp_path / "out")
    assert (before.exit_code, after.exit_code) == (TORN, TORN)
    assert before.counts == after.counts


def test_a_redacted_tape_is_refused_by_all_that_need_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, new = str(tmp_path / "out"), str(tmp_path / "new")
    redact(str(golden.DIVERGED), out, KEY)
    for arguments in (
        [out, "--depth", "forward"],
        [out, "--depth", "reference"],
        ["minimize", out, "-o", new],
        ["test", out, "-o", new],
        ["redact", out, "-o", new],
    ):
        assert main(arguments) == UNUSABLE, arguments
        said = capsys.readouterr().err
        assert "redacted" in said
        assert said.count("\n") == 1
    assert not Path(new).exists()


def test_nothing_is_written_over_and_a_short_key_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, key = tmp_path / "out", tmp_path / "key"
    out.write_bytes(b"mine")
    assert main(["redact", str(golden.PATH), "-o", str(out)]) == UNUSABLE
    assert out.read_bytes() == b"mine"
    key.write_bytes(b"short")
    new = str(tmp_path / "new")
    assert main(["redact", str(golden.PATH), "-o", new, "--key", str(key)]) == UNUSABLE
    assert "give 16 at least" in capsys.readouterr().err
    key.write_bytes(b"long enough for a key")
    assert main(["redact", str(golden.PATH), "-o", new, "--key", str(key), "--json"]) == CLEAN
    told = json.loads(schema.PATH.read_text(encoding="utf-8"))
    wanted = {"$schema": told["$schema"], "$ref": "#/$defs/RedactReport", "$defs": told["$defs"]}
    jsonschema.validate(json.loads(capsys.readouterr().out), wanted)
    data = bytearray(golden.PATH.read_bytes())
    data[4000] ^= 1
    out.write_bytes(data)
    with pytest.raises(Unusable, match="corrupt at byte"):
        redact(str(out), str(tmp_path / "none"), KEY)
    assert not (tmp_path / "none").exists()


def test_folders_are_cut_off_of_paths() -> None:
    assert without_folders("/home/alice/models/SmolLM2") == "SmolLM2"
    assert without_folders("OpenBLAS 0.3.28 (/opt/bob/lib/libopenblas.so), 2 threads") == (
        "OpenBLAS 0.3.28 (libopenblas.so), 2 threads"
    )
    names = Pseudonyms(KEY, repeats=False)
    assert names.reason("length") == "length"
    assert names.reason("alice") != "alice"
    assert names.text("id", "") == ""
    assert names.text("id", "a") != names.text("stop", "a").replace("stop", "id")


KNOWN = {
    rec.Parameters: "max_tokens temperature top_p top_k min_p seed end_tokens stop priority "
    "frequency_penalty presence_penalty repetition_penalty logit_bias grammar logprobs "
    "score_from embed",
    Header: "format software created_ns model digests geometry policy capabilities device blas "
    "sanitize context_tokens layers rank world segment redacted seeds adapters "
    "kv_bits draft",
    rec.AdapterUsed: "name digest path",
    RequestArrived: "request external_id tokens parameters namespace parent",
    rec.RequestCancelled: "request reason",
    rec.Finished: "request tokens_kept reason",
    rec.FlushRequested: "reason",
    rec.Observation: "offset_reads updates rows_updated attends strangers starts rows visible "
    "tables",
    rec.ShadowFinding: "seq group position block expected found",
    rec.ShadowReport: "checked found findings",
    rec.StepPlanned: "step events digest",
    StepDone: "step observation shadow sampled tokens logits margins events offsets digest scored "
    "scores",
    rec.StepFailed: "step stage error blamed events digest",
    rec.StepTimed: "step parts_us",
    Gap: "records reason",
    rec.RequestSnapshot: "arrived output running cached_tokens passed",
    Checkpoint: "step state requests digest alone stuck flush offered draft",
    rec.BlocksOffered: "request first end",
    rec.TapeEnded: "steps",
    Namespace: "adapter version salt",
    ev.Opened: "seq namespace",
    ev.PrefixAdopted: "seq tokens prompt_rows blocks",
    ev.Appended: "seq step rows tokens blocks purpose",
    ev.AppendedEach: "step seqs tokens purpose",
    ev.Committed: "seq tokens",
    ev.CommittedEach: "seqs tokens",
    ev.BlockPublished: "seq index group block key",
    ev.BlockEvicted: "group block key",
    ev.BlockStored: "group block key",
    ev.BlockLoaded: "seq step group block parent tokens key",
    ev.Closed: "seq reason",
}


def test_redacting_knows_each_field_that_may_tell_something() -> None:
    for kind, fields in KNOWN.items():
        assert kind.__struct_fields__ == tuple(fields.split()), (
            f"{kind.__name__} has other fields: say in replay/redacting.py what becomes of them"
        )


def test_prompts_of_pairs_share_no_more_than_their_prefix() -> None:
    names = Pseudonyms(KEY, repeats=False)
    rows = [names.rows(1, 1, (7,) * length) for length in range(6)]
    for short, long in pairwise(rows):
        assert long[: len(short)] == short
        assert len(set(long)) == len(long)
