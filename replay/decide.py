"""Decide: the smallest tape where the scheduler decides otherwise than the recorded one.

Fewer requests are scheduled otherwise, so the inputs of the few are run again by this version, and
the recorded decision is put where the scheduler comes to the same one (transplant.py). Where it
never does with fewer requests, the tape is cut to the steps from its last moment between two steps.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from server.failing import CLOSE
from server.view import checkpoint
from statemachine.records import Checkpoint, Record, StepDone, StepFailed, StepPlanned
from statemachine.state import State

from .again import Inputs, inputs_of, run_again
from .errors import Unusable
from .judge import sameness
from .search import SHORT, Search, Small, fewest
from .survey import needed
from .transplant import Difference, Follower, plain, raised_again, transplanted

DECIDED = (
    "the requests that are left, scheduled again by this version up to the wrong decision, which "
    "is the recorded one"
)

TRIED_MAX = 200
"""Runs after which what was found has to do: each schedules all requests of a candidate again."""


class PlanSearch:
    """The search where the scheduler decides otherwise than the tape."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._wanted = sameness(search.found, with_step=False)
        self._difference: Difference | None = None
        self._raised: tuple[StepFailed, State] | None = None
        self._late: list[Record] = []
        self._inputs: Inputs | None = None

    def run(self) -> Small:
        search = self._search
        self._follow()
        try:
            self._inputs = inputs_of(search.source())
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
        if self._search.tried >= TRIED_MAX:
            note = f"the search ended after {TRIED_MAX} candidates: fewer requests may do"
            return evolve(best, notes=[*best.notes, note])
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
                if isinstance(record, StepFailed) and follower.view is not None:
                    self._raised = (record, follower.view.state)
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
        if self._inputs is None or self._search.tried >= TRIED_MAX:
            return None
        for inputs in _timings(self._inputs.only(requests)):
            self._search.tried += 1
            try:
                records = plain(run_again(inputs))
            except Exception:
                # What the engine of this version raises is another bug than the tape's.
                continue
            mine = self._search.judged(records, DECIDED, requests, self._wanted)
            if mine is not None:
                return mine
            for candidate in self._wronged(records):
                mine = self._search.judged(candidate, DECIDED, requests, self._wanted)
                if mine is not None:
                    return mine
        return None

    def _wronged(self, records: list[Record]) -> Iterator[list[Record]]:
        """Tapes that are right, with the wrong decision in them."""
        if self._difference is not None:
            yield from transplanted(self._difference, records)
        elif self._raised is not None and self._raised[0].stage == CLOSE:
            named = self._search.about.named - {-1}
            yield from raised_again(self._raised[0], named, self._raised[1], records)

    def _from_checkpoint(self) -> Small:
        """No request could go: the steps from the last point between two steps on."""
        search = self._search
        note = "no request could be left out: the scheduler does not come to the same decision then"
        small = search.judged(self._late, SHORT, search.about.requests, sameness(search.found))
        if small is None:
            return evolve(search.whole(), notes=[note])
        live = {it.arrived.request for it in checkpoint_of(small.records).requests}
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


def checkpoint_of(records: list[Record]) -> Checkpoint:
    """The one that a tape begins with."""
    return next(it for it in records if isinstance(it, Checkpoint))
