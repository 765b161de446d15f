"""Capture: puts records on disk, one write a call, and never stands in the way of serving.

Owns the tape's files: their names, their mode (0600), rotation, compression of closed segments, and
what happens when the disk is full: the file is cut back to its last whole frame, the records that
follow are counted as a gap, and a Gap and a Checkpoint go on tape once there is room again. Nothing
here raises into the engine; the constructor does, for a path that cannot be used.

A path is one file, or (it ends in "/" or is a folder) a folder of segments:

    capture.log                                  what was there before is moved to capture.log.1
    captures/000002-00000.tape.zst               run 2, segment 0, closed
    captures/000002-00001.tape                   run 2, segment 1, being written

Each segment begins with the header and a checkpoint. A checkpoint cannot be made here: when one is
due (`checkpoint_due`), the engine puts one among its records, right before a StepPlanned, with no
step in flight; the next segment begins there.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import structlog
import zstandard
from msgspec import structs

from statemachine.codec import TapeEncoder
from statemachine.errors import CodecError
from statemachine.records import Checkpoint, Gap, Header, Record

log = structlog.get_logger()

SEGMENT_BYTES = 256 << 20
SUFFIX = ".tape"
COMPRESSED = ".zst"
_MODE = 0o600
_SEGMENT = re.compile(r"(\d{6,})-\d{5,}\.tape(\.zst(\.part)?)?")
"""The name of a segment; whatever else is in a folder is somebody's own."""


class CaptureError(Exception):
    """A capture path that cannot be used; one sentence."""


