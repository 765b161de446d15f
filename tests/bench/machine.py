"""What the tape costs: state machine, scheduler, capture, shadow and fold, without a model."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attrs
import zstandard
from msgspec import structs

from kernel.batch import Batch
from kernel.fake import FakeKernel
from kernel.metadata import StepMetadata, build
from kernel.shadow import Shadow
from replay.run import CLEAN, Options, replay
from server import scheduler
from server.capture import CaptureWriter
from server.engine import Engine
from server.parts import Parts
from server.policy import Policy
from server.submission import Submission, Update
from server.view import View, initial
from statemachine import commands
from statemachine.codec import TapeEncoder
from statemachine.events import DECODE, LOOKAHEAD
from statemachine.geometry import WINDOW, Geometry, Group
from statemachine.records import (
    FORMAT,
    Header,
    Parameters,
    Record,
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


PLAN_MACHINE_NS = 390.0
"""What one `Seven` took where the plan's figures were taken: divide by the ratio to compare."""


@attrs.frozen
class Seven:
    """A class that says how fast Python is here."""

    a: int
    b: int
    c: int
    d: int
    e: int
    f: int
    g: int


def record_ns(seconds: float = 1.0) -> float:
    """What one `Seven` takes here and now."""
    return median_us(lambda: [Seven(1, 2, 3, 4, 5, 6, 7) for _ in range(1000)], seconds=seconds)


def yardstick(table: Table) -> None:
    """How fast this machine runs Python, against the one of the plan's figures."""
    name = "a frozen attrs class of 7 fields"
    table.add(name, record_ns(), "ns", PLAN_MACHINE_NS, "the plan's machine")


def _decoding_state(groups: tuple[Group, ...]) -> State:
    """64 sequences of which 4 stand at a block's edge."""
    state = new_state(Geometry(block_size=16, groups=groups))
    for seq in range(ROWS):
        state = apply_all(state, commands.open_sequence(state, seq))
        tokens = tuple(range(seq, seq + 97 + seq % 16))
        state = apply_all(state, commands.append(state, seq, 1, tokens))
    return apply_all(state, commands.step_written(state, 1))


def state_machine(table: Table) -> None:
    """`append_each` and `apply_all` of one decode step, and of one with lookahead."""
    seqs, tokens = tuple(range(ROWS)), tuple(range(ROWS))
    for name, groups in (("one group", ONE), ("two groups", TWO)):
        state = _decoding_state(groups)
        events = commands.append_each(state, 2, seqs, tokens, DECODE)
        ahead = commands.append_each(state, 2, seqs, None, LOOKAHEAD)
        issued = apply_all(state, ahead)
        learned = commands.commit_each(issued, seqs, tokens)
        costs: dict[str, Callable[[], object]] = {
            "append_each, decode": partial(commands.append_each, state, 2, seqs, tokens, DECODE),
            "apply_all, decode": partial(apply_all, state, events),
            "append_each, lookahead": partial(
                commands.append_each, state, 2, seqs, None, LOOKAHEAD
            ),
            "apply_all, lookahead": partial(apply_all, state, ahead),
            "commit_each": partial(commands.commit_each, issued, seqs, tokens),
            "apply_all, commit_each": partial(apply_all, issued, learned),
        }
        for what, run in costs.items():
            table.add(f"{what}, {ROWS} rows, {name}", median_us(run), "us")


def decoding_view(
    rows: int = ROWS,
    context: int = 97,
    blocks: int = 4096,
    policy: Policy = POLICY,
    state: State | None = None,
) -> View:
    """`rows` running requests that decode, of which one in 16 stands at a block's edge.

    context: tokens of the shortest prompt; state: a pool to begin with, in place of an empty one.
    """
    view = initial(Geometry(block_size=16, groups=(Group(num_blocks=blocks),)))
    first = 0
    if state is not None:
        first = state.last_seq + 1
        view = structs.replace(view, state=state, step=state.issued_step + 1)
    lengths = {first + at: context + at % 16 for at in range(rows)}
    for request, length in lengths.items():
        tokens = tuple(range(request, request + length))
        view = scheduler.receive(
            view, RequestArrived(request, "", tokens, Parameters(max_tokens=512))
        )
    while len(view.running) < rows or any(
        view.state.sequences[seq].committed < lengths[seq] for seq in view.running
    ):
        view = turn(view, policy)
    return turn(view, policy)


