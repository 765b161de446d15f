"""`replay export`: tapes for other tools, each read back by code that is not ours."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import msgpack
import msgspec
import pytest

from replay.cli import main
from replay.export import Options, export
from replay.reader import Tape
from replay.stat import stat
from statemachine.geometry import Geometry, Group
from statemachine.records import (
    Header,
    Record,
    RequestArrived,
    StepDone,
    StepFailed,
    StepPlanned,
    StepTimed,
)
from statemachine.script import Script
from statemachine.sequence import pack
from statemachine.state import State
from statemachine.tags import root_key, row_tag

from .sim import POLICY, SMALL, Sim
from .simulation_play import play
from .simulation_random import random_load
from .tampering import write
from .tapes.golden import DIVERGED, FLIGHTS
from .tapes.golden import PATH as GOLDEN


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """As vLLM 0.20 has it; so are those below."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


def written(tape: object, to: str, folder: Path, options: Options = Options()) -> bytes:  # noqa: B008
    out = folder / "out"
    report = export(str(tape), to, str(out), options)
    data = out.read_bytes()
    assert report.bytes == len(data)
    return data


def final_digest(tape: object) -> int:
    answered = [it for it in Tape(str(tape)) if isinstance(it, StepPlanned | StepDone | StepFailed)]
    return answered[-1].digest


def batches(data: bytes) -> list[EventBatch]:
    """The stream, cut by a reader of msgpack that is not msgspec."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(data)
    found, place = [], 0
    for _ in unpacker:
        found.append(msgspec.msgpack.decode(data[place : unpacker.tell()], type=EventBatch))
        place = unpacker.tell()
    assert place == len(data)
    return found


def applied(lines: bytes) -> State:
    """The state that a script's lines lead to."""
    parsed = [json.loads(line) for line in lines.splitlines() if not line.startswith(b"#")]
    script = Script(msgspec.convert(parsed[0]["geometry"], Geometry))
    for line in parsed[1:]:
        script.run(line)
    return script.state


@pytest.mark.parametrize("tape", [GOLDEN, FLIGHTS])
def test_every_record_is_a_line_that_says_all_of_it(tape: Path, tmp_path: Path) -> None:
    lines = written(tape, "jsonl", tmp_path).splitlines()
    records = list(Tape(str(tape)))
    assert [json.loads(line)["type"] for line in lines] == [type(it).__name__ for it in records]
    decoder = msgspec.json.Decoder(Record)
    assert [decoder.decode(line) for line in lines] == records


