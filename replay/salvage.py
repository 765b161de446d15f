"""Salvage: the records of a tape that is torn or damaged, as far as they can be read, and what not.

Frames are found again behind damage, for each says where the one before it ended; but only a
checkpoint says how things stood, so the records go on at one. Judges no record, writes none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zstandard
from msgspec import Struct

from statemachine.codec import MAGIC, TapeDecoder, find_frame
from statemachine.errors import CodecError
from statemachine.records import Checkpoint, Header, Record, StepPlanned, TapeEnded

from .errors import Unusable
from .reader import STDIN, ZSTD_MAGIC, opened, sources_of

READ_BYTES = 1 << 20
_CRC_BYTES = 4
_FRAME_HEAD_BYTES = 12


class Loss(Struct):
    """A stretch of a tape that cannot be kept.

    why: in words. source, position: the file, and the byte in it (uncompressed) where it begins.
    bytes: of it that are there. records: that were found in it and cannot be understood without
    those before them. after_step: the newest step that was planned before it. until_step: the step
    of the checkpoint behind it; null where there is none.
    """

    why: str
    source: str
    position: int
    after_step: int
    bytes: int = 0
    records: int = 0
    until_step: int | None = None


class Salvage:
    """Iterate once: records, and a Loss where some are missing, before what comes behind it. Behind
    one, headers of further segments are left out, for their numbers need not follow.

    header: the first one; None where no record could be read. ended: the last record is TapeEnded.
    step: the newest that was planned. notes: what was left out.
    """

    def __init__(self, path: str) -> None:
        """Raises Unusable where there is no such tape."""
        self.header: Header | None = None
        self.ended = False
        self.step = 0
        self.notes: list[str] = []
        self._sources = sources_of(path, self.notes)
        self._loss: Loss | None = None
        self._segment = 0
        self._lossy = False

    def __iter__(self) -> Iterator[Record | Loss]:
        for source in self._sources:
            reading = _Reading(source)
            for item in reading:
                if isinstance(item, CodecError):
                    self._lose(str(item), source, reading.position)
                else:
                    yield from self._take(item, reading)
            self._count(reading, reading.size)
            end = reading.position
        if self._loss is None and not self.ended:
            self._lose("the tape stops without its end", self._sources[-1], end)
        if self._loss is not None:
            yield self._loss

    def _take(self, record: Record, reading: _Reading) -> Iterator[Record | Loss]:
        if isinstance(record, Header):
            yield from self._header(record, reading)
            return
        if isinstance(record, StepPlanned):
            self.step = record.step
        if self._loss is not None:
            # A segment begins with a checkpoint; what is found in its middle, with this or a Gap.
            loss, self._loss = self._loss, None
            self._count(reading, reading.start, loss)
            if isinstance(record, Checkpoint):
                loss.until_step = record.step
            yield loss
        self.ended = isinstance(record, TapeEnded)
        yield record

    def _header(self, record: Header, reading: _Reading) -> Iterator[Record | Loss]:
        expected, self._segment = self._segment + 1, record.segment
        if self.header is None:
            self.header = record
            if self._loss is not None:
                self._count(reading, 0)
                yield self._loss
            self._loss = None
            yield record
            return
        if (record.geometry, record.model) != (self.header.geometry, self.header.model):
            raise Unusable(
                f"{reading.source} is of another run than the segment before it: repair each alone"
            )
        if record.segment != expected:
            many = record.segment - expected
            what = f"segment {expected} is" if many == 1 else f"{many} segments are"
            self._lose(f"{what} missing before segment {record.segment}", reading.source, 0)
        if not self._lossy:
            yield record

    def _lose(self, why: str, source: str, position: int) -> None:
        self.ended, self._lossy = False, True
        if self._loss is None:
            self._loss = Loss(why, source, position, self.step)

    def _count(self, reading: _Reading, end: int, loss: Loss | None = None) -> None:
        """What is lost of a file up to a byte."""
        loss = loss or self._loss
        if loss is not None:
            loss.bytes += end - (loss.position if loss.source == reading.source else 0)
            loss.records += reading.take_passed_over()


class _Reading:
    """Records of one file, and a CodecError at each place from which it cannot be read on.

    start, position: bytes before and after the newest record. size: bytes so far.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.start = self.position = self.size = 0
        self._decoder = TapeDecoder()
        self._held = b""  # what stands behind `position`
        self._lost = False
        self._passed_over = 0

    def take_passed_over(self) -> int:
        """Frames that could be read and not used, since the last call."""
        count = self._decoder.passed_over - self._passed_over
        self._passed_over = self._decoder.passed_over
        return count

    def __iter__(self) -> Iterator[Record | CodecError]:
        with _opened(self.source) as file:
            while True:
                try:
                    # As much again as is held: a long record is not looked at too often.
                    more = file.read(max(READ_BYTES, len(self._held)))
                except (OSError, zstandard.ZstdError) as error:
                    yield CodecError(f"{self.source} cannot be read on ({error})")
                    return
                if not more:
                    break
                self.size += len(more)
                self._held += more
                yield from self._use_up(last=False)
        yield from self._use_up(last=True)
        if self._held and not self._lost:
            yield CodecError(f"the tape stops inside of a record, behind byte {self.position}")

    def _use_up(self, last: bool) -> Iterator[Record | CodecError]:
        """The records that are held."""
        while not self._lost or self._found(last):
            error: CodecError | None = None
            decoder, before, begin = self._decoder, self._decoder.position, self.position
            decoder.forget_torn()
            try:
                for record in decoder.feed(self._held):
                    self.start, self.position = self.position, begin + decoder.position - before
                    yield record
            except CodecError as damage:
                error = damage
            self.position = begin + decoder.position - before
            self._held = self._held[self.position - begin :]
            if error is None:
                return
            if decoder.position and self._held.startswith(MAGIC):
                self._begin_anew()  # segments may stand one behind the other
                continue
            yield error
            self._lost = True
            self._skip(1)

    def _found(self, last: bool) -> bool:
        """Go on at the next frame, or segment, that is held; `last`: no more will be."""
        begun = self._held.find(MAGIC)
        place = 0
        while (frame := find_frame(self._held, place)) is not None:
            place, crc, whole = frame
            if 0 <= begun < place:
                break
            if whole:
                self._skip(place)
                self._decoder.resume(self._decoder.position, crc)
                self._lost = False
                return True
            if not last:
                self._skip(place - _CRC_BYTES)
                return False
            place += 1
        if begun >= 0:
            self._skip(begun)
            self._begin_anew()
            self._lost = False
            return True
        self._skip(max(0, len(self._held) - _FRAME_HEAD_BYTES))
        return False

    def _skip(self, count: int) -> None:
        self.position += count
        self._held = self._held[count:]

    def _begin_anew(self) -> None:
        self._decoder, self._passed_over = TapeDecoder(), 0


@contextmanager
def _opened(source: str) -> Iterator[Any]:
    """A file's bytes, unpacked."""
    try:
        file: Any = sys.stdin.buffer if source == STDIN else opened(source)
    except OSError as error:
        raise Unusable(f"{source} cannot be read: {error.strerror}") from error
    with file:
        if not file.peek(len(ZSTD_MAGIC)).startswith(ZSTD_MAGIC):
            yield file
            return
        with zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as unpacked:
            yield unpacked
