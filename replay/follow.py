"""Follow: `replay follow TAPE`, the fold of a capture while a server writes it.

Owns the command, what it says while all is well, and what happens at a divergence: it ends with
the report, or a command is run and it goes on at the next checkpoint. Where to read is live.py's.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from msgspec import Struct

from statemachine.records import Checkpoint, Gap, Header, Record, StepPlanned

from .arguments import margin
from .divergence import Diverged
from .errors import Unusable
from .fold import AT_END, EACH_EVENT, EACH_STEP, Counts, Fold
from .hints import with_hint
from .live import Break, Live
from .reader import STDIN
from .report import ReplayReport, as_report, as_text
from .run import CLEAN, DIVERGED, FOLD, TORN, Outcome
from .words import plural

BETWEEN_S = 10.0
POLL_S = 0.5
ALERT_S = 60.0
STDERR = 2
RECORDS_BETWEEN = 1024
"""Records between two looks at the clock, while there is much to read."""

WAITING, FOLLOWING, NOTE, FOUND, END = "waiting", "following", "note", "diverged", "end"


class FollowReport(Struct, frozen=True, kw_only=True):
    """A line of `replay follow --json`.

    state: waiting (there is no capture yet), following (a line a while), note (something is missing
    on the tape, or a new run began), diverged, end (the last line). exit_code: what it ends with,
    null before the end. step: the newest one that was planned. unread_bytes: of the file that is
    being read. divergences: found so far. skipped: records that were not compared, because they
    stand between a divergence and the next checkpoint. report: of the divergence, as `replay TAPE
    --json` prints it.
    """

    format: int = 1
    state: str
    text: str
    exit_code: int | None = None
    path: str
    source: str
    step: int
    unread_bytes: int
    counts: Counts
    divergences: int
    skipped: int
    report: ReplayReport | None = None


class Options(Struct, frozen=True):
    """alert: a command, with which a divergence is no end. idle_s: end where nothing came for so
    long. between_s: from one line to the next.
    """

    alert: tuple[str, ...] = ()
    newest: bool = False
    between_s: float = BETWEEN_S
    idle_s: float | None = None
    invariants: str = EACH_STEP


class Follower:
    """Feeds what comes to a fold, and says what it came to."""

    def __init__(
        self,
        path: str,
        options: Options,
        say: Callable[[FollowReport], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: seconds."""
        self._path = path
        self._options = options
        self._say = say
        self._clock = clock
        self._live = Live(path, options.newest)
        self._fold: Fold | None = Fold(options.invariants)
        self._before = Counts()
        self._header: Header | None = None
        self._step = 0
        self._divergences = 0
        self._skipped = 0
        self._torn = False
        self._spoke = self._heard = clock()

    def run(self, wait: Callable[[], None]) -> int:
        """Follow the tape until it ends; `wait` passes the time between two looks at it. Returns
        the exit code. Raises Unusable.
        """
        try:
            if os.path.exists(self._path):
                self._tell(FOLLOWING, f"following {self._path}")
            else:
                self._tell(WAITING, f"waiting for {self._path}: nothing is there yet")
            while not self._read():
                if self._live.ended:
                    return self._ended()
                if self._silent():
                    return self._end(TORN, f"nothing came for {self._options.idle_s:g} s")
                self._speak()
                wait()
        except KeyboardInterrupt:
            return self._end(TORN, "stopped by hand")
        return DIVERGED

    def _read(self) -> bool:
        """Take all that is new; whether a divergence was found that ends it."""
        for number, item in enumerate(self._live.poll(), start=1):
            self._heard = self._clock()
            if isinstance(item, Break):
                self._broken(item)
            else:
                self._take(item)
            if self._divergences and not self._options.alert:
                return True
            if number % RECORDS_BETWEEN == 0:
                self._speak()
        return False

    def _take(self, record: Record) -> None:
        if isinstance(record, Header):
            self._header = record
        elif isinstance(record, StepPlanned):
            self._step = record.step
        if self._fold is None and isinstance(record, Checkpoint) and self._header is not None:
            self._fold = Fold(self._options.invariants)
            self._fold.feed(self._header)
            self._tell(NOTE, f"compared again from the checkpoint after step {record.step} on")
        if self._fold is None:
            self._skipped += 1
            return
        with self._finding():
            self._fold.feed(record)
        if isinstance(record, Gap):
            lost = plural(record.records, "record")
            self._tell(NOTE, f"{lost} missing: the server could not write them ({record.reason})")

    def _broken(self, item: Break) -> None:
        """What comes does not go on from what came."""
        self._torn |= item.over
        text = f"{item.text} begins" if item.over else f"{item.text}: going on behind that"
        if item.over and self._fold is not None and self._fold.pieces:
            text += f" (step {min(self._fold.pieces)} of the old one was never answered)"
        self._close_fold()
        self._fold = Fold(self._options.invariants)
        self._tell(NOTE, text)

    def _close_fold(self) -> None:
        self._before, self._fold = self._counts(), None

    @contextmanager
    def _finding(self) -> Iterator[None]:
        """A divergence in here is told; then nothing is compared up to the next checkpoint."""
        try:
            yield
        except Diverged as diverged:
            self._found(diverged)

    def _found(self, diverged: Diverged) -> None:
        assert self._fold is not None
        found, hint = with_hint(diverged.divergence, self._fold.state)
        outcome = Outcome(
            self._path, FOLD, DIVERGED, self._counts(), self._header, found,
            position=self._live.position, notes=[hint] if hint else [],
        )  # fmt: skip
        self._divergences += 1
        self._close_fold()
        self._tell(FOUND, as_text(outcome), as_report(outcome))
        if self._options.alert:
            self._tell(NOTE, alerted(self._options.alert, as_report(outcome)))

    def _counts(self) -> Counts:
        """Of all that was compared so far."""
        now = Counts() if self._fold is None else self._fold.counts
        names = Counts.__struct_fields__
        return Counts(*(getattr(self._before, it) + getattr(now, it) for it in names))

    def _silent(self) -> bool:
        idle = self._options.idle_s
        if idle is None or self._clock() - self._heard < idle:
            return False
        if not self._live.source:
            raise Unusable(f"{self._path} did not come to be: give the path of a server's capture")
        return True

    def _speak(self) -> None:
        """A line, if it is time for one."""
        if self._clock() - self._spoke >= self._options.between_s:
            self._spoke = self._clock()
            if self._live.source:
                self._tell(FOLLOWING, self._progress())
            else:
                self._tell(WAITING, f"waiting for {self._path}: nothing is there yet")

    def _progress(self) -> str:
        counts, left = self._counts(), self._live.unread_bytes
        clean = f"{self._divergences} diverged" if self._divergences else "clean so far"
        behind = f"; {left:,} bytes not read yet" if left else ""
        rows = f"{plural(counts.steps, 'step')}, {plural(counts.rows, 'row')}"
        blind = "; not compared up to the next checkpoint" if self._fold is None else ""
        return f"step {self._step}: {clean}, {rows}{behind}{blind}"

    def _ended(self) -> int:
        if self._live.closed_part:
            return self._end(TORN, "this segment is closed: follow its folder to see the next ones")
        return self._end(CLEAN, "the server closed the tape")

    def _end(self, code: int, why: str) -> int:
        if self._fold is not None and self._live.source:
            with self._finding():
                self._fold.finish()
        code = DIVERGED if self._divergences else TORN if self._torn else code
        counts = self._counts()
        word = {CLEAN: "CLEAN", TORN: "CLEAN SO FAR"}.get(code)
        word = word or f"DIVERGED in {plural(self._divergences, 'place')}"
        rows = f"{plural(counts.steps, 'step')}, {plural(counts.rows, 'row')}"
        skipped = f", {plural(self._skipped, 'record')} not compared" if self._skipped else ""
        gaps = f", {plural(counts.lost_records, 'record')} missing" if counts.gaps else ""
        self._tell(END, f"{word}: {rows} agree{gaps}{skipped}; {why}", code=code)
        return code

    def _tell(
        self, state: str, text: str, report: ReplayReport | None = None, code: int | None = None
    ) -> None:
        self._say(
            FollowReport(
                state=state,
                text=text,
                exit_code=code,
                path=self._path,
                source=self._live.source,
                step=self._step,
                unread_bytes=self._live.unread_bytes,
                counts=self._counts(),
                divergences=self._divergences,
                skipped=self._skipped,
                report=report,
            )
        )


