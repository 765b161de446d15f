"""ModelOwnedKernel: a model over the caches that mlx-lm makes for it, one sequence at a time.

Owns these caches, and when they are made anew: with the piece that starts at position 0, which is
what Opened, Reset, Preempted and PoolReset promise of an opaque group. Never at a release, which
might hit the sequence that runs by then. Decides no length: where a piece begins and ends is read
off the cache objects, and reported as read. One thread makes every call, the constructor included.

    open a            a's caches, offset 0      | a | a | a |
    a ends, b opens   the same, made anew       | b |            nothing of a is left

A forward that raises while its graph is built has moved some caches and not others, and they cannot
be moved back. So they are dropped; the one sequence that they were for ends with the step.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from attrs import frozen
from mlx_lm.models.cache import make_prompt_cache

from statemachine.geometry import OPAQUE, Geometry
from statemachine.records import Observation, ShadowReport

from . import fastmath
from .adapters import Adapters
from .adjusting import adjusted, asked_of, plan_adjustments
from .batch import Batch, BuildFailed, EvalFailed, Piece, StepResult
from .errors import ModelError, describe
from .masks import Masks
from .metadata import BadBatch
from .model_kernel import lacking
from .narrow_layers import quicken
from .owned_caches import OwnedCaches
from .owned_probe import probe
from .sampling import plan_samples, sample
from .split import cut
from .telling import Telling, plan_telling, read, tell

NOT_COUNTED = (0, 0)
"""Reads, updates and calls of attention are mlx-lm's own here, and nobody counts them."""

_USERS: weakref.WeakValueDictionary[int, ModelOwnedKernel] = weakref.WeakValueDictionary()
"""Who runs a model, by the model's id; a kernel keeps its model, so no id is used again before."""


@frozen(eq=False)
class Ticket:
    """A step under way. outputs: what goes to eval; samples first where there are any, then what
    `telling` asks for.
    """

    observation: Observation
    sampled: tuple[int, ...]
    outputs: list[mx.array]
    telling: Telling | None


