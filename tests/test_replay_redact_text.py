"""`replay redact`: what of a tape's tokens, keys, texts and paths is left, and what needs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec import structs

from replay import schema
from replay.cli import main
from replay.errors import Unusable
from replay.reader import Tape
from replay.redact import redact
from replay.run import CLEAN, PLAN, UNUSABLE
from server.redaction.pseudonyms import Pseudonyms, without_folders
from statemachine import events as ev
from statemachine import records as rec
from statemachine.events import Namespace
from statemachine.records import Checkpoint, Gap, Header, RequestArrived, StepDone
from statemachine.state import new_state
from statemachine.tags import root_key

from .redacting import KEY, both, essence, numbers_in, private, with_checkpoint, written
from .sim import POLICY, SMALL, Sim
from .tapes import golden


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
