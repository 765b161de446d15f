"""Prefix store: blocks of computed rows in files, so that a later server need not compute them.

    put  -> (the writer's thread) -> CHAIN.safetensors, by way of CHAIN.tmp, 0600
    read -> (the reader's thread) -> every check -> Kept blocks of a prompt, one after the other

A file is named by its *chain*: a BLAKE2b hash of what the rows were computed by (software, device,
digests of the model, shape of a block, namespace) and of all tokens up to its block's end. So files
of other models or namespaces have other names, and nobody can make two prompts share one.

Nothing in a file is trusted: it must be a plain file of ours that nobody else may write, of exactly
the right size and tensors, and its metadata (tokens, keys, a hash of the content) must be what is
worked out here. A file that fails a check is taken away, counted and logged, and never an error for
a request. Oldest used first, files go where they would take more than `bytes_max`.

Owns the folder. Never touches MLX, and knows no pool: kept.py stands between the two.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

import structlog
from msgspec import Struct, structs

from kernel.block_io import BlockRows, TensorSpec
from statemachine.events import Namespace
from statemachine.geometry import Geometry
from statemachine.sequence import pack
from statemachine.tags import block_tags, root_key, row_tag

from .kept_file import (
    FORMAT,
    BadBlock,
    Kept,
    StoreError,
    decoded,
    encoded,
    prepare,
    read_file,
    write_file,
)

SUFFIX = ".safetensors"
PENDING_MAX_BYTES = 1 << 28
"""Blocks that wait to be written; more are given up."""
READY_MAX_BYTES = 1 << 30
"""Blocks that were read for requests which have not started yet."""

_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")

log = structlog.get_logger()


class Counts:
    """What became of blocks. stored: written to files. loaded: into the pool. ignored: files that
    failed a check. dropped: blocks that could not be written, or not be trusted.
    """

    def __init__(self) -> None:
        self.stored = self.loaded = self.ignored = self.dropped = 0


class Read(Struct, frozen=True):
    """Blocks [first, first + len(blocks)) of a prompt, by chain in their order.

    clears: how often the store had been cleared when they were asked for.
    """

    first: int = 0
    blocks: Mapping[bytes, Kept] = {}
    clears: int = 0

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks.values())


class Chains:
    """Names of blocks: see the module. made_by: what the rows were computed by, but the pool."""

    def __init__(
        self, geometry: Geometry, spec: Mapping[str, TensorSpec], made_by: tuple[str, ...]
    ) -> None:
        self._geometry = geometry
        shapes = [f"{name} {it.dtype} {it.shape}" for name, it in sorted(spec.items())]
        self._base = (FORMAT, geometry.identity, str(geometry.block_size), *made_by, *shapes)

    def root(self, space: Namespace) -> bytes:
        """What the first block of a namespace builds on."""
        hashed = blake2b(digest_size=32)
        for field in (*self._base, space.adapter, str(space.version), space.salt):
            data = field.encode()
            hashed.update(len(data).to_bytes(8, "little") + data)
        return hashed.digest()

    def after(self, chain: bytes, packed: bytes) -> bytes:
        """The chain behind one more block of packed tokens."""
        return blake2b(chain + packed, digest_size=32).digest()

    def of(self, space: Namespace, tokens: tuple[int, ...]) -> list[bytes]:
        """Those of a prompt's whole blocks."""
        size, chain, found = self._geometry.block_size, self.root(space), []
        for first in range(0, len(tokens) - size + 1, size):
            chain = self.after(chain, pack(tokens[first : first + size]))
            found.append(chain)
        return found


