"""Play: a load on the real engine, scheduler and capture, step by step, and what became of it.

Owns clients (sinks that are slow, raise, or leave; detokenisers that fail), pinned arrivals and
cancels, and a driver that stops where the engine gave up. Judges nothing.
"""

from __future__ import annotations

import atexit
import functools
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import structlog
import tokenizers
from attrs import evolve, field, frozen
from msgspec import structs

from kernel.fake import FakeClock, FakeKernel, run_pinned
from kernel.tokenizer import Detokenizer, Tokenizer
from server.capture import CaptureWriter
from server.drafting import DraftParts
from server.engine import Engine
from server.kept import KeptBlocks
from server.loop import Parts
from server.prefix_store import PrefixStore
from server.submission import EngineStopped, RequestRefused, Submission, Update
from server.text import IncrementalDecoder
from statemachine.records import NO_PARENT

from .sim import draft_model, header
from .simulation_disk import in_memory
from .simulation_load import POISON, VOCAB, Load, Request

REFUSED = "refused"
"""The end of a request that the engine did not take in."""
GONE = "gone"
"""The end of a request whose sink raised: nobody is told how it ended."""
STEPS_MAX = 5_000


@frozen
class Played:
    """What became of a load: answers and ends by request; `error` where the engine itself died.

    adopted_rows: prompt rows that first admissions took from the prefix index. held_blocks: what
    is still held once all is over. arrived, ended: the steps before which a request came in and
    after which it ended. broken: too many steps failed in a row, the last of them with `failure`.
    tape: its bytes, if in memory. status, clients: of the engine, and how many clients it knew,
    when nothing was left to do. load: what was played. told, scores, embedded: by request, tokens
    that came with a log-probability, scores by position, and how many embeddings came. had: what
    simulation_check.py counts of the tape's events.
    """

    answers: tuple[tuple[int, ...], ...]
    reasons: tuple[str | None, ...]
    steps: int
    preemptions: int
    failed_steps: int
    adopted_rows: int
    held_blocks: int = 0
    error: str = ""
    arrived: tuple[int | None, ...] = ()
    ended: tuple[int | None, ...] = ()
    broken: bool = False
    failure: str = ""
    tape: bytes = b""
    lost_records: int = 0
    status: dict[str, int] = field(factory=dict)
    clients: int = 0
    updates_after_end: int = 0
    load: Load | None = None
    told: tuple[tuple[int, ...], ...] = ()
    scores: tuple[dict[int, float], ...] = ()
    embedded: tuple[int, ...] = ()
    had: Counter[str] = field(factory=Counter)


class ClientGone(Exception):
    """What a sink raises on order."""


class Client:
    """Who sent a request: its answer so far, and its end."""

    def __init__(self, stage: Stage, request: Request) -> None:
        self._stage = stage
        self.request = request
        self.id: int | None = None
        self.tokens: list[int] = []
        self.told: list[int] = []
        self.scores: dict[int, float] = {}
        self.embedded = 0
        self.reason: str | None = None
        self.cached_tokens = 0
        self.updates = self.late = 0
        self.arrived: int | None = None
        self.ended: int | None = None

    def __call__(self, update: Update) -> None:
        """The sink. What it was told counts, even where it raises then."""
        self.updates += 1
        self.late += self.reason is not None
        self.cached_tokens = max(self.cached_tokens, update.cached_tokens)
        self.tokens.extend(update.tokens)
        self.told.extend(it.token for it in update.logprobs)
        self.scores |= {update.scores_at + at: it.logprob for at, it in enumerate(update.scores)}
        self.embedded += bool(update.embedding)
        if update.finish_reason is not None:
            self.reason, self.ended = update.finish_reason, self._stage.step_now
        self._stage.clock.wait(self.request.slow_s)
        if self.updates == self.request.sink_cancels:
            self.cancel()
        if self.updates == self.request.sink_raises:
            if self.reason is None:
                self.reason, self.ended = GONE, self._stage.step_now
            raise ClientGone("the connection is gone")

    def send(self) -> None:
        """Submit the request."""
        request, engine = self.request, self._stage.engine
        given = Submission(
            request.tokens,
            request.parameters,
            namespace=request.namespace,
            parent=self._stage.id_of(request.parent),
        )
        self.arrived = self._stage.step_now
        if request.stop:
            self._stage.expect_text(request)
        try:
            self.id = engine.submit(given, self)
        except (RequestRefused, EngineStopped):
            self.reason, self.ended = REFUSED, self.arrived
            if request.stop:
                self._stage.texts.pop()

    def cancel(self) -> None:
        """Leave; a request that was not sent, or was refused, has nothing to leave."""
        if self.id is not None:
            self._stage.engine.cancel(self.id)


