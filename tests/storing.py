"""Storing: servers over the fake kernel that keep prefixes in a folder.

Owns what the tests of the prefix store share; judges nothing but a tape's replay.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from kernel.fake import FakeKernel
from replay.run import Options
from replay.run import replay as run_replay
from server.kept import KeptBlocks
from server.policy import Policy
from server.prefix_store import PrefixStore
from statemachine.codec import TapeEncoder
from statemachine.geometry import Geometry, Group

from .sim import POLICY, SMALL, Inbox, Sim

STORING = structs.replace(POLICY, store_evicted=True)
GEOMETRY = structs.replace(SMALL, identity="weights 1")
FEW = Geometry(block_size=4, groups=(Group(num_blocks=8),), identity="weights 1")
PROMPT = tuple(range(20, 43))  # 5 whole blocks of 4, and 3 tokens


class Server(Sim):
    """An engine over the fake kernel, with a store in a folder."""

    def __init__(
        self,
        folder: Path,
        geometry: Geometry = GEOMETRY,
        policy: Policy = STORING,
        *,
        bytes_max: int = 1 << 30,
        made_by: tuple[str, ...] = ("here",),
        **options: Any,
    ) -> None:
        def kept(kernel: FakeKernel) -> KeptBlocks:
            self.store = PrefixStore(folder, bytes_max, geometry, kernel.block_spec, made_by)
            return KeptBlocks(self.store, kernel, geometry)

        super().__init__(geometry, policy, kept=kept, **options)

    def ask(self, prompt: tuple[int, ...] = PROMPT, **options: Any) -> Inbox:
        """One request, to its end."""
        inbox = self.submit(prompt, **options)
        self.run()
        assert inbox.reason == "length"
        return inbox

    def stop(self) -> None:
        """Stop, with all files written."""
        self.engine.stop()


def warm(folder: Path, prompt: tuple[int, ...] = PROMPT, **options: Any) -> None:
    """A server that computes a prompt, and ends."""
    server = Server(folder, **options)
    assert server.ask(prompt).cached_tokens == 0
    server.stop()


def files(folder: Path) -> list[Path]:
    """The blocks in it."""
    return sorted(folder.glob("*.safetensors"))


def replays_clean(sim: Sim, path: Path) -> None:
    """The tape folds and plans, all invariants after each event."""
    path.write_bytes(TapeEncoder().encode(sim.capture.records))
    for depth in ("fold", "plan"):
        outcome = run_replay(str(path), Options(depth=depth, invariants="event"))
        assert outcome.divergence is None, outcome.divergence


@contextmanager
def held(store: PrefixStore) -> Iterator[None]:
    """The writer does nothing inside of the block."""
    go = threading.Event()
    store._writer.submit(go.wait)
    try:
        yield
    finally:
        go.set()


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """What a file says of itself, and its rows."""
    length = int.from_bytes(data[:8], "little")
    return msgspec.json.decode(data[8 : 8 + length]), data[8 + length :]
