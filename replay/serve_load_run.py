"""Serve-load run: keeps the recorded times, sends, hears, and joins each answer with its record.

Reads the tape no further than it has to: up to the next arrival, which waits for its time and for
room among the requests in flight. Between two records everyone else has a turn, so that no answer's
time is measured late because the tape was read. Memory: requests that are live on tape or here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
from attrs import define, frozen

from statemachine.records import RequestArrived

from .errors import Unusable
from .serve_load_client import Client, Failed, Measured, body_of
from .serve_load_compare import NOTHING, Compared, Difference, compare, is_whole
from .serve_load_tape import Arrival, Ended, Item, Left, Load, Lost
from .spread import Spread

if TYPE_CHECKING:
    from kernel.tokenizer import Tokenizer

LATE_US = 50_000
"""A request that is sent this much behind its time counts as late."""

FIRST, BETWEEN, WHOLE = "first_token", "inter_token", "whole"


@frozen
class Options:
    """speed: of time; None sends at once. concurrency: requests in flight at most. tokenizer: to
    compare texts; as_text: to send them as well.
    """

    model: str
    speed: float | None = 1.0
    concurrency: int = 256
    cancels: bool = True
    openai_only: bool = False
    tokenizer: Tokenizer | None = None
    as_text: bool = False


@define(eq=False)
class Exchange:
    """One request, from its arrival until both its ends are known."""

    order: int
    arrived: RequestArrived
    at_us: int
    content: bytes
    measured: Measured
    ended: Ended | Lost | None = None
    over: bool = False
    sent_s: float = 0.0
    patience: asyncio.Timeout | None = None
    leave_s: float | None = None


class Tally:
    """What it came to. recorded, measured: times of answers that were whole on both sides."""

    def __init__(self) -> None:
        self.sent = self.same = self.different = self.failed = self.uncompared = self.left = 0
        self.different_sampled = self.unsendable = self.other_prompts = self.retokenised = 0
        self.carried = self.adapters = self.grammars = 0
        self.by = Counter[str]()
        self.first: tuple[int, Difference] | None = None
        self.failures = Counter[str]()
        self.first_failure = ""
        self.recorded = {name: Spread() for name in (FIRST, BETWEEN, WHOLE)}
        self.measured = {name: Spread() for name in (FIRST, BETWEEN, WHOLE)}
        self.recorded_tokens = self.measured_tokens = 0
        self.late = self.late_most_us = 0
        self.in_flight_most = 0

    def settle(self, it: Exchange, compared: Compared) -> None:
        """A request whose both ends are known."""
        measured, difference = it.measured, compared.difference
        self.left += measured.left
        self.measured_tokens += _tokens_of(measured)
        if isinstance(it.ended, Ended):
            self.recorded_tokens += len(it.ended.tokens)
        if measured.failure:
            self.failed += 1
            self.failures[measured.failure] += 1
            if not self.first_failure:
                self.first_failure = f"request {it.arrived.request}: {measured.reason}"
            return
        if measured.prompt_tokens not in (None, len(it.arrived.tokens)):
            self.other_prompts += 1
        self._time(it)
        if not compared.by:
            self.uncompared += 1
            return
        self.by[compared.by] += 1
        if difference is None:
            self.same += 1
            return
        self.different += 1
        self.different_sampled += difference.sampled
        if self.first is None or it.order < self.first[0]:
            self.first = it.order, difference

    def _time(self, it: Exchange) -> None:
        measured, ended = it.measured, it.ended
        if measured.left or not isinstance(ended, Ended) or not is_whole(ended):
            return
        if measured.first_us is not None:
            self.measured[FIRST].add(measured.first_us)
        self.measured[WHOLE].add(measured.whole_us)
        for gap_us in measured.gaps_us:
            self.measured[BETWEEN].add(gap_us)
        if ended.times is not None:
            self.recorded[FIRST].add(ended.times.first_us)
            self.recorded[WHOLE].add(ended.times.whole_us)
            for gap_us in ended.times.gaps_us:
                self.recorded[BETWEEN].add(gap_us)


class Run:
    """Runs a load once. recorded_s, wall_s: from the first request to the last answer, on tape and
    here.
    """

    def __init__(self, client: Client, load: Load, options: Options) -> None:
        self.tally = Tally()
        self.recorded_s = self.wall_s = 0.0
        self._client = client
        self._load = load
        self._options = options
        self._live: dict[int, Exchange] = {}
        self._room = asyncio.Semaphore(options.concurrency)
        self._begun_s: float | None = None
        self._begun_us = 0
        self._in_flight = 0

    async def run(self) -> Tally:
        """Raises Unusable: the tape cannot be read on, or the server answers no request."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for item in self._load:
                    if item is None:
                        await asyncio.sleep(0)
                    else:
                        await self._take(item, tasks)
        except BaseExceptionGroup as group:
            if (unusable := group.subgroup(Unusable)) is not None:
                raise _leaf(unusable) from None
            raise
        if self._begun_s is not None:
            self.wall_s = asyncio.get_running_loop().time() - self._begun_s
            self.recorded_s = (self._load.now_us - self._begun_us) / 1e6
        return self.tally

    async def _take(self, item: Item, tasks: asyncio.TaskGroup) -> None:
        if isinstance(item, Arrival):
            await self._send(item, tasks)
        elif isinstance(item, Left):
            self._leave(item)
        elif (it := self._live.get(item.request)) is not None:
            it.ended = item
            self._settle(it)

    async def _send(self, item: Arrival, tasks: asyncio.TaskGroup) -> None:
        arrived, tally = item.arrived, self.tally
        if arrived.parameters.embed or arrived.parameters.max_tokens < 1 or not arrived.tokens:
            tally.unsendable += 1
            return
        loop = asyncio.get_running_loop()
        # Before its time has come, and aside: text of a long prompt takes milliseconds.
        content = await asyncio.to_thread(self._content, arrived)
        if self._begun_s is None:
            self._begun_s, self._begun_us = loop.time(), item.at_us
        due_s = loop.time()
        if self._options.speed is not None:
            due_s = self._begun_s + (item.at_us - self._begun_us) / 1e6 / self._options.speed
            if (early_s := due_s - loop.time()) > 0:
                await asyncio.sleep(early_s)
        await self._room.acquire()
        late_us = round((loop.time() - due_s) * 1e6)
        if self._options.speed is not None and late_us > LATE_US:
            tally.late += 1
            tally.late_most_us = max(tally.late_most_us, late_us)
        it = Exchange(tally.sent, arrived, item.at_us, content, Measured(), sent_s=loop.time())
        self._live[arrived.request] = it
        tally.sent += 1
        tally.carried += item.carried
        tally.adapters += bool(arrived.namespace.adapter)
        tally.grammars += bool(arrived.parameters.grammar)
        self._in_flight += 1
        tally.in_flight_most = max(tally.in_flight_most, self._in_flight)
        tasks.create_task(self._exchange(it))

    def _content(self, arrived: RequestArrived) -> bytes:
        options, text = self._options, None
        if options.as_text and options.tokenizer is not None:
            text = options.tokenizer.prompt_text(arrived.tokens)
            again = options.tokenizer.encode(text)
            self.tally.retokenised += tuple(again) != arrived.tokens
        return msgspec.json.encode(body_of(arrived, options.model, text, options.openai_only))

    async def _exchange(self, it: Exchange) -> None:
        measured = it.measured
        try:
            async with asyncio.timeout_at(it.leave_s) as it.patience:
                await self._client.complete(it.content, measured)
        except TimeoutError:
            measured.left = measured.finish_reason is None
        except Failed as failed:
            measured.failure, measured.reason = failed.kind, str(failed)
        finally:
            self._room.release()
            self._in_flight -= 1
        it.over = True
        self._settle(it)

    def _leave(self, item: Left) -> None:
        """The client's patience, counted from when its request was really sent."""
        it = self._live.get(item.request)
        if it is None or it.over or not self._options.cancels:
            return
        patience_s = (item.at_us - it.at_us) / 1e6 / (self._options.speed or 1.0)
        it.leave_s = it.sent_s + patience_s
        if it.patience is not None:
            it.patience.reschedule(it.leave_s)

    def _settle(self, it: Exchange) -> None:
        """Compare and forget a request once it is over here and on tape."""
        if it.ended is None or not it.over:
            return
        compared = NOTHING
        if isinstance(it.ended, Ended) and not it.measured.failure:
            compared = compare(it.arrived, it.ended, it.measured, self._options.tokenizer)
        self.tally.settle(it, compared)
        del self._live[it.arrived.request]


def _tokens_of(measured: Measured) -> int:
    """As the server counts them; else the ids, else the deliveries."""
    if measured.completion_tokens is not None:
        return measured.completion_tokens
    if measured.tokens is not None:
        return len(measured.tokens)
    return len(measured.text)


def _leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