class ModelOwnedKernel:
    """A Kernel over any mlx-lm model and its own caches; `geometry` has one opaque group.

    `adapters` are the model's; without it there are none.

    Raises ModelError where the model is in use by another kernel, cannot be run, or, with `check`,
    does not give the same logits in pieces as at once.
    """

    def __init__(
        self,
        model: Any,
        geometry: Geometry,
        *,
        masks: Masks | None = None,
        check: bool = True,
        adapters: Adapters | None = None,
    ) -> None:
        if [group.kind for group in geometry.groups] != [OPAQUE]:
            kinds = ", ".join(group.kind for group in geometry.groups)
            raise ModelError(
                f"a model over its own caches takes one opaque group, and the geometry has {kinds}:"
                " use those of families.owned_groups"
            )
        _claim(model, self)
        self._model = model
        self._geometry = geometry
        self._masks = masks
        self._adapters = adapters or Adapters(model)
        self._held: OwnedCaches | None = None
        self._native, self.left_out = "", ""
        if mx.default_device() == mx.Device(mx.cpu):
            fastmath.install()
            fastmath.turn_weights(model)
            self._native, self.left_out = quicken(model)
        found = probe(model, check)
        self._counted, self._vocab = found.counted, found.logits.shape[-1]
        self._body, self._head = cut(
            model, found.tokens, lambda: make_prompt_cache(model), found.logits
        )

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def computing(self) -> dict[str, str]:
        """As ModelKernel's."""
        return {"native": self._native} if self._native else {}

    @property
    def cannot(self) -> Mapping[str, str]:
        """What no request may ask of it, by the name in Parameters, each with its reason."""
        return lacking(self._masks, self._body is not self._model)

    def issue(self, batch: Batch) -> Ticket:
        """Build and start a step of one piece. Raises BuildFailed or EvalFailed."""
        piece = self._only_piece(batch)
        seq = piece.sequence.id
        if piece.start == 0:
            self._open(seq)
        held = self._held
        if held is None or held.seq != seq:
            whose = "nobody" if held is None else f"sequence {held.seq}"
            raise BuildFailed(
                f"step {batch.step}: sequence {seq} goes on at position {piece.start}, but the "
                f"model's caches are those of {whose}: it must start again at 0",
                seq,
            )
        before = self._offsets(held)
        ticket, failure, wished = None, "", False
        try:
            with self._adapters.serving([piece]).rows():
                ticket = self._build(held, piece, before)
        except BadBatch as error:
            failure, wished = str(error), error.wished
        except Exception as error:
            failure = describe(error)
        if ticket is None:
            self._held = None
            raise BuildFailed(f"step {batch.step}: {failure}", seq, wished)
        return self._start(held, ticket)

    def collect(self, ticket: object) -> StepResult:
        """Wait for a step's sample. Raises EvalFailed."""
        assert isinstance(ticket, Ticket)
        failure = ""
        columns: list[Any] = []
        sampled = 3 if ticket.sampled else 0
        try:
            mx.eval(ticket.outputs)
            columns = [np.array(array).tolist() for array in ticket.outputs[:sampled]]
        except Exception as error:
            failure = describe(error)
        if failure:
            ticket.outputs.clear()
            raise EvalFailed(failure)
        tokens, logits, margins = columns or ([], [], [])
        told = read(ticket.telling, tokens, map(np.array, ticket.outputs[sampled:]))
        return StepResult(
            observation=ticket.observation,
            shadow=ShadowReport(),
            sampled=ticket.sampled,
            tokens=tuple(tokens),
            logits=tuple(logits),
            margins=tuple(margins),
            logprobs=told.logprobs,
            scores=told.scores,
            embeddings=told.embeddings,
        )

    def reset_pages(self) -> None:
        """Drop the caches, unread; the next sequence makes its own."""
        self._held = None

    def _open(self, seq: int) -> None:
        """A sequence starts: it finds nothing of whoever was here before."""
        self._held = OwnedCaches(self._model, seq)

    def _only_piece(self, batch: Batch) -> Piece:
        """The piece of a step, if these caches can take it. Raises BuildFailed; nothing moved."""
        if len(batch.pieces) != 1:
            raise BuildFailed(
                f"step {batch.step} has {len(batch.pieces)} pieces, and the model's own caches "
                "hold one sequence at a time: set max_running to 1"
            )
        piece = batch.pieces[0]
        refused = ""
        if piece.pads:
            refused = f"{piece.pads} pad rows could not be taken back out of the model's own caches"
        elif piece.pending:
            refused = "rows ahead of their tokens could not be taken back: turn lookahead off"
        elif piece.samples > 1:
            refused = "drafts could not be taken back: set draft_tokens to 0"
        elif batch.copies:
            refused = "there are no blocks to copy in the model's own caches"
        elif not piece.tokens:
            refused = "it has no rows to feed"
        elif not 0 <= min(piece.tokens) <= max(piece.tokens) < self._vocab:
            refused = f"a token is not in the vocabulary of {self._vocab}"
        if refused:
            seq = piece.sequence.id
            raise BuildFailed(f"step {batch.step}: sequence {seq}: {refused}", seq)
        return piece

    def _offsets(self, held: OwnedCaches) -> list[int]:
        """Where the caches stand: each one's offset, or the rows that were fed where none has it.

        Slots that the model never writes were found at the start, and are left out.
        """
        if not self._counted:
            return [held.rows_fed]
        offsets = held.offsets()
        return [offsets[number] for number in self._counted]

    def _build(self, held: OwnedCaches, piece: Piece, before: list[int]) -> Ticket:
        changes = plan_adjustments(asked_of([piece]), piece.samples, self._vocab, self._masks)
        hidden = held.feed(self._body, mx.array([piece.tokens]))[0]
        seen = _observe(piece, before, self._offsets(held))
        logits, tokens, outputs = None, None, list[mx.array]()
        if piece.samples:
            logits = self._logits(hidden[-1:])
            plan = plan_samples([(piece.parameters, piece.sample_positions[0])])
            drawn = sample(adjusted(logits, changes), plan)
            tokens, outputs = drawn.tokens, [drawn.tokens, drawn.logits, drawn.margins]
        telling = plan_telling([piece])
        if telling is not None:
            outputs += tell(
                telling,
                logits,
                tokens,
                np.array(piece.target_rows, np.int64),
                hidden,
                lambda rows, held: self._logits(held[mx.array(rows.astype(np.uint32))]),
                lambda _: hidden[-1:],
            )
        return Ticket(seen, (0,) * piece.samples, outputs, telling)

    def _logits(self, hidden: mx.array) -> mx.array:
        """Logits [n, vocab] float32 of rows [n, D]."""
        return self._head(hidden[None])[0].astype(mx.float32)

    def _start(self, held: OwnedCaches, ticket: Ticket) -> Ticket:
        """Hand the graph to MLX, with all that the caches hold: not all of it leads to a sample."""
        if not ticket.sampled:
            # Logits that nobody samples are not computed.
            ticket.outputs.extend(held.arrays())
        failure = ""
        try:
            mx.async_eval(ticket.outputs, held.arrays())  # type: ignore[no-untyped-call]
        except Exception as error:
            failure = describe(error)
        if failure:
            ticket.outputs.clear()
            raise EvalFailed(failure)
        return ticket


def _claim(model: Any, kernel: ModelOwnedKernel) -> None:
    """Raise ModelError where another kernel runs this model."""
    if id(model) in _USERS:
        gc.collect()  # one that nobody holds any more may still wait for the collector
    if id(model) in _USERS:
        raise ModelError(
            "this model keeps the state of its sequence, and another kernel runs it already: load "
            "it a second time, or stop the other engine first"
        )
    _USERS[id(model)] = kernel


def _observe(piece: Piece, before: list[int], after: list[int]) -> Observation:
    """What the caches say of a piece. Of several that disagree, one that the batch does not say."""
    moved = [end - start for start, end in zip(before, after, strict=True)]
    return Observation(
        offset_reads=NOT_COUNTED,
        updates=NOT_COUNTED,
        rows_updated=(min(moved), max(moved)),
        attends=NOT_COUNTED,
        strangers=0,
        starts=(_odd(before, piece.start),),
        rows=(_odd(moved, piece.rows),),
        visible=((_odd(after, piece.start + piece.rows),),),
        tables=((0,),),
    )


def _odd(seen: list[int], expected: int) -> int:
    return next((value for value in seen if value != expected), seen[0])
