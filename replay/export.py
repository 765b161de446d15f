"""Export: `replay export TAPE --to FORMAT -o FILE`, a tape for other tools.

Owns the command, the file that is written, and the plainest format: every record as a line of JSON.
The others have a module each. A file is written beside its place and moved there when it is whole.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from statemachine.records import Record

from .arguments import TAPE_HELP, number, tell
from .errors import Unusable
from .progress import progress
from .reader import Tape
from .rewrite import check_place
from .run import CLEAN

STDOUT = "-"


class ExportReport(Struct, frozen=True, kw_only=True):
    """What `replay export --json` prints. items: lines, events or batches, as the format has them.

    notes: what the format cannot say of this tape.
    """

    format: int = 1
    path: str
    to: str
    output: str
    items: int
    bytes: int
    notes: tuple[str, ...]


class Options(Struct, frozen=True):
    """until: the last step that is written. block_tokens: tokens of a block in a Mooncake trace.
    kv_maps: KV events as maps, not arrays.
    """

    until: int | None = None
    block_tokens: int = 512
    kv_maps: bool = False


EVERYTHING = Options()

Exporter = Callable[[Iterable[Record], Options, list[str]], Iterator[bytes]]
"""Pieces of the file, one an item, from records; what cannot be said joins the notes."""


def as_jsonl(records: Iterable[Record], options: Options, notes: list[str]) -> Iterator[bytes]:
    """Each record as a line of JSON; `type` names it, bytes are in base64."""
    encoder = msgspec.json.Encoder()
    for record in records:
        yield encoder.encode(record) + b"\n"


def exporter(to: str) -> Exporter:
    """The format's writer, imported when it is asked for."""
    if to == "perfetto":
        from .export_perfetto import as_perfetto

        return as_perfetto
    if to == "kv-events":
        from .export_kv_events import as_kv_events

        return as_kv_events
    if to == "mooncake":
        from .export_mooncake import as_mooncake

        return as_mooncake
    if to == "script":
        from .export_script import as_script

        return as_script
    return as_jsonl


FORMATS = ("jsonl", "perfetto", "kv-events", "mooncake", "script")


def export(path: str, to: str, output: str, options: Options = EVERYTHING) -> ExportReport:
    """Write a tape in a format. Raises Unusable; then nothing is left at `output`."""
    if output != STDOUT:
        check_place(path, output)
    tape, notes = Tape(path), list[str]()
    items = size = 0
    with _written(output) as file, progress(tape, f"replay export, {to}") as records:
        for piece in exporter(to)(_until(records, options.until), options, notes):
            file.write(piece)
            items += 1
            size += len(piece)
    return ExportReport(
        path=path, to=to, output=output, items=items, bytes=size, notes=(*tape.notes, *notes)
    )


def _until(records: Iterable[Record], until: int | None) -> Iterator[Record]:
    """Records up to the end of a step, what was in flight behind it left out."""
    for record in records:
        step = getattr(record, "step", None)
        if until is not None and step is not None and step > until:
            return
        yield record


@contextmanager
def _written(output: str) -> Iterator[IO[bytes]]:
    """A file that is there once it is whole, or standard output."""
    if output == STDOUT:
        if sys.stdout is None:
            raise Unusable("standard output is closed: give -o the name of a file")
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    place = Path(output)
    if place.exists() and not place.is_file():
        with place.open("wb") as pipe:  # or a device: nothing may take its place
            yield pipe
        return
    try:
        file = tempfile.NamedTemporaryFile(  # noqa: SIM115 - closed and moved below
            dir=place.parent, prefix=f".{place.name}.", delete=False
        )
    except OSError as error:
        raise Unusable(f"{output} cannot be written: {error.strerror}") from error
    try:
        with file:
            yield file
        os.replace(file.name, place)
    except OSError as error:
        raise Unusable(f"{output} cannot be written: {error.strerror}") from error
    finally:
        Path(file.name).unlink(missing_ok=True)


def main(arguments: list[str]) -> int:
    """`replay export`."""
    parser = argparse.ArgumentParser(
        prog="replay export",
        description="A tape for other tools. jsonl: every record. perfetto: a trace for "
        "ui.perfetto.dev and chrome://tracing. kv-events: vLLM's KV cache event batches, as a "
        "msgpack stream. mooncake: a trace that load generators read. script: for `replay check`.",
    )
    parser.add_argument("tape", metavar="TAPE", help=TAPE_HELP)
    parser.add_argument("--to", required=True, choices=FORMATS, help="the format")
    parser.add_argument(
        "-o", dest="output", required=True, metavar="FILE", help="where to; - is standard output"
    )
    parser.add_argument("--until", type=number, metavar="STEP", help="stop after this step")
    parser.add_argument(
        "--block-tokens",
        type=number,
        default=512,
        metavar="N",
        help="mooncake: prompt tokens of one hash id (default: 512, as in the published traces)",
    )
    parser.add_argument(
        "--kv-maps", action="store_true", help="kv-events: maps as vLLM 0.33 writes, not arrays"
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    given = parser.parse_args(arguments)
    if given.json and given.output == STDOUT:
        raise Unusable("--json needs an -o FILE: standard output holds the export already")
    if not given.block_tokens:
        raise Unusable("--block-tokens must be at least 1")
    options = Options(given.until, given.block_tokens, given.kv_maps)
    report = export(given.tape, given.to, given.output, options)
    if given.json:
        print(msgspec.json.encode(report).decode())
        return CLEAN
    for note in report.notes:
        tell(f"note: {note}")
    if given.output != STDOUT:
        print(f"{given.output}: {given.to}, {report.items} items, {report.bytes} bytes")
    return CLEAN
