"""Compiled: steps of decode rows whose graph is built once and then fed, by mx.compile.

Owns the graphs, one for each number of rows and size of plan, with samples or without. Building a
step's graph in Python takes about as long as a large GPU takes to compute it. Only where rows are
written in place: then page arrays stay the same ones, and a step's body is a function of its
tokens, positions and plans, and of nothing else that changes. Plans are filled up to few sizes, so
that steps share graphs while contexts grow. Where samples are drawn of all rows as they are, that
is part of the graph as well.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable

import mlx.core as mx
from attrs import frozen

from .adapters import BASE
from .context import StepContext
from .errors import describe
from .metadata import CacheUse
from .pages import PageStep
from .split import Body
from .starting import settle

log = logging.getLogger(__name__)

GRAPHS_MAX = 128
Run = Callable[[Body, StepContext, PageStep], tuple[mx.array, list[CacheUse]]]
Draw = Callable[[mx.array, mx.array], list[mx.array]]
"""Of what leaves the body, [T, 1, D], and of what a sampler is told of each row, [T, ...]."""
Key = tuple[int, bool, tuple[tuple[int, int, bool], ...]]


@frozen(eq=False)
class _Graph:
    """A compiled step, and what the caches counted when it was traced."""

    call: Callable[..., list[mx.array]]
    uses: list[CacheUse]


class CompiledCalls:
    """A packed call, compiled where a step allows it. `run`: the call as it is; `draw`: what may
    follow.

    Feeding a graph that ran before evaluates nothing, and waits for nothing that is being started.
    """

    def __init__(self, run: Run, draw: Draw | None = None) -> None:
        self._run = run
        self._draw = draw
        self._graphs: OrderedDict[Key, _Graph] = OrderedDict()
        self._asked: tuple[tuple[int, int], ...] | None = None
        self.replayed = False
        """Whether the newest step was fed to a graph that had run before."""
        self.failure = ""
        """Why steps are built anew each time; empty where they share graphs."""

    def run(
        self, body: Body, context: StepContext, pages: PageStep, drawn: mx.array | None = None
    ) -> tuple[list[mx.array], list[CacheUse]]:
        """What leaves the body, [T, 1, D], or, with `drawn` for its sampler, what `draw` makes of
        that; and what each layer's cache counted.
        """
        self.replayed = False
        tables = context.tables
        if self.failure or tables is None or not tables.fixed or context.serving is not BASE:
            return self._anew(body, context, pages, drawn)
        if self._asked is None:
            ran = self._anew(body, context, pages, drawn)
            self._asked = tables.asked
            return ran
        planned = [tables.plan(*asked) for asked in self._asked]
        sizes = tuple(
            [(len(counts.ints), counts.items, counts.splits > 1) for _, counts in planned]
        )
        key = (context.metadata.total_rows, drawn is not None, sizes)
        graph = self._graphs.pop(key, None)
        known = graph is not None
        if graph is None:
            settle()
            graph = self._trace(body, context, pages)
        told = [] if drawn is None else [drawn]
        try:
            arrays = graph.call(
                context.tokens, context.offset, [array for array, _ in planned], told
            )
        except Exception as error:  # what a model does in Python that no graph can hold
            self._give_up(describe(error))
        if self.failure:
            return self._anew(body, context, pages, drawn)
        self.replayed = known
        self._graphs[key] = graph
        if len(self._graphs) > GRAPHS_MAX:
            self._graphs.popitem(last=False)
        return arrays, graph.uses

    def reset(self) -> None:
        """Forget the graphs, and with them all that they hold."""
        self._graphs.clear()

    def _give_up(self, failure: str) -> None:
        """No step shares a graph from here on."""
        self.failure = failure
        log.warning(
            "from here on each step's graph is built anew, which takes milliseconds: "
            "the step cannot be compiled: %s",
            failure,
        )
        self._graphs.clear()

    def _anew(
        self, body: Body, context: StepContext, pages: PageStep, drawn: mx.array | None
    ) -> tuple[list[mx.array], list[CacheUse]]:
        """As `run`, without a graph of before."""
        settle()
        hidden, uses = self._run(body, context, pages)
        return self._ended(hidden, drawn), uses

    def _ended(self, hidden: mx.array, drawn: mx.array | None) -> list[mx.array]:
        if drawn is None:
            return [hidden]
        assert self._draw is not None
        return self._draw(hidden, drawn)

    def _trace(self, body: Body, context: StepContext, pages: PageStep) -> _Graph:
        """A graph for steps like this one; traced when it is first called. It holds the page
        arrays, which stay the same ones until `reset`.
        """
        uses: list[CacheUse] = []
        asked = self._asked or ()

        def traced(
            tokens: mx.array, offset: mx.array, plans: list[mx.array], told: list[mx.array]
        ) -> list[mx.array]:
            inner = copy.copy(context)
            inner.tokens, inner.offset = tokens, offset
            assert context.tables is not None
            inner.tables = context.tables.with_plans(dict(zip(asked, plans, strict=True)))
            hidden, counted = self._run(body, inner, pages)
            uses[:] = counted
            return self._ended(hidden, told[0] if told else None)

        compiled: Callable[..., list[mx.array]] = mx.compile(traced)
        return _Graph(compiled, uses)