def turn(view: View, policy: Policy = POLICY) -> View:
    """One step: planned, closed, settled; each sample is token 7."""
    plan = scheduler.plan_step(view, policy)
    view = scheduler.begin(view, plan)
    tokens = (7,) * sum(piece.samples for piece in plan.pieces)
    outcomes = scheduler.outcomes(view, plan, tokens, ())
    events = scheduler.close_step(view, plan, outcomes)
    return scheduler.settle(view, plan, outcomes, events)


def policy(table: Table) -> None:
    """plan_step, close_step and what stands around them, and the kernel's host side."""
    _turns(table, "", decoding_view(), POLICY)
    ahead = structs.replace(POLICY, lookahead=True)
    view = decoding_view(policy=ahead)
    _turns(table, "lookahead: ", scheduler.begin(view, scheduler.plan_step(view, ahead)), ahead)


def _turns(table: Table, prefix: str, view: View, policy: Policy) -> None:
    """The parts of a turn; with a flight in `view`, that one is closed."""
    plan = scheduler.plan_step(view, policy)
    begun = scheduler.begin(view, plan)
    closing = begun.flights[0]
    tokens = (7,) * ROWS
    outcomes = scheduler.outcomes(begun, closing, tokens, ())
    events = scheduler.close_step(begun, closing, outcomes)
    batch: Batch = scheduler.batch(begun, plan)
    metadata: StepMetadata = build(batch, view.state.geometry)
    shadow = Shadow(view.state.geometry, "edges")
    costs = {
        "plan_step": median_us(lambda: scheduler.plan_step(view, policy)),
        "begin + batch": median_us(lambda: scheduler.batch(scheduler.begin(view, plan), plan)),
        "outcomes": median_us(lambda: scheduler.outcomes(begun, closing, tokens, ())),
        "close_step": median_us(lambda: scheduler.close_step(begun, closing, outcomes)),
        "settle": median_us(lambda: scheduler.settle(begun, closing, outcomes, events)),
        "metadata": median_us(lambda: build(batch, view.state.geometry)),
        "shadow, edges": median_us(lambda: shadow.apply(batch, metadata)),
    }
    for name, cost in costs.items():
        table.add(f"{prefix}{name}, {ROWS} rows", cost, "us a step")
    without = sum(cost for name, cost in costs.items() if name != "metadata")
    table.add(f"{prefix}plan, state, close, shadow", without / ROWS, "us a row")


def _run(path: Path | None, answers: int) -> int:
    """A long decode of 64 sequences over the fake kernel, on tape if `path`. Returns its rows."""
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
    parts = Parts(kernel, POLICY)
    if path is not None:
        parts = structs.replace(parts, capture=CaptureWriter(path), header=header)
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
        rows = _run(None, 600)
        without = min(_spent(lambda: _run(None, 600)) for _ in range(3)) / rows * 1e6
        spent = min(_spent(lambda: _again(path)) for _ in range(3)) / rows * 1e6
        data = path.read_bytes()
        table.add("engine over the fake kernel, no tape", without, "us a row")
        table.add("engine over the fake kernel, on tape", spent, "us a row", without, "no tape")
        table.add("tape", len(data) / rows, "bytes a row")
        packed = zstandard.ZstdCompressor(3).compress(data)
        table.add("tape, compressed", len(packed) / rows, "bytes a row")
        fold = min(_spent(lambda: _fold(path)) for _ in range(3))
        table.add("fold", rows / fold, "rows a s")


def _again(path: Path) -> None:
    path.unlink(missing_ok=True)
    _run(path, 600)


def _spent(run: Callable[[], object]) -> float:
    """Seconds of the processor."""
    started = time.process_time()
    run()
    return time.process_time() - started


def _fold(path: Path) -> None:
    assert replay(str(path), Options()).exit_code == CLEAN


def encoding(table: Table) -> None:
    """The encoder's share of a decode step."""
    geometry = Geometry(block_size=16, groups=ONE)
    records: list[Record] = []

    class Keep:
        checkpoint_due = False
        position = gaps = bytes_written = 0

        def write(self, given: list[Record]) -> None:
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
