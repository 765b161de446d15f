"""Upgrade: `replay upgrade TAPE [-o FILE]`, a tape of an older format in this version's.

Owns the command, and the check that both tapes have the same records and come to the same verdict.
What an older format means is the codec's business: whatever the reader takes can be upgraded.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from msgspec import Struct, structs

from statemachine.records import FORMAT, Header, Record

from .errors import Unusable
from .progress import progress
from .reader import STDIN, Tape, keep_stdin, read_header
from .report import json_text, verdict
from .rewrite import check_output, new_tape, rewriting_parser
from .run import CLEAN, Options, Outcome, replay
from .words import plural


class UpgradeReport(Struct, frozen=True, kw_only=True):
    """What `replay upgrade --json` prints.

    from_format, to_format: of the tape as it is, and of this version. current: they are the same.
    output: null where nothing was written. records, bytes: of the new tape. verdict: of `replay` on
    it, the same as on the tape itself; null where nothing was written.
    """

    format: int = 1
    path: str
    output: str | None
    from_format: int
    to_format: int
    current: bool
    records: int
    bytes: int
    verdict: str | None
    notes: tuple[str, ...]


def upgrade(path: str, output: str | None) -> UpgradeReport:
    """Write a tape in this version's format; without `output` only say which it has. Raises
    Unusable; then nothing is left at `output`.
    """
    if output is not None:
        check_output(output, path)
    if path == STDIN:
        keep_stdin()
    old = read_header(path).format
    if output is None and old != FORMAT:
        raise Unusable(f"{path} is of format {old}, and this version writes {FORMAT}: give -o FILE")
    report = UpgradeReport(
        path=path,
        output=output,
        from_format=old,
        to_format=FORMAT,
        current=old == FORMAT,
        records=0,
        bytes=0,
        verdict=None,
        notes=(),
    )
    return report if output is None else _written(path, output, report)


def _written(path: str, output: str, report: UpgradeReport) -> UpgradeReport:
    source = Tape(path)
    with new_tape(output) as tape:
        with progress(source, "replay upgrade") as records:
            for record in records:
                tape.put(_current(record))
        tape.close()
        after = _same(path, tape.path)
    return structs.replace(
        report,
        records=tape.records,
        bytes=tape.bytes,
        verdict=verdict(after),
        notes=tuple(source.notes),
    )


def _current(record: Record) -> Record:
    """A record as this version writes it."""
    return structs.replace(record, format=FORMAT) if isinstance(record, Header) else record


def _same(path: str, new: str) -> Outcome:
    """What a replay says of both tapes. Raises Unusable where they are not the same."""
    for number, (ours, theirs) in enumerate(zip_longest(_records(path), _records(new))):
        if ours != theirs:
            kind = type(ours or theirs).__name__
            raise Unusable(
                f"{path} cannot be upgraded: record {number}, a {kind}, would come back as another "
                "one, which is a bug of this version"
            )
    before, after = (replay(it, Options()) for it in (path, new))
    if _essence(before) != _essence(after):
        raise Unusable(
            f"{path} cannot be upgraded: the new tape says {verdict(after)!r}, and the tape itself "
            f"{verdict(before)!r}, which is a bug of this version"
        )
    return after


def _records(path: str) -> Iterator[Record]:
    return map(_current, Tape(path))


def _essence(outcome: Outcome) -> tuple[object, ...]:
    """What must be the same of two tapes; torn bytes at the end of one are not copied."""
    return outcome.exit_code, outcome.counts, outcome.divergence


def as_text(report: UpgradeReport) -> str:
    """The report for a person."""
    if report.output is None:
        return f"CURRENT: {report.path} is of format {report.to_format}, the newest: nothing to do"
    count = plural(report.records, "record")
    if report.current:
        was = f"{report.path} was of format {report.to_format}, the newest, already"
        lines = [f"CURRENT: {report.output} is a copy, {count}: {was}"]
    else:
        was = f"of format {report.to_format}, where {report.path} is of {report.from_format}"
        lines = [f"UPGRADED: {report.output} is {was}, {count}"]
    lines += [f"note      {note}" for note in report.notes]
    return "\n".join([*lines, f"replay    {report.verdict}"])


def main(arguments: list[str]) -> int:
    """`replay upgrade`."""
    parser = rewriting_parser(
        "replay upgrade",
        "Write a tape of an older format in this version's, with the same records. "
        "Without -o say which format a tape has.",
        must_write=False,
    )
    given = parser.parse_args(arguments)
    report = upgrade(given.tape, given.output)
    print(json_text(report) if given.json else as_text(report))
    return CLEAN
