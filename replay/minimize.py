"""Minimize: `replay minimize capture.log -o small.log`, the smallest tape that diverges the same.

Owns the search: whole requests go first, by delta debugging, then the last steps of requests that
are only needed for what they did before. What a tape is without a request says project.py; where
the scheduler is at fault, transplant.py. Deterministic. Never changes the tape that it is given.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from attrs import define, evolve, field
from msgspec import Struct

from server.view import checkpoint
from statemachine.codec import TapeEncoder, encode_state
from statemachine.records import (
    Checkpoint,
    Record,
    RequestArrived,
    RequestSnapshot,
    StepDone,
    StepFailed,
    StepPlanned,
)
from statemachine.tags import sequence_tags

from .again import Inputs, inputs_of, run_again
from .answers import Answers
from .arguments import TAPE_HELP, margin, tell
from .divergence import CONTENT, Diverged, Divergence
from .divergence import PLAN as PLAN_CLASS
from .errors import Unusable
from .fold import AT_END, Fold
from .judge import Sameness, first_divergence, sameness
from .project import Kept, Projection, Refused, batch_of
from .reader import STDIN, Tape
from .run import DEPTHS, FOLD, PLAN, Checker, Options, checker_for
from .survey import Size, Survey, named_in, needed, survey
from .transplant import Difference, Follower, transplanted

PROJECTED = "the recorded steps, without what belongs to other requests"
DECIDED = (
    "the requests that are left, scheduled again by this version up to the wrong decision, which "
    "is the recorded one"
)
SHORT = "the recorded steps from a checkpoint on, which was made for this"
WHOLE = "the tape up to its divergence: nothing else could go"


class MinimizeReport(Struct, frozen=True):
    """What `replay minimize` did. format: of this report. path, output: the tapes.

    diverges: class of the divergence, which is that of both. step, summary: of the small tape's.
    before, after: their sizes. how: what the small tape is made of. tried: candidates that were
    replayed. notes: what is to be known besides.
    """

    format: int
    path: str
    output: str
    depth: str
    diverges: str
    step: int
    summary: str
    before: Size
    after: Size
    how: str
    tried: int
    notes: tuple[str, ...] = ()


@define
class Small:
    """The smallest tape so far."""

    records: list[Record]
    found: Divergence
    how: str
    requests: frozenset[int]
    notes: list[str] = field(factory=list)


Make = Callable[[Options, Fold], "Checker | None"]


def main(arguments: list[str]) -> int:
    """`replay minimize`; 0 where a smaller or equal tape was written."""
    parser = argparse.ArgumentParser(
        prog="replay minimize",
        description="Write the smallest tape that still diverges in the same way.",
    )
    parser.add_argument("tape", help=TAPE_HELP)
    parser.add_argument("-o", "--output", required=True, metavar="SMALL", help="the file to write")
    parser.add_argument(
        "--depth", choices=DEPTHS, help="default: fold, and plan where the tape folds"
    )
    parser.add_argument("--model", metavar="PATH", help="the model, if not the tape's own name")
    parser.add_argument("--margin", type=margin, metavar="X", help="as for `replay`")
    parser.add_argument(
        "--short",
        action="store_true",
        help="begin at a checkpoint right before the divergence: fewer steps, but `replay test` "
        "cannot run such a tape",
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    given = parser.parse_args(arguments)
    options = Options(depth=given.depth or "", model=given.model, margin=given.margin, tell=tell)
    report = minimize(given.tape, given.output, options, short=given.short)
    print(msgspec.json.encode(report).decode() if given.json else as_text(report))
    return 0


def as_text(report: MinimizeReport) -> str:
    """The report for a person."""
    was, now = report.before, report.after
    lines = [
        f"{report.output}: {now.requests} of {was.requests} requests still diverge "
        f"({report.diverges}, step {report.step}): {report.summary}",
        "",
        f"{'':<10}{'before':>12}{'after':>12}",
    ]
    for name in Size.__struct_fields__:
        lines.append(f"{name:<10}{getattr(was, name):>12}{getattr(now, name):>12}")
    lines += ["", f"made of   {report.how}", f"tried     {report.tried} candidates"]
    lines += [f"note      {note}" for note in report.notes]
    return "\n".join(lines)


def minimize(path: str, output: str, options: Options, *, short: bool = False) -> MinimizeReport:
    """Write the smallest tape that diverges like the one at `path`.

    Depth "": fold, then plan. Raises Unusable where the tape cannot be read, is redacted, or does
    not diverge, and where the output cannot be written.
    """
    _check_output(path, output)
    with _readable(path) as (source, size_of):
        options, about = _surveyed(path, source, size_of, options)
        search = Search(source, options, about)
        small = search.run()
        if short:
            small = search.shortened(small)
    data = TapeEncoder().encode(small.records)
    _write(output, data)
    return MinimizeReport(
        format=1,
        path=path,
        output=output,
        depth=options.depth,
        diverges=small.found.kind,
        step=small.found.step,
        summary=small.found.summary,
        before=about.size,
        after=_size(small.records, len(data)),
        how=small.how,
        tried=search.tried,
        notes=tuple(small.notes),
    )


Source = Callable[[], Iterator[Record]]


@contextmanager
def _readable(path: str) -> Iterator[tuple[Source, Callable[[], int]]]:
    """A tape that can be read more than once, and its bytes once it was read."""
    with tempfile.TemporaryDirectory() as folder:
        place = path
        if path == STDIN:
            place = str(Path(folder) / "stdin")
            with open(place, "wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        sizes: dict[str, int] = {}

        def read() -> Iterator[Record]:
            tape = Tape(place)
            for record in tape:
                sizes[tape.source] = tape.position
                yield record

        yield read, lambda: sum(sizes.values())


def _surveyed(
    path: str, source: Source, size_of: Callable[[], int], options: Options
) -> tuple[Options, Survey]:
    """The depth at which a tape diverges, and what is known of it there."""
    depths = [options.depth] if options.depth else [FOLD, PLAN]
    for depth in depths:
        options = evolve(options, depth=depth)
        about = survey(source(), options, checker_for, size_of)
        if about.header is not None and about.header.redacted:
            raise Unusable(
                "the tape is redacted: without its tokens nothing can be taken out of it"
            )
        if about.found is not None:
            return options, about
    raise Unusable(
        f"{path} does not diverge at depth {' or '.join(depths)}: there is nothing to minimize"
        + ("" if options.depth == depths[0] and len(depths) == 1 else "; give a deeper --depth")
    )


class Search:
    """Looks for the smallest tape; `tried`: how many were replayed."""

    def __init__(self, source: Source, options: Options, about: Survey) -> None:
        assert about.found is not None
        self.tried = 0
        self._source = source
        self._about = about
        self._found: Divergence = about.found
        self._options = options
        if options.depth == PLAN and self._found.kind != PLAN_CLASS:
            self._options = evolve(options, depth=FOLD)
        self._records: list[Record] | None = None
        self._wrong = about.wrong

    def run(self) -> Small:
        """The smallest tape that was found."""
        if self._found.kind == PLAN_CLASS:
            return _PlanSearch(self).run()
        return self._by_projection()

    def _by_projection(self) -> Small:
        small = self._first()
        if small is None:
            return self.whole()
        small, must = self._with_sources(small)
        return self._less_of_each(self._fewest(small, must), must)

    def _with_sources(self, small: Small) -> tuple[Small, frozenset[int]]:
        """With those whose rows an event at fault shares, and who wrote the rows that were found in
        a wrong place: what diverges without them is not what happened.
        """
        about = self._about
        if about.donors:
            more = small.requests | about.with_dependencies(about.donors)
            other = self._projected(Kept(more))
            if other is not None:
                return other, about.donors & about.requests
        for writer in about.writers:
            more = small.requests | about.with_dependencies([writer])
            other = self._projected(Kept(more))
            if other is not None and _wrote(other, writer):
                return other, frozenset({writer})
        return small, frozenset()

    def whole(self) -> Small:
        """All requests, cut behind the divergence."""
        small = self._projected(Kept(self._about.requests))
        if small is None:
            records = list(needed(self._source(), self._about.base))[: self._wrong.at + 1]
            return Small(records, self._found, WHOLE, self._about.requests)
        return evolve(small, how=WHOLE)

    def starts(self) -> Iterator[frozenset[int]]:
        """Sets of requests that may do, small ones first."""
        about, seen = self._about, set[frozenset[int]]()
        for some in (
            about.named,
            about.named | about.near,
            about.named | about.near | about.live,
            about.requests,
        ):
            requests = about.with_dependencies(some)
            if requests and requests not in seen:
                seen.add(requests)
                yield requests

    def _first(self) -> Small | None:
        return next(
            (it for it in (self._projected(Kept(some)) for some in self.starts()) if it), None
        )

    def _fewest(self, small: Small, must: frozenset[int]) -> Small:
        """Without the requests that are not needed."""
        best = small

        def holds(requests: frozenset[int]) -> bool:
            nonlocal best
            found = self._projected(Kept(requests))
            best = found or best
            return found is not None

        self._keep_in_memory(small)
        fewest(small.requests, must, holds)
        return best

    def _keep_in_memory(self, small: Small) -> None:
        """Go on from a candidate's own records, which are few."""
        self._records = small.records
        again = survey(small.records, self._options, checker_for, lambda: 0)
        if again.found is not None:
            self._wrong = again.wrong

    def _less_of_each(self, small: Small, must: frozenset[int]) -> Small:
        """Each request without its last steps, as far as they are not needed."""
        until: dict[int, int] = {}
        for request in sorted(small.requests - must):
            steps = _steps_of(small.records, request)
            low, high = 0, len(steps)
            while low < high:
                middle = (low + high) // 2
                last = steps[middle - 1] if middle else 0
                other = self._projected(Kept(small.requests, {**until, request: last}))
                if other is None:
                    low = middle + 1
                else:
                    high, small, until = middle, other, {**until, request: last}
        return small

    def _projected(self, kept: Kept) -> Small | None:
        self.tried += 1
        records = self._records if self._records is not None else self._needed()
        try:
            made = list(Projection(kept, self._wrong).records(records))
        except Refused:
            return None
        return self.judged(made, PROJECTED, kept.requests, sameness(self._found))

    def _needed(self) -> Iterator[Record]:
        return needed(self._source(), self._about.base)

    def judged(
        self, records: list[Record], how: str, requests: frozenset[int], wanted: Sameness
    ) -> Small | None:
        """A candidate, if it diverges like the tape."""
        try:
            found = first_divergence(records, self._options, checker_for)
        except Unusable:
            return None
        if found is None or sameness(found, wanted.step is not None) != wanted:
            return None
        if how == PROJECTED and not self._concerns(records):
            return None
        return Small(records, found, how, requests)

    def _concerns(self, records: list[Record]) -> bool:
        """Whether the step that diverges still has rows, if it had any: where a digest is wrong,
        that is all that says whose state it is.
        """
        if not self._about.near:
            return True
        last = records[-1]
        plans = [
            it for it in records if isinstance(it, StepPlanned) and it.step == self._found.step
        ]
        issued = any(batch_of(it.events)[0] for it in plans)
        return issued or any(seq >= 0 for seq in named_in(getattr(last, "events", ())))

    def shortened(self, small: Small) -> Small:
        """From a checkpoint on, which is made right before the steps that matter."""
        records = _from_checkpoint(small.records)
        wanted = sameness(small.found)
        self.tried += 1
        short = records and self.judged(records, SHORT, small.requests, wanted)
        if not short:
            note = "it could not be begun at a checkpoint: the steps before are needed"
            return evolve(small, notes=[*small.notes, note])
        return evolve(short, notes=[*small.notes, "`replay test` cannot run a tape that begins so"])

    @property
    def about(self) -> Survey:
        return self._about

    @property
    def options(self) -> Options:
        return self._options

    @property
    def source(self) -> Source:
        return self._source

    @property
    def found(self) -> Divergence:
        return self._found


