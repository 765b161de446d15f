"""Disk: stands where the capture writer's `os` stands, in memory, and is full when it is told to.

Owns the bytes of one tape. The writer is the real one, and so is all that it does in a gap.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import server.capture

NONE = "none"
HALF = "half"
STUCK = "stuck"
"""How a write fails: nothing is written; half of it is; and that half cannot be cut off again."""


class Disk:
    """What server/capture.py uses of `os`. full: by number of the write (from 0), how it fails."""

    O_WRONLY, O_CREAT, O_APPEND, O_TRUNC = os.O_WRONLY, os.O_CREAT, os.O_APPEND, os.O_TRUNC
    sep = os.sep
    fspath = staticmethod(os.fspath)

    def __init__(self, full: Mapping[int, str]) -> None:
        self.data = bytearray()
        self._full = full
        self._writes = 0
        self._stuck = False

    def open(self, path: object, flags: int, mode: int) -> int:
        """There is one file."""
        return 0

    def write(self, file: int, data: bytes) -> int:
        """All of it, or what `full` says."""
        how = self._full.get(self._writes)
        self._writes += 1
        self._stuck = how == STUCK
        if how == NONE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = data if how is None else data[: len(data) // 2]
        self.data += written
        return len(written)

    def ftruncate(self, file: int, size: int) -> None:
        """Cut the file, unless the last write left it stuck."""
        if self._stuck:
            self._stuck = False
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        del self.data[size:]

    def fsync(self, file: int) -> None:
        """Nothing waits."""

    def close(self, file: int) -> None:
        """The bytes stay."""


@contextmanager
def in_memory(full: Mapping[int, str]) -> Iterator[Disk]:
    """Every capture writer inside of the block writes here. Not for folders of segments."""
    disk = Disk(full)
    before = server.capture.os
    server.capture.os = disk  # type: ignore[assignment]
    try:
        yield disk
    finally:
        server.capture.os = before
