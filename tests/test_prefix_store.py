"""Kept prefixes: what one server computed, another finds, and nothing that it should not."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kernel.fake import Failure
from replay.run import Options
from replay.run import replay as run_replay
from server.engine import Engine
from server.submission import Submission, Update
from statemachine.codec import TapeEncoder
from statemachine.events import (
    BlockCopied,
    BlockEvicted,
    BlockLoaded,
    BlockStored,
    Namespace,
)
from statemachine.records import (
    BlocksOffered,
    Checkpoint,
    Parameters,
    RequestArrived,
    StepFailed,
)

from .sim import Inbox, answer_alone
from .storing import (
    FEW,
    GEOMETRY,
    PROMPT,
    STORING,
    Server,
    files,
    header_of,
    held,
    replays_clean,
    warm,
)


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
    keys = {int(header_of(p.read_bytes())[0]["__metadata__"]["key"], 16)
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
