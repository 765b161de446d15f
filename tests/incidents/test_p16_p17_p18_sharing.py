"""P16, P18: who finds whose rows, from many threads, and across adapters and tenants."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from msgspec import structs

from kernel.fake import FakeKernel
from server.engine import Engine
from server.loop import Parts
from server.policy import Policy
from server.submission import Submission, Update
from statemachine import commands, invariants
from statemachine.events import Namespace
from statemachine.geometry import Geometry, Group
from statemachine.records import Parameters
from statemachine.transitions import apply_all

from ..sim import MemoryCapture, Sim, answer_alone, header
from .serving import replays, settle

WAIT_S = 60.0
THREADS, INSERTS, FETCHES = 8, 25, 1250
"""10,000 fetches, while 200 requests insert."""
TREE = Geometry(2, (Group(num_blocks=96),))
ROOM = Geometry(4, (Group(num_blocks=256),))
POLICY = Policy(max_batch_tokens=128, prefill_chunk=64, context_tokens=128)


def branch(generator: random.Random) -> tuple[int, ...]:
    """A prompt of a tree with two children at each node: most are prefixes of others."""
    return tuple(1 + generator.randrange(2) for _ in range(generator.randint(2, 12)))


class Client:
    """Sends prompts one after the other, and fetches what the index holds in between."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.generator = random.Random(seed)
        self.ends: list[str | None] = []
        self.found = self.fetched = 0
        self.error: Exception | None = None
        self._ended = threading.Semaphore(4)
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            for _ in range(INSERTS):
                assert self._ended.acquire(timeout=WAIT_S)
                self.engine.submit(Submission(branch(self.generator), Parameters(2)), self._hear)
                for _ in range(FETCHES // INSERTS):
                    self._fetch()
        except Exception as error:
            self.error = error

    def _hear(self, update: Update) -> None:
        if update.finish_reason is not None:
            self.ends.append(update.finish_reason)
            self._ended.release()

    def _fetch(self) -> None:
        """Search in one snapshot, read in a later one: all of it, a part, or a miss."""
        tokens = (*branch(self.generator), 9)
        hit = commands.lookup(self.engine.view.state, Namespace(), tokens)
        state = self.engine.view.state
        seq = state.last_seq + 1
        opened = apply_all(state, commands.open_sequence(state, seq))
        taken = apply_all(opened, commands.adopt(opened, seq, tokens, hit))
        assert taken.sequences[seq].offset <= hit.rows
        self.found += hit.rows > 0
        self.fetched += 1


def test_p16_eight_threads_insert_and_fetch_overlapping_prefixes(tmp_path: Path) -> None:
    capture, kernel = MemoryCapture(), FakeKernel(TREE, vocab_size=3)
    engine = Engine(lambda: Parts(kernel, POLICY, capture, header(TREE, POLICY)))
    engine.start()
    clients = [Client(engine, seed) for seed in range(THREADS)]
    for client in clients:
        client.thread.start()
    for client in clients:
        client.thread.join(WAIT_S)
        assert client.error is None
        for _ in range(4):
            assert client._ended.acquire(timeout=WAIT_S)
    assert [client.ends for client in clients] == [["length"] * INSERTS] * THREADS
    assert sum(client.fetched for client in clients) == 10_000
    assert sum(client.found for client in clients) > 1_000
    state = engine.view.state
    invariants.check_all(state)
    # A recount of the index: published, and, since nobody runs, cached.
    assert state.published_blocks() == state.cached_blocks() == 96 - state.free_blocks() > 0
    assert engine.status()["held"] == engine.status()["shadow_found"] == 0
    engine.stop(WAIT_S)
    replays(capture.records, tmp_path)


BASE = Namespace()
KINDS = (
    BASE,
    Namespace("A", 1),
    Namespace("B", 1),
    Namespace("A", 2),
    Namespace(salt="tenant one"),
    Namespace(salt="tenant two"),
    Namespace("A", 2, "tenant one"),
)


@pytest.mark.parametrize("hashed", ["xxh3", "constant"])
def test_p18_rows_are_shared_within_an_adapters_version_and_a_tenant_only(
    hashed: str, tmp_path: Path
) -> None:
    """A reload in place is another version of the same name. With a hash under which all keys
    collide nothing is shared either (P17).
    """
    sim = Sim(structs.replace(ROOM, hash=hashed), POLICY)
    prompt = [n % 50 for n in range(64)]
    fresh = {
        kind: answer_alone(prompt, 4, ROOM, structs.replace(POLICY, prefix_cache=False), **at(kind))
        for kind in KINDS
    }
    assert hashed == "constant" or len(set(fresh.values())) == len(KINDS)
    for cached in (0, 63):
        for kind in KINDS:
            inbox = sim.submit(prompt, 4, namespace=kind)
            sim.run()
            assert inbox.cached_tokens == cached
            if hashed == "xxh3":
                assert inbox.tokens == fresh[kind]
    settle(sim, tmp_path)


def at(namespace: Namespace) -> dict[str, Namespace]:
    return {"namespace": namespace}


def test_p18_an_adapter_that_is_used_again_finds_what_its_version_left(tmp_path: Path) -> None:
    """Base, A, B, A reloaded, A reloaded again in use: 0, 0, 0, 0, then a hit; the old A's rows are
    still there for whoever names that version.
    """
    sim = Sim(ROOM, POLICY)
    order = (BASE, Namespace("A", 1), Namespace("B", 1), Namespace("A", 2), Namespace("A", 2))
    cached = []
    for kind in (*order, Namespace("A", 1)):
        inbox = sim.submit(range(64), 2, namespace=kind)
        sim.run()
        cached.append(inbox.cached_tokens)
    assert cached == [0, 0, 0, 0, 63, 63]
    settle(sim, tmp_path)
