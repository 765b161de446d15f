"""Reader: the records of a tape, one by one, wherever its bytes are.

A tape is a file, a zstd-compressed file, a folder of segments (server/capture.py names them), or
standard input. Memory stays at one frame, whatever the tape's size. Never judges what the records
say, apart from segments that do not follow each other.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO

import zstandard
from attrs import frozen

from statemachine.codec import MAGIC, TapeDecoder
from statemachine.errors import CodecError
from statemachine.records import Checkpoint, Header, Record, StepPlanned, TapeEnded

from .errors import Unusable

CHUNK_BYTES = 1 << 20
PIECE_BYTES = 1 << 8
"""Compressed bytes that are unpacked at once: each can become 32 KiB, in a file made to hurt."""
UNPACKED_BYTES = 1 << 16
"""Unpacked bytes that are handed on at once, at the least."""
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
STDIN = "-"
SUFFIX = ".tape"
COMPRESSED = ".zst"
HEAD_RECORDS = 2
"""What each segment of a folder begins with: the header, and a checkpoint."""


@frozen
class Segment:
    """A part of a tape that can be read alone, in its place: a file of a folder. sources: with one
    behind it that was cut too early to be told apart. behind: the file that it must lead to.
    """

    number: int
    sources: list[str]
    behind: str | None

    @property
    def last(self) -> bool:
        return self.behind is None


class Tape:
    """Iterate once over the records; then ask `torn`, `ended` and `notes`.

    header: the first one; None before the first record. position: bytes up to the end of the last
    record, uncompressed, in `source`, the file that is being read. torn: the bytes stop inside of a
    frame. ended: the last record is TapeEnded. bytes_read, of bytes_total: of the files as they
    are stored; bytes_total is None where that is not known. started_after: the step of the
    checkpoint that a tape from the middle begins with.
    """

    def __init__(
        self,
        path: str,
        from_step: int | None = None,
        near: int | None = None,
        segment: Segment | None = None,
    ) -> None:
        """`from_step`: begin with the last checkpoint that stands before this step's plan; whole
        segments before it are not read. `near`: only leave such segments out. `segment`: read that
        one alone, and of the one behind it what it must lead to. Raises Unusable where there is no
        such tape.
        """
        self.path = path
        self.header: Header | None = None
        self.source = path
        self.position = 0
        self.torn = False
        self.ended = False
        self.notes: list[str] = []
        self.bytes_read = 0
        self.started_after: int | None = None
        self._from = from_step
        self._near = near if from_step is None else from_step
        self._skipped = 0
        self._segment = 0
        self._place = 0
        self._fresh = True
        self._only = segment
        self._segments = sources_of(path, self.notes) if segment is None else segment.sources
        self.bytes_total = _size(self._segments)

    def __iter__(self) -> Iterator[Record]:
        """The records in order. Raises Unusable where a tape is no tape, or corrupt."""
        if self._near is not None:
            self._skip_segments(self._near)
        if self._from is not None:
            self._find_start(self._from)
        behind = None if self._only is None else self._only.behind
        for source in self._segments:
            yield from self._read(source, last=source == self._segments[-1] and behind is None)
        if behind is not None:
            yield from itertools.islice(self._read(behind, last=True), HEAD_RECORDS)
        if self.header is None and Path(self.path).is_fifo():
            raise Unusable(
                f"nothing is left to read in the pipe {self.path}: where a tape is read more than "
                "once, give it to standard input, and - as its name"
            )
        if self.header is None:
            raise Unusable(f"{self.path} is too short to hold a header: there is nothing to replay")

    def _skip_segments(self, step: int) -> None:
        """Leave out the segments that end before the last one whose checkpoint is before a step."""
        segments = self._segments
        for number in range(len(segments) - 1, 0, -1):
            first = _first_checkpoint(segments[number])
            if first is not None and first < step:
                self._segments = segments[number:]
                self.bytes_total = _size(self._segments)
                return

    def _find_start(self, step: int) -> None:
        """Leave out what stands before the last checkpoint before a step."""
        if self.path == STDIN:
            keep_stdin()
            self.bytes_total = _size(self._segments)
        self._skipped, self.started_after = _last_checkpoint(self._segments[0], step)
        if self.started_after:
            self.notes.append(
                f"it starts at the checkpoint after step {self.started_after}, the last one before "
                f"step {step}: nothing before it was looked at"
            )

    def _read(self, source: str, last: bool) -> Iterator[Record]:
        self.source = source
        decoder, self._fresh, before = TapeDecoder(), True, b""
        try:
            for chunk in self._chunks(source):
                data = chunk
                while data:
                    try:
                        yield from self._records(decoder, data, source)
                        break
                    except CodecError:
                        # Segments may stand one behind the other: `zstdcat captures/*.zst`.
                        data = (before + data)[-decoder.pending_bytes :]
                        if not data.startswith(MAGIC) or not decoder.position:
                            raise
                        decoder, self._fresh, before = TapeDecoder(), True, b""
                before = (before + chunk)[-len(MAGIC) :]
        except _Cut as cut:
            self.torn = True
            self.notes.append(str(cut))
        except CodecError as error:
            kept = " (replay repair keeps what stands before it)" if decoder.position else ""
            raise Unusable(f"{source}: {error}{kept}") from error
        except (OSError, zstandard.ZstdError) as error:
            raise Unusable(f"{source} cannot be read: {error}") from error
        if decoder.torn:
            self.torn = True
            self.notes.append(
                f"the tape stops inside of a frame: {decoder.pending_bytes} bytes after byte "
                f"{decoder.position} are the start of a record that was never finished"
            )
        if self.torn and not last:
            raise Unusable(
                f"{source} is cut short, but a later segment follows it: replay repair says what "
                "can be kept"
            )

    def _records(self, decoder: TapeDecoder, data: bytes, source: str) -> Iterator[Record]:
        """The records that the bytes complete, those that are skipped left out."""
        for record in decoder.feed(data):
            self.position = decoder.position
            self.ended = isinstance(record, TapeEnded)
            if isinstance(record, Header):
                if not self._fresh:
                    raise Unusable(
                        f"{source}: a header stands in the middle: two tapes were joined"
                    )
                self._check_segment(record, source)
            self._fresh = False
            place, self._place = self._place, self._place + 1
            if place == 1 and self._from_middle and not isinstance(record, Checkpoint):
                raise Unusable(f"{source} has no checkpoint to start from: replay without --jobs")
            if place == 0 or place >= self._skipped:
                yield record

    def _check_segment(self, header: Header, source: str) -> None:
        self._segment += 1
        if self.header is None:
            self.header = header
            if self._near is None and header.segment and not self._from_middle:
                self.notes.append(f"the tape starts at segment {header.segment}: older ones went")
            return
        expected = self.header.segment + self._segment - 1
        if not header.segment:
            raise Unusable(
                f"{source}: another tape begins where segment {expected} of this one should "
                "follow: replay each by itself"
            )
        if header.segment != expected:
            raise Unusable(f"{source} is segment {header.segment}, where {expected} should follow")
        if header.geometry != self.header.geometry or header.model != self.header.model:
            raise Unusable(f"{source} is of another run than the segment before it")

    @property
    def _from_middle(self) -> bool:
        """Whether the segment that is read alone is not the first of its tape."""
        return self._only is not None and self._only.number > 0

    def _chunks(self, source: str) -> Iterator[bytes]:
        if source == STDIN:
            file = sys.stdin.buffer
            if file.seekable():
                file.seek(0)
            yield from self._plain_or_zstd(file)
            return
        with opened(source) as file:
            yield from self._plain_or_zstd(file)

    def _plain_or_zstd(self, file: IO[bytes]) -> Iterator[bytes]:
        chunk = self._next(file)
        if not chunk.startswith(ZSTD_MAGIC):
            while chunk:
                yield chunk
                chunk = self._next(file)
            return
        rest = memoryview(chunk)
        while rest:  # frames, one behind the other (RFC 8878, section 3): parts that were joined
            rest = yield from self._unpacked(rest, file)
            if len(rest) < len(ZSTD_MAGIC):
                rest = memoryview(bytes(rest) + self._next(file))
            if rest and rest[: len(ZSTD_MAGIC)] != ZSTD_MAGIC:
                raise zstandard.ZstdError("bytes follow the end of the compressed stream")

    def _unpacked(self, chunk: memoryview, file: IO[bytes]) -> Generator[bytes, None, memoryview]:
        """What a zstd frame holds, which begins with `chunk`; returns bytes read behind it."""
        unpacker = zstandard.ZstdDecompressor().decompressobj()
        parts, size = [], 0
        while chunk:
            for at in range(0, len(chunk), PIECE_BYTES):
                piece = chunk[at : at + PIECE_BYTES]
                parts.append(unpacker.decompress(piece))
                size += len(parts[-1])
                if size >= UNPACKED_BYTES or unpacker.eof:
                    yield b"".join(parts)
                    parts, size = [], 0
                if unpacker.eof:
                    return chunk[at + len(piece) - len(unpacker.unused_data) :]
            chunk = memoryview(self._next(file))
        yield b"".join(parts)
        raise _Cut("the compressed tape stops early")

    def _next(self, file: IO[bytes]) -> bytes:
        chunk = file.read(CHUNK_BYTES)
        self.bytes_read += len(chunk)
        return chunk


def opened(source: str) -> IO[bytes]:
    """A file, or what its server made of it since its folder was looked at. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        return open(source, "rb")
    return open(_compressed(source), "rb")


