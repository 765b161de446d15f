"""Kept file: one block of rows in a safetensors file, and what is checked before it is believed.

The tensors are those of a block (`k.LAYER`, `v.LAYER`; bfloat16 as its bits, uint16). The metadata
says all that they are a function of, and a hash of the content: a file holds only where each of
these is what the reader worked out itself. Owns the format, and the way files are opened.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct, structs
from safetensors import SafetensorError
from safetensors.numpy import load, save
from xxhash import xxh3_128

from kernel.block_io import BlockRows, TensorSpec

FORMAT = "mlxtape kept block 1"
HEADER_MAX_BYTES = 1 << 20
"""What a file may have beside its tensors."""

_STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "<u1", "U32": "<u4", "U64": "<u8"}


class StoreError(Exception):
    """The store cannot be used; one sentence that says what to do."""


class BadBlock(Exception):
    """A file that is not the block that it should be."""


class Kept(Struct, frozen=True):
    """A block of rows and all that they are a function of.

    chain: its name, a hash of all tokens up to its end (prefix_store.Chains). root: the namespace's
    key; parent: that of the block before.
    """

    chain: bytes
    root: int
    parent: int
    tokens: tuple[int, ...]
    key: int
    rows: BlockRows

    @property
    def nbytes(self) -> int:
        return sum(len(data) for data in self.rows.tensors.values())


def encoded(block: Kept, spec: Mapping[str, TensorSpec], model: str) -> bytes:
    """The bytes of a block's file; model: the digest of the weights."""
    arrays = {
        name: np.frombuffer(block.rows.tensors[name], _STORED[it.dtype]).reshape(it.shape)
        for name, it in spec.items()
    }
    return save(arrays, _metadata(block, model))


def decoded(claim: Kept, data: bytes, spec: Mapping[str, TensorSpec], model: str) -> Kept:
    """The claim with the tensors of a file's bytes. Raises BadBlock."""
    try:
        arrays = load(data)
        length = int.from_bytes(data[:8], "little")
        said = msgspec.json.decode(data[8 : 8 + length]).get("__metadata__", {})
    except (SafetensorError, msgspec.MsgspecError, ValueError, KeyError) as error:
        raise BadBlock(f"it is no safetensors file: {error}") from error
    wanted = {name: (np.dtype(_STORED[it.dtype]), it.shape) for name, it in spec.items()}
    if {name: (array.dtype, array.shape) for name, array in arrays.items()} != wanted:
        raise BadBlock("its tensors are not those of a block of this pool")
    tensors = {name: array.tobytes() for name, array in arrays.items()}
    block = structs.replace(claim, rows=BlockRows(tensors, claim.rows.tags))
    metadata = _metadata(block, model)
    wrong = [name for name, value in metadata.items() if said.get(name) != value]
    if wrong:
        raise BadBlock(f"its {', '.join(wrong)} is not what it must be")
    return block


def _metadata(block: Kept, model: str) -> dict[str, str]:
    """All that a file says of itself."""
    content = xxh3_128()
    for name in sorted(block.rows.tensors):
        content.update(block.rows.tensors[name])
    return {
        "format": FORMAT,
        "chain": block.chain.hex(),
        "model": model,
        "root": f"{block.root:016x}",
        "parent": f"{block.parent:016x}",
        "key": f"{block.key:016x}",
        "tokens": " ".join(map(str, block.tokens)),
        "content": content.hexdigest(),
    }


def prepare(folder: Path) -> None:
    """Make the folder, or see that nobody else may write in it. Raises StoreError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = folder.stat()
    except OSError as error:
        raise StoreError(
            f"prefix_store {folder} cannot be made: {error.strerror}; name another folder"
        ) from None
    if known.st_uid != os.geteuid() or known.st_mode & 0o022:
        raise StoreError(
            f"prefix_store {folder} can be written by other users, who could put rows into "
            "answers: make it your own, with mode 0700"
        )


def write_file(path: Path, data: bytes) -> None:
    """Whole or not at all, for us alone. Raises OSError."""
    unfinished = path.with_suffix(".tmp")
    unfinished.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with open(os.open(unfinished, flags, 0o600), "wb") as file:
            file.write(data)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def read_file(path: Path, block_bytes: int) -> bytes:
    """A file's bytes; it counts as used now. Raises OSError, and BadBlock for a file that is not
    ours alone to write, or not as large as a block is.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        known = os.fstat(file.fileno())
        if not stat.S_ISREG(known.st_mode):
            raise BadBlock("it is no plain file")
        if known.st_uid != os.geteuid() or known.st_mode & 0o022:
            raise BadBlock("other users can write it")
        if not block_bytes < known.st_size <= block_bytes + HEADER_MAX_BYTES:
            raise BadBlock(f"it has {known.st_size} bytes, which no block has")
        os.utime(file.fileno())
        return file.read()
