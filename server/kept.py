"""Kept: between an engine's pool and the prefix store.

    a request comes in  -> ask      -> the store reads -> offer -> BlocksOffered on tape
    a plan says so      -> carry_out: BlockStored blocks out of the pages, BlockLoaded ones in
    its step held       -> settled: what was read out may be written
    the server ends     -> finish: all that can be found is written

Owns what was read for requests that wait, and what was read of pages whose steps are not collected
yet: after a forward that raised, pages read as garbage without an error. All calls but `ask` come
from the engine's thread.

Rows are trusted as far as tags go: a block whose tags are not those of its identity is not kept.
Adapters' rows are not kept: a name and a version mean the same weights in one process only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import structlog

from kernel.block_io import BlockIO, BlockRows
from statemachine.events import BlockLoaded, BlockStored
from statemachine.geometry import FULL, Geometry
from statemachine.prefix import lookup
from statemachine.records import NO_PARENT, BlocksOffered, RequestArrived
from statemachine.sequence import pack, unpack
from statemachine.state import NO_ENTRY, Entry, State
from statemachine.tags import block_tags, root_key

from .kept_file import Kept, StoreError
from .prefix_store import PrefixStore, Read
from .submission import Submission
from .view import StepPlan

AT_ONCE = 64
"""Blocks that are read out of the pages together when a server ends."""
CHAINS_MAX = 1 << 16

log = structlog.get_logger()


def check_storable(geometry: Geometry) -> None:
    """Raise StoreError where a pool's blocks cannot be kept."""
    if [group.kind for group in geometry.groups] != [FULL]:
        kinds = ", ".join(group.kind for group in geometry.groups)
        raise StoreError(
            "prefix_store keeps blocks of models whose layers all keep all rows, and this one's "
            f"groups are {kinds}: leave it out"
        )


class KeptBlocks:
    """See the module."""

    def __init__(self, store: PrefixStore, io: BlockIO, geometry: Geometry) -> None:
        """Raises StoreError for a pool that cannot be kept."""
        check_storable(geometry)
        self._store = store
        self._io = io
        self._geometry = geometry
        self._ready: dict[int, Read] = {}
        self._unsettled: dict[int, list[Kept]] = {}
        self._chains: dict[int, bytes] = {}
        """Of index entries, by their ids."""
        self.counts = store.counts

    def ask(self, submission: Submission, state: State) -> Future[Read] | None:
        """Have a prompt's blocks read that `state` does not have; None where there are none."""
        space, tokens = submission.namespace, submission.tokens
        if space.adapter or submission.parent != NO_PARENT:
            return None  # a copy shares its parent's rows
        found = lookup(state, space, tokens).rows // self._geometry.block_size
        return self._store.ask(space, tokens, found)

    def offer(self, arrived: RequestArrived, read: Read) -> BlocksOffered | None:
        """What a request may load, if anything was read for it; it is held until `forget`."""
        if not self._store.holds(read):
            self._store.release(read)
            return None
        if not read.blocks:
            return None
        self._ready[arrived.request] = read
        return BlocksOffered(arrived.request, read.first, read.first + len(read.blocks))

    def drop(self, reading: Future[Read]) -> None:
        """A request was refused after all."""
        if not reading.cancelled():
            self._store.release(reading.result())

    def forget(self, request: int) -> None:
        """A request started, or ended."""
        read = self._ready.pop(request, None)
        if read is not None:
            self._store.release(read)

    def carry_out(self, before: State, plan: StepPlan) -> None:
        """Read and write the pages as a plan's events say; `before` is the state that it was made
        from. Call before its step is issued. What it raises leaves pages of which nothing is known.
        """
        stored = [event for event in plan.events if isinstance(event, BlockStored)]
        loaded = [event for event in plan.events if isinstance(event, BlockLoaded)]
        if stored:
            blocks = [event.block for event in stored]
            self._unsettled[plan.step] = self._read_out(before, blocks)
        if loaded:
            rows = [self._rows_for(plan.state, event) for event in loaded]
            self._io.write_blocks([event.block for event in loaded], rows)
            self.counts.loaded += len(loaded)
        for request, _ in plan.admitted:
            self.forget(request)

    def settled(self, step: int) -> None:
        """A step and all before it were collected: what was read before it is what it claims."""
        for block in self._unsettled.pop(step, ()):
            self._store.put(block)

    def lost(self) -> None:
        """The pages were lost; what was read of them may be garbage."""
        self._unsettled.clear()

    def flush(self) -> None:
        """The index is to be emptied, and so is the store."""
        self._unsettled.clear()
        self._store.clear()

    def finish(self, state: State) -> None:
        """Keep all that can be found, the least recently used first; nothing is in flight."""
        cached = state.groups[0].cached
        blocks = [cached.items[place] for place in sorted(cached.items)][-self._store.blocks_max :]
        for first in range(0, len(blocks), AT_ONCE):
            for block in self._read_out(state, blocks[first : first + AT_ONCE]):
                self._store.put(block)
            self._store.drain()

    def close(self) -> None:
        """Write what waits, and end the store's threads."""
        self._store.close()

    def _read_out(self, state: State, blocks: Sequence[int]) -> list[Kept]:
        """Blocks that the store does not have yet."""
        records = state.groups[0].blocks
        entries = [(block, state.entries[records[block].entry]) for block in blocks]
        wanted = [
            (block, entry)
            for block, entry in entries
            if not entry.namespace.adapter and not self._store.has(self._chain(state, entry))
        ]
        if not wanted:
            return []
        rows = self._io.read_blocks([block for block, _ in wanted])
        pairs = zip((entry for _, entry in wanted), rows, strict=True)
        return list(self._sound(state, pairs))

    def _sound(self, state: State, pairs: Iterable[tuple[Entry, BlockRows]]) -> Iterable[Kept]:
        """Blocks whose tags are those of their identity, as far as there are tags."""
        for entry, rows in pairs:
            root = root_key(self._geometry, entry.namespace)
            parent = root if entry.parent == NO_ENTRY else state.entries[entry.parent].key
            tags = tuple(block_tags(self._geometry, parent, entry.tokens))
            if rows.tags not in ((), tags):
                self.counts.dropped += 1
                log.error("a block held other rows than it should, and was not kept")
                continue
            chain, tokens = self._chain(state, entry), unpack(entry.tokens)
            yield Kept(chain, root, parent, tokens, entry.key, rows)

    def _rows_for(self, state: State, event: BlockLoaded) -> BlockRows:
        """The rows that were read for a load."""
        parent = state.entries.get(event.parent)
        if parent is None:
            above = self._store.chains.root(state.sequences[event.seq].namespace)
        else:
            above = self._chain(state, parent)
        chain = self._store.chains.after(above, pack(event.tokens))
        return self._ready[event.seq].blocks[chain].rows

    def _chain(self, state: State, entry: Entry) -> bytes:
        """The name of an entry's rows in the store."""
        path = []
        while entry.id not in self._chains:
            path.append(entry)
            if entry.parent == NO_ENTRY:
                break
            entry = state.entries[entry.parent]
        chain = self._chains.get(entry.id) or self._store.chains.root(entry.namespace)
        for it in reversed(path):
            chain = self._store.chains.after(chain, it.tokens)
            self._chains[it.id] = chain
        if len(self._chains) > CHAINS_MAX:
            self._chains.clear()
        return chain