@pytest.mark.parametrize("tape", [GOLDEN, FLIGHTS])
def test_a_script_leads_to_the_state_of_the_tape(
    tape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert main(["export", str(tape), "--to", "script", "-o", str(out)]) == 0
    assert main(["check", str(out)]) == 0
    assert capsys.readouterr().out.endswith("lines hold\n")
    assert applied(out.read_bytes()).digest == final_digest(tape)


def test_scripts_of_random_loads_lead_to_the_states_of_their_tapes(tmp_path: Path) -> None:
    for seed in range(8):
        load = attrs.evolve(random_load(seed), full_disk={}, segment_bytes=0)
        path = tmp_path / f"{seed}.log"
        play(load, path)
        state = applied(written(path, "script", tmp_path))
        assert state.digest == final_digest(path), f"seed {seed}"


def test_the_script_of_a_tape_that_cannot_be_applied_fails_at_its_last_event(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert main(["export", str(DIVERGED), "--to", "script", "-o", str(out)]) == 0
    assert "`replay check` will fail at the script's end" in capsys.readouterr().err
    assert main(["check", str(out)]) == 1
    number = len(out.read_text().splitlines())
    said = capsys.readouterr().out
    failed = int(said.split("line ")[1].split(":")[0])
    assert number - 8 < failed <= number
    assert "InvariantBroken" in said


@pytest.mark.parametrize("tape", [GOLDEN, FLIGHTS])
def test_a_reader_of_kv_events_knows_what_can_be_found(tape: Path, tmp_path: Path) -> None:
    found = batches(written(tape, "kv-events", tmp_path))
    known: set[int] = set()
    kinds = Counter[str]()
    header = next(it for it in Tape(str(tape)) if isinstance(it, Header))
    for event in (event for batch in found for event in batch.events):
        kinds[type(event).__name__] += 1
        if isinstance(event, BlockStored):
            (key,) = event.block_hashes
            assert isinstance(key, int)
            assert key not in known
            assert event.parent_block_hash is None or event.parent_block_hash in known
            assert (event.medium, len(event.token_ids)) == ("GPU", event.block_size)
            known.add(key)
        elif isinstance(event, BlockRemoved):
            assert set(event.block_hashes) <= known
            known -= {key for key in event.block_hashes if isinstance(key, int)}
        else:
            known.clear()
    state = applied(written(tape, "script", tmp_path))
    assert known == {it.key for it in state.entries.values() if it.blocks[0]}
    assert min(kinds.values()) >= 1
    assert len(kinds) == 3
    assert [batch.ts for batch in found] == sorted(batch.ts for batch in found)
    assert header.created_ns == 0
    assert 0 < found[-1].ts < 60


def test_hashes_of_kv_events_are_of_the_parent_and_the_tokens(tmp_path: Path) -> None:
    sim = Sim(SMALL, POLICY)
    sim.submit(tuple(range(1, 13)), 4)
    sim.run()
    (tape,) = [write(tmp_path, sim.capture.records)]
    stored = [
        event for batch in batches(written(tape, "kv-events", tmp_path)) for event in batch.events
    ]
    assert [it.token_ids for it in stored if isinstance(it, BlockStored)][:3] == [
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        [9, 10, 11, 12],
    ]
    above = root_key(SMALL, next(it.namespace for it in sim.records(RequestArrived)))
    parent = None
    for event in stored:
        assert isinstance(event, BlockStored)
        assert event.parent_block_hash == parent
        key = row_tag(SMALL, above, pack(event.token_ids))
        assert event.block_hashes == [key]
        above = parent = key


def test_kv_events_are_maps_for_readers_that_want_them(tmp_path: Path) -> None:
    data = written(GOLDEN, "kv-events", tmp_path, Options(kv_maps=True))
    unpacker = msgpack.Unpacker()
    unpacker.feed(data)
    maps = [event for _, events in unpacker for event in events]
    arrays = [
        it for batch in batches(written(GOLDEN, "kv-events", tmp_path)) for it in batch.events
    ]
    assert [it["type"] for it in maps] == [type(it).__name__ for it in arrays]
    stored = next(it for it in maps if it["type"] == "BlockStored")
    assert set(stored) == {"type", *BlockStored.__struct_fields__} - {"extra_keys", "group_idx"}


def test_a_mooncake_trace_says_lengths_and_shared_prefixes(tmp_path: Path) -> None:
    sim = Sim(SMALL, POLICY)
    stem = tuple(range(8))
    given = [(*stem, 9), (*stem, 9, 9, 9), (9, 9, 9, 9, *stem[4:]), (*stem, 9)]
    actions = {
        1 + 3 * at: [lambda it=it, at=at: sim.submit(it, 2 + at)] for at, it in enumerate(given)
    }
    sim.run(actions)
    tape = write(tmp_path, sim.capture.records)
    data = written(tape, "mooncake", tmp_path, Options(block_tokens=4))
    lines = [json.loads(line) for line in data.splitlines()]
    assert [it["input_length"] for it in lines] == [9, 11, 8, 9]
    assert [it["output_length"] for it in lines] == [2, 3, 4, 5]
    # Blocks of four tokens, the last one in part: 9 alone is no 9 9 9; and 4 to 7 behind another
    # block are not the ones behind 0 to 3.
    assert [it["hash_ids"] for it in lines] == [[0, 1, 2], [0, 1, 3], [4, 5], [0, 1, 2]]
    stamps = [it["timestamp"] for it in lines]
    assert stamps == sorted(stamps)
    assert stamps[0] == 0 < stamps[-1]
    assert set(lines[0]) == {"timestamp", "input_length", "output_length", "hash_ids"}


def test_a_perfetto_trace_has_balanced_lanes_and_the_tapes_figures(tmp_path: Path) -> None:
    trace = json.loads(written(FLIGHTS, "perfetto", tmp_path))["traceEvents"]
    report = stat(str(FLIGHTS))
    lanes: dict[tuple[int, int], list[Any]] = {}
    for event in trace:
        if event["ph"] in "BE":
            lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    assert len(lanes) == report.requests.arrived
    for lane in lanes.values():
        assert [it["ph"] for it in lane] == ["B", "E"] * (len(lane) // 2)
        assert [it["ts"] for it in lane] == sorted(it["ts"] for it in lane)
        assert [it["name"] for it in lane[::2]] == [it["name"] for it in lane[1::2]]
        assert lane[0]["name"] == "queued"
    held = [it["args"]["held"] for it in trace if it["name"] == "blocks, group 0"]
    assert max(held) == report.pool[0].held_most
    rows = [it["args"] for it in trace if it["name"] == "rows"]
    assert sum(sum(it.values()) for it in rows) == report.rows.issued
    names = Counter(it["name"] for it in trace if it["ph"] == "i")
    assert names["preempted"] == report.requests.preemptions
    ended = sum(count for name, count in names.items() if name.startswith("ended by"))
    assert ended == sum(report.requests.ended.values())


def test_a_lane_is_queued_again_behind_a_preemption(tmp_path: Path) -> None:
    sim = Sim(Geometry(4, (Group(num_blocks=8),)), POLICY)
    for prompt in ((1,) * 12, (2,) * 12):
        sim.submit(prompt, 12)
    sim.run()
    tape = write(tmp_path, sim.capture.records)
    trace = json.loads(written(tape, "perfetto", tmp_path))["traceEvents"]
    names = [it["name"] for it in trace if it["ph"] == "B" and it["tid"] == 2]
    assert stat(tape).requests.preemptions == 1
    assert names == ["queued", "prompt", "answer", "queued", "prompt", "answer"]


def test_without_times_each_step_takes_a_millisecond(tmp_path: Path) -> None:
    sim = Sim(SMALL, POLICY)
    sim.submit((1, 2, 3), 4)
    sim.run()
    tape = write(tmp_path, [it for it in sim.capture.records if not isinstance(it, StepTimed)])
    trace = json.loads(written(tape, "perfetto", tmp_path))["traceEvents"]
    (ended,) = [it for it in trace if it["name"] == "ended by length"]
    assert ended["ts"] == 4 * 1000


def test_steps_of_a_trace_last_as_long_as_the_tape_says(tmp_path: Path) -> None:
    trace = json.loads(written(FLIGHTS, "perfetto", tmp_path))["traceEvents"]
    timed = {it.step: it.parts_us for it in Tape(str(FLIGHTS)) if isinstance(it, StepTimed)}
    steps = [it for it in trace if it["ph"] == "X" and it["name"].startswith("step ")]
    assert {int(it["name"][5:]): it["dur"] for it in steps} == {
        step: sum(parts.values()) for step, parts in timed.items()
    }
    for lane in (1, 2):
        mine = [it for it in steps if it["tid"] == lane]
        pairs = pairwise(mine)
        assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in pairs)


def test_an_export_can_stop_behind_a_step(tmp_path: Path) -> None:
    lines = written(GOLDEN, "jsonl", tmp_path, Options(until=5)).splitlines()
    steps = [json.loads(line).get("step", 0) for line in lines]
    assert max(steps) == 5
    assert len(lines) > 10


def test_a_script_of_a_later_segment_is_refused_and_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = attrs.evolve(random_load(3), fail={}, full_disk={}, segment_bytes=400)
    play(load, tmp_path / "captures")
    segment = sorted((tmp_path / "captures").glob("*.tape*"))[-1]
    out = tmp_path / "out"
    assert main(["export", str(segment), "--to", "script", "-o", str(out)]) == 2
    assert "the tape begins in the middle of a run" in capsys.readouterr().err
    assert [it.name for it in tmp_path.iterdir()] == ["captures"]


def test_places_that_cannot_be_written_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["export", str(GOLDEN), "--to", "jsonl"]
    assert main([*given, "-o", str(tmp_path)]) == 2
    assert "is a folder: give the name of a file" in capsys.readouterr().err
    assert main([*given, "-o", str(tmp_path / "no" / "out")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
    assert main([*given, "-o", "-", "--json"]) == 2
    assert "--json needs an -o FILE" in capsys.readouterr().err


def test_the_report_says_what_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert main(["export", str(GOLDEN), "--to", "mooncake", "-o", out, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["format"], report["to"], report["items"]) == (1, "mooncake", 10)
    assert main(["export", str(FLIGHTS), "--to", "kv-events", "-o", out]) == 0
    assert "only those of group 0 are in it" in capsys.readouterr().err
