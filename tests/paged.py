"""Sequences by hand, over shuffled tables: what the kernel's tests share."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
from mlx_lm.models import activations, llama
from mlx_lm.models.cache import make_prompt_cache
from msgspec import structs

from kernel.batch import Batch, Piece
from kernel.forward import Forward
from kernel.layout import Layout, look
from kernel.metadata import build
from kernel.pages import Pages
from statemachine.content import extend
from statemachine.events import NO_BLOCK, Namespace
from statemachine.geometry import WINDOW, Geometry
from statemachine.records import Parameters
from statemachine.sequence import NO_TOKEN, Sequence, Speculative
from statemachine.tags import root_key


class Book:
    """Gives out blocks in a shuffled order and keeps a Sequence for each id."""

    def __init__(self, geometry: Geometry, seed: int = 0) -> None:
        self.geometry = geometry
        self.sequences: dict[int, Sequence] = {}
        self._free = []
        for number, group in enumerate(geometry.groups):
            blocks = list(range(group.num_blocks))
            random.Random(seed + number).shuffle(blocks)
            self._free.append(blocks)

    def open(self, seq: int) -> Sequence:
        namespace = Namespace()
        groups = len(self.geometry.groups)
        sequence = Sequence(
            seq,
            namespace,
            root_key(self.geometry, namespace),
            tables=((),) * groups,
            starts=(0,) * groups,
        )
        self.sequences[seq] = sequence
        return sequence

    def append(
        self, seq: int, tokens: list[int], pads: int = 0, sample: bool = True, **wanted: Any
    ) -> Piece:
        """A piece that feeds `tokens` and pads; parameters by keyword."""
        before = self.sequences.get(seq) or self.open(seq)
        grown = extend(self.geometry, before, tuple(tokens))
        need = self.geometry.blocks_for(grown.committed + pads)
        tables = tuple(self._grown(group, table, need) for group, table in enumerate(before.tables))
        sequence = structs.replace(grown, tables=tables, pads=pads)
        self.sequences[seq] = sequence
        return Piece(
            sequence,
            tuple(tokens),
            pads,
            samples=int(sample),
            parameters=Parameters(max_tokens=1, **wanted) if wanted else None,
        )

    def share(self, seq: int, child: int, rows: int) -> None:
        """A new sequence over the first rows, whole blocks, of another."""
        parent, keep = self.sequences[seq], rows // self.geometry.block_size
        tables = tuple(table[:keep] for table in parent.tables)
        grown = extend(self.geometry, self.open(child), parent.tokens[:rows])
        self.sequences[child] = structs.replace(grown, tables=tables)

    def _grown(self, group: int, table: tuple[int, ...], need: int) -> tuple[int, ...]:
        """The table with blocks of its own up to `need`; of slots the last one alone."""
        new = self.geometry.groups[group].new_blocks(len(table), need)
        holes = (NO_BLOCK,) * (need - len(table) - new)
        return table + holes + tuple(self._free[group].pop() for _ in range(new))

    def ahead(self, seq: int, step: int, **wanted: Any) -> Piece:
        """A piece of one row whose token the step before samples."""
        before = self.sequences[seq]
        need = self.geometry.blocks_for(before.offset + 1)
        tables = tuple(self._grown(group, table, need) for group, table in enumerate(before.tables))
        rows = (*before.speculative, Speculative(NO_TOKEN, step))
        self.sequences[seq] = structs.replace(before, tables=tables, speculative=rows)
        parameters = Parameters(max_tokens=1, **wanted) if wanted else None
        return Piece(self.sequences[seq], (), pending=1, samples=1, parameters=parameters)

    def commit(self, seq: int, token: int) -> None:
        """What a Committed event does: the oldest speculative row's token is known."""
        before = self.sequences[seq]
        rest = before.speculative[1:]
        bare = structs.replace(before, speculative=())
        grown = extend(self.geometry, bare, (token,))
        self.sequences[seq] = structs.replace(grown, speculative=rest)

    def trim_pads(self, seq: int) -> None:
        """What a Trimmed event does after a padded prefill."""
        sequence = self.sequences[seq]
        keep = self.geometry.blocks_for(sequence.committed)
        for group, table in enumerate(sequence.tables):
            self._free[group].extend(table[keep:])
        tables = tuple(table[:keep] for table in sequence.tables)
        self.sequences[seq] = structs.replace(sequence, pads=0, tables=tables)

    def front_trim(self, seq: int) -> None:
        """What FrontTrimmed events do: windows drop what no later query needs."""
        sequence = self.sequences[seq]
        tables, starts = list(sequence.tables), list(sequence.starts)
        for number, group in enumerate(self.geometry.groups):
            if group.kind == WINDOW:
                start = max(0, sequence.committed - group.window + 1)
                sinks = self.geometry.blocks_for(group.sink)
                gone = range(sinks, start // self.geometry.block_size)
                table = list(tables[number])
                for index in gone:
                    if table[index] != NO_BLOCK:
                        self._free[number].insert(0, table[index])
                        table[index] = NO_BLOCK
                tables[number], starts[number] = tuple(table), start
        self.sequences[seq] = structs.replace(sequence, tables=tuple(tables), starts=tuple(starts))


class Runner:
    """Forwards over pages, logits out: no sampling, no shadow."""

    def __init__(
        self, model: Any, num_blocks: int = 64, block_size: int = 4, layout: Layout | None = None
    ) -> None:
        layout = layout or look(model)
        groups = layout.groups(num_blocks)
        self.geometry = Geometry(block_size=block_size, groups=groups, identity="test")
        self.book = Book(self.geometry)
        self.pages = Pages(self.geometry, layout.shapes, states=layout.states)
        self.forward = Forward(model, layout)
        self._step = 0

    def run(self, *pieces: Piece) -> np.ndarray:
        """Logits of the sampled rows: [S, vocab]."""
        self._step += 1
        metadata = build(Batch(self._step, pieces), self.geometry)
        pages = self.pages.begin()
        logits, anchor, self.seen = self.forward.run(self.forward.context(metadata), pages)
        self.pages.commit(pages)
        mx.eval(anchor if logits is None else logits)
        return np.empty((0,)) if logits is None else np.array(logits)


def dense_logits(model: Any, tokens: list[int], prompt: int) -> np.ndarray:
    """mlx-lm's own caches and arithmetic: logits after `prompt` tokens and each later one."""
    with mock.patch.object(llama, "swiglu", activations.swiglu):
        return _dense_logits(model, tokens, prompt)


def _dense_logits(model: Any, tokens: list[int], prompt: int) -> np.ndarray:
    caches = make_prompt_cache(model)
    rows = [model(mx.array([tokens[:prompt]]), cache=caches)[0, -1]]
    for token in tokens[prompt:]:
        rows.append(model(mx.array([[token]]), cache=caches)[0, -1])
    return np.array(mx.stack(rows).astype(mx.float32))


def random_tokens(seed: int, count: int, vocab: int = 97) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()
