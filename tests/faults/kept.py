"""Faults of kept prefixes: what is read out of the pages, put into them, and indexed."""

from __future__ import annotations

from typing import Any

from statemachine.events import BlockLoaded, Event

from . import loads
from .fault import Catalogue, Witness

FAULTS = Catalogue()


@FAULTS.add(
    "kept-rows-of-another-file",
    "a block is loaded with the rows of the file after its own",
    "server.kept:KeptBlocks._rows_for",
    loads.KEPT,
    "fold",
    "content",
    "not the row",
)
def rows_of_another(original: Any, witness: Witness) -> Any:
    def rows_for(self: Any, state: Any, event: BlockLoaded) -> Any:
        right = original(self, state, event)
        read = [block.rows for block in self._ready[event.seq].blocks.values()]
        wrong = read[(read.index(right) + 1) % len(read)]
        if wrong != right:
            witness.note(event.seq)
        return wrong

    return rows_for


@FAULTS.add(
    "kept-under-another-key",
    "rows that are loaded together go into each other's blocks",
    "kernel.fake:FakeKernel.write_blocks",
    loads.KEPT,
    "fold",
    "content",
    "not the row",
)
def under_another_key(original: Any, witness: Witness) -> Any:
    def write_blocks(self: Any, blocks: Any, rows: Any) -> None:
        if len(rows) > 1:
            witness.note()
        original(self, blocks, [*rows[1:], rows[0]])

    return write_blocks


@FAULTS.add(
    "kept-rows-not-written",
    "a load is indexed, and its rows never reach the pages",
    "kernel.fake:FakeKernel.write_blocks",
    loads.KEPT,
    "fold",
    "content",
    "not the row",
)
def not_written(original: Any, witness: Witness) -> Any:
    def write_blocks(self: Any, blocks: Any, rows: Any) -> None:
        witness.note()

    return write_blocks


@FAULTS.add(
    "kept-block-stays-held",
    "a loaded block counts as held by a table that does not name it",
    "statemachine.publication:loaded",
    loads.KEPT,
    "fold",
    "fold",
    "has digest",
)
def stays_held(original: Any, witness: Witness) -> Any:
    def loaded(draft: Any, namespace: Any, event: BlockLoaded) -> None:
        original(draft, namespace, event)
        witness.note()
        draft.group(event.group).hold(event.block, refs=1)

    return loaded


@FAULTS.add(
    "evicted-not-stored",
    "a block makes room for another and is not read for the store",
    "server.draft:Draft._stored",
    loads.KEPT,
    "plan",
    "plan",
    "BlockStored",
)
def not_stored(original: Any, witness: Witness) -> Any:
    def stored(self: Any, event: Event) -> tuple[Event, ...]:
        if len(original(self, event)) > 1:
            witness.note()
        return (event,)

    return stored


@FAULTS.add(
    "loaded-short-of-the-offer",
    "a request leaves the last of the blocks that it was offered where they are",
    "server.reuse:_loads",
    loads.KEPT,
    "plan",
    "plan",
    "BlockLoaded",
)
def fewer_loaded(original: Any, witness: Witness) -> Any:
    def loads_of(draft: Any, state: Any, request: int, tokens: tuple[int, ...]) -> Any:
        found = original(draft, state, request, tokens)
        if not found:
            return found
        witness.note(request)
        last = max(at for at, event in enumerate(found) if isinstance(event, BlockLoaded))
        return found[:last]

    return loads_of
