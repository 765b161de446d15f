"""Engine: one thread that makes every kernel call, and the door to it for all others.

Owns the thread, the inbox and the ids of requests. `submit` and `cancel` put inputs into the inbox
and wake the thread, which sleeps on a condition while there is nothing to do; sinks are called on
the thread. Adapters come and go by errands, which the thread runs between two steps while their
caller waits. What a step does is loop.py's business. The thread never dies silently: whatever ends
it ends every request with an error, and makes later submissions raise.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from itertools import takewhile

import structlog
from msgspec import Struct

from statemachine.events import Namespace
from statemachine.geometry import Geometry
from statemachine.records import FlushRequested, Header, RequestArrived, RequestCancelled

from . import errands
from .adapters import Adapter, Shelf
from .admission import capacity_tokens, check_pool, refuse
from .counters import Counters
from .errands import Errands, Made
from .garbage import IDLE_S, tidy
from .kept import KeptBlocks
from .loop import Loop
from .parts import Arrival, Input, Parts
from .policy import Policy
from .prefix_store import Read
from .submission import (
    CANCELLED,
    ERROR,
    EngineStopped,
    RequestRefused,
    Sink,
    Submission,
    Update,
)
from .view import View

log = structlog.get_logger()


STOPPED = "the server was stopped before this answer was complete"


class QueueFull(RequestRefused):
    """More requests wait than the queue may hold; the same request may be sent again later."""

    def __init__(self, waiting: int) -> None:
        super().__init__(
            f"{waiting} requests are waiting already: send it again later",
            code="rate_limit_exceeded",
        )


class _Limits(Struct, frozen=True):
    """What a submission is held against, on any thread, and what will answer it."""

    geometry: Geometry
    policy: Policy
    vocab_size: int
    identity: str
    cannot: Mapping[str, str]
    shelf: Shelf
    kept: KeptBlocks | None
    prepare: Callable[[str], object] | None
    embedding_size: int


def _is_ready(given: Input) -> bool:
    return not isinstance(given, Arrival) or given.reading is None or given.reading.done()


def _identity(header: Header | None) -> str:
    if header is None:
        return ""
    digests = (f"{name}={digest}" for name, digest in sorted(header.digests.items()))
    return " ".join((header.software, *digests))


class Engine:
    """Serves requests on a thread of its own (`start`), or step by step (`open`, `step`)."""

    def __init__(
        self,
        make: Callable[[], Parts],
        *,
        clock: Callable[[], float] = time.perf_counter,
        waiting_max: int = 1024,
        keep_thread: bool = False,
    ) -> None:
        """`make` loads the model and makes the pages; it runs on the engine's thread.

        keep_thread: let the thread sleep for good once it is done. MLX needs it: the end of a
        thread that used it runs destructors that take the interpreter's lock, and abort the
        process if that happens to be on its way out.
        """
        self._make = make
        self._clock = clock
        self._waiting_max = waiting_max
        self._wake = threading.Condition()
        self._inbox: list[Input] = []
        self._errands = Errands()
        self._next_request = 0
        self._stopping = False
        self._ended = False
        self._loop: Loop | None = None
        self._limits: _Limits | None = None
        self._thread: threading.Thread | None = None
        self._keep_thread = keep_thread
        self._opened = threading.Event()
        self._done = threading.Event()
        self._error: BaseException | None = None

    def start(self) -> None:
        """Start the thread and wait until it can serve. Raises what `make` raised."""
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()
        self._opened.wait()
        if self._error is not None:
            self._done.wait()
            raise self._error

    def open(self) -> None:
        """Make the kernel and the loop, on this thread. Raises what `make` raised."""
        parts = self._make()
        check_pool(parts.kernel.geometry, parts.policy)
        geometry, identity = parts.kernel.geometry, _identity(parts.header)
        cannot = parts.kernel.cannot
        self._limits = _Limits(
            geometry,
            parts.policy,
            parts.vocab_size,
            identity,
            cannot,
            parts.shelf,
            parts.kept,
            parts.prepare,
            parts.embedding_size,
        )
        self._loop = Loop(parts, self._clock)

    def step(self) -> bool:
        """One turn of the loop with all that came in; False where there was nothing to do."""
        with self._wake:
            inputs = self._take_in()
            due = self._errands.take()
        worked = self._opened_loop().step(inputs)
        errands.run(due)
        shelf = self._opened_limits().shelf
        if shelf.retired:
            shelf.sweep(self._namespaces())
        return worked or bool(due)

    def _take_in(self) -> list[Input]:
        """What came in, in its order, up to a request whose kept rows are still being read; where
        nobody else could wake this thread, that is waited for.
        """
        inputs = list(self._inbox)
        if self._thread is not None:
            inputs = list(takewhile(_is_ready, inputs))
        del self._inbox[: len(inputs)]
        return inputs

    def stop(self, timeout_s: float | None = None) -> None:
        """Cancel what is live, end the tape, and wait until the thread is done."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread is None:
            if self._loop is not None and not self._ended:
                self._finish(CANCELLED, STOPPED)
        elif self._thread is not threading.current_thread():
            self._done.wait(timeout_s)

    @property
    def healthy(self) -> bool:
        """Whether submissions are accepted and steps still succeed."""
        return self._loop is not None and not (self._ended or self._stopping or self._loop.broken)

    @property
    def identity(self) -> str:
        """What answers: the software's version and the model's digests, in one line."""
        return self._opened_limits().identity

    @property
    def context_tokens(self) -> int:
        """The longest prompt + answer that this model and pool can hold."""
        limits = self._opened_limits()
        return capacity_tokens(limits.geometry, limits.policy)

    @property
    def embedding_size(self) -> int:
        """Numbers of an embedding; 0 where this model makes none."""
        return self._opened_limits().embedding_size

    @property
    def view(self) -> View:
        """The scheduler's view after the last step: a value, so safe to read from any thread."""
        return self._opened_loop().view

    @property
    def counters(self) -> Counters:
        """What was counted so far; to be read only, from any thread."""
        return self._opened_loop().counters

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters that requests may ask for, by name: a value."""
        return self._opened_limits().shelf.offered

    def load_adapter(self, name: str, path: str) -> Adapter:
        """Read a folder and offer it; waits for it. Raises AdapterError, EngineStopped."""
        return self._do(lambda: self._opened_limits().shelf.load(name, path))

    def unload_adapter(self, name: str) -> None:
        """Offer it no more; requests that have it go on. Raises RequestRefused, EngineStopped."""
        self._do(lambda: self._opened_limits().shelf.unload(name))

    @property
    def next_step(self) -> int:
        """The number that the next step will have."""
        return self.view.step

    def submit(self, submission: Submission, sink: Sink) -> int:
        """Queue a request; returns its id. Raises RequestRefused, QueueFull, EngineStopped."""
        if not self.healthy:
            raise EngineStopped("the engine is not running: restart the server")
        limits = self._opened_limits()
        refuse(limits.geometry, limits.policy, submission, limits.vocab_size, limits.cannot)
        reading = None if limits.kept is None else limits.kept.ask(submission, self.view.state)
        try:
            return self._queue(submission, sink, limits, reading)
        except Exception:
            if reading is not None and limits.kept is not None:
                reading.add_done_callback(limits.kept.drop)
            raise

    def _queue(
        self, submission: Submission, sink: Sink, limits: _Limits, reading: Future[Read] | None
    ) -> int:
        with self._wake:
            if not self.healthy:
                raise EngineStopped("the engine is not running: restart the server")
            limits.shelf.refuse(submission.namespace)
            waiting = len(self.view.waiting) + self._arrivals()
            if waiting >= self._waiting_max:
                raise QueueFull(waiting)
            request = self._next_request
            self._next_request += 1
            record = RequestArrived(
                request=request,
                external_id=submission.external_id,
                tokens=submission.tokens,
                parameters=submission.parameters,
                namespace=submission.namespace,
                parent=submission.parent,
            )
            self._inbox.append(Arrival(record, sink, reading=reading))
            self._wake.notify_all()
        if reading is not None:
            reading.add_done_callback(self._was_read)
        return request

    def _arrivals(self) -> int:
        """Requests in the inbox: the newest, since ids grow and it is emptied from its front."""
        oldest = next((it for it in self._inbox if isinstance(it, Arrival)), None)
        return 0 if oldest is None else self._next_request - oldest.record.request

    def _was_read(self, _reading: object) -> None:
        with self._wake:
            self._wake.notify_all()

    def prepare(self, grammar: str) -> object:
        """Do what the first token under a grammar would have the engine's thread wait for; on the
        caller's. It is done as long as the caller holds what is returned. What cannot be followed
        is refused by `submit`.
        """
        prepare = self._opened_limits().prepare
        return None if prepare is None else prepare(grammar)

    def cancel(self, request: int) -> None:
        """Give a request up; a request that already ended, or is unknown, is left alone."""
        self._put(RequestCancelled(request, CANCELLED))

    def flush(self) -> None:
        """Empty the prefix index: what nobody holds cannot be found any more after the next step.
        Blocks that running requests hold stay findable; they can be flushed once these have ended.
        """
        self._put(FlushRequested())

    def _do(self, work: Callable[[], Made]) -> Made:
        """Run `work` on the engine's thread and wait; here, where there is no such thread."""
        with self._wake:
            if not self.healthy:
                raise EngineStopped("the engine is not running: restart the server")
            future = self._errands.put(work)
            self._wake.notify_all()
        if self._thread is None:
            self.step()
        return future.result()

    def _namespaces(self) -> list[Namespace]:
        """Those of all requests that are live, or were taken in."""
        with self._wake:
            waiting = [given.record for given in self._inbox if isinstance(given, Arrival)]
        live = [request.arrived for request in self.view.requests.values()]
        return [arrived.namespace for arrived in (*waiting, *live)]

    def _put(self, given: Input) -> None:
        """Into the inbox, as long as somebody looks into it."""
        with self._wake:
            if not self._ended:
                self._inbox.append(given)
                self._wake.notify_all()

    def status(self) -> dict[str, int]:
        """Counts, of requests and (over all groups) of blocks; a snapshot between two steps."""
        loop = self._opened_loop()
        view, counters = loop.view, loop.counters
        state, groups = view.state, view.state.paged_groups()
        return {
            "running": len(view.running),
            "waiting": len(view.waiting),
            "held": sum(state.held_blocks(group) for group in groups),
            "free": sum(state.free_blocks(group) for group in groups),
            "cached": sum(state.cached_blocks(group) for group in groups),
            "num_blocks": sum(state.geometry.groups[group].num_blocks for group in groups),
            "steps": counters.steps,
            "failed_steps": counters.failed_steps,
            "preemptions": counters.preemptions,
            "plans_raised": counters.plans_raised,
            "shadow_found": counters.shadow_found,
            "divergences": sum(counters.divergences.values()),
            "capture_failures": counters.capture_failures,
            "capture_gaps": counters.capture_gaps,
        }

    def _opened_loop(self) -> Loop:
        if self._loop is None:
            raise EngineStopped("the engine was not started")
        return self._loop

    def _opened_limits(self) -> _Limits:
        if self._limits is None:
            raise EngineStopped("the engine was not started")
        return self._limits

    def _serve(self) -> None:
        """The thread's life."""
        try:
            self._live()
        finally:
            self._done.set()
        if self._keep_thread:
            threading.Event().wait()

    def _live(self) -> None:
        try:
            self.open()
        except BaseException as error:
            self._error = error
            self._ended = True
            return
        finally:
            self._opened.set()
        try:
            self._run()
            reason, said = CANCELLED, STOPPED
            if self._opened_loop().broken:
                reason, said = ERROR, f"the engine stopped: {self._opened_loop().failure}"
        except BaseException as error:
            log.exception("the engine's thread ended by an error of its own")
            reason, said = ERROR, f"the engine stopped: {error}"
        self._finish(reason, said)

    def _run(self) -> None:
        loop = self._opened_loop()
        tidied = False
        while not loop.broken:
            with self._wake:
                came = self._wake.wait_for(self._is_due, None if tidied else IDLE_S)
                if self._stopping:
                    return
            if came:
                self.step()
            else:
                tidy()
            tidied = not came

    def _is_due(self) -> bool:
        """Whether the thread has anything to do."""
        ready = bool(self._inbox) and _is_ready(self._inbox[0])
        return self._stopping or ready or bool(self._errands) or self._opened_loop().busy

    def _finish(self, reason: str, said: str) -> None:
        """End every request and the tape; no submission gets in after it."""
        with self._wake:
            self._ended = True
            inbox, self._inbox = self._inbox, []
            due = self._errands.take()
        errands.give_up(due, EngineStopped(said))
        loop = self._opened_loop()
        try:
            loop.end(reason, said)
        except Exception:
            log.exception("the tape could not be ended in order")
            loop.tell_all(ERROR, said)
        loop.release()
        self._opened_limits().shelf.release()
        if self._keep_thread:
            gc.collect()  # what MLX made on this thread ends on it
        for given in inbox:
            if isinstance(given, Arrival):
                self._refuse_late(given, reason, said)

    def _refuse_late(self, given: Arrival, reason: str, said: str) -> None:
        """Tell a request that came in while the engine ended."""
        try:
            given.sink(Update(given.record.request, (), reason, error=said))
        except Exception:
            log.exception("a sink raised", request=given.record.request)