def stored_bytes(source: str) -> int:
    """Bytes of such a file. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        return Path(source).stat().st_size
    return Path(_compressed(source)).stat().st_size


def _compressed(source: str) -> str:
    return source if source.endswith(COMPRESSED) else source + COMPRESSED


class _Cut(Exception):
    """A compressed stream that stops early."""


def keep_stdin() -> None:
    """Make standard input a file that can be read more than once; it has no name, and goes with
    the process. Raises Unusable where there is no room for it.
    """
    if sys.stdin.buffer.seekable():
        return
    kept = tempfile.TemporaryFile()  # noqa: SIM115 - it is standard input from here on
    try:
        shutil.copyfileobj(sys.stdin.buffer, kept, CHUNK_BYTES)
    except OSError as error:
        raise Unusable(
            f"standard input cannot be kept to be read twice ({error}): write it to a file"
        ) from error
    sys.stdin = io.TextIOWrapper(kept)


def _first_checkpoint(source: str) -> int | None:
    """The step of a segment's first checkpoint; None where steps come before it."""
    for record in Tape(source):
        if isinstance(record, Checkpoint):
            return record.step
        if isinstance(record, StepPlanned):
            break
    return None


def _last_checkpoint(source: str, step: int) -> tuple[int, int]:
    """Place and step of the last checkpoint before the plan of a step. Raises Unusable."""
    place, at, newest = -1, -1, -1
    for number, record in enumerate(Tape(source)):
        if isinstance(record, StepPlanned):
            newest = record.step
            if newest >= step:
                break
        elif isinstance(record, Checkpoint) and record.step < step:
            place, at = number, record.step
    if newest < 0:
        raise Unusable(f"{source} has no step at all")
    if newest < step:
        raise Unusable(f"the tape has no step {step} to start from: its last one is {newest}")
    if place < 0:
        raise Unusable(f"the tape holds no checkpoint before step {step}: it cannot start there")
    return place, at


