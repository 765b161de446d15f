"""Stream: the way back of a request's answers, from the engine's thread to their HTTP response.

Owns the crossing of threads and the end of a request: an `Answer` is closed on every way out, and
closing it before the engine said how it ended cancels it there, once. `news_of(answers)` iterates
over what the answers of one Ask are told, as it comes; `gather` waits for all of it.

completion_tokens counts the tokens that the engine delivered: an end token is none of them, the
token that completes a stop string is one. The engine delivers that token, for the text is cut here
(`TextStream`); tokens after it, if any, are neither shown nor counted. A token's log-probability is
told once text from where it begins was shown, so none is told of what a stop string cut away.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec import Struct
from starlette.requests import ClientDisconnect

from kernel.batch import Logprob
from kernel.tokenizer import Detokenizer, Tokenizer
from statemachine.records import NO_SCORES

from ..dialects.parts import Part
from ..submission import CANCELLED, ERROR, LENGTH, STOP, EngineApi, Submission, Update
from ..text import TextStream
from .asking import Ask
from .wire import ApiError, PromptDetails, Usage

Receive = Callable[[], Awaitable[Any]]


class Told(Struct, frozen=True):
    """An answer token's log-probability; `start` is where its text begins, in characters."""

    logprob: Logprob
    start: int


class News(Struct):
    """What an answer was told at once; all of it, if it comes from `gather`.

    finish_reason: stop or length, in an answer's last news.
    """

    answer: Answer
    parts: list[Part]
    tokens: list[Told]
    finish_reason: str | None = None


Inbox = asyncio.Queue[tuple["Answer", Update]]


