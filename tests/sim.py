"""Simulations: the real scheduler, loop and tape over the fake kernel, without threads or time."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import structs

from kernel.fake import FakeClock, FakeKernel, run_pinned
from server.drafting import DraftParts
from server.engine import Engine
from server.kept import KeptBlocks
from server.loop import Parts
from server.policy import Policy
from server.submission import Submission, Update
from server.text import IncrementalDecoder
from statemachine import invariants
from statemachine.codec import TapeEncoder
from statemachine.events import Namespace
from statemachine.geometry import Geometry, Group
from statemachine.records import FORMAT, DraftModel, Header, Parameters, Record, StepTimed

SMALL = Geometry(block_size=4, groups=(Group(num_blocks=64),))
"""A pool in which a dozen short requests fit."""
TIGHT = Geometry(block_size=4, groups=(Group(num_blocks=24),))
"""A pool in which a few do, so that others wait or are preempted."""
POLICY = Policy(max_batch_tokens=64, max_running=32, prefill_chunk=16, context_tokens=64)


class MemoryCapture:
    """Keeps the records of each write in a list."""

    def __init__(self) -> None:
        self.writes: list[list[Record]] = []
        self.closed = False
        self.checkpoint_due = False
        self.position = self.bytes_written = self.gaps = 0

    @property
    def records(self) -> list[Record]:
        """All records, in tape order."""
        return [record for records in self.writes for record in records]

    def write(self, records: list[Record]) -> None:
        """One write."""
        assert not self.closed
        self.writes.append(list(records))

    def close(self) -> None:
        """No write comes after it."""
        self.closed = True


class Inbox:
    """A sink for one request: its tokens, its end, and how often it was told of one."""

    def __init__(self) -> None:
        self.updates: list[Update] = []

    def __call__(self, update: Update) -> None:
        assert self.reason is None, f"news after the end: {update}"
        self.updates.append(update)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All answer tokens, in order of delivery."""
        return tuple(token for update in self.updates for token in update.tokens)

    @property
    def reason(self) -> str | None:
        """The finish reason, once there is one."""
        return self.updates[-1].finish_reason if self.updates else None

    @property
    def error(self) -> str:
        """What the last update said went wrong."""
        return self.updates[-1].error if self.updates else ""

    @property
    def cached_tokens(self) -> int:
        """Adopted prompt tokens, as last told."""
        return self.updates[-1].cached_tokens if self.updates else -1


class Sim:
    """An engine over a fake kernel, stepped by hand; each step ends in all invariants."""

    def __init__(
        self,
        geometry: Geometry = SMALL,
        policy: Policy = POLICY,
        *,
        decoder: Callable[[], IncrementalDecoder] | None = None,
        clock: Callable[[], float] | None = None,
        waiting_max: int = 1024,
        kept: Callable[[FakeKernel], KeptBlocks] | None = None,
        draft: FakeKernel | None = None,
        **kernel: Any,
    ) -> None:
        self.kernel = FakeKernel(geometry, **kernel)
        drafted = None if draft is None else DraftParts(draft, draft_model(draft.geometry))
        self.capture = MemoryCapture()
        self.policy = policy
        self.parts = parts = Parts(
            self.kernel,
            policy,
            self.capture,
            header(geometry, policy, None if drafted is None else drafted.model),
            decoder,
            kept=None if kept is None else kept(self.kernel),
            draft=drafted,
        )
        self.engine = Engine(lambda: parts, clock=clock or FakeClock(), waiting_max=waiting_max)
        self.engine.open()
        self.inboxes: dict[int, Inbox] = {}

    @property
    def next_step(self) -> int:
        """The next step's number."""
        return self.engine.next_step

    def step(self) -> bool:
        """One turn, then every invariant of the state."""
        moved = self.engine.step()
        view = self.engine.view
        invariants.check_all(view.state)
        if view.draft is not None:
            invariants.check_all(view.draft.state)
        return moved

    def submit(
        self,
        tokens: Sequence[int],
        max_tokens: int = 8,
        *,
        namespace: Namespace = Namespace(),
        **parameters: Any,
    ) -> Inbox:
        """Queue a request; its id is the order of submission."""
        inbox = Inbox()
        given = Submission(tuple(tokens), Parameters(max_tokens, **parameters), namespace=namespace)
        self.inboxes[self.engine.submit(given, inbox)] = inbox
        return inbox

    def run(
        self,
        actions: Mapping[int, Sequence[Callable[[], object]]] | None = None,
        steps_max: int = 5_000,
    ) -> None:
        """Run until nothing is left, with actions pinned to steps."""
        run_pinned(self, actions or {}, steps_max)

    def records(self, kind: type[Any]) -> list[Any]:
        """The records of one kind, in tape order."""
        return [record for record in self.capture.records if isinstance(record, kind)]

    def events(self, kind: type[Any]) -> list[Any]:
        """The events of one kind on tape, in order of application."""
        found = []
        for record in self.capture.records:
            found += [e for e in getattr(record, "events", ()) if isinstance(e, kind)]
        return found

    def idle_counts(self) -> dict[str, int]:
        """held, and free + cached: what IDLE asks about."""
        status = self.engine.status()
        return {
            "running": status["running"],
            "waiting": status["waiting"],
            "held": status["held"],
            "free + cached": status["free"] + status["cached"],
        }


