"""Serve-load tape: a tape as a load: who arrives when, whose client leaves when, and the answers.

Owns the times (clock.py) of arrivals and of answer tokens. A token's time is the end of its step,
which the tape tells behind the step's answer, so an ending is told one record late. Memory grows
with the requests that are live at once, and 8 bytes for each step since the oldest of them came.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import pairwise

from attrs import frozen

from statemachine.records import (
    Checkpoint,
    Gap,
    Header,
    Record,
    RequestArrived,
    RequestCancelled,
    StepDone,
    StepPlanned,
    StepTimed,
)

from .answers import Sampled
from .clock import Clock
from .diff import CANCELLED
from .endings import Ending, Endings
from .errors import Unusable


@frozen
class Arrival:
    """Send it now. at_us: since the tape's start. carried: it was live already when the tape began,
    or arrived in a gap, so nothing is known of its time.
    """

    arrived: RequestArrived
    at_us: int
    carried: bool


@frozen
class Left:
    """Its client went away."""

    request: int
    at_us: int


@frozen
class Times:
    """Microseconds from a request's arrival to its first token and to its end, and from one
    delivery of tokens to the next (a step may deliver several).
    """

    first_us: int
    whole_us: int
    gaps_us: tuple[int, ...]


@frozen
class Ended:
    """A request's end on tape. tokens: its answer, an end token left out; ended_by_token: whether
    there was one. times: None where the tape does not tell them.
    """

    request: int
    tokens: tuple[int, ...]
    reason: str
    ended_by_token: bool
    times: Times | None


@frozen
class Lost:
    """It ended in a gap of the tape: nobody knows how."""

    request: int


Item = Arrival | Left | Ended | Lost


class Load:
    """Iterate once: each item where it stands on the tape, None for a record that has none.

    now_us: the tape's clock. timed: whether steps say how long they took. stopped: why the tape
    could not be followed to its end; "" where it was.
    """

    def __init__(self, path: str, records: Iterable[Record]) -> None:
        self.timed = False
        self._path = path
        self._records = records
        self._clock = Clock()
        self._endings = Endings()
        self._answered: int | None = None
        self._ends_us: OrderedDict[int, int] = OrderedDict()
        self._arrived_us: dict[int, int | None] = {}
        self._since: dict[int, int] = {}
        self._step = 0
        self._newest = -1
        self._gap = False
        self._held: list[Ending] = []

    @property
    def now_us(self) -> int:
        return self._clock.now

    @property
    def stopped(self) -> str:
        return self._endings.stopped

    def __iter__(self) -> Iterator[Item | None]:
        """Raises Unusable where the tape holds no prompts."""
        for record in self._records:
            yield from self._feed(record)
            yield None
            if self.stopped:
                break
        self._clock.settle()
        self._note_end()
        self._held += self._endings.rest()
        yield from self._release()

    def _feed(self, record: Record) -> Iterator[Item]:
        self._clock.feed(record)
        self.timed = self.timed or isinstance(record, StepTimed)
        self._note_end()
        yield from self._release()
        if isinstance(record, Header):
            self._require_prompts(record)
        elif isinstance(record, RequestArrived):
            yield self._arrival(record, carried=False)
        elif isinstance(record, Checkpoint):
            yield from self._checkpoint(record)
        elif isinstance(record, RequestCancelled) and record.reason == CANCELLED:
            yield Left(record.request, self.now_us)
        elif isinstance(record, Gap):
            self._gap = True
            self._arrived_us = dict.fromkeys(self._arrived_us)  # time went on, unseen
        elif isinstance(record, StepPlanned):
            self._step = record.step
        elif isinstance(record, StepDone):
            self._answered = record.step
        self._held += self._endings.feed(record)

    def _require_prompts(self, header: Header) -> None:
        if header.redacted:
            raise Unusable(
                f"{self._path} is redacted: tags stand in it where the prompts' tokens were, so "
                "there is nothing to send; give a tape that was captured without redaction"
            )

    def _arrival(self, record: RequestArrived, *, carried: bool) -> Arrival:
        request = record.request
        if request in self._arrived_us:
            raise Unusable(
                f"request {request} arrives twice on the tape: `replay {self._path}` tells what is "
                "wrong with it"
            )
        self._newest = max(self._newest, request)
        self._arrived_us[request] = None if carried else self.now_us
        self._since[request] = self._step
        return Arrival(record, self.now_us, carried)

    def _checkpoint(self, record: Checkpoint) -> Iterator[Item]:
        """Requests that came before the tape's start or in a gap; a gap's ends are not told."""
        live = {held.arrived.request for held in record.requests}
        for request in sorted(self._arrived_us.keys() - live if self._gap else ()):
            self._forget(request)
            yield Lost(request)
        self._gap = False
        for held in record.requests:
            if held.arrived.request > self._newest:
                yield self._arrival(held.arrived, carried=True)

    def _note_end(self) -> None:
        """The step that was answered last is over."""
        if self._answered is not None:
            self._ends_us[self._answered] = self.now_us
            self._answered = None

    def _release(self) -> Iterator[Item]:
        """Endings whose last step's time is known by now."""
        for ending in self._held:
            yield self._ended(ending)
            self._forget(ending.arrived.request)
        self._held.clear()

    def _ended(self, ending: Ending) -> Ended:
        kept = ending.samples[: max(0, ending.answer_tokens - len(ending.before))]
        tokens = (*ending.before, *(it.token for it in kept))[: ending.answer_tokens]
        ends = ending.arrived.parameters.end_tokens
        by_token = bool(ending.samples) and ending.samples[-1].token in ends
        times = self._times(ending, kept) if kept and not ending.before and self.timed else None
        return Ended(ending.arrived.request, tokens, ending.reason, by_token, times)

    def _times(self, ending: Ending, kept: tuple[Sampled, ...]) -> Times | None:
        arrived_us = self._arrived_us.get(ending.arrived.request)
        steps = dict.fromkeys(it.step for it in kept)
        if arrived_us is None or not all(step in self._ends_us for step in steps):
            return None
        delivered = [self._ends_us[step] for step in steps]
        gaps = tuple(after - before for before, after in pairwise(delivered))
        end_us = self._ends_us.get(ending.samples[-1].step, delivered[-1])
        return Times(delivered[0] - arrived_us, end_us - arrived_us, gaps)

    def _forget(self, request: int) -> None:
        """Steps before all that are live now are of no use any more."""
        self._arrived_us.pop(request, None)
        if self._since.pop(request, None) is None:
            return
        oldest = min(self._since.values(), default=self._step)
        while self._ends_us and next(iter(self._ends_us)) < oldest:
            self._ends_us.popitem(last=False)