class Answer:
    """One submitted request, as seen by the event loop that made it.

    The inbox, which all answers of an Ask share, needs no bound of its own: the engine sends at
    most max_tokens updates and one end, however slowly the client reads.

    index: prompt * n + copy. model: the name of what answers. scores: one for each token of the
    prompt, None where there is none; empty unless asked for. embedding: empty unless asked for.
    """

    def __init__(
        self,
        engine: EngineApi,
        tokenizer: Tokenizer,
        ask: Ask,
        index: int,
        submission: Submission,
        first: Answer | None = None,
    ) -> None:
        """Submit it. `first`: the Ask's first answer. Raises RequestRefused, EngineStopped."""
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self.inbox: Inbox = asyncio.Queue() if first is None else first.inbox
        self._text = TextStream(Detokenizer(tokenizer), submission.parameters.stop)
        self._splitter = ask.splitter()
        self._prepared = ask.prepared
        self._untold: deque[Told] = deque()
        self._shown = 0
        self._silent = ask.parameters.max_tokens == 0
        self._open = True
        self._given_up = False
        self.index = index
        self.model = ask.model or ""
        self.copy = index % ask.n
        self.prompt = submission.tokens
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.scores: list[Logprob | None] = []
        if submission.parameters.score_from != NO_SCORES:
            self.scores = [None] * len(submission.tokens)
        self.embedding: tuple[float, ...] = ()
        self.finish_reason: str | None = None
        self.request = engine.submit(submission, self._sink)

    def _sink(self, update: Update) -> None:
        """Called on the engine's thread."""
        if update.finish_reason is not None:
            self._open = False
        try:
            self._loop.call_soon_threadsafe(self.inbox.put_nowait, (self, update))
        except RuntimeError:  # the loop is closed: the server stopped, and nobody listens
            if not self._loop.is_closed():
                raise

    def take(self, update: Update) -> News:
        """What an update says; `finish_reason` is set with the last one.

        Raises ApiError (500, 503) where the engine failed or gave the request up.
        """
        if update.cached_tokens >= 0:
            self.cached_tokens = update.cached_tokens
        for position, score in enumerate(update.scores, update.scores_at):
            self.scores[position] = score
        self.embedding = update.embedding or self.embedding
        text = "" if self._silent else self._feed(update)
        parts = self._splitter.feed(text)
        if update.finish_reason is not None:
            text = self._end(update)
            parts += self._splitter.feed(text) + self._splitter.finish()
        return News(self, parts, self._tell(), self.finish_reason)

    def _feed(self, update: Update) -> str:
        pieces = []
        for place, token in enumerate(update.tokens):
            if self._text.stopped:
                break
            self.completion_tokens += 1
            if update.logprobs:
                start = self._shown + self._text.held
                self._untold.append(Told(update.logprobs[place], start))
            piece = self._text.feed(token)
            self._shown += len(piece)
            pieces.append(piece)
        return "".join(pieces)

    def _end(self, update: Update) -> str:
        if update.finish_reason not in (STOP, LENGTH):
            self.finish_reason = update.finish_reason
            raise _failure(update)
        text = self._text.finish()
        self._shown += len(text)
        self.finish_reason = STOP if self._text.stopped else update.finish_reason
        if self._silent:
            self.finish_reason = LENGTH
        return text

    def _tell(self) -> list[Told]:
        """The tokens that have come to be shown; with an answer's end all that are left, unless a
        stop string cut them away.
        """
        told = []
        rest = self.finish_reason is not None and not self._text.stopped
        while self._untold and (rest or self._untold[0].start < self._shown):
            told.append(self._untold.popleft())
        return told

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the answer."""
        return self._text.stopped_by

    @property
    def outcome(self) -> str:
        """How it ended, in one word: the finish reason, or who gave it up."""
        return self.finish_reason or (CANCELLED if self._given_up else "disconnected")

    def close(self) -> None:
        """Nobody listens any more: the engine is told, unless it ended the request itself."""
        if self._open:
            self._open = False
            self._engine.cancel(self.request)

    def give_up(self) -> None:
        """The server stops: cancel, and end the response without waiting for the engine. Where the
        engine has ended it, the response has all that it waits for.
        """
        self._given_up = self.finish_reason is None
        if self._open:
            self.close()
            self.inbox.put_nowait((self, Update(self.request, finish_reason=CANCELLED)))


def _failure(update: Update) -> ApiError:
    if update.finish_reason == ERROR:
        message = update.error or "The engine failed on this request."
        return ApiError(message, status=500, kind="server_error", code="engine_error")
    message = "The server gave this request up, for it is stopping; send it again later."
    return ApiError(message, status=503, kind="server_error", code="server_stopping")


class Feed:
    """See `news_of`. No generator, which would have to be closed where nobody reads it out."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._inbox = answers[0].inbox
        self._open = len(answers)

    def __aiter__(self) -> Feed:
        return self

    async def __anext__(self) -> News:
        if not self._open:
            raise StopAsyncIteration
        answer, update = await self._inbox.get()
        news = answer.take(update)
        self._open -= news.finish_reason is not None
        return news


def news_of(answers: Sequence[Answer]) -> Feed:
    """Iterates over the news of one Ask's answers, as they come, until all of them have ended.

    Raises ApiError where one fails: the others are then of no use.
    """
    return Feed(answers)


async def gather(answers: Sequence[Answer]) -> list[News]:
    """All news of each answer in one, in order of the answers. Raises like `news_of`."""
    whole = [News(answer, [], []) for answer in answers]
    async for news in news_of(answers):
        into = whole[news.answer.index]
        into.parts += news.parts
        into.tokens += news.tokens
        into.finish_reason = news.finish_reason
    return whole


def usage_of(answers: Sequence[Answer]) -> Usage:
    """Tokens so far. A prompt counts once, however many answers it has."""
    first = [answer for answer in answers if not answer.copy]
    prompt = sum(len(answer.prompt) for answer in first)
    completion = sum(answer.completion_tokens for answer in answers)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(sum(answer.cached_tokens for answer in first)),
    )


async def while_connected(receive: Receive, work: Awaitable[Any]) -> Any:
    """`work`'s result; ClientDisconnect, with `work` cancelled, where the client goes first.

    Also where it goes in the same turn of the loop: a disconnect is told once, and nobody behind
    this would hear of it.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
