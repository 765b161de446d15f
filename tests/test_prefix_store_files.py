"""The files of kept prefixes: checked before use, bounded, and no reason to stop serving."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kernel.block_io import BlockRows, TensorSpec
from server import prefix_store
from server.kept_file import FORMAT, Kept, StoreError
from server.prefix_store import PrefixStore
from statemachine.events import (
    BlockLoaded,
    BlockStored,
    Namespace,
)
from statemachine.sequence import pack
from statemachine.tags import root_key, row_tag

from .sim import answer_alone
from .storing import FEW, GEOMETRY, PROMPT, Server, files, header_of, held, replays_clean, warm

FILE_BYTES = 392
"""Of a block of 4 tags, with one digit a token."""


def _name_of(folder: Path, index: int) -> Path:
    """The file of a block of PROMPT."""
    server = Server(folder)
    chain = server.store.chains.of(Namespace(), PROMPT)[index]
    return folder / f"{chain.hex()}.safetensors"


def _with_header(header: dict[str, Any], body: bytes) -> bytes:
    told = msgspec.json.encode(header)
    told += b" " * (-len(told) % 8)
    return len(told).to_bytes(8, "little") + told + body


def _says(**changes: str) -> Callable[[Path], None]:
    """The file says something else of itself."""

    def spoil(path: Path) -> None:
        header, body = header_of(path.read_bytes())
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
    header, body = header_of(path.read_bytes())
    header["tags"]["shape"] = [2, 2]
    path.write_bytes(_with_header(header, body))


def _other_dtype(path: Path) -> None:
    header, body = header_of(path.read_bytes())
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
