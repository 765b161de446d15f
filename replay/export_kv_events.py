"""Export KV events: which prefix blocks can be found, as vLLM's KV cache event batches.

A stream of msgpack arrays `[ts, events]`, one for each record that changed something. Events are
`BlockStored`, `BlockRemoved` and `AllBlocksCleared`, with the fields and the order of vLLM 0.20
(vllm/distributed/kv_events.py): arrays that begin with the name, which its readers from 0.12 on
take; or, as vLLM 0.33 writes them, maps in which `type` is the name. A block that stands in two
places is stored with the first and removed with the last, as a reader that counts nothing needs
it. ts: seconds since 1970, of the tape's start plus its steps' times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Struct, structs

from statemachine.events import BlockEvicted, BlockLoaded, BlockPublished, Event, PoolReset
from statemachine.records import Checkpoint, Gap, Record, StepDone, StepFailed, StepPlanned
from statemachine.sequence import unpack
from statemachine.state import Entry, State

from .clock import Clock
from .export import Options
from .following import Following

MEDIUM = "GPU"
"""vLLM's name for the pool that attention reads, whatever the device."""


class BlockStored(Struct, frozen=True, array_like=True, tag=True):
    """Blocks that can be found from now on; the parent is None for a prompt's first one."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None


class BlockRemoved(Struct, frozen=True, array_like=True, tag=True):
    """Blocks that can be found no more."""

    block_hashes: tuple[int, ...]
    medium: str


class AllBlocksCleared(Struct, frozen=True, array_like=True, tag=True):
    """Nothing can be found any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


def as_kv_events(records: Iterable[Record], options: Options, notes: list[str]) -> Iterator[bytes]:
    """Batches."""
    index, encoder = _Index(), msgspec.msgpack.Encoder()
    for record in records:
        found = index.feed(record)
        if found:
            told = [_as_map(it) for it in found] if options.kv_maps else found
            yield encoder.encode((index.time, told))
        if index.following.broken:
            notes.append(f"the export ends there: {index.following.broken}")
            return
    header = index.following.header
    if header is not None and len(header.geometry.groups) > 1:
        notes.append("the format knows one kind of block: only those of group 0 are in it")
    if index.salted:
        notes.append(
            f"{index.salted} blocks are of a namespace with a salt or a version, which the format "
            "has no field for: their hashes say it"
        )


class _Index:
    """Follows a tape's prefix index, of group 0."""

    def __init__(self) -> None:
        self.following = Following()
        self.salted = 0
        self._clock = Clock()
        self._counts = Counter[int]()
        self._fresh = True

    @property
    def time(self) -> float:
        """Seconds since 1970."""
        header = self.following.header
        return (0 if header is None else header.created_ns / 1e9) + self._clock.now / 1e6

    def feed(self, record: Record) -> list[KVEvent]:
        """What a record changes."""
        self._clock.feed(record)
        before = self._state()
        self.following.feed(record)
        if self.following.broken:
            return []
        if isinstance(record, Gap):
            self._fresh = True
        elif isinstance(record, Checkpoint) and self._fresh:
            self._fresh = False
            return self._begin(self.following.state)
        elif isinstance(record, StepPlanned | StepDone | StepFailed):
            self._fresh = False
            return self._events(record.events, before)
        return []

    def _state(self) -> State | None:
        return None if self.following.header is None else self.following.state

    def _begin(self, state: State) -> list[KVEvent]:
        """What can be found at the start, or behind a gap; parents have lesser ids."""
        found: list[KVEvent] = [AllBlocksCleared()] if self._counts else []
        self._counts.clear()
        for number in sorted(state.entries):
            entry = state.entries[number]
            for _ in entry.blocks[0]:
                found += self._stored(state, entry)
        return found

    def _events(self, events: tuple[Event, ...], before: State | None) -> list[KVEvent]:
        found: list[KVEvent] = []
        state = self.following.state
        for event in events:
            if isinstance(event, BlockPublished | BlockLoaded) and event.group == 0:
                entries = state.by_key.get(event.key, ())
                # Of several that share a key, which is a collision, the newest was published.
                found += self._stored(state, state.entries[entries[-1]]) if entries else []
            elif isinstance(event, BlockEvicted) and event.group == 0:
                self._counts[event.key] -= 1
                if not self._counts[event.key]:
                    del self._counts[event.key]
                    found.append(BlockRemoved((event.key,), MEDIUM))
            elif isinstance(event, PoolReset):
                self._counts.clear()
                found.append(AllBlocksCleared())
        return found

    def _stored(self, state: State, entry: Entry) -> list[KVEvent]:
        self._counts[entry.key] += 1
        if self._counts[entry.key] > 1:
            return []
        space = entry.namespace
        self.salted += bool(space.salt or space.version)
        parent = state.entries.get(entry.parent)
        return [
            BlockStored(
                (entry.key,),
                None if parent is None else parent.key,
                unpack(entry.tokens),
                state.geometry.block_size,
                None,
                MEDIUM,
                space.adapter or None,
            )
        ]


def _as_map(event: KVEvent) -> dict[str, object]:
    return {"type": type(event).__name__, **structs.asdict(event)}
