"""How fast tapes are replayed, and whether that, or memory, grows with a tape's length.

Rates are of decode steps of 32 and 64 rows, with and without a step in flight. Growth is measured
in processes of their own, which read a tape that is made while they read it, so that no disk is
needed: chats of 32 at a time, most of whose rows are prompts. For the fold the tape is made by
hand; for the plan a scheduler has to make it, which takes longer than the replay.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import structs

from kernel.fake import FakeKernel
from replay.parallel import replay_segments
from replay.run import CLEAN, FOLD, PLAN, Options, Outcome, replay
from server import capture
from server.engine import Engine
from server.loop import Parts
from server.policy import Policy
from server.submission import Submission
from statemachine.geometry import Geometry, Group
from statemachine.records import FORMAT, Header, Parameters

from . import machine
from .replay_child import measured
from .table import Table

ANSWER_TOKENS = 600
FOLDER_ROUNDS = 40
SEGMENT_BYTES = 1_500_000
"""Behind a checkpoint of half as much, which each pass begins with."""
REPEATS = 5
ROWS_MIN = 10_000
ROWS_MAX = 100_000
"""The longest tape where nobody asks for longer ones."""
ASKED = {FOLD: 300_000, PLAN: 3_000 * 32}
"""Rows a second."""
PACE_SECONDS = 0.1
_MAKERS = {
    FOLD: ("tests.bench.by_hand", "{rows}"),
    PLAN: ("tests.long_tape", "/dev/stdout", "{rows}", "chats"),
}
"""Modules that write a tape of so many rows to standard output, with their arguments."""


def rates(table: Table) -> None:
    """Rows and steps a second of processor time, medians; and how many records of seven fields
    could be made in that time, as measured around each replay: by these the machine's moods and
    other machines compare.
    """
    with tempfile.TemporaryDirectory() as folder:
        for running, lookahead in ((64, False), (32, False), (32, True)):
            path = Path(folder) / f"{running}-{lookahead}.log"
            _decode_steps(path, running, lookahead)
            ahead = ", lookahead" if lookahead else ""
            for depth in (FOLD, PLAN):
                seconds, rows, steps, records = _median(path, depth)
                name = f"{depth}, {running} rows a step{ahead}"
                table.add(name, rows / seconds, "rows a s")
                table.add(name, steps / seconds, "steps a s")
                asked = 1e9 / ASKED[depth] / machine.PLAN_MACHINE_NS
                what = f"{ASKED[depth]:,} rows a s on the plan's machine"
                table.add(f"{name}: a row", records / rows, "records", asked, what)


def side_by_side(table: Table) -> None:
    """Steps of 32 rows a second, by the clock on the wall, of a folder of segments: by one process
    and by as many as there are cores, in turn; medians.
    """
    jobs = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        _decode_steps(f"{folder}/", 32, False, FOLDER_ROUNDS, SEGMENT_BYTES)
        for depth in (FOLD, PLAN):
            alone: list[float] = []
            shared: list[float] = []
            for _ in range(REPEATS):
                alone.append(_clocked(lambda: replay(folder, Options(depth))))  # noqa: B023
                shared.append(_clocked(lambda: replay_segments(folder, Options(depth), jobs)))  # noqa: B023
            one, many = statistics.median(alone), statistics.median(shared)
            table.add(f"{depth}, 32 rows a step, 1 process", one, "steps a s")
            table.add(f"{depth}, 32 rows a step, {jobs} processes", many, "steps a s", one, "1")


def _clocked(run: Callable[[], Outcome]) -> float:
    """Steps a second of a replay."""
    started = time.perf_counter()
    outcome = run()
    assert outcome.exit_code == CLEAN, outcome.divergence
    return outcome.counts.steps / (time.perf_counter() - started)


def _decode_steps(
    path: Path | str,
    running: int,
    lookahead: bool,
    rounds: int = 1,
    segment_bytes: int = capture.SEGMENT_BYTES,
) -> None:
    """Long decodes of so many sequences, blocks' edges in every step, on tape."""
    policy = Policy(max_batch_tokens=8192, max_running=running, prefill_chunk=512)
    policy = structs.replace(policy, context_tokens=4096, lookahead=lookahead)
    geometry = Geometry(block_size=16, groups=(Group(num_blocks=4096),))
    header = Header(
        format=FORMAT,
        software="bench",
        created_ns=0,
        model="fake",
        digests={},
        geometry=geometry,
        policy=msgspec.to_builtins(policy),
        capabilities={},
    )
    kernel = FakeKernel(geometry, vocab_size=49152, sanitize="edges")
    writer = capture.CaptureWriter(path, segment_bytes=segment_bytes)
    parts = Parts(kernel, policy, writer, header)
    engine = Engine(lambda: parts)
    engine.open()
    for _ in range(rounds):
        for request in range(running):
            prompt = tuple(range(request, request + 32 + request % 16))
            engine.submit(Submission(prompt, Parameters(ANSWER_TOKENS)), lambda _update: None)
        while engine.step():
            pass
    engine.stop()


def _median(path: Path, depth: str) -> tuple[float, int, int, float]:
    """Seconds of the processor, rows, steps and the cost in records of a replay."""
    seconds: list[float] = []
    records: list[float] = []
    before = machine.record_ns(PACE_SECONDS)
    for _ in range(REPEATS):
        spent, rows, steps = measured(str(path), depth)
        after = machine.record_ns(PACE_SECONDS)
        seconds.append(spent)
        records.append(spent * 1e9 / ((before + after) / 2))
        before = after
    return statistics.median(seconds), rows, steps, statistics.median(records)


def growth(table: Table, rows_max: int = ROWS_MAX) -> None:
    """Rate and peak memory at each power of ten, up to `rows_max`."""
    for depth in (FOLD, PLAN):
        first = 0.0
        rows = ROWS_MIN
        while rows <= rows_max:
            told = _in_a_process(rows, depth)
            rate = told["rows"] / told["seconds"]
            first = first or rate
            name = f"{depth}, {told['rows']:,} rows in {told['steps']:,} steps"
            table.add(name, rate, "rows a s", first, f"at {ROWS_MIN:,}")
            table.add(f"{name}: peak memory", told["peak_bytes"] / 2**20, "MiB")
            rows *= 10


def _in_a_process(rows: int, depth: str) -> dict[str, float]:
    make = [sys.executable, "-m", *(word.format(rows=rows) for word in _MAKERS[depth])]
    with subprocess.Popen(make, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as maker:
        read = [sys.executable, "-m", "tests.bench.replay_child", depth]
        done = subprocess.run(read, stdin=maker.stdout, capture_output=True, check=True)
    told: dict[str, float] = json.loads(done.stdout)
    return told
