"""Codec of tape format 1: bytes <-> records. Never opens a file.

    tape   = magic, frame, frame, ...
    frame  = length   u32   of the payload
             check    u32   CRC-32 of the length's 4 bytes and the previous frame's payload CRC
             payload        one record, msgpack (wire.py)
             CRC      u32   CRC-32 of the payload

all little-endian; before the first frame, the previous CRC is that of the magic. A length is
believed only once its check fits, so that a flipped byte anywhere is corruption, and bytes that
stop early are a torn tail, which is normal: a process died.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from zlib import crc32

import msgspec

from . import wire
from .errors import CodecError
from .packing import pack_record, unpack_record
from .records import FORMAT, Header, Record
from .snapshot import decode_state, encode_state
from .tracker import Tracker

__all__ = [
    "MAGIC",
    "MAX_FRAME_BYTES",
    "TapeDecoder",
    "TapeEncoder",
    "decode_state",
    "encode_state",
    "find_frame",
]

MAGIC = b"MLXTAPE1"
MAX_FRAME_BYTES = 256 << 20
"""A longer payload is never written, and never believed. Checkpoints are the long ones."""

_HEAD = struct.Struct("<II")
_U32 = struct.Struct("<I")
_FIRST_CRC = crc32(MAGIC)
_FAMILY = MAGIC[:-1]
# What a payload with right checksums can still get wrong, if it was not written by this code.
_MALFORMED = (
    msgspec.MsgspecError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    struct.error,
)


_ALONE = (b"\x09", b"\x0a", b"\x0f", b"\x11")
"""Numbers of Gap and of checkpoints, the second byte of their payloads (wire.py)."""


class TapeEncoder:
    """Records to bytes, one tape or segment from its start; the first bytes carry the magic."""

    def __init__(self) -> None:
        self._tracker = Tracker()
        self._encoder = msgspec.msgpack.Encoder()
        self._crc = _FIRST_CRC
        self._started = False

    def encode(self, records: Iterable[Record]) -> bytes:
        """The records' frames. Raises CodecError where a record does not fit into the format."""
        parts: list[bytes] = []
        if not self._started:
            parts.append(MAGIC)
            self._started = True
        for record in records:
            try:
                payload = self._encoder.encode(pack_record(self._tracker, record))
            except (TypeError, ValueError, OverflowError) as error:
                kind = type(record).__name__
                raise CodecError(f"a {kind} record does not fit into the tape: {error}") from error
            parts.append(self._frame(payload))
        return b"".join(parts)

    @property
    def crc(self) -> int:
        """The CRC that the next frame's header builds on: a mark for `resume`."""
        return self._crc

    def resume(self, crc: int) -> None:
        """Go on after the frame where `crc` was read, the later ones lost.

        What follows must be Gap, then Checkpoint: only these rely on nothing before them.
        """
        self._crc = crc

    def _frame(self, payload: bytes) -> bytes:
        if len(payload) > MAX_FRAME_BYTES:
            raise CodecError(
                f"a record of {len(payload)} bytes is longer than a frame may be "
                f"({MAX_FRAME_BYTES})"
            )
        length = _U32.pack(len(payload))
        check = _U32.pack(crc32(_U32.pack(self._crc), crc32(length)))
        self._crc = crc32(payload)
        return b"".join((length, check, payload, _U32.pack(self._crc)))


def find_frame(data: bytes, start: int) -> tuple[int, int, bool] | None:
    """Of the first frame at or after `start`: its place, the CRC to `TapeDecoder.resume` with, and
    whether all of it is there.

    Its header must fit the CRC that stands right before it, and its payload, if it is there, its
    own. Looks at every byte: some 2 MB a second.
    """
    for at in range(max(start, _U32.size), len(data) - _HEAD.size + 1):
        length, check = _HEAD.unpack_from(data, at)
        if length > MAX_FRAME_BYTES:
            continue
        before = data[at - _U32.size : at]
        if crc32(before, crc32(data[at : at + _U32.size])) != check:
            continue
        end = at + _HEAD.size + length
        whole = end + _U32.size <= len(data)
        if whole and crc32(data[at + _HEAD.size : end]) != _U32.unpack_from(data, end)[0]:
            continue
        return at, _U32.unpack(before)[0], whole
    return None


