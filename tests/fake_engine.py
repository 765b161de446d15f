"""A scripted engine on a thread of its own, with a byte-level tokenizer: HTTP without a model.

Every byte is a token (its id is the byte), some texts are one token more, and END ends an answer.
What it tells of log-probabilities is `logprob_of`; a prompt's vector is `vector_of`.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import tokenizers
from attrs import frozen

from kernel.batch import Logprob
from kernel.errors import AdapterError
from kernel.tokenizer import Detokenizer, Tokenizer
from server.adapters import Adapter, Key, Shelf
from server.counters import Counters
from server.submission import (
    CANCELLED,
    ERROR,
    LENGTH,
    STOP,
    EngineStopped,
    RequestRefused,
    Sink,
    Submission,
    Update,
)
from server.text import TextStream
from server.view import initial
from statemachine.geometry import Geometry, Group
from statemachine.records import NO_LOGPROBS, NO_SCORES

WAIT_S = 20.0
END = "<|im_end|>"
LONG = "long" * 1024
WORDS = ("one END two", "DEF", "HI", LONG)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def byte_tokenizer(chat_template: str | None = TEMPLATE, special: Sequence[str] = ()) -> Tokenizer:
    """256 byte tokens, WORDS as tokens 256.., END, and special tokens last."""
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = _byte_alphabet()
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=alphabet, merges=[]))
    core.pre_tokenizer = byte_level
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_tokens([tokenizers.AddedToken(word, special=False) for word in WORDS])
    names = (END, *special)
    core.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in names])
    return Tokenizer(core, chat_template=chat_template)


def _byte_alphabet() -> dict[str, int]:
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in visible]
    table = {chr(byte): byte for byte in visible}
    return table | {chr(0x100 + at): byte for at, byte in enumerate(hidden)}


def logprob_of(token: int, top: int) -> Logprob:
    """A capital letter is never among the likeliest; everything else is the likeliest."""
    capital = chr(token).isupper()
    likeliest = [(token + place) % 256 for place in range(int(capital), top + int(capital))]
    named = tuple((other, -(place + 1) / 4) for place, other in enumerate(likeliest))
    return Logprob(token, -9.0 if capital else -0.25, named)


def vector_of(prompt: tuple[int, ...]) -> tuple[float, ...]:
    """Three numbers that float32 holds exactly."""
    return (float(len(prompt)), float(prompt[-1]), -0.5)


class Request:
    """One submitted request, driven by a test: `send` tokens, then `end` it."""

    def __init__(self, engine: FakeEngine, number: int, submission: Submission, sink: Sink) -> None:
        self.engine = engine
        self.number = number
        self.submission = submission
        self.sink = sink
        self.ended = False

    def send(self, tokens: Iterable[int], cached_tokens: int = 0) -> None:
        self._post(Update(self.number, tuple(tokens), cached_tokens=cached_tokens))

    def end(self, reason: str = STOP, error: str = "") -> None:
        self._post(Update(self.number, finish_reason=reason, error=error))

    def _post(self, update: Update) -> None:
        self.engine.jobs.put(lambda: self._deliver(update))

    def _deliver(self, update: Update) -> None:
        if not self.ended:
            self.ended = update.finish_reason is not None
            self.sink(update)


@frozen
class FakeAdapter:
    """Its digest is its path, in hex: another path is another version."""

    name: str
    path: str

    @property
    def digest(self) -> str:
        return self.path.encode().hex().zfill(32)

    @property
    def key(self) -> Key:
        return self.name, int(self.digest, 16)


class FakeAdapters:
    """A store that holds whatever stands at paths without a slash."""

    def load(self, name: str, path: str) -> FakeAdapter:
        if "/" in path:
            raise AdapterError(f"{path} cannot be read: give a word")
        return FakeAdapter(name, path)

    def keep(self, keys: Collection[Key]) -> None:
        """Nothing to let go of."""


class Kept:
    """What a grammar is kept ready by."""


class FakeEngine:
    """EngineApi. `script` gives the tokens of an answer; None leaves the request to the test."""

    identity = "scripted"
    embedding_size = len(vector_of((0,)))

    def __init__(
        self,
        tokenizer: Tokenizer,
        script: Callable[[Submission], Iterable[int]] | None = None,
        context_tokens: int = 4096,
    ) -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.context_tokens = context_tokens
        self.shelf = Shelf(FakeAdapters())
        self.healthy = True
        self.counters = Counters()
        self.view = initial(Geometry(groups=(Group(num_blocks=64),)))
        self.refusal: RequestRefused | None = None
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.submitted: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self.cancelled: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.requests: dict[int, Request] = {}
        self.prepared: list[tuple[str, threading.Thread]] = []
        self.kept: list[weakref.ref[Kept]] = []
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)

    def __enter__(self) -> FakeEngine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.jobs.put(None)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()

    def submit(self, submission: Submission, sink: Sink) -> int:
        if not self.healthy:
            raise EngineStopped
        if self.refusal is not None:
            raise self.refusal
        request = Request(self, len(self.requests), submission, sink)
        self.requests[request.number] = request
        self.submitted.put(request)
        if self.script is not None:
            self.jobs.put(lambda: self._play(request))
        return request.number

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return self.shelf.offered

    def load_adapter(self, name: str, path: str) -> Adapter:
        return self.shelf.load(name, path)

    def unload_adapter(self, name: str) -> None:
        self.shelf.unload(name)

    def prepare(self, grammar: str) -> object:
        self.prepared.append((grammar, threading.current_thread()))
        kept = Kept()
        self.kept.append(weakref.ref(kept))
        return kept

    def cancel(self, request: int) -> None:
        self.cancelled.put(request)
        self.requests[request].end(CANCELLED)

    def status(self) -> dict[str, int]:
        return {"running": sum(not request.ended for request in self.requests.values())}

    def next_request(self) -> Request:
        """The next submitted request, once it is there."""
        return self.submitted.get(timeout=WAIT_S)

    def cancels_so_far(self) -> list[int]:
        """Requests cancelled since the last call."""
        return [self.cancelled.get() for _ in range(self.cancelled.qsize())]

    def _play(self, request: Request) -> None:
        """The scripted answer, one token an update, ended as the real engine ends it."""
        assert self.script is not None
        parameters = request.submission.parameters
        self._tell_prompt(request)
        if parameters.embed:
            vector = vector_of(request.submission.tokens)
            request._deliver(Update(request.number, (), LENGTH, 0, embedding=vector))
            return
        text = TextStream(Detokenizer(self.tokenizer), parameters.stop)
        reason = ERROR
        for count, token in enumerate(self.script(request.submission), start=1):
            if token in parameters.end_tokens:
                reason = STOP
                break
            text.feed(token)
            told: tuple[Logprob, ...] = ()
            if parameters.logprobs != NO_LOGPROBS:
                told = (logprob_of(token, parameters.logprobs),)
            request._deliver(Update(request.number, (token,), cached_tokens=3, logprobs=told))
            if text.stopped or count == parameters.max_tokens:
                reason = STOP if text.stopped else LENGTH
                break
        request._deliver(Update(request.number, finish_reason=reason, error="the script ended"))

    def _tell_prompt(self, request: Request) -> None:
        """Scores of the prompt in two pieces, which overlap, as after a preemption."""
        parameters, prompt = request.submission.parameters, request.submission.tokens
        if parameters.score_from == NO_SCORES:
            return
        scores = tuple(logprob_of(token, parameters.logprobs) for token in prompt)
        begin, middle = parameters.score_from, max(parameters.score_from, len(prompt) // 2)
        for first, last in ((begin, middle + 1), (middle, len(prompt))):
            piece = scores[first:last]
            request._deliver(Update(request.number, scores=piece, scores_at=first))


@contextmanager
def scripted(text: str) -> Iterator[FakeEngine]:
    """An engine that answers every request with `text`, then END."""
    tokenizer = byte_tokenizer()
    with FakeEngine(tokenizer, lambda _: tokenizer.encode(text + END)) as engine:
        yield engine
