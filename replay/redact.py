"""Redact: `replay redact TAPE -o FILE`, a tape without what users said, that folds and plans alike.

Owns the command, the secret, and the check that the new tape comes to the same verdict. What
becomes of a record and of a token is server/redaction's.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b
from pathlib import Path

from msgspec import Struct

from server.redaction.pseudonyms import KEY_BYTES, Pseudonyms
from server.redaction.redacting import NotRedactable, Redactor

from .errors import Unusable
from .progress import progress
from .reader import STDIN, Tape, keep_stdin, read_header
from .report import json_text, verdict
from .rewrite import check_output, new_tape, rewriting_parser
from .run import CLEAN, DIVERGED, FOLD, PLAN, Options, Outcome, replay
from .soundness import require_sound
from .words import plural


class RedactReport(Struct, frozen=True, kw_only=True):
    """What `replay redact --json` prints.

    repeats: equal tokens of a namespace are still equal, because the scheduler looks guesses up in
    a text. depth: at which the two tapes were compared: plan, or fold where the scheduler of this
    version cannot plan the tape. verdict: of `replay` on the new tape at that depth; diverged:
    whether that is a divergence. cut: why nothing behind the last record could be kept; "" for a
    tape that was redacted to its end.
    """

    format: int = 1
    path: str
    output: str
    records: int
    bytes: int
    repeats: bool
    depth: str
    verdict: str
    diverged: bool
    cut: str
    notes: tuple[str, ...]


def redact(
    path: str, output: str, key: bytes | None = None, hide_repeats: bool = False
) -> RedactReport:
    """Write a tape without its tokens and texts. `key`: a secret one, if it is None. Raises
    Unusable; then nothing is left at `output`.
    """
    check_output(output, path)
    if path == STDIN:
        keep_stdin()
    header = read_header(path)
    repeats = bool(header.policy.get("draft_tokens")) and not hide_repeats
    names = Pseudonyms(key or secrets.token_bytes(KEY_BYTES), repeats)
    redactor = Redactor(names, check=require_sound)
    source = Tape(path)
    with new_tape(output) as tape:
        with progress(source, "replay redact") as records:
            for record in records:
                try:
                    tape.put(redactor.feed(record))
                except NotRedactable as error:
                    raise Unusable(str(error)) from error
                if redactor.stopped:
                    break
        tape.close()
        depth, after, notes = _compared(path, tape.path)
    return RedactReport(
        path=path,
        output=output,
        records=tape.records,
        bytes=tape.bytes,
        repeats=repeats,
        depth=depth,
        verdict=verdict(after),
        diverged=after.exit_code == DIVERGED,
        cut=redactor.stopped,
        notes=(*source.notes, *notes),
    )


def _compared(path: str, new: str) -> tuple[str, Outcome, list[str]]:
    """Depth, the new tape's outcome, and notes. Raises Unusable where they do not fold alike."""
    notes: list[str] = []
    try:
        before, after = (replay(it, Options(PLAN)) for it in (path, new))
        if _essence(before) == _essence(after):
            return PLAN, after, notes
        notes.append(f"it does not plan as {path} does, whose verdict is: {verdict(before)}")
    except Unusable as error:
        notes.append(f"it was compared at depth fold only: {error}")
    before, after = (replay(it, Options(FOLD)) for it in (path, new))
    if _essence(before) != _essence(after):
        raise Unusable(
            f"{path} cannot be redacted, for what is left would say something else: "
            f"{verdict(after)}, and the tape itself: {verdict(before)}"
        )
    return FOLD, after, notes


def _essence(outcome: Outcome) -> tuple[object, ...]:
    """What must be the same of two tapes."""
    found = outcome.divergence
    counts = outcome.counts
    what = found and (found.kind, found.step, found.record, found.event_index, found.sequence)
    return outcome.exit_code, what, counts.steps, counts.rows, counts.events


def key_of(path: str) -> bytes:
    """The secret that a file's bytes make. Raises Unusable."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise Unusable(f"the key {path} cannot be read: {error.strerror}") from error
    if len(data) < KEY_BYTES // 2:
        raise Unusable(f"the key {path} has {len(data)} bytes: give {KEY_BYTES // 2} at least")
    return blake2b(data, digest_size=KEY_BYTES).digest()


def as_text(report: RedactReport) -> str:
    """The report for a person."""
    lines = [f"REDACTED: {report.output}, {plural(report.records, 'record')}"]
    if report.repeats:
        lines.append(
            "note      equal tokens of a namespace are still equal, for the scheduler looked drafts"
            " up among them: how often each one comes can be seen (--hide-repeats)"
        )
    if report.cut:
        lines.append(f"note      it ends where the tape diverges: {report.cut}")
    lines += [f"note      {note}" for note in report.notes]
    return "\n".join([*lines, f"replay    {report.verdict}"])


def main(arguments: list[str]) -> int:
    """`replay redact`."""
    parser = rewriting_parser(
        "replay redact",
        "Write a tape that can be given away: no token, text, name or salt is in it, "
        "and it folds and plans as the tape itself does, or diverges at the same place.",
    )
    parser.add_argument(
        "--key",
        metavar="FILE",
        help="a secret from this file's bytes, so that tapes redacted with it can be compared; "
        "without it a new one is made and forgotten",
    )
    parser.add_argument(
        "--hide-repeats",
        action="store_true",
        help="do not keep equal tokens equal where drafts are looked up; the tape does not plan",
    )
    given = parser.parse_args(arguments)
    key = None if given.key is None else key_of(given.key)
    report = redact(given.tape, given.output, key, given.hide_repeats)
    print(json_text(report) if given.json else as_text(report))
    return CLEAN