class PrefixStore:
    """See the module. Any thread may call; two threads of its own touch the files."""

    def __init__(
        self,
        folder: Path,
        bytes_max: int,
        geometry: Geometry,
        spec: Mapping[str, TensorSpec],
        made_by: tuple[str, ...] = (),
    ) -> None:
        """Makes the folder if need be. Raises StoreError where it is not for us alone to write."""
        self.chains = Chains(geometry, spec, made_by)
        self.counts = Counts()
        self._folder = folder
        self._bytes_max = bytes_max
        self._geometry = geometry
        self._spec = dict(spec)
        self._block_bytes = sum(it.nbytes for it in spec.values())
        self._lock = threading.Lock()
        self._files: OrderedDict[bytes, int] = OrderedDict()
        """Bytes of each file by its chain, least recently used first."""
        self._bytes = 0
        self._pending: dict[bytes, Kept] = {}
        self._ready_bytes = 0
        self._clears = 0
        self._full = False
        prepare(folder)
        try:
            self._scan()
        except OSError as error:
            raise StoreError(f"prefix_store {folder} cannot be read: {error.strerror}") from None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="prefix-store-writer")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="prefix-store-reader")

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return self._bytes

    @property
    def blocks_max(self) -> int:
        """How many blocks fit, at least one."""
        return max(1, self._bytes_max // self._block_bytes)

    def has(self, chain: bytes) -> bool:
        """Whether a block is in the store, or on its way into it."""
        with self._lock:
            return chain in self._files or chain in self._pending

    def put(self, block: Kept) -> None:
        """Write a block, soon. One that is there already counts as used again."""
        with self._lock:
            if block.chain in self._files:
                self._files.move_to_end(block.chain)
                return
            if block.chain in self._pending:
                return
            waiting = len(self._pending) * self._block_bytes
            if waiting + block.nbytes > PENDING_MAX_BYTES:
                self.counts.dropped += 1
                return
            self._pending[block.chain] = block
        self._writer.submit(self._guarded, self._write, block)

    def ask(self, space: Namespace, tokens: tuple[int, ...], first: int) -> Future[Read] | None:
        """Read a prompt's blocks from block `first` on; None where the first is not there."""
        chains, clears = self.chains.of(space, tokens), self._clears
        if first >= len(chains) or not self.has(chains[first]):
            return None
        return self._reader.submit(self._read_or_none, space, tokens, first, chains, clears)

    def holds(self, read: Read) -> bool:
        """Whether the store was not cleared since: what was read before is not to be used."""
        return read.clears == self._clears

    def release(self, read: Read) -> None:
        """What was read is not needed any more."""
        with self._lock:
            self._ready_bytes -= read.nbytes

    def clear(self) -> None:
        """Forget all blocks, those on their way too, and take their files away."""
        with self._lock:
            gone = list(self._files)
            self._files.clear()
            self._pending.clear()
            self._bytes = 0
            self._clears += 1
        self._writer.submit(self._guarded, self._unlink, gone)

    def drain(self) -> None:
        """Wait until all that was put is written."""
        self._writer.submit(int).result()

    def close(self) -> None:
        """Write what waits, and end the threads."""
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()

    def _scan(self) -> None:
        """Know the files of a server before, oldest used first; unfinished ones go."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(".tmp") and _NAME.fullmatch(entry.name[:-4] + SUFFIX):
                    os.unlink(entry.path)
                elif _NAME.fullmatch(entry.name):
                    known = entry.stat(follow_symlinks=False)
                    found.append((known.st_mtime_ns, entry.name, known.st_size))
        for _, name, size in sorted(found):
            self._files[bytes.fromhex(name.removesuffix(SUFFIX))] = size
            self._bytes += size
        self._unlink(self._too_many())

    def _path(self, chain: bytes) -> Path:
        return self._folder / f"{chain.hex()}{SUFFIX}"

    def _too_many(self) -> list[bytes]:
        """Files that must go for the others to fit, out of the index already."""
        gone = []
        with self._lock:
            while self._bytes > self._bytes_max:
                chain, size = self._files.popitem(last=False)
                self._bytes -= size
                gone.append(chain)
        return gone

    def _unlink(self, chains: list[bytes]) -> None:
        for chain in chains:
            self._path(chain).unlink(missing_ok=True)

    def _guarded(self, work: Callable[[Any], None], argument: Any) -> None:
        """The writer never dies: what cannot be written is not kept."""
        try:
            work(argument)
        except Exception:
            log.exception("the prefix store could not be written")

    def _write(self, block: Kept) -> None:
        with self._lock:
            if self._pending.get(block.chain) is not block:
                return  # the store was cleared since
        path = self._path(block.chain)
        data = encoded(block, self._spec, self._geometry.identity)
        try:
            write_file(path, data)
        except OSError as error:
            self._could_not(block, error)
            return
        self._full = False
        with self._lock:
            # Another of that name may wait by now: its own rows are to be written, not these.
            cleared = self._pending.get(block.chain) is not block
            if not cleared:
                del self._pending[block.chain]
                self._files[block.chain] = len(data)
                self._bytes += len(data)
                self.counts.stored += 1
        self._unlink([block.chain] if cleared else self._too_many())

    def _could_not(self, block: Kept, error: OSError) -> None:
        with self._lock:
            if self._pending.get(block.chain) is block:
                del self._pending[block.chain]
            self.counts.dropped += 1
        if not self._full:  # once for a disk that is full, not for each block
            log.warning("a block was not kept", folder=str(self._folder), error=error.strerror)
        self._full = True

    def _read_or_none(
        self,
        space: Namespace,
        tokens: tuple[int, ...],
        first: int,
        chains: list[bytes],
        clears: int,
    ) -> Read:
        try:
            return Read(first, self._read(space, tokens, first, chains), clears)
        except Exception:
            log.exception("the prefix store could not be read")
            return Read()

    def _read(
        self, space: Namespace, tokens: tuple[int, ...], first: int, chains: list[bytes]
    ) -> dict[bytes, Kept]:
        """As many blocks as are there and hold, one after the other."""
        geometry, size = self._geometry, self._geometry.block_size
        found: dict[bytes, Kept] = {}
        root = parent = root_key(geometry, space)
        for index, chain in enumerate(chains):
            mine = tokens[index * size : (index + 1) * size]
            packed = pack(mine)
            key = row_tag(geometry, parent, packed)
            if index >= first:
                tags = tuple(block_tags(geometry, parent, packed))
                claim = Kept(chain, root, parent, mine, key, BlockRows({}, tags))
                block = self._fetch(claim)
                if block is None or not self._reserve():
                    break
                found[chain] = block
            parent = key
        return found

    def _reserve(self) -> bool:
        with self._lock:
            if self._ready_bytes + self._block_bytes > READY_MAX_BYTES:
                return False
            self._ready_bytes += self._block_bytes
            return True

    def _fetch(self, claim: Kept) -> Kept | None:
        """A block under its claim: what it must be, all but the tensors."""
        with self._lock:
            pending = self._pending.get(claim.chain)
            known = claim.chain in self._files
            if known:
                self._files.move_to_end(claim.chain)
        if pending is not None:
            assert structs.replace(pending, rows=claim.rows) == claim, "chains do not collide"
            return structs.replace(claim, rows=BlockRows(pending.rows.tensors, claim.rows.tags))
        if not known:
            return None
        path = self._path(claim.chain)
        try:
            data = read_file(path, self._block_bytes)
            return decoded(claim, data, self._spec, self._geometry.identity)
        except FileNotFoundError:
            self._forget(claim.chain)  # somebody took it away, which is fine
        except (OSError, BadBlock) as error:
            self.counts.ignored += 1
            log.warning("a kept block was ignored", file=path.name, error=str(error))
            self._forget(claim.chain)
            self._writer.submit(self._guarded, self._unlink, [claim.chain])
        return None

    def _forget(self, chain: bytes) -> None:
        with self._lock:
            self._bytes -= self._files.pop(chain, 0)