class _PlanSearch:
    """The search where the scheduler decides otherwise than the tape."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._wanted = sameness(search.found, with_step=False)
        self._difference: Difference | None = None
        self._late: list[Record] = []
        self._inputs: Inputs | None = None

    def run(self) -> Small:
        search = self._search
        self._follow()
        try:
            self._inputs = inputs_of(list(search.source()))
        except Unusable:
            self._inputs = None
        found = next((it for it in map(self._decided, search.starts()) if it is not None), None)
        if found is None:
            return self._from_checkpoint()
        best = found

        def holds(requests: frozenset[int]) -> bool:
            nonlocal best
            other = self._decided(requests)
            best = other or best
            return other is not None

        fewest(found.requests, frozenset(), holds)
        return best

    def _follow(self) -> None:
        """Go along the tape to its divergence: what is wrong there, and the last checkpoint that
        could be made before it.
        """
        follower, start = Follower(), list[Record]()
        for number, record in enumerate(needed(self._search.source(), self._search.about.base)):
            if number == 0:
                start = [record]
                self._late = [record]
            elif number == self._search.about.wrong.at:
                if isinstance(record, StepPlanned | StepDone | StepFailed):
                    self._difference = follower.difference(record)
                self._late.append(record)
                return
            elif number > 1:
                view = follower.view
                if isinstance(record, StepPlanned) and view is not None and not view.flights:
                    self._late = [*start, checkpoint(view)]
                self._late.append(record)
            else:
                self._late.append(record)
            follower.feed(record)

    def _decided(self, requests: frozenset[int]) -> Small | None:
        """The requests' inputs run again, with the wrong decision in it, if they come to it."""
        if self._inputs is None:
            return None
        for inputs in _timings(self._inputs.only(requests)):
            self._search.tried += 1
            try:
                records = run_again(inputs)
            except Exception:
                # What the engine of this version raises is another bug than the tape's.
                continue
            mine = self._search.judged(records, DECIDED, requests, self._wanted)
            if mine is not None:
                return mine
            for candidate in transplanted(self._difference, records) if self._difference else ():
                mine = self._search.judged(candidate, DECIDED, requests, self._wanted)
                if mine is not None:
                    return mine
        return None

    def _from_checkpoint(self) -> Small:
        """No request could go: the steps from the last point between two steps on."""
        search = self._search
        note = "no request could be left out: the scheduler does not come to the same decision then"
        small = search.judged(self._late, SHORT, search.about.requests, sameness(search.found))
        if small is None:
            return evolve(search.whole(), notes=[note])
        live = {it.arrived.request for it in _checkpoint_of(small.records).requests}
        return evolve(small, requests=frozenset(live), notes=[note])


