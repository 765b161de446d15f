"""ModelKernel: a real model behind the Kernel protocol.

Owns a model's pages, its shadow and the order of a step: lay out, build, account, start, read.
Decides no length. One thread makes every call, the constructor included.

A step that fails while its graph is built leaves pages and shadow as they were. Errors are raised
anew, outside of the handler that caught them: a traceback would keep frames alive, these hold page
arrays, and a page array that is held is copied by the next write instead of donated.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from attrs import frozen
from msgspec import structs

from statemachine.geometry import Geometry
from statemachine.records import Observation, ShadowReport

from . import attention, fastmath
from .batch import Batch, BuildFailed, EvalFailed, StepResult
from .context import StepContext
from .families import check_family, layer_shapes
from .forward import Forward
from .metadata import BadBatch, StepMetadata, build
from .pages import Pages, PageStep
from .probe import probe
from .sampling import plan_samples, sample
from .shadow import EDGES, Shadow


@frozen(eq=False)
class Ticket:
    """A step under way: what is known already, and arrays that are being computed.

    outputs: all that goes to eval, never a page array: tokens, logits and margins, or the forward's
    anchor where nothing samples. Emptied by a failure, so that no one's ticket holds on to a graph.
    """

    metadata: StepMetadata
    observation: Observation
    shadow: ShadowReport
    outputs: list[mx.array]


@frozen(eq=False)
class _Built:
    """A step's graph, not yet started."""

    metadata: StepMetadata
    pages: PageStep
    observation: Observation
    outputs: list[mx.array]


class ModelKernel:
    """A Kernel over an mlx-lm model.

    `geometry` must have the groups of `families.groups_for`. `sanitize` is the shadow's mode. With
    `check`, a few tokens run over the pages first and must agree with mlx-lm's own caches;
    raises ModelError where they do not, or where the architecture is none that is served.
    """

    def __init__(
        self, model: Any, geometry: Geometry, *, sanitize: str = EDGES, check: bool = True
    ) -> None:
        check_family(model)
        self._geometry = geometry
        self._vocab = int(model.args.vocab_size)
        shapes = layer_shapes(model)
        attention.install()
        if mx.default_device() == mx.Device(mx.cpu):
            fastmath.install()
            fastmath.turn_weights(model)
        self._forward = Forward(model, geometry)
        self._shadow = Shadow(geometry, sanitize)
        if check:
            probe(model, self._forward, geometry, shapes)
        self._pages = Pages(geometry, shapes)

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def pages_bytes(self) -> int:
        """Bytes of all page arrays."""
        return self._pages.nbytes

    def issue(self, batch: Batch) -> Ticket:
        """Build and start a step. Raises BuildFailed or EvalFailed.

        Its block copies stand even where its build fails: they are part of the state by then.
        """
        self._copy(batch)
        built, seq, failure = None, None, ""
        try:
            built = self._build(batch)
        except BadBatch as error:
            seq, failure = error.seq, str(error)
        except Exception as error:
            failure = describe(error)
        if built is None:
            raise BuildFailed(f"step {batch.step}: {failure}", seq)
        report = self._shadow.apply(structs.replace(batch, copies=()), built.metadata)
        return self._start(built, report)

    def collect(self, ticket: object) -> StepResult:
        """Wait for a step's samples. Raises EvalFailed."""
        assert isinstance(ticket, Ticket)
        failure = ""
        columns: list[list[Any]] = [[], [], []]
        try:
            mx.eval(ticket.outputs)
            if ticket.metadata.sampled:
                columns = [np.array(array).tolist() for array in ticket.outputs]
        except Exception as error:
            failure = describe(error)
        if failure:
            ticket.outputs.clear()
            raise EvalFailed(failure)
        tokens, logits, margins = columns
        return StepResult(
            observation=ticket.observation,
            shadow=ticket.shadow,
            sampled=ticket.metadata.sampled,
            tokens=tuple(tokens),
            logits=tuple(logits),
            margins=tuple(margins),
        )

    def reset_pages(self) -> None:
        """Throw the page arrays away, unread, and make new ones."""
        self._pages.reset()
        self._shadow.reset()

    def _copy(self, batch: Batch) -> None:
        """Copy on write, before any write of the step. Raises EvalFailed."""
        if not batch.copies:
            return
        failure = ""
        try:
            self._pages.copy_blocks(batch.copies)
        except Exception as error:
            failure = describe(error)
        if failure:
            raise EvalFailed(failure)
        self._shadow.copy_blocks(batch.copies)

    def _build(self, batch: Batch) -> _Built:
        metadata = build(batch, self._geometry)
        self._check_tokens(batch, metadata)
        context = StepContext(metadata)
        pages = self._pages.begin()
        logits, anchor, observation = self._forward.run(context, pages)
        outputs = [anchor]
        if logits is not None:
            asked = [batch.pieces[i] for i in metadata.sampled]
            plan = plan_samples((p.parameters, p.sample_position or 0) for p in asked)
            samples = sample(logits, plan)
            outputs = [samples.tokens, samples.logits, samples.margins]
        return _Built(metadata, pages, observation, outputs)

    def _check_tokens(self, batch: Batch, metadata: StepMetadata) -> None:
        """MLX reads beyond an embedding without an error."""
        tokens = metadata.tokens
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= self._vocab):
            row = int(np.argmax((tokens < 0) | (tokens >= self._vocab)))
            piece = int(np.searchsorted(metadata.first, row, side="right")) - 1
            raise BadBatch(
                f"token {int(tokens[row])} is not in the vocabulary of {self._vocab}",
                batch.pieces[piece].sequence.id,
            )

    def _start(self, built: _Built, report: ShadowReport) -> Ticket:
        """Hand the graph to MLX; from here on the pages are what the step makes of them."""
        self._pages.commit(built.pages)
        ticket = Ticket(built.metadata, built.observation, report, built.outputs)
        failure = ""
        try:
            mx.async_eval(ticket.outputs)  # type: ignore[no-untyped-call]
        except Exception as error:
            failure = describe(error)
        if failure:
            ticket.outputs.clear()
            raise EvalFailed(failure)
        return ticket


def describe(error: Exception) -> str:
    """An error in a line, with nothing kept of its frames."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:500]