def sources_of(path: str, notes: list[str]) -> list[str]:
    """The files of a tape in order; what was left out is added to `notes`. Raises Unusable."""
    if path == STDIN:
        return [path]
    if not path:
        raise Unusable("the tape's path is empty: give the path of a capture")
    place = Path(path)
    if place.is_dir():
        return _folder(place, notes)
    if not place.exists():
        raise Unusable(f"{path} does not exist: give the path of a capture")
    return [path]


def segments_of(path: str, notes: list[str]) -> list[Segment]:
    """The parts of a tape; `notes` as above. Raises Unusable."""
    parts = [[source] for source in sources_of(path, notes)]
    if len(parts) > 1 and _cut_in_its_head(parts[-1][0]):
        parts[-2:] = [parts[-2] + parts[-1]]
    behind = [part[0] for part in parts[1:]]
    pairs = zip(parts, [*behind, None], strict=True)
    return [Segment(number, sources, next_one) for number, (sources, next_one) in enumerate(pairs)]


def _cut_in_its_head(source: str) -> bool:
    """Whether a file stops before its checkpoint does."""
    tape = Tape(source)
    try:
        return len(list(itertools.islice(tape, HEAD_RECORDS))) < HEAD_RECORDS
    except Unusable:
        return tape.torn or tape.header is None


def segments(folder: str | Path) -> dict[tuple[int, int], Path]:
    """The segments of a folder, by run and number (server/capture.py names them)."""
    found: dict[tuple[int, int], Path] = {}
    for file in sorted(Path(folder).iterdir()):
        run, _, number = file.name.removesuffix(COMPRESSED).removesuffix(SUFFIX).partition("-")
        if SUFFIX in file.name and run.isdecimal() and number.isdecimal():
            # While it is compressed both forms are there for a moment; either is whole.
            found.setdefault((int(run), int(number)), file)
    return found


def _folder(folder: Path, notes: list[str]) -> list[str]:
    """The segments of the folder's newest run."""
    found = segments(folder)
    if not found:
        raise Unusable(
            f"{folder} holds no segments of a tape (000001-00000.tape and so on, or .tape.zst): "
            "give the path of a tape"
        )
    runs = sorted({run for run, _ in found})
    if len(runs) > 1:
        notes.append(f"the folder holds {len(runs)} runs; this is the newest, {runs[-1]:06}")
    return [str(found[key]) for key in sorted(found) if key[0] == runs[-1]]


def _size(sources: list[str]) -> int | None:
    """Bytes of the files, as they are stored; None where that is not known."""
    if sources == [STDIN]:
        try:
            size = os.fstat(sys.stdin.fileno()).st_size
        except (OSError, ValueError):
            return None
        return size if sys.stdin.buffer.seekable() else None
    with contextlib.suppress(FileNotFoundError):
        return sum(map(stored_bytes, sources))
    return None


def read_header(path: str) -> Header:
    """The header of a tape, and no more. Raises Unusable."""
    for record in Tape(path):
        if isinstance(record, Header):
            return record
    raise Unusable(f"{path} holds no header")


__all__ = ["STDIN", "Checkpoint", "Tape", "keep_stdin", "read_header", "sources_of"]
