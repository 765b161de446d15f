"""Live: the records of a capture that a server is still writing, as they come.

Owns where to read next: a frame that is half written, a file that is cut back when the disk is
full, the next segment, one that was compressed or deleted meanwhile, the capture of a new run in
the place of this one. What server/capture.py does to its files, this can read. Judges no record.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from statemachine.codec import TapeDecoder, find_frame
from statemachine.errors import CodecError
from statemachine.records import Record, TapeEnded

from .errors import Unusable
from .reader import CHUNK_BYTES, COMPRESSED, Tape, segments

_MARKS = 1024
"""Frames from which on a file may be cut back: those of the last write, which has a few."""
_GAP_BYTES = 1024
_GAP = b"\x09"
_CRC_BYTES, _HEAD_BYTES = 4, 8


class Break(Struct, frozen=True):
    """What comes does not go on from what came: it begins with a header and a checkpoint.

    over: a run stopped here without its end; else records between were deleted.
    """

    text: str
    over: bool


class _Growing:
    """An uncompressed file, read as far as it goes, again and again."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.ended = False
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        self._decoder = TapeDecoder()
        self._marks: deque[tuple[int, int]] = deque(maxlen=_MARKS)

    @property
    def identity(self) -> tuple[int, int]:
        """Which file it is, whatever it is called now."""
        status = os.fstat(self._file)
        return status.st_dev, status.st_ino

    @property
    def deleted(self) -> bool:
        """Whether no folder names the file any more."""
        return os.fstat(self._file).st_nlink == 0

    @property
    def position(self) -> int:
        """Bytes up to the end of the last whole record that was read."""
        return self._decoder.position

    @property
    def unread_bytes(self) -> int:
        """Bytes behind that."""
        return max(0, os.fstat(self._file).st_size - self._decoder.position)

    def records(self) -> Iterator[Record]:
        """All whole records that are there and were not read. Raises Unusable."""
        decoder = self._decoder
        cut_back = os.fstat(self._file).st_size < decoder.position
        if cut_back and not self._go_back():
            return  # what takes the place of the lost records is not there yet
        place = decoder.position
        while data := os.pread(self._file, CHUNK_BYTES, place):
            try:
                for record in decoder.feed(data):
                    self._marks.append((decoder.position, decoder.crc))
                    self.ended = isinstance(record, TapeEnded)
                    yield record
                place += len(data)
            except CodecError as error:
                if not self._go_back():
                    raise Unusable(f"{self.name}: {error}") from error
                place = decoder.position
        decoder.forget_torn()

    def close(self) -> None:
        """Nothing more is read."""
        os.close(self._file)

    def _go_back(self) -> bool:
        """To where the writer cut its file back; a Gap stands there that was not read yet."""
        read = None
        for at, (position, crc) in reversed(list(enumerate(self._marks))):
            data = os.pread(self._file, _GAP_BYTES, position - _CRC_BYTES)
            head = data[_CRC_BYTES : _CRC_BYTES + _HEAD_BYTES]
            size = 2 * _CRC_BYTES + _HEAD_BYTES + int.from_bytes(head[:4], "little")
            payload = data[_CRC_BYTES + _HEAD_BYTES :]
            if size <= len(data) and payload[1:2] == _GAP and data[size - 4 : size] != read:
                found = find_frame(data[:size], _CRC_BYTES)
                if found == (_CRC_BYTES, crc, True):
                    self._decoder.resume(position, crc)
                    self._marks = deque(list(self._marks)[: at + 1], _MARKS)
                    return True
            read = crc.to_bytes(_CRC_BYTES, "little")
        return False


class _Packed:
    """A closed segment, compressed: read once."""

    def __init__(self, path: Path) -> None:
        """Opens it, so that it can be deleted. Raises FileNotFoundError where it was."""
        self.name = str(path)
        self.ended, self.deleted = False, False
        status = path.stat()
        self.identity, self.unread_bytes = (status.st_dev, status.st_ino), status.st_size
        self._tape = Tape(self.name)
        self._records = iter(self._tape)
        try:
            self._first = [next(self._records)]
        except Unusable:
            if path.exists():
                raise
            raise FileNotFoundError(self.name) from None

    @property
    def position(self) -> int:
        """Bytes up to the end of the last record that was read, uncompressed."""
        return self._tape.position

    def records(self) -> Iterator[Record]:
        """All of its records, the first time. Raises Unusable."""
        while self._first:
            yield self._first.pop()
        yield from self._records
        self.unread_bytes, self.ended = 0, self._tape.ended
        if self._tape.torn:
            raise Unusable(f"{self.name}: {self._tape.notes[-1]}")

    def close(self) -> None:
        """Nothing more is read."""
        self._first.clear()
        self._records = iter(())


