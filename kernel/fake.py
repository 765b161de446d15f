"""Fake kernel: everything but the model. No MLX.

Owns sampling without logits, failures on order, and the step-pinned driver. Metadata,
observations and shadow tags are the real ones; a token is a function of the tag that the shadow
array holds in its row's place (and of seed and position, where the request samples; and of answer,
prompt and wishes, where these change what is sampled). So a row that was issued for other tokens,
or written elsewhere, changes the answer, and so does a state of a recurrent group that is another's
(fake_states.py). What a row reads beyond these changes no token, on purpose: a table that names
another's blocks gives the right answer here, as it gives a plausible one with a model, and is found
by what was observed (`neighbours-table`, `freed-block-read`) or by the shadow's tags, not by text.
Log-probabilities, scores and embeddings are made up of the same tags; grammars are not followed.
Never keeps a length of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct
from xxhash import xxh3_64_intdigest

from statemachine.geometry import Geometry
from statemachine.records import Parameters, ShadowReport

from .batch import Batch, BuildFailed, EvalFailed, Logprob, Piece, StepResult
from .block_io import BlockRows, TensorSpec
from .fake_states import FakeStates
from .metadata import (
    BadBatch,
    CacheUse,
    StepMetadata,
    build,
    last_tokens,
    observe,
    pending_sources,
)
from .order import Order
from .shadow import EDGES, OFF, Shadow

BUILD = "build"
EVAL = "eval"


class Failure(Struct, frozen=True):
    """A failure on order: at `build` or `eval`; `seq` is named as the one at fault."""

    stage: str
    seq: int | None = None


class Ticket(Struct, frozen=True):
    """A step between issue and collect."""

    number: int
    batch: Batch
    metadata: StepMetadata
    result: StepResult


class FakeKernel:
    """A kernel whose model is a hash. Layers count like real ones would.

    fail: by step, what fails. poison: a prompt token whose sequence cannot be built (nobody is
    blamed). end_token: sampled once in `end_every` tokens, if given. script: the token of a
    (sequence, position) where it gives one. delay: called with each batch before it is issued.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        vocab_size: int = 64,
        end_token: int | None = None,
        end_every: int = 16,
        sanitize: str = "full",
        layers: int = 2,
        fail: Mapping[int, Failure] | None = None,
        poison: int | None = None,
        script: Callable[[int, int], int | None] | None = None,
        delay: Callable[[Batch], None] | None = None,
    ) -> None:
        self._geometry = geometry
        self._vocab_size = vocab_size
        self._end_token = end_token
        self._end_every = end_every
        self._sanitize = sanitize
        self._layers = layers
        self._fail = dict(fail or {})
        self._poison = poison
        self._script = script
        self._delay = delay
        # With the sanitizer off tags are still what stands for the pages' content.
        self._shadow = Shadow(geometry, EDGES if sanitize == OFF else sanitize)
        self._order = Order()
        self._states = FakeStates(geometry)
        self._newest: dict[int, int] = {}
        """What the newest step sampled last for each of its sequences."""
        self._newest_step = 0
        self.resets = 0
        self.batches: list[Batch] = []

    @property
    def geometry(self) -> Geometry:
        """Sizes of the pool."""
        return self._geometry

    @property
    def cannot(self) -> Mapping[str, str]:
        """Nothing is refused."""
        return {}

    def issue(self, batch: Batch) -> Ticket:
        """Build a step. Raises BuildFailed: its copies stand, its rows are as before then.

        Raises EvalFailed while the pages are lost.
        """
        number = self._order.issue()
        if self._delay is not None:
            self._delay(batch)
        self.batches.append(batch)
        self._shadow.copy_blocks(batch.copies)
        self._states.copy(batch.copies)
        try:
            metadata = build(batch, self._geometry)
            pending_sources(metadata, self._newest)
        except BadBatch as error:
            raise BuildFailed(str(error), error.seq) from error
        failure = self._fail.get(batch.step)
        if self._fails_to_build(batch, failure):
            named = failure.seq if failure is not None and failure.stage == BUILD else None
            raise BuildFailed("a failure on order", named)
        report = self._shadow.apply(batch, metadata)
        # The rows hold what was fed, whoever has read it: tokens come from their real tags.
        self._shadow.learn(self._newest_step, self._newest)
        held = self._states.held_tags(batch, metadata, self._shadow.tags)
        return Ticket(number, batch, metadata, self._result(batch, metadata, report, held))

    def _result(
        self, batch: Batch, metadata: StepMetadata, report: ShadowReport, held: list[int]
    ) -> StepResult:
        """held: the tag of each row of the batch, as it is found."""
        # Each layer reads the offset, updates and attends once.
        uses = [CacheUse(1, 1, metadata.total_rows, 1, 0)] * self._layers
        rows = iter(zip(metadata.sample_rows.tolist(), metadata.sample_positions, strict=True))
        drawn = [
            self._draw(piece, place, position, held[row])
            for piece in batch.pieces
            for place, (row, position) in zip(range(piece.samples), rows, strict=False)
        ]
        tokens = tuple(token for token, _ in drawn)
        self._newest, self._newest_step = last_tokens(metadata, tokens), batch.step
        return StepResult(
            observation=observe(metadata, uses),
            shadow=ShadowReport() if self._sanitize == OFF else report,
            sampled=metadata.sampled,
            tokens=tokens,
            logits=tuple(_fraction(mix) for _, mix in drawn),
            margins=tuple(_fraction(mix >> 24) for _, mix in drawn),
            logprobs=self._logprobs(batch, metadata, drawn),
            scores=self._scores(batch, metadata, held),
            embeddings={
                number: tuple(_fraction(held[row] >> shift) for shift in (0, 8))
                for number, row in zip(metadata.sampled, metadata.sample_rows.tolist(), strict=True)
                if _parameters(batch.pieces[number]).embed
            },
        )

    def _logprobs(
        self, batch: Batch, metadata: StepMetadata, drawn: list[tuple[int, int]]
    ) -> tuple[Logprob | None, ...]:
        asked = [_parameters(batch.pieces[number]).logprobs for number in metadata.sampled]
        if not any(top >= 0 for top in asked):
            return ()
        return tuple(
            self._logprob(token, mix, top) if top >= 0 else None
            for (token, mix), top in zip(drawn, asked, strict=True)
        )

    def _scores(
        self, batch: Batch, metadata: StepMetadata, held: list[int]
    ) -> dict[int, tuple[Logprob, ...]]:
        rows = iter(metadata.score_rows.tolist())
        return {
            number: tuple(
                self._logprob(token, held[row], _parameters(piece).logprobs)
                for token, row in zip(piece.targets, rows, strict=False)
            )
            for number, piece in enumerate(batch.pieces)
            if piece.targets
        }

    def _logprob(self, token: int, tag: int, top: int) -> Logprob:
        """Made up; a tag and a token always have the same."""
        mix = xxh3_64_intdigest(struct.pack("<QQ", tag, token))
        others = [((mix + at) % self._vocab_size, -_fraction(mix) - at) for at in range(top)]
        return Logprob(token, -_fraction(mix >> 8), tuple(others))

    def _fails_to_build(self, batch: Batch, failure: Failure | None) -> bool:
        if failure is not None and failure.stage == BUILD:
            return True
        return self._poison is not None and any(self._poison in p.tokens for p in batch.pieces)

    def collect(self, ticket: object) -> StepResult:
        """The step's samples. Raises EvalFailed."""
        assert isinstance(ticket, Ticket)
        self._order.collect(ticket.number)
        failure = self._fail.get(ticket.batch.step)
        if failure is not None and failure.stage == EVAL:
            self._order.fail()
            raise EvalFailed("a failure on order")
        return ticket.result

    def reset_pages(self) -> None:
        """All rows are unwritten again."""
        self._shadow.reset()
        self._states.reset()
        self._order.reset()
        self._newest = {}
        self.resets += 1

    @property
    def block_spec(self) -> Mapping[str, TensorSpec]:
        """Tags are what stands for the pages' content."""
        return {"tags": TensorSpec("U64", (self._geometry.block_size,))}

    def read_blocks(self, blocks: Sequence[int]) -> list[BlockRows]:
        """What stands in blocks of the first group."""
        held = self._shadow.block_tags(0, blocks)
        off = self._sanitize == OFF
        return [
            BlockRows({"tags": np.array(tags, "<u8").tobytes()}, () if off else tags)
            for tags in held
        ]

    def write_blocks(self, blocks: Sequence[int], rows: Sequence[BlockRows]) -> None:
        """The bytes are what stands there; what they claim to be changes nothing."""
        content = [np.frombuffer(it.tensors["tags"], "<u8").tolist() for it in rows]
        self._shadow.load_blocks(0, blocks, [tuple(tags) for tags in content])

    def _draw(self, piece: Piece, place: int, position: int, tag: int) -> tuple[int, int]:
        """The token for `position`, which the piece's sample number `place` fills, and the hash
        that it came from.
        """
        parameters = _parameters(piece)
        seed = parameters.seed if parameters.temperature > 0 else 0
        mix = xxh3_64_intdigest(struct.pack("<QQQ", tag, seed % 2**64, position if seed else 0))
        if parameters.logit_bias or parameters.reads_answer:
            guesses = piece.tokens[len(piece.tokens) - piece.samples + 1 :][:place]
            answer = piece.answer + guesses if parameters.reads_answer else ()
            mix = with_wishes(mix, parameters, answer, piece.prompt)
        told = self._script(piece.sequence.id, position) if self._script is not None else None
        if told is not None:
            return told, mix
        if self._end_token is not None and (mix >> 40) % self._end_every == 0:
            return self._end_token, mix
        return mix % self._vocab_size, mix