class Clock(FakeClock):
    """A fake clock that others can move on."""

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self._now_s += seconds


class Stage:
    """An engine and its clients, driven step by step."""

    def __init__(self, load: Load, begin: Callable[[int], None]) -> None:
        self.load = load
        self.clock = Clock()
        self.texts: list[Request] = []
        self.step_now = 1
        self._begin = begin
        self.engine: Engine
        self.clients = [Client(self, request) for request in load.requests]

    def id_of(self, number: int | None) -> int:
        """The engine's id of a request of the load; NO_PARENT where it did not take that in."""
        known = number is not None and number < len(self.clients)
        found = self.clients[number].id if known else None
        return NO_PARENT if found is None else found

    def expect_text(self, request: Request) -> None:
        """The next detokeniser but for those before it is of this request."""
        self.texts.append(request)

    def decoder(self) -> IncrementalDecoder:
        """A detokeniser for the request that arrived first of those that have none yet."""
        return Text(self.texts.pop(0).text_raises)

    @property
    def next_step(self) -> int:
        """For the driver; past every step once the engine gave up, or was stopped."""
        return self.engine.next_step

    def step(self) -> bool:
        """One turn. False where there is nothing to do, or nobody to do it."""
        self.step_now = self.engine.next_step
        stop_at = self.load.stop_at
        if stop_at is not None and self.step_now >= stop_at:
            self.engine.stop()
        if not self.engine.healthy:
            return False
        self._begin(self.step_now)
        return self.engine.step()

    def actions(self) -> dict[int, list[Callable[[], object]]]:
        """Arrivals, cancels and flushes by step, arrivals in the order of the load."""
        actions: dict[int, list[Callable[[], object]]] = {}
        for client in self.clients:
            actions.setdefault(client.request.at, []).append(client.send)
        for client in self.clients:
            if client.request.cancel_at is not None:
                actions.setdefault(client.request.cancel_at, []).append(client.cancel)
        for step in self.load.flush_at:
            actions.setdefault(step, []).append(self.engine.flush)
        return actions


class Text:
    """The real detokeniser over a small vocabulary; raises at the token that it is told."""

    def __init__(self, raises: int | None) -> None:
        if raises == 0:
            raise ValueError("this text cannot begin")
        self._left = raises
        self._real = Detokenizer(tokenizer())

    def add(self, token: int) -> str:
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                raise ValueError("this token has no text")
        return self._real.add(token)

    def finish(self) -> str:
        return self._real.finish()


@functools.cache
def tokenizer() -> Tokenizer:
    """A byte-level vocabulary of VOCAB tokens: letters, pairs, and halves of a character."""
    texts = ["\u00c3", "\u00a9", "\u0120", *"abcde"]  # 0xC3 0xA9 are the two halves of an e acute
    texts += [a + b for a in "abcde" for b in "abcde"]
    texts += [f"{a}{b}{c}" for a in "abc" for b in "abc" for c in "abcd"]
    vocab = {text: number for number, text in enumerate(texts[:VOCAB])}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    core.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(core)