def _timings(inputs: Inputs) -> Iterator[Inputs]:
    """When the requests come in: as recorded, one step after the other, all at once."""
    steps = sorted({step for step, _ in inputs.given})
    rank = {step: at for at, step in enumerate(steps, start=1)}
    seen: list[list[int]] = []
    for moved in ({step: step for step in steps}, rank, dict.fromkeys(steps, 1)):
        given = [(moved[step], it) for step, it in inputs.given]
        when = [step for step, _ in given]
        if when not in seen:
            seen.append(when)
            yield evolve(inputs, given=given)


def fewest(
    requests: frozenset[int], must: frozenset[int], holds: Callable[[frozenset[int]], bool]
) -> frozenset[int]:
    """Delta debugging: a set that holds, of which no single one can go. `requests` holds."""
    left, parts = sorted(requests - must), 2
    while left:
        size = max(1, -(-len(left) // parts))
        for first in range(0, len(left), size):
            rest = [*left[:first], *left[first + size :]]
            if (rest or must) and holds(must | frozenset(rest)):
                left, parts = rest, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(left), parts * 2)
    return must | frozenset(left)


def _steps_of(records: Sequence[Record], request: int) -> list[int]:
    """The steps in which a request has rows, in order."""
    found = []
    for record in records:
        if isinstance(record, StepPlanned) and request in batch_of(record.events)[0]:
            found.append(record.step)
    return found


def _wrote(small: Small, writer: int) -> bool:
    """Whether the row that was found in a wrong place is one of the writer's."""
    wrong = small.records[-1]
    if small.found.kind != CONTENT or not isinstance(wrong, StepDone):
        return False
    fold = Fold(AT_END)
    for record in small.records[:-1]:
        fold.feed(record)
        sequence = fold.state.sequences.get(writer)
        if sequence is not None and isinstance(record, StepPlanned | StepDone):
            tags = set(sequence_tags(fold.state.geometry, sequence, 0, sequence.offset))
            if any(it.found in tags for it in wrong.shadow.findings):
                return True
    return False


def _from_checkpoint(records: list[Record]) -> list[Record]:
    """The records from the last moment between two steps on; [] where there is none."""
    fold, answers, late = Fold(AT_END), Answers(), list[Record]()
    for number, record in enumerate(records):
        if isinstance(record, StepPlanned) and number > 2 and not fold.pieces:
            state = fold.state
            live = tuple(
                RequestSnapshot(it.arrived, it.stream[len(it.arrived.tokens) :], running=True)
                for it in answers.live.values()
            )
            made = Checkpoint(record.step - 1, encode_state(state), live, state.digest)
            late = [records[0], made]
        if late:
            late.append(record)
        if number == len(records) - 1:
            break
        answers.begin(record)
        if isinstance(record, StepDone):
            answers.done(record, fold.pieces[record.step])
        try:
            fold.feed(record)
        except Diverged:
            break
        answers.ended(record)
    return late


def _checkpoint_of(records: list[Record]) -> Checkpoint:
    return next(it for it in records if isinstance(it, Checkpoint))


def _size(records: list[Record], count: int) -> Size:
    requests = {it.request for it in records if isinstance(it, RequestArrived)}
    for it in _checkpoint_of(records).requests:
        requests.add(it.arrived.request)
    plans = [it for it in records if isinstance(it, StepPlanned)]
    rows = sum(sum(batch_of(it.events)[1]) for it in plans)
    return Size(len(requests), len(plans), rows, count)


def _check_output(path: str, output: str) -> None:
    place = Path(output)
    if path != STDIN and place.exists() and Path(path).exists() and place.samefile(path):
        raise Unusable("the output is the tape itself, which is never changed: give another file")
    if place.is_dir():
        raise Unusable(f"{output} is a folder: give the name of a file to write")


def _write(output: str, data: bytes) -> None:
    """Put a tape in a file that only its owner may read, as captures are."""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with os.fdopen(os.open(output, flags, 0o600), "wb") as file:
            file.write(data)
    except OSError as error:
        raise Unusable(f"{output} cannot be written: {error.strerror}") from error
