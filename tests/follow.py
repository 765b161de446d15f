"""Following a simulation: its tape in short, what it must come to, and random loads to compare."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

from msgspec import structs

from kernel.fake import Failure
from replay.fold import Fold
from replay.plan import PlanChecker
from server.policy import Policy
from server.submission import Submission
from statemachine.events import Event
from statemachine.geometry import Geometry, Group
from statemachine.records import (
    Checkpoint,
    FlushRequested,
    Parameters,
    StepDone,
    StepFailed,
    StepPlanned,
    TapeEnded,
)

from .sim import POLICY, Inbox, Sim, idle, prompts

AHEAD = structs.replace(POLICY, lookahead=True)
GUESSING = structs.replace(POLICY, draft_tokens=4, lookup_ngram=2)

_MARKS = {StepPlanned: "P", StepDone: "D", StepFailed: "F"}
_OTHERS = {Checkpoint: "C", FlushRequested: "flush", TapeEnded: "end"}


class Letters:
    """A decoder for which token n is the n-th letter; token 60 is none."""

    def add(self, token: int) -> str:
        if token == 60:
            raise ValueError("no letter")
        return chr(ord("A") + token)

    def finish(self) -> str:
        return ""


def pool(num_blocks: int, block_size: int = 4) -> Geometry:
    """One full group."""
    return Geometry(block_size, (Group(num_blocks=num_blocks),))


def outline(sim: Sim) -> str:
    """A tape in short: P1 P2 D1: two steps planned, the first of them done; F2: one that failed."""
    marks = []
    for record in sim.capture.records[2:]:
        kind: Any = type(record)
        if kind in _MARKS:
            marks.append(f"{_MARKS[kind]}{getattr(record, 'step')}")  # noqa: B009
        elif kind in _OTHERS:
            marks.append(_OTHERS[kind])
    return " ".join(marks)


def planned(sim: Sim, step: int) -> tuple[Event, ...]:
    """A step's opening events."""
    return _events(sim, StepPlanned, step)


def done(sim: Sim, step: int) -> tuple[Event, ...]:
    """A step's closing events."""
    return _events(sim, StepDone, step)


def failed(sim: Sim, step: int) -> tuple[Event, ...]:
    """The events that undid a step."""
    return _events(sim, StepFailed, step)


def _events(sim: Sim, kind: Any, step: int) -> tuple[Event, ...]:
    events: tuple[Event, ...] = next(r.events for r in sim.records(kind) if r.step == step)
    return events


def offsets(sim: Sim) -> dict[int, int]:
    """The offset of each live sequence."""
    sequences = sim.engine.view.state.sequences
    return {seq: sequences[seq].offset for seq in sorted(sequences)}


def fork(sim: Sim, tokens: tuple[int, ...], parent: int, **parameters: Any) -> Inbox:
    """Submit a request as a copy of `parent`; `max_tokens` among its parameters."""
    inbox = Inbox()
    given = Submission(tuple(tokens), Parameters(**parameters), parent=parent)
    sim.inboxes[sim.engine.submit(given, inbox)] = inbox
    return inbox


def follow(sim: Sim, invariants: str = "event") -> None:
    """The tape folds, with every invariant after every event, and is planned again the same."""
    fold, plan = Fold(invariants), PlanChecker()
    for record in sim.capture.records:
        fold.feed(record)
        plan.feed(record)
    fold.finish()


def clean(sim: Sim, invariants: str = "event", plans_raised: int = 0) -> None:
    """`follow`, and nobody is left, nothing is held, and no row was ever another's."""
    follow(sim, invariants)
    assert sim.engine._loop.counters.plans_raised == plans_raised  # type: ignore[union-attr]
    assert sim.idle_counts() == idle(sim.kernel.geometry)
    assert sim.engine.status()["shadow_found"] == 0
    assert not sim.engine._loop.busy  # type: ignore[union-attr]
    assert all(inbox.reason is not None for inbox in sim.inboxes.values())


Answers = list[tuple[tuple[int, ...], str | None]]


@cache
def random_load(seed: int, **settings: Any) -> tuple[Sim, Answers]:
    """A load out of a seed, run to its end and followed; `settings` are the policy's.

    Tight pools of one or two groups, padded pieces, copies of requests, cancels, end tokens,
    texts that repeat themselves, steps that fail.
    """
    g = random.Random(seed)
    geometry = _random_geometry(g)
    policy = Policy(
        max_batch_tokens=g.choice([16, 32, 64]),
        max_running=g.choice([2, 8, 16]),
        prefill_chunk=g.choice([8, 16]),
        prefill_tile=g.choice([1, 1, 8]),
        prefill_cohort=g.random() < 0.3,
        prefix_cache=g.random() < 0.8,
        watermark_blocks=g.choice([0, 2]),
        context_tokens=96,
    )
    count = g.choice([0, 0, 1, 3])
    fail = {step: Failure(g.choice(["build", "eval"])) for step in g.sample(range(2, 30), count)}
    sim = Sim(
        geometry,
        structs.replace(policy, **settings),
        vocab_size=g.choice([3, 64]),
        end_token=g.choice([None, 0]),
        fail=fail,
    )
    actions: dict[int, list[Callable[[], object]]] = {}
    for number, prompt in enumerate(prompts(g.randint(3, 7), seed)):
        _add_request(g, sim, actions, number, prompt)
    sim.run(actions)
    clean(sim, "step")
    return sim, [(inbox.tokens, inbox.reason) for _, inbox in sorted(sim.inboxes.items())]


def _random_geometry(g: random.Random) -> Geometry:
    size = g.choice([1, 4, 16])
    groups = (Group(num_blocks=g.choice([1, 1, 2]) * (64 // size)),)
    if size == 4 and g.random() < 0.4:
        groups += (Group("window", num_blocks=96, window=8, sink=g.choice([0, 2])),)
    return Geometry(size, groups)


def _add_request(
    g: random.Random,
    sim: Sim,
    actions: dict[int, list[Callable[[], object]]],
    number: int,
    prompt: tuple[int, ...],
) -> None:
    """A request, perhaps with two copies, perhaps cancelled. Requests arrive in order."""
    tokens = tuple(token % 3 for token in prompt) if g.random() < 0.5 else prompt
    given = {
        "max_tokens": g.randint(1, 20),
        "temperature": g.choice([0.0, 1.0]),
        "end_tokens": (0,) if g.random() < 0.3 else (),
        "priority": g.choice([0, 0, 1, -1]),
    }
    copies = 2 if g.random() < 0.3 else 0

    def submit() -> None:
        sim.submit(tokens, seed=number, **given)
        parent = max(sim.inboxes)
        for copy in range(copies):
            fork(sim, tokens, parent, seed=number + 100 * (copy + 1), **given)

    at = 1 + 2 * number
    actions.setdefault(at, []).append(submit)
    if g.random() < 0.15:
        after = at + g.randint(0, 9)
        actions.setdefault(after, []).append(lambda: sim.engine.cancel(number))


def same_answers(one: Answers, other: Answers) -> None:
    """Tokens and ends agree; of a request that was given up, as far as both got."""
    assert len(one) == len(other)
    for (tokens, reason), (others, other_reason) in zip(one, other, strict=True):
        if {"cancelled", "error"} & {reason, other_reason}:
            kept = min(len(tokens), len(others))
            assert tokens[:kept] == others[:kept]
        else:
            assert (tokens, reason) == (others, other_reason)
