"""A flush beside the prefix store's threads: what was there before it is used by nobody after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kernel.block_io import BlockRows
from server import prefix_store
from server.kept_file import Kept, decoded
from statemachine.events import Namespace
from statemachine.records import BlocksOffered

from .storing import GEOMETRY, PROMPT, Server, files, replays_clean, warm


def test_a_request_behind_a_flush_is_offered_nothing_that_was_read_before_it(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "store"
    warm(folder)
    server = Server(folder)
    server.engine.flush()
    inbox = server.submit(PROMPT)  # its rows are read at once, the flush waits for a step
    server.run()
    assert inbox.reason == "length"
    assert server.records(BlocksOffered) == []
    assert inbox.cached_tokens == 0
    assert server.store._ready_bytes == 0
    replays_clean(server, tmp_path / "tape.log")


def test_a_block_that_was_being_written_at_a_flush_does_not_stand_for_the_one_kept_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm(tmp_path)
    server = Server(tmp_path)
    store = server.store
    before = _first_block(server, tmp_path)
    after = structs.replace(
        before,
        rows=BlockRows({name: _other(data) for name, data in before.rows.tensors.items()}, ()),
    )
    write_file = prefix_store.write_file

    def overtaken(path: Path, data: bytes) -> None:
        monkeypatch.setattr(prefix_store, "write_file", write_file)
        store.clear()
        store.put(after)
        write_file(path, data)

    store.clear()
    store.drain()
    monkeypatch.setattr(prefix_store, "write_file", overtaken)
    store.put(before)
    store.drain()
    store.drain()
    assert [path.stem for path in files(tmp_path)] == [before.chain.hex()]
    assert _first_block(server, tmp_path).rows.tensors == after.rows.tensors
    assert store.counts.stored == 1
    server.stop()


def _first_block(server: Server, folder: Path) -> Kept:
    """The first block of PROMPT, as its file has it."""
    store = server.store
    chain = store.chains.of(Namespace(), PROMPT)[0]
    claim = store._read(Namespace(), PROMPT, 0, [chain])[chain]
    store._ready_bytes = 0
    data = (folder / f"{chain.hex()}.safetensors").read_bytes()
    return decoded(claim, data, store._spec, GEOMETRY.identity)


def _other(data: Any) -> bytes:
    return bytes(byte ^ 1 for byte in data)
