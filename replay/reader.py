"""Reader: the records of a tape, one by one, wherever its bytes are.

A tape is a file, a zstd-compressed file, a folder of segments (server/capture.py names them), or
standard input. Memory stays at one frame, whatever the tape's size. Never judges what the records
say, apart from segments that do not follow each other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import zstandard

from statemachine.codec import TapeDecoder
from statemachine.errors import CodecError
from statemachine.records import Checkpoint, Header, Record, TapeEnded

from .errors import Unusable

CHUNK_BYTES = 1 << 20
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
STDIN = "-"


class Tape:
    """Iterate once over the records; then ask `torn`, `ended` and `notes`.

    header: the first one; None before the first record. position: bytes up to the end of the last
    record, uncompressed, in `source`, the file that is being read. torn: the bytes stop inside of a
    frame. ended: the last record is TapeEnded.
    """

    def __init__(self, path: str) -> None:
        """Raises Unusable where there is no such tape."""
        self.path = path
        self.header: Header | None = None
        self.source = path
        self.position = 0
        self.torn = False
        self.ended = False
        self.notes: list[str] = []
        self._segments = _sources(path, self.notes)

    def __iter__(self) -> Iterator[Record]:
        """The records in order. Raises Unusable where a tape is no tape, or corrupt."""
        for number, source in enumerate(self._segments):
            self.source = source
            last = number == len(self._segments) - 1
            yield from self._read(source, number, last)
        if self.header is None:
            raise Unusable(f"{self.path} is too short to hold a header: there is nothing to replay")

    def _read(self, source: str, number: int, last: bool) -> Iterator[Record]:
        decoder = TapeDecoder()
        first = True
        try:
            for chunk in _chunks(source):
                for record in decoder.feed(chunk):
                    self.position = decoder.position
                    self.ended = isinstance(record, TapeEnded)
                    if isinstance(record, Header):
                        if not first:
                            raise CodecError("a header stands in the middle: two tapes were joined")
                        self._check_segment(record, source, number)
                    first = False
                    yield record
        except _Cut as cut:
            self.torn = True
            self.notes.append(str(cut))
        except CodecError as error:
            raise Unusable(f"{source}: {error}") from error
        except (OSError, zstandard.ZstdError) as error:
            raise Unusable(f"{source} cannot be read: {error}") from error
        if decoder.torn:
            self.torn = True
            self.notes.append(
                f"the tape stops inside of a frame: {decoder.pending_bytes} bytes after byte "
                f"{decoder.position} are the start of a record that was never finished"
            )
        if self.torn and not last:
            raise Unusable(f"{source} is cut short, but a later segment follows it")

    def _check_segment(self, header: Header, source: str, number: int) -> None:
        if self.header is None:
            self.header = header
            if number == 0 and header.segment:
                self.notes.append(f"the tape starts at segment {header.segment}: older ones went")
            return
        expected = self.header.segment + number
        if header.segment != expected:
            raise Unusable(f"{source} is segment {header.segment}, where {expected} should follow")
        if header.geometry != self.header.geometry or header.model != self.header.model:
            raise Unusable(f"{source} is of another run than the segment before it")


class _Cut(Exception):
    """A compressed stream that stops early."""


def _sources(path: str, notes: list[str]) -> list[str]:
    if path == STDIN:
        return [path]
    place = Path(path)
    if place.is_dir():
        return _folder(place, notes)
    if not place.exists():
        raise Unusable(f"{path} does not exist: give the path of a capture")
    return [path]


def _folder(folder: Path, notes: list[str]) -> list[str]:
    """The segments of the folder's newest run."""
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.tape*")):
        if file.name.endswith((".tape", ".tape.zst")):
            # Between a compression's rename and its unlink both forms exist; either is whole.
            found.setdefault(file.name.removesuffix(".zst"), file)
    runs = sorted({name.split("-")[0] for name in found})
    if not runs:
        raise Unusable(f"{folder} holds no segments of a tape (*.tape, *.tape.zst)")
    if len(runs) > 1:
        notes.append(f"the folder holds {len(runs)} runs; this is the newest, {runs[-1]}")
    return [str(found[name]) for name in sorted(found) if name.split("-")[0] == runs[-1]]


def _chunks(source: str) -> Iterator[bytes]:
    if source == STDIN:
        yield from _plain_or_zstd(sys.stdin.buffer)
        return
    with open(source, "rb") as file:
        yield from _plain_or_zstd(file)


def _plain_or_zstd(file: IO[bytes]) -> Iterator[bytes]:
    chunk = file.read(CHUNK_BYTES)
    if not chunk.startswith(ZSTD_MAGIC):
        while chunk:
            yield chunk
            chunk = file.read(CHUNK_BYTES)
        return
    unpacker = zstandard.ZstdDecompressor().decompressobj()
    while chunk:
        yield unpacker.decompress(chunk)
        if unpacker.eof:
            if unpacker.unused_data or file.read(1):
                raise zstandard.ZstdError("bytes follow the end of the compressed stream")
            return
        chunk = file.read(CHUNK_BYTES)
    raise _Cut("the compressed tape stops early")


def read_header(path: str) -> Header:
    """The header of a tape, and no more. Raises Unusable."""
    for record in Tape(path):
        if isinstance(record, Header):
            return record
    raise Unusable(f"{path} holds no header")


__all__ = ["STDIN", "Checkpoint", "Tape", "read_header"]
