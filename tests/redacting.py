"""Tapes before and after `replay redact`: what replay says of both, and what is left in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from replay.redact import redact
from replay.run import PLAN, Options, Outcome, replay
from statemachine import records as rec
from statemachine.codec import TapeEncoder, decode_state
from statemachine.events import Namespace
from statemachine.geometry import Geometry, Group
from statemachine.records import Checkpoint, Record, StepDone

from .follow import Letters
from .sim import POLICY, Sim

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
