"""What a simulated load is: requests pinned to steps, and the kernel, pool, policy and troubles.

Owns the values and their form as a Python literal, which a test can paste. Plays nothing.
"""

from __future__ import annotations

import random
from typing import Any

import attrs
from attrs import field, frozen
from msgspec import Struct, structs

from kernel.fake import Failure
from server.policy import Policy
from statemachine.events import Namespace
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters

FAKE = "fake"
VOCAB = 64
POISON = VOCAB
"""A prompt token with which a sequence cannot be built, where a load says so; never sampled."""

PLAIN = Parameters(max_tokens=1)
POLICY = Policy(max_batch_tokens=64, prefill_chunk=16, context_tokens=96)
POOL = Geometry(block_size=4, groups=(Group(num_blocks=64),))


@frozen
class Request:
    """A request that arrives before step `at`; `cancel_at`: the client goes away before that.

    sink_raises, sink_cancels: at this update (from 1) its sink raises, or gives the request up from
    inside. slow_s: seconds that each call of its sink takes. text_raises: at this token (from 1)
    its detokeniser raises; 0: it cannot be made. Both ask for a stop string. parent: the number of
    a request of the load whose prompt it shares (n > 1). wishes: penalties, bias, grammar (with end
    tokens only), log-probabilities, scores and embedding; the rest of it is not looked at.
    """

    tokens: tuple[int, ...]
    max_tokens: int = 8
    at: int = 1
    cancel_at: int | None = None
    namespace: Namespace = Namespace()
    temperature: float = 0.0
    seed: int = 0
    end_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    sink_raises: int | None = None
    sink_cancels: int | None = None
    slow_s: float = 0.0
    text_raises: int | None = None
    priority: int = 0
    parent: int | None = None
    wishes: Parameters = PLAIN

    @property
    def parameters(self) -> Parameters:
        """What it sends."""
        return structs.replace(
            self.wishes,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            end_tokens=self.end_tokens,
            stop=self.stop,
            priority=self.priority,
            grammar=self.wishes.grammar if self.end_tokens else "",
        )


@frozen
class Load:
    """Requests, and what they run on. segment_bytes: the tape is a folder of such segments.

    full_disk: by number of the tape's write, how it fails (simulation_disk.py). waiting_max: of the
    queue. stop_at: the server is stopped before this step. poison: whether POISON cannot be built.
    flush_at: before these steps the prefix index is emptied. vocab: of the model. period: in every
    second eight positions the model says the same `period` tokens over and over; 0: nowhere. draft:
    a draft model guesses, and is wrong at each position that this divides; 0: there is none.
    draft_blocks, draft_fail: of its pool, and of its steps. tables: a real model attends by the
    processor's kernels, not by the gather.
    """

    name: str
    requests: tuple[Request, ...]
    policy: Policy = POLICY
    geometry: Geometry = POOL
    kernel: str = FAKE
    fail: dict[int, Failure] = field(factory=dict)
    segment_bytes: int = 0
    sanitize: str = "full"
    full_disk: dict[int, str] = field(factory=dict)
    waiting_max: int = 1024
    stop_at: int | None = None
    poison: bool = False
    flush_at: tuple[int, ...] = ()
    vocab: int = VOCAB
    period: int = 0
    draft: int = 0
    draft_blocks: int = 64
    draft_fail: dict[int, Failure] = field(factory=dict)
    tables: bool = False

    @property
    def draft_geometry(self) -> Geometry:
        """Of the draft model's pool: a draft model keeps no states."""
        blocks = self.draft_blocks
        rows = [it for it in self.geometry.groups if not it.recurrent] or [Group()]
        groups = tuple(structs.replace(it, num_blocks=blocks) for it in rows)
        return structs.replace(self.geometry, groups=groups)

    def guessed(self, sequence: int, position: int) -> int | None:
        """What the draft model says at a position, in the place of what the model says."""
        if position % self.draft == 0:
            return position % 2
        return self.told(sequence, position)

    def told(self, sequence: int, position: int) -> int | None:
        """What the model says at a position, whatever stands before it; None where it listens."""
        if self.period and position // 8 % 2:
            return 1 + position % self.period
        return None


def tokens(rows: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids, the same for equal arguments."""
    generator = random.Random(f"{rows} {seed}")
    return tuple(generator.randrange(1, VOCAB) for _ in range(rows))


def literal(value: Any) -> str:
    """Python that makes an equal value, what is a default left out."""
    if isinstance(value, Struct) or attrs.has(type(value)):
        return f"{type(value).__name__}({', '.join(_fields(value))})"
    if isinstance(value, tuple):
        return f"({''.join(literal(item) + ', ' for item in value).rstrip(' ')})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {literal(item)}' for key, item in value.items())}}}"
    return repr(value)


def _fields(value: Any) -> list[str]:
    names = (
        list(type(value).__struct_fields__)
        if isinstance(value, Struct)
        else [it.name for it in attrs.fields(type(value))]
    )
    plain = _defaults(value, names)
    return [
        f"{name}={literal(getattr(value, name))}"
        for name in names
        if name not in plain or getattr(value, name) != plain[name]
    ]


def _defaults(value: Any, names: list[str]) -> dict[str, Any]:
    """Defaults of a value's fields; those that have none are not in it."""
    if isinstance(value, Struct):
        found = type(value).__struct_defaults__
        return dict(zip(names[len(names) - len(found) :], found, strict=True))
    plain = {}
    for it in attrs.fields(type(value)):
        if it.default is not attrs.NOTHING:
            made = it.default.factory() if isinstance(it.default, attrs.Factory) else it.default
            plain[it.name] = made
    return plain