_Source = _Growing | _Packed


def _opened(path: Path) -> _Source | None:
    """A file to read from its start; None where it is gone, or not there yet. Raises Unusable."""
    if path.is_dir():
        raise Unusable(f"{path} cannot be read: it is a folder, not a part of a tape")
    with contextlib.suppress(FileNotFoundError):
        return _Packed(path) if path.name.endswith(COMPRESSED) else _Growing(path)
    return None


class Live:
    """Poll it again and again; then ask `ended`.

    ended: the server closed the tape, or this part of it (`closed_part`). source: the file that is
    being read, "" before there is one. newest: begin with the newest segment, not the oldest.
    """

    def __init__(self, path: str, newest: bool = False) -> None:
        self.path = path
        self.ended = False
        self.closed_part = False
        self._newest = newest
        self._source: _Source | None = None
        self._place = (0, 0)

    @property
    def source(self) -> str:
        """The file that is being read; "" before there is one."""
        return "" if self._source is None else self._source.name

    @property
    def position(self) -> int:
        """Bytes of it that were read, uncompressed."""
        return 0 if self._source is None else self._source.position

    @property
    def unread_bytes(self) -> int:
        """Bytes of that file that were not read."""
        return 0 if self._source is None else self._source.unread_bytes

    def poll(self) -> Iterator[Record | Break]:
        """All that is new. Raises Unusable where the bytes are no tape, or damaged."""
        if self._source is None:
            self._source = self._first()
        while self._source is not None and not self.ended:
            yield from self._source.records()
            following = None if self._source.ended else self._next()
            if following is not None:
                # What was written to the old one before there was a new one.
                yield from self._source.records()
            self.ended = self._source.ended or self._closed_alone()
            if following is None or self.ended:
                return
            source, place, what = following
            if what is None and self._source.unread_bytes:
                raise Unusable(f"{self.source} is cut short, but a later segment follows it")
            if what is not None:
                yield what
            self._source.close()
            self._source, self._place = source, place

    def _first(self) -> _Source | None:
        if not Path(self.path).is_dir():
            return _opened(Path(self.path))
        found = segments(self.path)
        if not found:
            return None
        of_run = [place for place in found if place[0] == max(found)[0]]
        self._place = max(of_run) if self._newest else min(of_run)
        return _opened(found[self._place])

    def _next(self) -> tuple[_Source, tuple[int, int], Break | None] | None:
        """What is read after this source, and whether that goes on from it; None: nothing yet."""
        if not Path(self.path).is_dir():
            return self._next_file()
        later = {place: it for place, it in segments(self.path).items() if place > self._place}
        if not later:
            return None
        place = min(later)
        source = _opened(later[place])
        if source is None:
            return None  # compressed or deleted since: look again
        (run, number), (old_run, old_number) = place, self._place
        if run != old_run:
            return source, place, Break(f"run {old_run} stopped without its end; run {run}", True)
        missing = number - old_number - 1
        if not missing:
            return source, place, None
        some = f"segment {number - 1} was" if missing == 1 else f"{missing} segments were"
        return source, place, Break(f"{some} deleted before they could be read", False)

    def _next_file(self) -> tuple[_Source, tuple[int, int], Break | None] | None:
        assert self._source is not None
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return None  # it was renamed, and its writer may still have it open
        if (status.st_dev, status.st_ino) == self._source.identity:
            return None
        source = _opened(Path(self.path))
        if source is None:
            return None
        return source, self._place, Break("the run stopped without its end; a new capture", True)

    def _closed_alone(self) -> bool:
        """Whether the path is that of one segment, which was compressed: no more will come."""
        source = self._source
        assert source is not None
        packed = source.name.endswith(COMPRESSED) and not Path(self.path).is_dir()
        gone = source.deleted and Path(source.name + COMPRESSED).exists()
        self.closed_part = not source.ended and (packed or (gone and not Path(self.path).is_dir()))
        return self.closed_part
