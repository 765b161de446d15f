"""Progress: a bar on a terminal, with an estimate, while a tape is read; nothing anywhere else.

Goes by the bytes read against the size of the tape's files. Writes to the error stream only, so
that a report is the same with and without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from statemachine.records import Record, StepPlanned

from .reader import Tape

RECORDS_BETWEEN = 256
"""Records between two looks at the bar: looking costs more than reading a record."""

Told = Callable[[int, object], None]
"""Of bytes that are done by now, and the step."""


@contextmanager
def progress(tape: Tape, what: str) -> Iterator[Iterable[Record]]:
    """The tape's records; while they are taken, a bar says how far `what` is."""
    if not sys.stderr.isatty():
        yield tape
        return
    with progress_bar(what, tape.bytes_total) as tell:

        def records() -> Iterator[Record]:
            step = -1
            for number, record in enumerate(tape):
                if isinstance(record, StepPlanned):
                    step = record.step
                if number % RECORDS_BETWEEN == 0:
                    tell(tape.bytes_read, step)
                yield record

        yield records()


@contextmanager
def progress_bar(what: str, bytes_total: int | None) -> Iterator[Told]:
    """A bar for `what`, on a terminal, and how it is told."""
    if not sys.stderr.isatty():
        yield lambda _done, _step: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        Remaining(),
        TextColumn("step {task.fields[step]}"),
    )
    console = Console(file=sys.stderr, stderr=True)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=bytes_total, step="-")
        yield lambda done, step: bar.update(task, completed=done, step=step)