_PLAIN = Parameters(max_tokens=1)


def _parameters(piece: Piece) -> Parameters:
    return piece.parameters or _PLAIN


def with_wishes(
    mix: int, parameters: Parameters, answer: tuple[int, ...], prompt: tuple[int, ...]
) -> int:
    """A hash with what a request asks of its logits; prompt: where a repetition penalty counts."""
    wishes = (
        parameters.logit_bias,
        parameters.frequency_penalty,
        parameters.presence_penalty,
        parameters.repetition_penalty,
        parameters.grammar,
    )
    return xxh3_64_intdigest(repr((mix, wishes, answer, prompt)).encode())


def _fraction(mix: int) -> float:
    """A float32 in [0, 1) out of a hash."""
    return float(np.float32((mix & 0xFFFFFF) / 2**24))


class Steppable(Protocol):
    """What the driver drives: an engine that was opened, not started."""

    @property
    def next_step(self) -> int:
        """The number that the next step will have."""

    def step(self) -> bool:
        """One turn; False where there was nothing to do."""


def run_pinned(
    engine: Steppable,
    actions: Mapping[int, Sequence[Callable[[], object]]],
    steps_max: int = 10_000,
) -> None:
    """Do `actions[n]` right before step n is planned, and run until nothing is left to do.

    While the engine idles its steps do not count on, so actions of later steps come then, in
    order. No threads and no time. Raises RuntimeError after `steps_max` turns.
    """
    due = sorted(actions)
    for _ in range(steps_max):
        while due and due[0] <= engine.next_step:
            for action in actions[due.pop(0)]:
                action()
        if engine.step():
            continue
        if not due:
            return
        for action in actions[due.pop(0)]:
            action()
    raise RuntimeError(f"work was left after {steps_max} turns")


class FakeClock:
    """Seconds that pass by a fixed tick at each reading."""

    def __init__(self, tick_s: float = 0.001) -> None:
        self._now_s = 0.0
        self._tick_s = tick_s

    def __call__(self) -> float:
        self._now_s += self._tick_s
        return self._now_s