class CaptureWriter:
    """See the module. One thread makes every call.

    position: bytes of the current file. gaps: how often records were lost, lost_records: how many.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        keep_bytes: int | None = None,
        sync: bool = False,
        redact: Callable[[Record], Record] | None = None,
    ) -> None:
        """`redact`: gives what is written in a record's place. `keep_bytes`: closed segments
        beyond this are deleted, oldest first. `sync`: fsync each write. Raises CaptureError where
        the path cannot be written.
        """
        text = os.fspath(path)
        self._path = Path(path)
        self._segment_bytes = segment_bytes
        self._keep_bytes = keep_bytes
        self._sync = sync
        self._redact = redact
        self._encoder = TapeEncoder()
        self._header: Header | None = None
        self._segment = 0
        self._closed: list[Path] = []
        self._worker: threading.Thread | None = None
        self._lost = 0
        self._reason = ""
        self._crc = self._encoder.crc
        self.position = 0
        self.bytes_written = 0
        self.gaps = 0
        self.lost_records = 0
        try:
            self._folder = text.endswith(os.sep) or self._path.is_dir()
            self._prepare()
            self._file = self._begin()
        except OSError as error:
            raise CaptureError(
                f"the capture cannot be written to {path}, so give another path "
                f"({error.filename}: {error.strerror})"
            ) from error

    @property
    def checkpoint_due(self) -> bool:
        """Whether the engine should put a Checkpoint before its next StepPlanned."""
        return self._lost > 0 or (self._folder and self.position >= self._full_at)

    def write(self, records: list[Record]) -> None:
        """Put records on tape in one write. Raises nothing but what `redact` does; what it has not
        taken is on no tape.
        """
        if self._file < 0:
            return
        if self._redact is not None:
            records = [self._redact(record) for record in records]
        if self._header is None:
            self._header = next((it for it in records if isinstance(it, Header)), None)
        if self.checkpoint_due:
            at = next((i for i, it in enumerate(records) if isinstance(it, Checkpoint)), None)
            if self._lost:
                self._recover(records, at)
                return
            if at is not None:
                self._put(records[:at])
                records = records[at:]
                if self._lost:
                    self._recover(records, 0)
                    return
                if self._rotate():
                    self._put(self._headed(records))
                    # Beyond its checkpoint, which may be larger: else each step would be one's end.
                    self._full_at = self.position + self._segment_bytes
                    return
        self._put(records)

    def close(self) -> None:
        """Close the file; the tape is whole if its last record was written."""
        if self._file < 0:
            return
        if self._lost:
            log.warning("the tape ends in a gap", records=self._lost, reason=self._reason)
        os.close(self._file)
        self._file = -1
        self._join()

    def _prepare(self) -> None:
        if not self._folder:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.is_file() and self._path.stat().st_size:
                self._path.rename(_free_name(self._path))
            return
        self._path.mkdir(parents=True, exist_ok=True)
        found = (_SEGMENT.fullmatch(it.name) for it in self._path.iterdir())
        self._run = max((int(it[1]) for it in found if it), default=0) + 1

    def _file_name(self) -> Path:
        if not self._folder:
            return self._path
        return self._path / f"{self._run:06}-{self._segment:05}{SUFFIX}"

    def _begin(self) -> int:
        """The first file; of a folder it is nobody else's, who may begin a run just now, too."""
        while True:
            try:
                return self._open()
            except FileExistsError:
                self._run += 1

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        if self._folder:
            flags |= os.O_EXCL
        file = os.open(self._file_name(), flags, _MODE)
        self.position, self._full_at = 0, self._segment_bytes
        return file

    def _headed(self, records: list[Record]) -> list[Record]:
        """Records for the start of a segment."""
        if self._header is None:
            return records
        return [structs.replace(self._header, segment=self._segment), *records]

    def _put(self, records: list[Record]) -> None:
        """Encode and write; a failure starts a gap."""
        if not records:
            return
        try:
            data = self._encoder.encode(records)
            self._write_all(data)
        except (OSError, CodecError) as error:
            self._start_gap(records, error)
            return
        self._crc = self._encoder.crc

    def _write_all(self, data: bytes) -> None:
        wrote = os.write(self._file, data)
        if wrote != len(data):
            raise OSError(f"only {wrote} of {len(data)} bytes could be written: the disk is full")
        if self._sync:
            os.fsync(self._file)
        self.position += wrote
        self.bytes_written += wrote

    def _start_gap(self, records: list[Record], error: Exception) -> None:
        self._reason = getattr(error, "strerror", None) or str(error)
        self.gaps += 1
        self._lose(len(records))
        self._cut()
        log.error("the tape has a gap from here on; serving goes on", reason=self._reason)

    def _lose(self, count: int) -> None:
        self._lost += count
        self.lost_records += count

    def _cut(self) -> bool:
        """Cut the file back to its last whole frame; False where even that fails."""
        try:
            os.ftruncate(self._file, self.position)
        except OSError as error:
            log.error("the tape's torn end could not be cut off", reason=str(error))
            return False
        return True

    def _recover(self, records: list[Record], at: int | None) -> None:
        """In a gap: try to go on at a checkpoint, else lose the records too."""
        if at is None or not self._cut():
            self._lose(len(records))
            return
        before, records = records[:at], records[at:]
        self._lose(len(before))
        gap = Gap(self._lost, self._reason)
        fresh = self.position == 0
        try:
            if fresh:
                self._encoder = TapeEncoder()
                data = self._encoder.encode([*self._headed([]), gap, *records])
            else:
                self._encoder.resume(self._crc)
                data = self._encoder.encode([gap, *records])
            self._write_all(data)
        except (OSError, CodecError) as error:
            self._reason = getattr(error, "strerror", None) or str(error)
            self._lose(len(records))
            self._cut()
            return
        self._crc, self._lost = self._encoder.crc, 0
        log.info("the tape goes on after its gap", records=gap.records)

    def _rotate(self) -> bool:
        """Close the segment and open the next one; on failure the old one goes on."""
        done = self._file_name()
        self._segment += 1
        try:
            file = self._open()
        except OSError as error:
            self._segment -= 1
            log.error("no new segment could be opened", reason=str(error))
            return False
        os.close(self._file)
        self._file = file
        self._encoder = TapeEncoder()
        self._crc = self._encoder.crc
        self._closed.append(done)
        self._join()
        self._worker = threading.Thread(target=self._tidy, args=(done,), name="capture-compress")
        self._worker.start()
        return True

    def _join(self) -> None:
        if self._worker is not None:
            self._worker.join()
            self._worker = None

    def _tidy(self, segment: Path) -> None:
        """Compress a closed segment, and delete the oldest ones beyond `keep_bytes`."""
        try:
            compress(segment)
            self._drop_oldest()
        except OSError as error:
            log.error("a closed segment stays as it is", segment=segment.name, reason=str(error))

    def _drop_oldest(self) -> None:
        if self._keep_bytes is None:
            return
        found = self._path.glob(f"*{SUFFIX}{COMPRESSED}")
        kept = sorted(it for it in found if _SEGMENT.fullmatch(it.name))
        total = sum(it.stat().st_size for it in kept)
        for oldest in kept:
            if total <= self._keep_bytes:
                return
            total -= oldest.stat().st_size
            oldest.unlink()


def compress(segment: Path) -> Path:
    """Replace a segment by its zstd form, in one rename; returns the new path. Raises OSError."""
    target = segment.with_name(segment.name + COMPRESSED)
    partial = target.with_name(target.name + ".part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with segment.open("rb") as source, os.fdopen(os.open(partial, flags, _MODE), "wb") as file:
        zstandard.ZstdCompressor(level=3, write_checksum=True).copy_stream(source, file)
    partial.replace(target)
    segment.unlink()
    return target


def _free_name(path: Path) -> Path:
    number = 1
    while (name := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return name
