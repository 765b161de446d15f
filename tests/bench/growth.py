"""What a step's cost grows with: queue, pool, index, running rows, contexts; and where it goes.

Each curve varies one size and keeps the others: 64 running rows in contexts of about 100 tokens, a
pool of 4,096 blocks, nothing queued or cached. Ratios are to the curve's smallest size.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from functools import partial

from msgspec import structs

from server import scheduler
from server.policy import Policy
from server.view import View
from statemachine import commands
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters, RequestArrived
from statemachine.state import State, new_state
from statemachine.transitions import apply_all

from .machine import ROWS, decoding_view
from .table import Table, median_us

POLICY = Policy(
    max_batch_tokens=16_384, max_running=ROWS, prefill_chunk=8192, context_tokens=16_384
)
BLOCK = 16
MILLION = 1 << 20
CACHED_BLOCKS_AT_ONCE = 512
"""Blocks of each prompt that fills the index."""
PROFILED_STEPS = 300
PROFILED_LINES = 12


def curves(table: Table) -> None:
    """All curves. Filling an index of a million blocks takes a minute."""
    grow(table, "queued requests", (10, 100, 1000, 10_000), _queued)
    grow(table, "blocks in the pool", (1024, 4096, 16_384, 65_536, 262_144, MILLION), _pool)
    grow(table, "published blocks, none free", (1024, 16_384, 262_144, MILLION), _published)
    grow(table, "running rows", (1, 4, 16, 64, 256), _running)
    grow(table, "tokens of context", (128, 512, 2048, 8192), _context)


def grow(
    table: Table, name: str, sizes: tuple[int, ...], make: Callable[[int], tuple[View, Policy]]
) -> None:
    """One curve: what a decode step takes at each size, and an arrival."""
    table.section(f"against {name}")
    smallest: dict[str, float] = {}
    for size in sizes:
        view, policy = make(size)
        for what, run in _calls(view, policy).items():
            cost = median_us(run, seconds=0.25)
            least = smallest.setdefault(what, cost)
            table.add(f"{what}, {size:,} {name}", cost, "us", least, f"at {sizes[0]:,}")


def _calls(view: View, policy: Policy) -> dict[str, Callable[[], object]]:
    plan = scheduler.plan_step(view, policy)
    begun = scheduler.begin(view, plan)
    tokens = (7,) * sum(piece.samples for piece in plan.pieces)
    outcomes = scheduler.outcomes(begun, plan, tokens, ())
    arrival = RequestArrived(1 << 40, "", tuple(range(100)), Parameters(max_tokens=9))
    return {
        "plan_step": partial(scheduler.plan_step, view, policy),
        "apply_all": partial(apply_all, view.state, plan.events),
        "close_step": partial(scheduler.close_step, begun, plan, outcomes),
        "receive": partial(scheduler.receive, view, arrival),
    }


def _queued(count: int) -> tuple[View, Policy]:
    view = decoding_view(policy=POLICY)
    tokens = tuple(range(100))
    for request in range(ROWS, ROWS + count):
        view = scheduler.receive(
            view, RequestArrived(request, "", tokens, Parameters(max_tokens=100))
        )
    return view, POLICY


def _pool(blocks: int) -> tuple[View, Policy]:
    return decoding_view(blocks=blocks, policy=POLICY), POLICY


def _running(rows: int) -> tuple[View, Policy]:
    policy = structs.replace(POLICY, max_running=rows)
    return decoding_view(rows=rows, policy=policy), policy


def _context(tokens: int) -> tuple[View, Policy]:
    blocks = ROWS * (tokens // BLOCK + 4)
    return decoding_view(context=tokens, blocks=blocks, policy=POLICY), POLICY


def _published(blocks: int) -> tuple[View, Policy]:
    """A pool whose blocks are all cached, but for those of the rows that run."""
    state = _full_index(blocks)
    return decoding_view(blocks=blocks, policy=POLICY, state=state), POLICY


def _full_index(blocks: int) -> State:
    """Every block of a pool holds a prompt's rows, is published, and is not held."""
    state = new_state(Geometry(block_size=BLOCK, groups=(Group(num_blocks=blocks),)))
    rows = CACHED_BLOCKS_AT_ONCE * BLOCK
    for seq in range(blocks // CACHED_BLOCKS_AT_ONCE):
        step, tokens = seq + 1, tuple(range(1_000_000 + seq, 1_000_000 + seq + rows))
        state = apply_all(state, commands.open_sequence(state, seq))
        state = apply_all(state, commands.append(state, seq, step, tokens))
        state = apply_all(state, commands.step_written(state, step))
        state = apply_all(state, commands.publish(state, seq))
        state = apply_all(state, commands.close(state, seq))
    return state


def profile() -> None:
    """Where a step of 64 decode rows spends its time, by function, without those it calls."""
    view = decoding_view(policy=POLICY)
    profiler = cProfile.Profile()
    for _ in range(PROFILED_STEPS):
        profiler.enable()
        plan = scheduler.plan_step(view, POLICY)
        begun = scheduler.begin(view, plan)
        tokens = (7,) * sum(piece.samples for piece in plan.pieces)
        outcomes = scheduler.outcomes(begun, plan, tokens, ())
        events = scheduler.close_step(begun, plan, outcomes)
        view = scheduler.settle(begun, plan, outcomes, events)
        profiler.disable()
    print(
        f"\n{PROFILED_STEPS} steps of {ROWS} rows under the profiler, which slows small functions"
    )
    stats = pstats.Stats(profiler).strip_dirs().sort_stats("tottime")
    stats.print_stats(PROFILED_LINES)