def idle(geometry: Geometry) -> dict[str, int]:
    """What `idle_counts` says of a pool that nobody uses."""
    blocks = sum(group.num_blocks for group in geometry.groups)
    return {"running": 0, "waiting": 0, "held": 0, "free + cached": blocks}


def draft_model(geometry: Geometry) -> DraftModel:
    """What a header says of a fake draft model."""
    return DraftModel("fake draft", {"weights": "fake"}, geometry, {"pad": True}, 2)


def header(geometry: Geometry, policy: Policy, draft: DraftModel | None = None) -> Header:
    """A tape's header for a fake model."""
    return Header(
        format=FORMAT,
        software="mlxtape test",
        created_ns=0,
        model="fake",
        digests={"weights": "fake"},
        geometry=geometry,
        policy=structs.asdict(policy),
        capabilities={"pad": True, "share": True},
        device="none",
        sanitize="full",
        context_tokens=policy.context_tokens,
        layers=2,
        draft=draft,
    )


def prompts(count: int, seed: int = 0, low: int = 3, high: int = 30) -> list[tuple[int, ...]]:
    """Prompts of random lengths; about half of them share a beginning with another."""
    generator = random.Random(seed)
    shared = [tuple(generator.randrange(64) for _ in range(high)) for _ in range(2)]
    found = []
    for _ in range(count):
        rows = generator.randint(low, high)
        own = tuple(generator.randrange(64) for _ in range(rows))
        kept = generator.choice([0, 0, rows // 2, rows - 1])
        found.append(generator.choice(shared)[:kept] + own[kept:])
    return found


def answer_alone(
    prompt: Sequence[int],
    max_tokens: int = 8,
    geometry: Geometry = SMALL,
    policy: Policy | None = None,
    **options: Any,
) -> tuple[int, ...]:
    """What a request answers when it is the only one: cold, whole prompt, no prefix cache."""
    alone = policy or Policy(max_batch_tokens=512, prefix_cache=False, context_tokens=64)
    names = ("end_token", "end_every", "script", "vocab_size")
    kernel = {name: options.pop(name) for name in names if name in options}
    sim = Sim(geometry, alone, **kernel)
    inbox = sim.submit(prompt, max_tokens, **options)
    sim.run()
    return inbox.tokens


def tape_bytes(records: Sequence[Record]) -> bytes:
    """The records as they stand on tape, StepTimed left out."""
    encoder = TapeEncoder()
    return b"".join(
        encoder.encode([record]) for record in records if not isinstance(record, StepTimed)
    )
