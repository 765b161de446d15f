"""`replay serve-load`: which answers and times are compared, and how a difference is told."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from kernel.hf import read_tokenizer
from replay import schema
from replay.reader import Tape
from replay.serve_load_client import Measured
from replay.serve_load_compare import NOTHING, compare, first_difference
from replay.serve_load_tape import Ended
from statemachine.records import Parameters, RequestArrived

from ..tampering import write
from .completions_server import completions_server
from .recorded import TAPE, Printed, Recorded, say, told


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


def test_the_report_is_what_the_schema_says(run: Printed) -> None:
    published = json.loads(schema.PATH.read_text(encoding="utf-8"))
    with completions_server(Recorded(TAPE, {4: say(1)})) as server:
        _, report = run(server)
    jsonschema.validate(
        report, published["$defs"]["ServeLoadReport"] | {"$defs": published["$defs"]}
    )
    assert list(published["$defs"]["ServeLoadReport"]["properties"]) == list(report)
