"""Search: the smallest set of a tape's requests that still diverges in the same way.

Owns delta debugging over whole requests, and over the last steps of those that are only needed for
what they did before; which candidates are tried first; what may not go. What a tape is without a
request says project.py, and decide.py where the scheduler is at fault. Deterministic; reads the
tape again for each candidate until there are few records, which are kept. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from attrs import define, evolve, field

from statemachine.codec import encode_state
from statemachine.records import Checkpoint, Record, RequestSnapshot, StepDone, StepPlanned
from statemachine.tags import sequence_tags

from .answers import Answers
from .divergence import CONTENT, Diverged, Divergence
from .divergence import PLAN as PLAN_CLASS
from .errors import Unusable
from .fold import AT_END, Fold
from .judge import Sameness, first_divergence, sameness
from .project import Projection
from .pytestfile import decision, wrong_again
from .run import FOLD, PLAN, Options, checker_for
from .subset import Kept, Refused, batch_of
from .survey import Survey, named_in, needed, survey

Source = Callable[[], Iterator[Record]]

PROJECTED = "the recorded steps, without what belongs to other requests"
SHORT = "the recorded steps from a checkpoint on, which was made for this"
WHOLE = "the tape up to its divergence: nothing else could go"


@define
class Small:
    """The smallest tape so far."""

    records: list[Record]
    found: Divergence
    how: str
    requests: frozenset[int]
    notes: list[str] = field(factory=list)


class Search:
    """Looks for the smallest tape; `tried`: how many were replayed."""

    def __init__(
        self, source: Source, options: Options, about: Survey, again: bool = False
    ) -> None:
        """again: a candidate must also diverge where its inputs are run again by this version."""
        assert about.found is not None
        self.tried = 0
        self._again = again
        self._source = source
        self._about = about
        self._found: Divergence = about.found
        self._options = options
        if options.depth == PLAN and self._found.kind != PLAN_CLASS:
            self._options = evolve(options, depth=FOLD)
        self._records: list[Record] | None = None
        self._wrong = about.wrong

    def run(self) -> Small:
        """The smallest tape that was found; decide.py looks where the scheduler is at fault."""
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
        if self._again and not wrong_again(records, decision(found)):
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
        records = from_checkpoint(small.records)
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


def from_checkpoint(records: list[Record]) -> list[Record]:
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