def alerted(command: tuple[str, ...], report: ReplayReport) -> str:
    """Run a command with the verdict as its last argument, the report as JSON on its standard
    input; returns what became of it.
    """
    try:
        done = subprocess.run(
            [*command, report.verdict],
            input=msgspec.json.encode(report),
            stdout=STDERR,  # standard output holds the lines
            timeout=ALERT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{command[0]} could not be run to its end: {error}"
    return f"{command[0]} was told (its exit code is {done.returncode})"


def _as_text(report: FollowReport) -> str:
    if report.state == FOUND:
        return report.text
    return f"{time.strftime('%H:%M:%S')}  {report.text}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="replay follow",
        description="Check the capture of a running server while it is written; end with the whole "
        "report at the first divergence.",
        epilog="exit codes: 0 the server closed the tape and all of it agrees, 1 diverged, "
        "2 unusable, 3 clean so far (stopped by hand, or the tape has no end)",
    )
    parser.add_argument(
        "tape", metavar="TAPE", help="the capture's file or folder; it need not be there yet"
    )
    parser.add_argument(
        "--alert",
        metavar="COMMAND",
        help="at a divergence run this, with the verdict as its last argument and the report as "
        "JSON on its standard input, and go on at the next checkpoint",
    )
    parser.add_argument(
        "--newest", action="store_true", help="begin with the newest segment, not the oldest"
    )
    parser.add_argument(
        "--every", type=margin, default=BETWEEN_S, metavar="S", help="a line each S seconds (10)"
    )
    parser.add_argument(
        "--idle", type=margin, metavar="S", help="end where nothing came for S seconds"
    )
    parser.add_argument(
        "--invariants",
        choices=(EACH_EVENT, EACH_STEP, AT_END),
        default=EACH_STEP,
        help="when to check them; `event` checks all after each event and is slow",
    )
    parser.add_argument("--json", action="store_true", help="each line as JSON")
    return parser


def main(arguments: list[str]) -> int:
    """`replay follow`."""
    given = _parser().parse_args(arguments)
    if given.tape == STDIN:
        raise Unusable("follow takes a path; of a pipe `replay -` says the same at its end")
    try:
        alert = tuple(shlex.split(given.alert or ""))
    except ValueError as error:
        raise Unusable(f"--alert {given.alert!r} cannot be read: {error}") from error
    if given.alert is not None and (not alert or shutil.which(alert[0]) is None):
        raise Unusable(f"--alert {given.alert!r} cannot be run: there is no such command")
    options = Options(alert, given.newest, given.every, given.idle, given.invariants)

    def say(report: FollowReport) -> None:
        line = msgspec.json.encode(report).decode() if given.json else _as_text(report)
        print(line, flush=True)

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return Follower(given.tape, options, say).run(lambda: time.sleep(POLL_S))
    finally:
        signal.signal(signal.SIGTERM, before)
