"""Parts: what a loop runs on, and what it is given from outside.

Owns these shapes, which build.py, the engine and the loop share, and nothing that they do.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from time import perf_counter
from typing import Protocol

from msgspec import Struct, field

from kernel.batch import Kernel
from statemachine.records import FlushRequested, Header, Record, RequestArrived, RequestCancelled

from .adapters import Shelf
from .drafting import DraftParts
from .kept import KeptBlocks
from .live_guard import WARN
from .policy import Policy
from .prefix_store import Read
from .submission import Sink
from .text import IncrementalDecoder


class Capture(Protocol):
    """Where records go (capture.CaptureWriter).

    position: bytes of the tape's current file; bytes_written: of all of them. gaps: how often
    records were lost, since a disk was full.
    """

    position: int
    bytes_written: int
    gaps: int

    @property
    def checkpoint_due(self) -> bool:
        """Whether a Checkpoint should stand before the next StepPlanned."""

    def write(self, records: list[Record]) -> None:
        """Put records on tape, in one write."""

    def close(self) -> None:
        """End the tape."""


class Parts(Struct, frozen=True):
    """What a loop runs on.

    decoder: makes a detokeniser, needed for stop strings only. vocab_size: token ids below it may
    be sent; 0 checks nothing. on_divergence: what a step does that finds one (live_guard.MODES).
    shelf: the adapters that requests may ask for. kept: the prefix store's side of the pool. draft:
    a model that guesses. prepare: makes a grammar ready, on any thread, and returns what keeps it
    so. embedding_size: numbers of an embedding; 0 where there are none.
    """

    kernel: Kernel
    policy: Policy
    capture: Capture | None = None
    header: Header | None = None
    decoder: Callable[[], IncrementalDecoder] | None = None
    vocab_size: int = 0
    on_divergence: str = WARN
    shelf: Shelf = field(default_factory=Shelf)
    kept: KeptBlocks | None = None
    draft: DraftParts | None = None
    prepare: Callable[[str], object] | None = None
    embedding_size: int = 0


class Arrival(Struct, frozen=True):
    """A request as it comes in, who hears of it, and when that was, for the counters' latencies.

    reading: what the prefix store has of its prompt, done before the loop is given it.
    """

    record: RequestArrived
    sink: Sink
    at_s: float = field(default_factory=perf_counter)
    reading: Future[Read] | None = None


Input = Arrival | RequestCancelled | FlushRequested