def play(
    load: Load,
    path: Path | None,
    begin: Callable[[int], None] = lambda step: None,
    make: Callable[[CaptureWriter], Parts] | None = None,
) -> Played:
    """Run a load to its end. Its tape is in `path`, or, without one, in what comes back.

    begin hears each step's number. make: the engine's parts; the fake kernel's by default.
    """
    if path is not None:
        return _play(load, _capture(load, path), begin, make)
    with in_memory(load.full_disk) as disk:
        played = _play(load, CaptureWriter("in memory"), begin, make)
        return evolve(played, tape=bytes(disk.data))


def _play(
    load: Load,
    capture: CaptureWriter,
    begin: Callable[[int], None],
    make: Callable[[CaptureWriter], Parts] | None,
) -> Played:
    stage = Stage(load, begin)
    build = make or fake_parts(load, stage.decoder)
    error = ""
    with structlog.testing.capture_logs():
        engine = Engine(lambda: build(capture), clock=stage.clock, waiting_max=load.waiting_max)
        stage.engine = engine
        engine.open()
        loop = engine._opened_loop()
        status, clients = {}, 0
        try:
            run_pinned(stage, stage.actions(), STEPS_MAX)
            status, clients = engine.status(), len(loop._clients)
            engine.stop()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            capture.close()
    after, told = engine.status(), stage.clients
    return Played(
        answers=tuple(tuple(client.tokens) for client in told),
        reasons=tuple(client.reason for client in told),
        steps=after["steps"],
        preemptions=after["preemptions"],
        failed_steps=after["failed_steps"],
        adopted_rows=sum(client.cached_tokens for client in told),
        held_blocks=after["held"],
        error=error,
        arrived=tuple(client.arrived for client in told),
        ended=tuple(client.ended for client in told),
        broken=loop.broken,
        failure=loop.failure,
        lost_records=capture.lost_records,
        status=status or after,
        clients=clients,
        updates_after_end=sum(client.late for client in told),
        load=load,
        told=tuple(tuple(client.told) for client in told),
        scores=tuple(client.scores for client in told),
        embedded=tuple(client.embedded for client in told),
    )


def _capture(load: Load, path: Path) -> CaptureWriter:
    if not load.segment_bytes:
        return CaptureWriter(path)
    path.mkdir()
    return CaptureWriter(path, segment_bytes=load.segment_bytes)


def fake_parts(
    load: Load, decoder: Callable[[], IncrementalDecoder] | None = None
) -> Callable[[CaptureWriter], Parts]:
    """What makes the engine's parts over the fake kernel, and a prefix store where evicted blocks
    are stored. Its folder goes with the process.
    """

    def make(capture: CaptureWriter) -> Parts:
        kernel = FakeKernel(
            load.geometry,
            vocab_size=load.vocab,
            script=load.told,
            fail=load.fail,
            sanitize=load.sanitize,
            poison=POISON if load.poison else None,
        )
        draft = _draft_parts(load)
        head = header(load.geometry, load.policy, None if draft is None else draft.model)
        head = structs.replace(head, sanitize=load.sanitize)
        kept = None
        if load.policy.store_evicted:
            folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            store = PrefixStore(Path(folder.name), 1 << 30, load.geometry, kernel.block_spec)
            kept = KeptBlocks(store, kernel, load.geometry)
            atexit.register(folder.cleanup)
        return Parts(kernel, load.policy, capture, head, decoder, kept=kept, draft=draft)

    return make


def _draft_parts(load: Load) -> DraftParts | None:
    """A fake draft model, where the load has one."""
    if not load.draft:
        return None
    kernel = FakeKernel(
        load.draft_geometry,
        vocab_size=load.vocab,
        script=load.guessed,
        fail=load.draft_fail,
        sanitize=load.sanitize,
    )
    return DraftParts(kernel, draft_model(load.draft_geometry))