class TapeDecoder:
    """Bytes to records, fed in pieces of any size; holds no more than one frame and one piece.

    position: bytes up to the end of the last whole frame. torn: whether bytes follow it that are
    the start of a frame (ask when the input has ended). passed_over: frames left out by `resume`.
    """

    def __init__(self) -> None:
        self.position = 0
        self.passed_over = 0
        self._lost = False
        self._tracker = Tracker()
        self._decoder = msgspec.msgpack.Decoder(wire.WireRecord)
        self._crc = _FIRST_CRC
        self._buffer = bytearray()
        self._seen_header = False

    @property
    def torn(self) -> bool:
        """Whether the bytes fed so far end inside of a frame."""
        return bool(self._buffer)

    @property
    def pending_bytes(self) -> int:
        """Bytes after the last whole frame."""
        return len(self._buffer)

    @property
    def crc(self) -> int:
        """The CRC that the next frame's header builds on: a mark for `resume`."""
        return self._crc

    def resume(self, position: int, crc: int) -> None:
        """Go on at the frame that begins at `position`, behind lost ones; `crc`: as above.

        Frames up to the next Gap or Checkpoint, which rely on nothing before them, are passed over.
        """
        self.position, self._crc, self._lost = position, crc, True
        self._buffer.clear()

    def forget_torn(self) -> None:
        """Forget the bytes after the last whole frame: they will be fed again, maybe others."""
        self._buffer.clear()

    def feed(self, data: bytes) -> Iterator[Record]:
        """The records that `data` completes. Raises CodecError, with the byte, at corruption.

        The iterator must be used up before the next call.
        """
        self._buffer += data
        if self.position == 0 and not self._take_magic():
            return
        at = 0
        try:
            while (frame := self._next_frame(at)) is not None:
                payload, size = frame
                if self._lost and payload[1:2] not in _ALONE:
                    self.passed_over += 1
                    at += size
                    self.position += size
                    continue
                record = self._record(payload)
                self._lost = False
                at += size
                self.position += size
                yield record
        finally:
            del self._buffer[:at]

    def _take_magic(self) -> bool:
        head = bytes(self._buffer[: len(MAGIC)])
        if head == MAGIC:
            del self._buffer[: len(MAGIC)]
            self.position = len(MAGIC)
            return True
        if MAGIC.startswith(head):
            return False
        if head.startswith(_FAMILY):
            raise CodecError(
                f"this is a tape of format {head[-1:].decode('ascii', 'replace')}, and this "
                f"version reads format {FORMAT}: use the version that wrote it"
            )
        raise CodecError(f"this is not a tape: it does not start with {MAGIC.decode()}")

    def _next_frame(self, at: int) -> tuple[bytes, int] | None:
        """Payload and size of the whole frame at `at` of the buffer; None where it is cut short."""
        buffer, left = self._buffer, len(self._buffer) - at
        if left < _HEAD.size:
            return None
        length, check = _HEAD.unpack_from(buffer, at)
        if crc32(_U32.pack(self._crc), crc32(buffer[at : at + 4])) != check:
            raise self._corrupt("a frame's header does not fit its checksum")
        if length > MAX_FRAME_BYTES:
            raise self._corrupt(f"a frame claims {length} bytes, more than {MAX_FRAME_BYTES}")
        size = _HEAD.size + length + _U32.size
        if left < size:
            return None
        payload = bytes(buffer[at + _HEAD.size : at + _HEAD.size + length])
        crc = crc32(payload)
        if crc != _U32.unpack_from(buffer, at + size - _U32.size)[0]:
            raise self._corrupt("a frame's content does not fit its checksum")
        self._crc = crc
        return payload, size

    def _record(self, payload: bytes) -> Record:
        if not self._seen_header:
            self._check_header(payload)
        try:
            return unpack_record(self._tracker, self._decoder.decode(payload))
        except CodecError as error:
            raise self._corrupt(str(error)) from error
        except _MALFORMED as error:
            raise self._corrupt(f"a frame is whole but holds no record ({error})") from error

    def _check_header(self, payload: bytes) -> None:
        """The first record says which format this is, before anything relies on it."""
        try:
            number, fields = msgspec.msgpack.decode(payload, type=tuple[int, dict[str, object]])
        except _MALFORMED as error:
            raise self._corrupt("the first frame holds no header") from error
        if number != 1 or fields.get("type") != Header.__name__:
            raise self._corrupt("the first frame holds no header")
        if fields.get("format") != FORMAT:
            raise CodecError(
                f"this is a tape of format {fields.get('format')}, and this version reads "
                f"format {FORMAT}: use the version that wrote it ({fields.get('software')})"
            )
        self._seen_header = True

    def _corrupt(self, what: str) -> CodecError:
        return CodecError(f"the tape is corrupt at byte {self.position}: {what}")
