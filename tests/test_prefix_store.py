"""Kept prefixes: what one server computed, another finds, and nothing that it should not."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attrs import evolve
from msgspec import structs

from kernel.block_io import BlockRows, TensorSpec
from kernel.fake import Failure, FakeKernel
from replay.run import Options
from replay.run import replay as run_replay
from server import prefix_store
from server.engine import Engine
from server.kept import KeptBlocks
from server.kept_file import FORMAT, Kept, StoreError
from server.policy import Policy
from server.prefix_store import PrefixStore
from server.submission import Submission, Update
from statemachine.codec import TapeDecoder, TapeEncoder
from statemachine.events import (
    BlockCopied,
    BlockEvicted,
    BlockLoaded,
    BlockStored,
    Event,
    Namespace,
)
from statemachine.geometry import Geometry, Group
from statemachine.records import (
    BlocksOffered,
    Checkpoint,
    Parameters,
    RequestArrived,
    StepFailed,
)
from statemachine.sequence import pack
from statemachine.tags import root_key, row_tag

from .sim import POLICY, SMALL, Inbox, Sim, answer_alone, prompts
from .simulation_check import check_load
from .simulation_random import random_load

STORING = structs.replace(POLICY, store_evicted=True)
GEOMETRY = structs.replace(SMALL, identity="weights 1")
FEW = Geometry(block_size=4, groups=(Group(num_blocks=8),), identity="weights 1")
PROMPT = tuple(range(20, 43))  # 5 whole blocks of 4, and 3 tokens
FILE_BYTES = 392
"""Of a block of 4 tags, with one digit a token."""


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
    return sorted(folder.glob("*.safetensors"))


def replays_clean(sim: Sim, path: Path) -> None:
    """The tape folds and plans, all invariants after each event."""
    path.write_bytes(TapeEncoder().encode(sim.capture.records))
    for depth in ("fold", "plan"):
        outcome = run_replay(str(path), Options(depth=depth, invariants="event"))
        assert outcome.divergence is None, outcome.divergence


def test_a_second_server_finds_what_the_first_computed_and_says_the_same(tmp_path: Path) -> None:
    warm(tmp_path / "store")
    server = Server(tmp_path / "store")
    inbox = server.ask()
    server.stop()
    assert inbox.cached_tokens == 20
    assert inbox.tokens == answer_alone(PROMPT, geometry=GEOMETRY)
    assert server.records(BlocksOffered) == [BlocksOffered(0, 0, 5)]
    assert [event.block for event in server.events(BlockLoaded)] == [0, 1, 2, 3, 4]
    assert server.engine.counters.kept.loaded == 5
    replays_clean(server, tmp_path / "tape.log")


def test_the_end_of_a_server_keeps_all_that_can_be_found(tmp_path: Path) -> None:
    """5 blocks of the prompt; its 3 tokens left and 7 of the 8 of the answer fill 2 more."""
    server = Server(tmp_path)
    server.ask()
    assert files(tmp_path) == []
    server.stop()
    assert len(files(tmp_path)) == 7
    assert {path.stat().st_mode & 0o777 for path in files(tmp_path)} == {0o600}
    assert [path for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []
    assert server.engine.counters.kept.stored == 7


def test_a_whole_prompt_hit_uses_the_last_loaded_block_in_part_and_copies_it(
    tmp_path: Path,
) -> None:
    prompt = PROMPT[:20]
    warm(tmp_path / "store", prompt)
    server = Server(tmp_path / "store")
    inbox = server.ask(prompt)
    assert inbox.cached_tokens == 19
    (copied,) = server.events(BlockCopied)
    assert copied.source == server.events(BlockLoaded)[-1].block
    assert inbox.tokens == answer_alone(prompt, geometry=GEOMETRY)
    replays_clean(server, tmp_path / "tape.log")


def test_evicted_blocks_are_stored_first_and_found_again_by_the_same_server(
    tmp_path: Path,
) -> None:
    server = Server(tmp_path / "store", FEW)
    first = server.ask()
    server.ask(tuple(range(43, 63)))
    stored, evicted = server.events(BlockStored), server.events(BlockEvicted)
    assert len(evicted) >= 5
    assert [(it.block, it.key) for it in stored] == [(it.block, it.key) for it in evicted]
    server.store.drain()
    again = server.ask()
    assert again.cached_tokens == 20
    assert again.tokens == first.tokens == answer_alone(PROMPT, geometry=FEW)
    assert len(server.events(BlockLoaded)) >= 1
    replays_clean(server, tmp_path / "tape.log")


def test_blocks_on_their_way_into_a_file_are_found_too(tmp_path: Path) -> None:
    server = Server(tmp_path, FEW)
    server.ask()
    with held(server.store):
        server.ask(tuple(range(43, 63)))
        assert files(tmp_path) == []
        assert server.ask().cached_tokens == 20


@contextmanager
def held(store: PrefixStore) -> Iterator[None]:
    """The writer does nothing inside of the block."""
    go = threading.Event()
    store._writer.submit(go.wait)
    try:
        yield
    finally:
        go.set()


def test_a_request_waits_for_its_rows_in_its_turn_and_others_go_on(tmp_path: Path) -> None:
    warm(tmp_path)
    sim = Server(tmp_path)
    engine = Engine(lambda: sim.parts)
    engine.start()
    done = {name: threading.Event() for name in "abc"}
    cached: dict[str, int] = {}
    order: list[str] = []

    def send(name: str, prompt: tuple[int, ...]) -> None:
        def sink(update: Update) -> None:
            cached[name] = update.cached_tokens
            if update.finish_reason is not None:
                order.append(name)
                done[name].set()

        engine.submit(Submission(prompt, Parameters(8)), sink)

    go = threading.Event()
    sim.store._reader.submit(go.wait)
    try:
        send("a", (1, 2, 3))
        send("b", PROMPT)
        send("c", (4, 5, 6))
        assert done["a"].wait(30)
        assert set(engine.view.requests) == set(), "b is being read, and c stands behind it"
    finally:
        go.set()
    assert all(event.wait(30) for event in done.values())
    engine.stop()
    assert cached == {"a": 0, "b": 20, "c": 0}
    assert order[0] == "a"
    arrived = [record.request for record in sim.records(RequestArrived)]
    assert arrived == [0, 1, 2]


def test_copies_of_a_request_and_twins_of_it_load_nothing_twice(tmp_path: Path) -> None:
    warm(tmp_path)
    server = Server(tmp_path)
    inboxes = [server.submit(PROMPT), server.submit(PROMPT), Inbox()]
    parent = Submission(PROMPT, Parameters(8), parent=0)
    server.engine.submit(parent, inboxes[2])
    server.run()
    assert [it.request for it in server.records(BlocksOffered)] == [0, 1]
    assert len(server.events(BlockLoaded)) == 5
    assert len({inbox.tokens for inbox in inboxes}) == 1
    assert server.store._ready_bytes == 0, "what was read is let go of"


def test_a_salted_prompt_is_found_by_the_same_salt_only(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    first = Server(folder)
    first.ask(namespace=Namespace(salt="a"))
    first.stop()
    server = Server(folder)
    assert server.ask().cached_tokens == 0
    assert server.ask(namespace=Namespace(salt="b")).cached_tokens == 0
    assert server.ask(namespace=Namespace(salt="a")).cached_tokens == 20
    names = b"".join(path.read_bytes() for path in files(folder))
    assert b"salt" not in names


def test_rows_of_adapters_are_not_kept(tmp_path: Path) -> None:
    """A version is a number of one process: in the next it may mean other weights."""
    server = Server(tmp_path)
    server.ask(namespace=Namespace("style", 1))
    server.stop()
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"geometry": structs.replace(GEOMETRY, identity="weights 2")},
        {"geometry": structs.replace(GEOMETRY, block_size=2)},
        {"made_by": ("elsewhere",)},
    ],
    ids=["model", "geometry", "software"],
)
def test_another_model_finds_nothing_and_leaves_the_files(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    warm(tmp_path)
    before = files(tmp_path)
    server = Server(tmp_path, **changed)
    assert server.ask().cached_tokens == 0
    assert server.engine.counters.kept.ignored == 0
    assert files(tmp_path) == before


def _name_of(folder: Path, index: int) -> Path:
    """The file of a block of PROMPT."""
    server = Server(folder)
    chain = server.store.chains.of(Namespace(), PROMPT)[index]
    return folder / f"{chain.hex()}.safetensors"


def _header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    return msgspec.json.decode(data[8 : 8 + length]), data[8 + length :]


def _with_header(header: dict[str, Any], body: bytes) -> bytes:
    told = msgspec.json.encode(header)
    told += b" " * (-len(told) % 8)
    return len(told).to_bytes(8, "little") + told + body


def _says(**changes: str) -> Callable[[Path], None]:
    """The file says something else of itself."""

    def spoil(path: Path) -> None:
        header, body = _header_of(path.read_bytes())
        header["__metadata__"] |= changes
        path.write_bytes(_with_header(header, body))

    return spoil


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def _of_another_place(path: Path) -> None:
    path.write_bytes(_name_of(path.parent, 3).read_bytes())


def _other_shape(path: Path) -> None:
    header, body = _header_of(path.read_bytes())
    header["tags"]["shape"] = [2, 2]
    path.write_bytes(_with_header(header, body))


def _other_dtype(path: Path) -> None:
    header, body = _header_of(path.read_bytes())
    header["tags"]["dtype"] = "F64"
    path.write_bytes(_with_header(header, body))


def _linked(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def _folder(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


SPOILED: dict[str, tuple[Callable[[Path], None], str]] = {
    "corrupt": (_flipped, "its content is not what it must be"),
    "truncated": (_cut, "no safetensors file"),
    "empty": (lambda path: path.write_bytes(b""), "0 bytes, which no block has"),
    "huge": (lambda path: os.truncate(path, 1 << 28), "268435456 bytes, which no block has"),
    "noise": (lambda path: path.write_bytes(os.urandom(500)), "no safetensors file"),
    "another block's": (_of_another_place, "its chain, parent, key, tokens is not"),
    "of another shape": (_other_shape, "not those of a block of this pool"),
    "of another dtype": (_other_dtype, "not those of a block of this pool"),
    "of another format": (_says(format=FORMAT + "0"), "its format is not"),
    "of another model": (_says(model="weights 2"), "its model is not"),
    "of another namespace": (_says(root="0" * 16), "its root is not"),
    "of another parent": (_says(parent="0" * 16), "its parent is not"),
    "under another key": (_says(key="0" * 16), "its key is not"),
    "of other tokens": (_says(tokens="1 2 3 4"), "its tokens is not"),
    "for others to write": (lambda path: path.chmod(0o666), "other users can write it"),
    "a link": (_linked, "levels of symbolic links"),
    "a pipe": (_folder, "no plain file"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_file_that_fails_a_check_is_ignored_and_taken_away(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    """The blocks before it are loaded, those behind it are not: they cannot be found without it."""
    spoil, said = SPOILED[name]
    folder = tmp_path / "store"
    warm(folder)
    path = _name_of(folder, 2)
    spoil(path)
    server = Server(folder)
    inbox = server.ask()
    assert inbox.cached_tokens == 8
    assert inbox.tokens == answer_alone(PROMPT, geometry=GEOMETRY)
    assert server.engine.counters.kept.ignored == 1
    assert said in capsys.readouterr().out + caplog.text
    server.store.drain()
    assert not path.is_symlink()
    assert not path.exists()
    replays_clean(server, tmp_path / "tape.log")


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(StoreError, match="can be written by other users"):
        Server(tmp_path)
    tmp_path.chmod(0o700)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be made"):
        Server(tmp_path / "file")


def _plain_store(folder: Path, files_max: int = 100) -> tuple[PrefixStore, list[Kept]]:
    """A store for `files_max` files, and blocks of four prompts to put into it."""
    spec = {"tags": TensorSpec("U64", (4,))}
    store = PrefixStore(folder, files_max * FILE_BYTES, GEOMETRY, spec)
    root = root_key(GEOMETRY, Namespace())
    blocks = []
    for first in range(4):
        tokens = tuple(range(first, first + 4))
        (chain,) = store.chains.of(Namespace(), tokens)
        key = row_tag(GEOMETRY, root, pack(tokens))
        blocks.append(Kept(chain, root, root, tokens, key, BlockRows({"tags": bytes(32)})))
    return store, blocks


def _there(store: PrefixStore, blocks: list[Kept]) -> list[int]:
    store.drain()
    names = {path.name for path in files(store._folder)}
    found = [at for at, it in enumerate(blocks) if f"{it.chain.hex()}.safetensors" in names]
    assert [at for at, it in enumerate(blocks) if store.has(it.chain)] == found
    assert store.nbytes == sum(path.stat().st_size for path in files(store._folder))
    return found


def test_the_files_stay_below_their_bound_and_the_oldest_used_go_first(tmp_path: Path) -> None:
    store, blocks = _plain_store(tmp_path, files_max=3)
    for block in blocks[:3]:
        store.put(block)
    assert _there(store, blocks) == [0, 1, 2]
    reading = store.ask(Namespace(), blocks[0].tokens, 0)
    assert reading is not None
    assert list(reading.result().blocks) == [blocks[0].chain]
    store.put(blocks[3])
    assert _there(store, blocks) == [0, 2, 3]
    store.close()
    store, blocks = _plain_store(tmp_path, files_max=2)
    assert _there(store, blocks) == [0, 3], "a later server knows what was used last"
    store.put(blocks[0])
    store.put(blocks[1])
    assert _there(store, blocks) == [0, 1], "what is put again counts as used"
    store.close()


def test_what_is_read_and_not_used_yet_is_bounded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, blocks = _plain_store(tmp_path)
    for block in blocks:
        store.put(block)
    monkeypatch.setattr(prefix_store, "READY_MAX_BYTES", 64)
    reads = [store.ask(Namespace(), block.tokens, 0) for block in blocks]
    found = [len(read.result().blocks) for read in reads if read is not None]
    assert found == [1, 1, 0, 0]
    assert reads[0] is not None
    store.release(reads[0].result())
    again = store.ask(Namespace(), blocks[2].tokens, 0)
    assert again is not None
    assert len(again.result().blocks) == 1
    store.close()


def test_blocks_that_come_faster_than_the_disk_takes_them_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, blocks = _plain_store(tmp_path)
    monkeypatch.setattr(prefix_store, "PENDING_MAX_BYTES", 64)
    with held(store):
        for block in blocks:
            store.put(block)
        assert store.counts.dropped == 2
    assert _there(store, blocks) == [0, 1]
    store.close()


def test_a_full_disk_stops_the_keeping_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, FEW)
    real = prefix_store.write_file
    full = True

    def write(path: Path, data: bytes) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, data)

    monkeypatch.setattr(prefix_store, "write_file", write)
    server.ask()
    server.ask(tuple(range(43, 63)))
    server.store.drain()
    kept = server.engine.counters.kept
    assert (kept.stored, kept.dropped) == (0, len(server.events(BlockStored)))
    assert server.ask().tokens == answer_alone(PROMPT, geometry=FEW)
    assert server.events(BlockLoaded) == []
    full = False
    server.stop()
    assert kept.stored == len(files(tmp_path)) > 0


def test_an_unfinished_file_of_a_server_that_died_is_taken_away(tmp_path: Path) -> None:
    warm(tmp_path)
    path = _name_of(tmp_path, 0)
    path.with_suffix(".tmp").write_bytes(b"half")
    (tmp_path / "notes.tmp").write_text("mine")
    Server(tmp_path)
    assert not path.with_suffix(".tmp").exists()
    assert (tmp_path / "notes.tmp").exists()


@pytest.mark.parametrize("lookahead", [False, True])
def test_rows_that_were_read_before_a_failed_eval_are_not_kept(
    tmp_path: Path, lookahead: bool
) -> None:
    """Pages read after a failed eval are garbage without an error; with lookahead that is known
    only after they were read.
    """
    policy = structs.replace(STORING, lookahead=lookahead)
    probe = Server(tmp_path / "probe", FEW, policy)
    probe.ask()
    probe.ask(tuple(range(43, 63)))
    stores = [
        record.step
        for record in probe.capture.records
        if any(isinstance(event, BlockStored) for event in getattr(record, "events", ()))
    ]
    server = Server(tmp_path / "store", FEW, policy, fail={stores[0]: Failure("eval")})
    server.ask()
    inbox = server.ask(tuple(range(43, 63)))
    assert [record.stage for record in server.records(StepFailed)][:1] == ["eval"]
    assert inbox.tokens == answer_alone(tuple(range(43, 63)), geometry=FEW)
    server.store.drain()
    evicted = {
        event.key
        for record in server.capture.records
        if getattr(record, "step", 0) == stores[0]
        for event in getattr(record, "events", ())
        if isinstance(event, BlockStored)
    }
    assert evicted
    keys = {int(_header_of(p.read_bytes())[0]["__metadata__"]["key"], 16)
            for p in files(tmp_path / "store")}  # fmt: skip
    assert not keys & evicted
    replays_clean(server, tmp_path / "tape.log")


def test_a_block_that_holds_other_rows_than_it_should_is_not_kept(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.ask()
    cached = server.engine.view.state.groups[0].cached.items
    spoiled = cached[min(cached)]
    server.kernel._shadow.tags[0][4 * spoiled] ^= 1
    server.stop()
    assert server.engine.counters.kept.dropped == 1
    assert len(files(tmp_path)) == len(cached) - 1


def test_what_a_flush_evicts_is_not_stored(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.ask()
    server.engine.flush()
    server.run()
    assert len(server.events(BlockEvicted)) == 7
    assert server.events(BlockStored) == []


def test_a_flush_takes_back_what_was_offered_to_those_that_wait(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    warm(folder)
    server = Server(folder, GEOMETRY, structs.replace(STORING, max_running=1))
    server.submit(tuple(range(43, 53)), 20)
    second = server.submit(PROMPT)
    server.step()
    server.engine.flush()
    server.run()
    assert server.records(BlocksOffered) == [BlocksOffered(1, 0, 5)]
    assert second.cached_tokens == 0
    replays_clean(server, tmp_path / "tape.log")


def test_a_flush_empties_the_store(tmp_path: Path) -> None:
    warm(tmp_path)
    server = Server(tmp_path)
    server.engine.flush()
    server.run()
    assert server.ask().cached_tokens == 0
    server.store.drain()
    assert files(tmp_path) == []


def test_offers_to_requests_that_wait_stand_in_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    warm(folder)
    server = Server(folder, FEW, structs.replace(STORING, max_running=1))
    server.stop()
    server = Server(folder, GEOMETRY, structs.replace(STORING, max_running=1))
    first = server.submit(tuple(range(43, 53)), 20)
    second = server.submit(PROMPT)
    server.step()
    server.step()
    server.capture.checkpoint_due = True
    server.step()
    server.capture.checkpoint_due = False
    server.run()
    assert server.records(Checkpoint)[-1].offered == (BlocksOffered(1, 0, 5),)
    assert (first.cached_tokens, second.cached_tokens) == (0, 20)
    records = server.capture.records
    at = max(i for i, record in enumerate(records) if isinstance(record, Checkpoint))
    path = tmp_path / "late.log"
    path.write_bytes(TapeEncoder().encode([records[0], *records[at:]]))
    outcome = run_replay(str(path), Options(depth="plan", invariants="event"))
    assert outcome.divergence is None, outcome.divergence


@pytest.mark.parametrize("seed", range(6))
def test_many_requests_in_a_tight_pool_answer_as_alone(tmp_path: Path, seed: int) -> None:
    """Preemptions, evictions, loads, with and without lookahead; the sanitizer finds nothing."""
    geometry = Geometry(block_size=4, groups=(Group(num_blocks=24),), identity="weights 1")
    policy = structs.replace(STORING, lookahead=bool(seed % 2), prefix_aware=seed % 3 == 0)
    asked = prompts(16, seed=seed // 2)
    totals = dict.fromkeys(("loaded", "preemptions"), 0)
    for life in range(2):
        server = Server(tmp_path / "store", geometry, policy)
        inboxes: dict[int, Inbox] = {}

        def send(number: int, server: Server = server, into: dict[int, Inbox] = inboxes) -> None:
            into[number] = server.submit(asked[number], 12)

        server.run({1 + at // 2: [lambda at=at: send(at), lambda at=at: send(at + 1)]
                    for at in range(0, 16, 2)})  # fmt: skip
        for number, inbox in inboxes.items():
            assert inbox.tokens == answer_alone(asked[number], 12, geometry=geometry)
        totals["loaded"] += server.engine.counters.kept.loaded
        totals["preemptions"] += server.engine.counters.preemptions
        assert server.engine.counters.shadow_found == 0
        assert server.engine.counters.kept.ignored == 0
        server.stop()
        replays_clean(server, tmp_path / f"{life}.log")
    assert totals["loaded"] > 5
    assert totals["preemptions"] > 0


SEEDS = tuple(range(60))


def test_random_loads_with_a_store_are_clean() -> None:
    """The simulation's loads, as far as their pools can have a store; judged as they are there."""
    had: Counter[str] = Counter()
    for seed in SEEDS:
        load = random_load(seed)
        if [group.kind for group in load.geometry.groups] != ["full"]:
            continue
        if load.geometry.hash != "xxh3":
            continue
        policy = structs.replace(load.policy, store_evicted=True, prefix_cache=True)
        played = check_load(evolve(load, policy=policy), every_event=seed % 10 == 0)
        had.update(type(it).__name__ for it in _events_of(played.tape))
    assert had["BlockStored"] > 50
    assert had["BlockLoaded"] > 10


def _events_of(tape: bytes) -> Iterator[Event]:
    for record in TapeDecoder().feed(tape):
        yield from getattr(record, "events", ())
