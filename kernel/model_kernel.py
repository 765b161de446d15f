"""ModelKernel: a real model behind the Kernel protocol.

Owns a model's pages, its shadow and the order of a step: lay out, build, account, start, read.
Decides no length. One thread makes every call, the constructor included.

A step may be issued before the samples of the one before it were read: its rows take their tokens
from that step's array, on the device.

Where steps share graphs, a step is started by another thread (starting.py), while this one reads
the step before it.

A step that fails while its graph is built leaves pages and shadow as they were. Errors are raised
anew, outside of the handler that caught them: a traceback would keep frames alive, these hold page
arrays, and a page array that is held is copied by the next write instead of donated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np
from attrs import frozen
from msgspec import structs

from statemachine.geometry import Geometry
from statemachine.records import Observation, ShadowReport

from . import attention, fastmath, heap, rotations
from .adapters import Adapters
from .adjusting import Adjustments, adjusted, asked_of, plan_adjustments
from .batch import GATHER, Batch, BuildFailed, EvalFailed, StepResult
from .block_arrays import block_spec, to_device, to_host
from .block_io import BlockRows, TensorSpec
from .context import StepContext
from .drawing import asked_by, sampler_for
from .errors import ModelError, describe
from .families import family_of
from .few_rows import few_rows
from .forward import Forward, anchor, as_fed, hidden_rows
from .layout import Layout, look
from .masks import Masks
from .metadata import BadBatch, StepMetadata, build, last_tokens, pending_sources
from .narrow_layers import quicken
from .order import Order
from .paged_attention import Dialect
from .paged_choice import choose, not_shared
from .pages import Pages, PageStep
from .sampling import Samples, SamplingPlan, plan_samples, sample
from .shadow import EDGES, Shadow
from .starting import Starter, settle
from .telling import Telling, plan_telling, read, tell


@frozen(eq=False)
class Ticket:
    """A step under way: what is known already, and arrays that are being computed.

    number: the order of issue. outputs: all that goes to eval, never a page array: tokens, logits
    and margins, or the forward's anchor where nothing samples; then what `telling` asks for.
    Emptied by a failure, so that no one's ticket holds on to a graph. started: by another thread.
    """

    number: int
    metadata: StepMetadata
    observation: Observation
    shadow: ShadowReport
    outputs: list[mx.array]
    telling: Telling | None
    started: Future[str] | None


@frozen(eq=False)
class _Built:
    """A step's graph, not yet started. fed: its tokens as the next step may be fed them, where it
    samples. replayed: whether it ran before, with other numbers.
    """

    metadata: StepMetadata
    pages: PageStep
    observation: Observation
    outputs: list[mx.array]
    fed: mx.array | None
    telling: Telling | None
    replayed: bool


@frozen(eq=False)
class _Newest:
    """The step issued last: its sampled tokens [S] int32, an array that only the next step reads,
    and where each sequence's last one stands.
    """

    tokens: mx.array | None = None
    places: Mapping[int, int] = {}


class ModelKernel:
    """A Kernel over an mlx-lm model.

    `geometry` must have the groups of the layout. `sanitize` is the shadow's mode. `masks` knows
    grammars; without it requests that have one cannot be built. `layout` is what a probe found
    (families.family_of); without it one is made here, or, without `check`, the model is called
    packed unprobed. `adapters` are the model's; without it there are none. `dialect`: kernels that
    read block tables; chosen for the device, and checked, if None.

    Raises ModelError where the model is served in no way over pages.
    """

    def __init__(
        self,
        model: Any,
        geometry: Geometry,
        *,
        sanitize: str = EDGES,
        masks: Masks | None = None,
        check: bool = True,
        layout: Layout | None = None,
        adapters: Adapters | None = None,
        dialect: Dialect | None = None,
    ) -> None:
        if layout is None:
            layout = _probed(model) if check else look(model)
        _check_groups(geometry, layout)
        self._geometry = geometry
        self._masks = masks
        self._adapters = adapters or Adapters(model)
        self._vocab = layout.vocab_size
        attention.install()
        if mx.default_device() == mx.Device(mx.cpu):
            heap.keep_freed()
            fastmath.install()
            rotations.install()
            fastmath.turn_weights(model)
        self._tables_off = ""
        if dialect is None:
            dialect, self._tables_off = choose(model, layout, geometry.block_size)
        self._dialect = dialect
        shares = dialect is not None and dialect.in_place
        self._starter = Starter.of_thread() if shares else None
        products = None if dialect is None or not layout.split else dialect.products
        few, few_off = few_rows(model, products)
        sampler = None if dialect is None else dialect.sampler
        self._sampler, sampler_off = sampler_for(sampler, layout.vocab_size)
        self._native, native_off = quicken(model) if few is None else ("", "")
        if dialect is not None and dialect.native:
            self._native = dialect.native
        if dialect is None:
            self._tables_off = self._tables_off or native_off
            native_off = ""
        self._forward = Forward(model, layout, dialect=dialect, few_rows=few, sampler=self._sampler)
        anew = ""
        if dialect is not None and dialect.in_place:
            anew = not_shared(self._forward, layout, geometry.block_size)
        left_out = dict.fromkeys((few_off, native_off, sampler_off, anew))
        self._left_out = tuple(filter(None, left_out))
        self._shadow = Shadow(geometry, sanitize)
        self._order = Order()
        self._newest = _Newest()
        self._pages = Pages(geometry, layout.shapes, dialect, layout.states)

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def cannot(self) -> Mapping[str, str]:
        """What no request may ask of it, by the name in Parameters, each with its reason."""
        return lacking(self._masks, self._forward.shows_hidden)

    @property
    def attention(self) -> str:
        """How pages are attended to: `tables` or GATHER, and why what else is not used here."""
        if self._dialect is not None:
            level = self._dialect.native.partition(" ")[0]
            return "; ".join((f"tables ({level})" if level else "tables", *self._left_out))
        return f"{GATHER}: {self._tables_off}" if self._tables_off else GATHER

    @property
    def computing(self) -> dict[str, str]:
        """What decides about the bits of results beside device and BLAS, as headers say it."""
        told = {} if self.attention == GATHER else {"attention": self.attention}
        return told | ({"native": self._native} if self._native else {})

    @property
    def pages_bytes(self) -> int:
        """Bytes of all page arrays."""
        return self._pages.nbytes

    def issue(self, batch: Batch) -> Ticket:
        """Build and start a step. Raises BuildFailed or EvalFailed.

        Its block copies stand even where its build fails: they are part of the state by then.
        """
        number = self._order.issue()
        self._copy(batch)
        built, seq, failure, wished = None, None, "", False
        try:
            built = self._build(batch)
        except BadBatch as error:
            seq, failure, wished = error.seq, str(error), error.wished
        except Exception as error:
            failure = describe(error)
        if built is None:
            raise BuildFailed(f"step {batch.step}: {failure}", seq, wished)
        report = self._shadow.apply(batch, built.metadata)
        return self._start(number, built, report)

    def collect(self, ticket: object) -> StepResult:
        """Wait for a step's samples. Raises EvalFailed."""
        assert isinstance(ticket, Ticket)
        try:
            self._order.collect(ticket.number)
        except EvalFailed:
            ticket.outputs.clear()
            raise
        failure = "" if ticket.started is None else ticket.started.result()
        columns: list[Any] = []
        sampled = 3 if ticket.metadata.sampled else 0
        try:
            if not failure:
                if ticket.started is None or ticket.telling is not None or not sampled:
                    settle()  # a read alone waits as well, but an eval must not meet another thread
                    mx.eval(ticket.outputs)
                # numpy's list of them takes a third of the time that MLX's own takes.
                columns = [np.array(array).tolist() for array in ticket.outputs[:sampled]]
        except Exception as error:
            failure = describe(error)
        if failure:
            self._fail(ticket.outputs, failure)
        tokens, logits, margins = columns or ([], [], [])
        told = read(ticket.telling, tokens, map(np.array, ticket.outputs[sampled or 1 :]))
        self._shadow.learn(ticket.metadata.step, last_tokens(ticket.metadata, tokens))
        return StepResult(
            observation=ticket.observation,
            shadow=ticket.shadow,
            sampled=ticket.metadata.sampled,
            tokens=tuple(tokens),
            logits=tuple(logits),
            margins=tuple(margins),
            logprobs=told.logprobs,
            scores=told.scores,
            embeddings=told.embeddings,
        )

    def reset_pages(self) -> None:
        """Throw the page arrays away, unread, and make new ones."""
        settle()
        self._forward.reset()
        self._pages.reset()
        if self._dialect is not None:
            self._dialect.reset()
        self._shadow.reset()
        self._order.reset()
        self._newest = _Newest()

    @property
    def block_spec(self) -> dict[str, TensorSpec]:
        """The tensors of a block."""
        return block_spec(self._geometry.block_size, self._pages.layers)

    def read_blocks(self, blocks: Sequence[int]) -> list[BlockRows]:
        """What stands in blocks after all steps that were issued (block_io.BlockIO)."""
        settle()
        layers = self._pages.read_blocks(blocks)
        return to_host(layers, self._shadow.block_tags(0, blocks))

    def write_blocks(self, blocks: Sequence[int], rows: Sequence[BlockRows]) -> None:
        """Put rows into blocks, before any step that is issued later."""
        settle()
        self._pages.write_blocks(blocks, to_device(rows, self.block_spec, self._pages.layers))
        self._shadow.load_blocks(0, blocks, [it.tags for it in rows])

    def _copy(self, batch: Batch) -> None:
        """Copy on write, before any write of the step. Raises EvalFailed."""
        if not batch.copies:
            return
        settle()
        failure = ""
        try:
            self._pages.copy_blocks(batch.copies)
        except Exception as error:
            failure = describe(error)
        if failure:
            self._fail([], failure)
        self._shadow.copy_blocks(batch.copies)

    def _build(self, batch: Batch) -> _Built:
        metadata = build(batch, self._geometry)
        self._check_tokens(batch, metadata)
        serving = self._adapters.serving(batch.pieces)
        context = self._forward.context(metadata, self._fed(metadata), serving)
        pages = self._pages.begin()
        plan, changes = self._plan(batch, metadata)
        telling = plan_telling(batch.pieces)
        fed: mx.array | None
        plain = plan is not None and changes is None and telling is None
        if plan is not None and plain and self._forward.draws(context):
            (*outputs, fed), observation = self._forward.drawn(context, pages, asked_by(plan))
        else:
            hidden, observation = self._forward.hidden(context, pages)
            outputs, fed = self._outputs(context, hidden, plan, changes, telling)
        replayed = self._forward.replayed
        return _Built(metadata, pages, observation, outputs, fed, telling, replayed)

    def _plan(
        self, batch: Batch, metadata: StepMetadata
    ) -> tuple[SamplingPlan | None, Adjustments | None]:
        """What samples a step has, and what is done to their logits before; None for neither."""
        if not metadata.sampled:
            return None, None
        asked = [batch.pieces[i].parameters for i in metadata.sampled]
        plan = plan_samples(zip(asked, metadata.sample_positions, strict=True))
        wished = asked_of(batch.pieces)
        return plan, plan_adjustments(wished, plan.rows, self._vocab, self._masks)

    def _outputs(
        self,
        context: StepContext,
        hidden: mx.array,
        plan: SamplingPlan | None,
        changes: Adjustments | None,
        telling: Telling | None,
    ) -> tuple[list[mx.array], mx.array | None]:
        """A step's outputs, and its tokens as the next is fed them, of what left the body."""
        metadata, serving = context.metadata, context.serving
        logits, tokens, fed = None, None, None
        if plan is None:
            outputs = [anchor(hidden)]
        else:
            logits = self._forward.logits(hidden, metadata.sample_rows, serving)
            samples = self._draw(adjusted(logits, changes), plan)
            outputs = [samples.tokens, samples.logits, samples.margins]
            tokens, fed = samples.tokens, as_fed(samples.tokens)
        if telling is not None:
            outputs += tell(
                telling,
                logits,
                tokens,
                metadata.score_rows,
                hidden,
                lambda rows, held: self._forward.logits(held, rows, serving),
                lambda numbers: hidden_rows(hidden, metadata.sample_rows[numbers]),
            )
        return outputs, fed

    def _draw(self, logits: mx.array, plan: SamplingPlan) -> Samples:
        if self._sampler is None:
            return sample(logits, plan)
        return self._sampler.sample(logits, asked_by(plan))

    def _fed(self, metadata: StepMetadata) -> mx.array | None:
        """Tokens of the pending rows, [Q], from the newest step's, which may still run."""
        sources = pending_sources(metadata, self._newest.places)
        if not sources:
            return None
        tokens = self._newest.tokens
        assert tokens is not None
        if sources == list(range(len(tokens))):
            return tokens
        return tokens[mx.array(np.array(sources, np.uint32))]

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

    def _start(self, number: int, built: _Built, report: ShadowReport) -> Ticket:
        """Hand the graph to MLX; from here on the pages are what the step makes of them."""
        self._pages.commit(built.pages)
        metadata, outputs = built.metadata, built.outputs
        places = last_tokens(metadata, range(len(metadata.sampled)))
        fed = [] if built.fed is None else [built.fed]
        arrays = [*outputs, *self._pages.states, *fed]
        started, failure = None, ""
        if built.replayed and self._starter is not None:
            started = self._starter.start(arrays)
        else:
            settle()
            try:
                mx.async_eval(arrays)  # type: ignore[no-untyped-call]
            except Exception as error:
                failure = describe(error)
        if failure:
            self._fail(outputs, failure)
        self._newest = _Newest(built.fed, places)
        telling = built.telling
        return Ticket(number, metadata, built.observation, report, outputs, telling, started)

    def _fail(self, outputs: list[mx.array], failure: str) -> NoReturn:
        """The pages are lost: let go of all that holds on to a graph. Raises EvalFailed."""
        settle()
        outputs.clear()
        self._newest = _Newest()
        self._order.fail()
        raise EvalFailed(failure)


def _probed(model: Any) -> Layout:
    family = family_of(model)
    if family.layout is None:
        raise ModelError(f"this model is {family.reason}: it needs a ModelOwnedKernel")
    return family.layout


def _check_groups(geometry: Geometry, layout: Layout) -> None:
    """Raise ModelError where a pool was laid out for other groups than the model has."""
    wanted = [structs.replace(group, num_blocks=0) for group in layout.groups(0)]
    found = [structs.replace(group, num_blocks=0) for group in geometry.groups]
    if wanted != found:
        raise ModelError(
            f"the pool's groups are not the model's ({found}, not {wanted}): make the pool anew"
        )


def lacking(masks: Masks | None, shows_hidden: bool) -> dict[str, str]:
    """What a kernel cannot do for a request (batch.Kernel.cannot)."""
    reasons = {}
    if masks is None:
        reasons["grammar"] = "this engine was built without a tokenizer, which grammars need"
    if not shows_hidden:
        reasons["embed"] = "this model's last hidden state cannot be told from its logits"
    return reasons
