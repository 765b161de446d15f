"""Rewrite: a new tape from records, beside its place until it is whole; never over another file.

The segments of a folder become one file, in which they stand one behind the other.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zstandard

from statemachine.codec import TapeEncoder
from statemachine.errors import CodecError
from statemachine.records import Header, Record

from .arguments import TAPE_HELP
from .errors import Unusable
from .reader import COMPRESSED, STDIN


class NewTape:
    """Takes records, one by one. path: where it is until it is whole; bytes: written so far."""

    def __init__(self, path: str, file: Any) -> None:
        self.path = path
        self.records = 0
        self.bytes = 0
        self._file = file
        self._encoder = TapeEncoder()

    def put(self, record: Record) -> None:
        """One record at the end; a header begins a segment. Raises Unusable."""
        if isinstance(record, Header):
            self._encoder = TapeEncoder()
        try:
            data = self._encoder.encode([record])
        except CodecError as error:
            raise Unusable(str(error)) from error
        self._file.write(data)
        self.records += 1
        self.bytes += len(data)

    def close(self) -> None:
        """All is written: the file at `path` can be read."""
        self._file.close()


def rewriting_parser(
    prog: str, description: str, must_write: bool = True
) -> argparse.ArgumentParser:
    """Arguments of a command that writes a tape anew: TAPE, -o FILE and --json."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("tape", metavar="TAPE", help=TAPE_HELP)
    parser.add_argument(
        "-o",
        dest="output",
        required=must_write,
        metavar="FILE",
        help="where to; there must be nothing",
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    return parser


def check_output(output: str, tape: str) -> None:
    """Raise Unusable where no new tape may be made of another: there is something already, or it
    would stand among the other's segments.
    """
    _require_nothing(output)
    check_place(tape, output)


def _require_nothing(output: str) -> None:
    if os.path.lexists(output):
        raise Unusable(f"{output} is there already, and nothing is written over: give another name")


def check_place(tape: str, output: str) -> None:
    """Raise Unusable where `output` cannot be a file beside a tape: what was there is written over,
    but never the tape, and nothing joins the segments of its folder.
    """
    place, read = Path(output), Path(tape)
    if not output or place.is_dir():
        raise Unusable(f"{output} is a folder: give the name of a file")
    if tape == STDIN or not read.exists():
        return
    inside = read.is_dir() and place.resolve().parent == read.resolve() and ".tape" in place.name
    if inside and not place.exists():
        raise Unusable(f"{output} would be read as a part of {tape}: give it another place")
    if inside or (place.exists() and place.samefile(read)):
        raise Unusable(f"{output} is the tape itself, which is never changed: give another name")


@contextmanager
def new_tape(output: str) -> Iterator[NewTape]:
    """A tape that stands at `output` once the block ends without an error; compressed where that
    ends in .zst. Raises Unusable where there is something already, or it cannot be written.
    """
    _require_nothing(output)
    place = Path(output)
    suffix = COMPRESSED if output.endswith(COMPRESSED) else ""
    try:
        number, beside = tempfile.mkstemp(suffix, f".{place.name}.", place.parent)
    except OSError as error:
        raise Unusable(f"{output} cannot be written: {error.strerror}") from error
    file: Any = os.fdopen(number, "wb")
    if suffix:
        packer = zstandard.ZstdCompressor(level=3, write_checksum=True)
        file = packer.stream_writer(file)
    tape = NewTape(beside, file)
    try:
        yield tape
        tape.close()
        _require_nothing(output)
        os.replace(beside, place)
    except OSError as error:
        raise Unusable(f"{output} cannot be written: {error.strerror}") from error
    finally:
        tape.close()
        Path(beside).unlink(missing_ok=True)
