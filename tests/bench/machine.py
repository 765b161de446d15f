"""What the tape costs: state machine, scheduler, capture, shadow and fold, without a model."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import zstandard

from kernel.batch import Batch
from kernel.fake import FakeKernel
from kernel.metadata import StepMetadata, build
from kernel.shadow import Shadow
from replay.fold import Fold
from replay.reader import Tape
from server import scheduler
from server.capture import CaptureWriter
from server.engine import Engine
from server.loop import Parts
from server.policy import Policy
from server.submission import Submission, Update
from server.view import View, initial
from statemachine import commands
from statemachine.codec import TapeEncoder
from statemachine.events import DECODE
from statemachine.geometry import WINDOW, Geometry, Group
from statemachine.records import (
    FORMAT,
    Header,
    Parameters,
    RequestArrived,
    StepDone,
    StepPlanned,
    StepTimed,
)
from statemachine.state import State, new_state
from statemachine.transitions import apply_all

from .table import Table, median_us

ROWS = 64
ONE = (Group(num_blocks=4096),)
TWO = (Group(num_blocks=4096), Group(kind=WINDOW, window=64, num_blocks=4096))
POLICY = Policy(max_batch_tokens=2048, max_running=ROWS, prefill_chunk=512, context_tokens=4096)


def _decoding_state(groups: tuple[Group, ...]) -> State:
    """64 sequences of which 4 stand at a block's edge."""
    state = new_state(Geometry(block_size=16, groups=groups))
    for seq in range(ROWS):
        state = apply_all(state, commands.open_sequence(state, seq))
        tokens = tuple(range(seq, seq + 97 + seq % 16))
        state = apply_all(state, commands.append(state, seq, 1, tokens))
    return apply_all(state, commands.step_written(state, 1))


def state_machine(table: Table) -> None:
    """`apply_all` of one decode step."""
    for name, groups in (("one group", ONE), ("two groups", TWO)):
        state = _decoding_state(groups)
        seqs, tokens = tuple(range(ROWS)), tuple(range(ROWS))
        events = commands.append_each(state, 2, seqs, tokens, DECODE)
        cost = median_us(lambda state=state, events=events: apply_all(state, events))
        table.add(f"apply_all, {ROWS} decode rows, {name}", cost, "us")


def _decoding_view() -> View:
    view = initial(Geometry(block_size=16, groups=ONE))
    for request in range(ROWS):
        tokens = tuple(range(request, request + 97 + request % 16))
        record = RequestArrived(request, "", tokens, Parameters(max_tokens=512))
        view = scheduler.receive(view, record)
    while view.waiting or any(
        view.state.sequences[seq].committed < 97 + seq % 16 for seq in view.running
    ):
        view = _turn(view)
    return _turn(view)


def _turn(view: View) -> View:
    plan = scheduler.plan_step(view, POLICY)
    view = scheduler.begin(view, plan)
    tokens = tuple(7 for piece in plan.pieces if piece.samples)
    events = scheduler.close_step(view, plan, tokens)
    return scheduler.settle(view, plan, tokens, (), events)


def policy(table: Table) -> None:
    """plan_step, close_step and what stands around them, and the kernel's host side."""
    view = _decoding_view()
    plan = scheduler.plan_step(view, POLICY)
    begun = scheduler.begin(view, plan)
    tokens = (7,) * ROWS
    events = scheduler.close_step(begun, plan, tokens)
    batch: Batch = scheduler.batch(begun, plan)
    metadata: StepMetadata = build(batch, view.state.geometry)
    shadow = Shadow(view.state.geometry, "edges")
    costs = {
        "plan_step": median_us(lambda: scheduler.plan_step(view, POLICY)),
        "begin + batch": median_us(lambda: scheduler.batch(scheduler.begin(view, plan), plan)),
        "close_step": median_us(lambda: scheduler.close_step(begun, plan, tokens)),
        "settle": median_us(lambda: scheduler.settle(begun, plan, tokens, (), events)),
        "metadata": median_us(lambda: build(batch, view.state.geometry)),
        "shadow, edges": median_us(lambda: shadow.apply(batch, metadata)),
    }
    for name, cost in costs.items():
        table.add(f"{name}, {ROWS} rows", cost, "us a step")
    without = sum(cost for name, cost in costs.items() if name != "metadata")
    table.add("plan, state, close, shadow", without / ROWS, "us a row")


def _run(path: Path, answers: int) -> int:
    """A long decode of 64 sequences over the fake kernel, on tape. Returns its rows."""
    geometry = Geometry(block_size=16, groups=ONE)
    header = Header(
        format=FORMAT,
        software="bench",
        created_ns=0,
        model="fake",
        digests={},
        geometry=geometry,
        policy={},
        capabilities={},
    )
    kernel = FakeKernel(geometry, vocab_size=49152, sanitize="edges")
    parts = Parts(kernel, POLICY, CaptureWriter(path), header)
    engine = Engine(lambda: parts)
    engine.open()

    def ignore(_update: Update) -> None:
        return

    for request in range(ROWS):
        prompt = tuple(range(request, request + 100))
        engine.submit(Submission(prompt, Parameters(max_tokens=answers)), ignore)
    while engine.step():
        pass
    engine.stop()
    return ROWS * (answers + 100)


def tape(table: Table) -> None:
    """Bytes and microseconds a row on tape, and how fast a tape folds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "capture.log"
        started = time.perf_counter()
        rows = _run(path, 600)
        spent = time.perf_counter() - started
        data = path.read_bytes()
        table.add("engine over the fake kernel", spent / rows * 1e6, "us a row")
        table.add("tape", len(data) / rows, "bytes a row")
        packed = zstandard.ZstdCompressor(3).compress(data)
        table.add("tape, compressed", len(packed) / rows, "bytes a row")
        started = time.perf_counter()
        fold = Fold()
        for record in Tape(str(path)):
            fold.feed(record)
        fold.finish()
        table.add("fold", rows / (time.perf_counter() - started), "rows a s")


def encoding(table: Table) -> None:
    """The encoder's share of a decode step."""
    geometry = Geometry(block_size=16, groups=ONE)
    records = []

    class Keep:
        checkpoint_due = False
        position = gaps = 0

        def write(self, given: list[object]) -> None:
            records.extend(given)

        def close(self) -> None:
            return

    kernel = FakeKernel(geometry, vocab_size=49152, sanitize="edges")
    parts = Parts(kernel, POLICY, Keep())
    engine = Engine(lambda: parts)
    engine.open()
    for request in range(ROWS):
        prompt = tuple(range(request, request + 100))
        engine.submit(Submission(prompt, Parameters(max_tokens=64)), lambda _update: None)
    while engine.step():
        pass
    kept = [r for r in records if isinstance(r, StepPlanned | StepDone | StepTimed)]
    encoder = TapeEncoder()
    started = time.perf_counter()
    for record in records:
        encoder.encode([record])
    rows = sum(len(r.observation.rows) for r in kept if isinstance(r, StepDone))
    table.add("encode", (time.perf_counter() - started) / rows * 1e6, "us a row")
