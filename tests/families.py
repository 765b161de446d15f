"""An architecture under an engine: unlike requests over few small blocks, and what mlx-lm says.

Owns one load that does to rows all that a policy may: prompts in chunks beside decode, prefixes
adopted, drafts taken back, preemption, windows left behind; and its comparison with mlx-lm's own
caches, a request at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from attrs import field, frozen
from mlx_lm.models.cache import make_prompt_cache
from msgspec import structs

from kernel.batch import Batch, StepResult
from kernel.layout import Layout
from kernel.model_kernel import ModelKernel
from replay.run import PLAN, Options, replay
from server.engine import Engine
from server.loop import Parts
from server.policy import Policy
from server.submission import Submission
from statemachine.events import Preempted, PrefixAdopted, Rewound
from statemachine.geometry import Geometry
from statemachine.records import Parameters, Record

from .paged import random_tokens
from .sim import Inbox, MemoryCapture, header
from .tampering import write

POLICY = Policy(
    max_batch_tokens=14, max_running=3, prefill_chunk=5, watermark_blocks=0, context_tokens=64,
    lookahead=True, draft_tokens=2, lookup_ngram=1,
)  # fmt: skip
BLOCKS = 13
"""Of 4 rows: two requests fit and three do not."""
ANSWER = 10
TOLERANCE = 1e-4
"""Of the largest score of a request."""


@frozen
class Drawn:
    """A sampled token: whose, at which position, what was fed from `start` on before it, and its
    score. What is drawn behind a guess that was wrong says nothing.
    """

    seq: int
    position: int
    start: int
    fed: tuple[int, ...]
    token: int
    logit: float

    def tells_of(self, number: int, text: tuple[int, ...]) -> bool:
        """Whether it was drawn behind this request's own text."""
        mine = text[self.start : self.start + len(self.fed)] == self.fed
        return number == self.seq and mine and self.position < len(text)


class Recorder:
    """A kernel that notes what each row drew."""

    def __init__(self, kernel: ModelKernel) -> None:
        self._kernel = kernel
        self._batches: dict[int, Batch] = {}
        self.drawn: list[Drawn] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def issue(self, batch: Batch) -> Any:
        ticket = self._kernel.issue(batch)
        self._batches[id(ticket)] = batch
        return ticket

    def collect(self, ticket: object) -> StepResult:
        result = self._kernel.collect(ticket)
        pieces = self._batches.pop(id(ticket)).pieces
        places = [
            (piece.sequence.id, position, piece.start, piece.tokens[: position - piece.start])
            for piece in pieces
            for position in piece.sample_positions
        ]
        columns = zip(places, result.tokens, result.logits, strict=True)
        self.drawn += [Drawn(*place, *rest) for place, *rest in columns]
        return result


@frozen
class Outcome:
    """What became of the load. texts: prompt and answer of each request, by its number."""

    texts: dict[int, tuple[int, ...]]
    drawn: list[Drawn]
    records: list[Record] = field(repr=False)

    def count(self, kind: type) -> int:
        """How many events of a kind are on tape."""
        events = [event for record in self.records for event in getattr(record, "events", ())]
        return sum(isinstance(event, kind) for event in events)


def prompts(vocab: int) -> list[list[int]]:
    """The second shares most of the first's prompt, the last is the first again."""
    first = random_tokens(3, 19, vocab)
    other = [*first[:13], *random_tokens(4, 8, vocab)]
    return [first, other, random_tokens(5, 7, vocab), random_tokens(6, 14, vocab), first]


def serve(model: Any, layout: Layout) -> Outcome:
    """The load over a pool of BLOCKS blocks: one request alone, then the others at once."""
    pool = Geometry(4, layout.groups(BLOCKS), "family")
    kernel = Recorder(ModelKernel(model, pool, sanitize="full", layout=layout))
    capture = MemoryCapture()
    head = structs.replace(header(pool, POLICY), sanitize="full", layers=len(layout.kinds))
    parts: Any = Parts(kernel, POLICY, capture, head, vocab_size=layout.vocab_size)
    engine = Engine(lambda: parts)
    engine.open()
    inboxes = []
    for number, prompt in enumerate(prompts(layout.vocab_size)):
        inboxes.append(Inbox())
        engine.submit(Submission(tuple(prompt), Parameters(max_tokens=ANSWER)), inboxes[-1])
        while number == 0 and engine.step():
            pass
    while engine.step():
        pass
    engine.stop()
    assert [inbox.error for inbox in inboxes] == [""] * len(inboxes)
    texts = zip(prompts(layout.vocab_size), inboxes, strict=True)
    told = {n: (*prompt, *inbox.tokens) for n, (prompt, inbox) in enumerate(texts)}
    return Outcome(told, kernel.drawn, capture.records)


def wrong(model: Any, outcome: Outcome) -> str:
    """The first token or score that mlx-lm's own caches do not give, in words; else nothing."""
    for number, text in outcome.texts.items():
        caches = make_prompt_cache(model)
        scores = np.array(model(mx.array([text]), cache=caches)[0].astype(mx.float32))
        bound = TOLERANCE * max(1.0, float(np.abs(scores).max()))
        for place in range(len(text) - ANSWER, len(text)):
            row = scores[place - 1]
            if row.max() - row[text[place]] > bound:
                return f"request {number} says {text[place]} at {place}, not {row.argmax()}"
        for drawn in outcome.drawn:
            if drawn.tells_of(number, text):
                off = abs(float(scores[drawn.position - 1].max()) - drawn.logit)
                if not off <= bound:
                    return f"request {number} at {drawn.position}: a score is off by {off:.2g}"
    return ""


def replayed(outcome: Outcome, folder: Path) -> str:
    """What replay says of the tape at plan depth; empty where it is clean."""
    found = replay(write(folder, outcome.records), Options(depth=PLAN))
    return "" if found.divergence is None else str(found.divergence)


EVENTS = (PrefixAdopted, Preempted, Rewound)
