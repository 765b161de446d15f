"""Engine: a model in this process, for Python programs; the server's scheduler runs underneath.

    with Engine.load("smollm2-135m") as engine:
        print(engine.chat("Name the capital of France.", max_tokens=12).text)

Parameters are those of the HTTP bodies, by the same names, checked by the same code: `generate` and
`stream` take the ones of /v1/completions, `chat` and `chat_stream` those of /v1/chat/completions.
Each method has a twin with an `a` in front for asyncio. What is wrong with a request is told as
ApiError, in one sentence.

Owns an event loop on a thread of its own, where all requests of all callers live: so methods may be
called from any thread and from any event loop. Never touches MLX.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, Self, TypeVar

from msgspec import Struct

from kernel.batch import Logprob
from kernel.tokenizer import Tokenizer
from statemachine.records import Parameters

from .dialects.parts import Text, ToolCall, join
from .http.asking import Ask
from .http.chat import ask_of_chat
from .http.completions import ask_of_completion
from .http.desk import Desk
from .http.stream import Answer as Streamed
from .http.stream import Feed, News, gather, news_of
from .http.wire import ApiError
from .http.wire_chat import ChatRequest, read_chat_request
from .http.wire_completions import CompletionRequest, read_completion_request
from .settings import Settings, load_settings
from .submission import EngineApi

Made = TypeVar("Made")
Messages = str | Sequence[dict[str, Any]]
Prompt = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]


class Answer(Struct, frozen=True):
    """A whole answer.

    finish_reason: stop, length or tool_calls. reasoning, tool_calls: what the model's own markers
    set apart from the text. logprobs: one for each token of the text, where `logprobs` was asked
    for; natural logarithms. cached_tokens: prompt tokens whose rows were computed before.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[Logprob, ...] = ()


class Score(Struct, frozen=True):
    """How likely a continuation is. logprob: the sum over its tokens, a natural logarithm.

    greedy: each token is the likeliest at its place. tokens: each one's own, with the likeliest.
    """

    logprob: float
    greedy: bool
    tokens: tuple[Logprob, ...]


class RunningEngine(EngineApi, Protocol):
    """An engine that was started."""

    def stop(self) -> None:
        """Cancel what is live, end the tape, wait for the thread."""


class Engine:
    """See the module. Close it, or use it in a `with` block: the tape ends in order then."""

    def __init__(self, engine: RunningEngine, tokenizer: Tokenizer, settings: Settings) -> None:
        """`load` is what most want; this takes an engine that runs already, and stops it."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._desk = Desk(engine, tokenizer, settings.model, settings)
        self._numbers = itertools.count(1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="requests", daemon=True)
        self._thread.start()

    @classmethod
    def load(
        cls,
        model: str = "smollm2-135m",
        *,
        progress: Callable[[str], None] | None = None,
        **settings: Any,
    ) -> Self:
        """Load a model and start its engine. `settings` are those of `mlxtape serve`, by name.

        progress: is told what is being done. Raises SettingsError, ModelError, CaptureError.
        """
        from .build import build_engine  # it loads MLX

        chosen = load_settings({"model": model, **settings}, {})
        engine, tokenizer = build_engine(chosen, progress)
        return cls(engine, tokenizer, chosen)

    @property
    def context_tokens(self) -> int:
        """The most that a prompt and its answer may have together."""
        return self._engine.context_tokens

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def close(self) -> None:
        """Give up what still runs and end the tape. The engine is of no use after it."""
        if self._loop.is_closed():
            return
        self._do(self._desk.drain(0.0))
        self._engine.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def generate(self, prompt: Prompt, **parameters: Any) -> Any:
        """What follows a text: an Answer; a list of them, prompt by prompt, for several prompts or
        n > 1. A prompt may be token ids. Raises ApiError.
        """
        return self._do(self._whole(self._completion(prompt, parameters)))

    async def agenerate(self, prompt: Prompt, **parameters: Any) -> Any:
        """`generate`, for asyncio."""
        return await self._wait(self._whole(self._completion(prompt, parameters)))

    def chat(self, messages: Messages, **parameters: Any) -> Any:
        """The answer to a conversation, or to one user's text. Raises ApiError."""
        return self._do(self._whole(self._conversation(messages, parameters)))

    async def achat(self, messages: Messages, **parameters: Any) -> Any:
        """`chat`, for asyncio."""
        return await self._wait(self._whole(self._conversation(messages, parameters)))

    def stream(self, prompt: str | Sequence[int], **parameters: Any) -> Iterator[str]:
        """The text that follows, as it comes. Leaving the loop gives the request up."""
        return self._pieces(self._completion(prompt, parameters))

    def astream(self, prompt: str | Sequence[int], **parameters: Any) -> AsyncIterator[str]:
        """`stream`, for asyncio."""
        return self._apieces(self._completion(prompt, parameters))

    def chat_stream(self, messages: Messages, **parameters: Any) -> Iterator[str]:
        """The text of the answer to a conversation, as it comes."""
        return self._pieces(self._conversation(messages, parameters))

    def achat_stream(self, messages: Messages, **parameters: Any) -> AsyncIterator[str]:
        """`chat_stream`, for asyncio."""
        return self._apieces(self._conversation(messages, parameters))

    def score(
        self, context: str, continuations: Sequence[str], model: str | None = None
    ) -> list[Score]:
        """Log-likelihood of each continuation of a context that is not empty. Raises ApiError.

        A continuation's tokens are those that context and continuation have together beyond the
        context's own; spaces at the context's end count as the continuation's. model: an adapter's
        name, if one is to be used.
        """
        return self._do(self._scores(context, continuations, model))

    async def ascore(
        self, context: str, continuations: Sequence[str], model: str | None = None
    ) -> list[Score]:
        """`score`, for asyncio."""
        return await self._wait(self._scores(context, continuations, model))

    def _completion(self, prompt: Prompt, parameters: dict[str, Any]) -> Ask:
        _check_names(CompletionRequest, parameters)
        body = read_completion_request({"prompt": prompt, **parameters})
        return self._desk.ask(ask_of_completion, body, self._name())

    def _conversation(self, messages: Messages, parameters: dict[str, Any]) -> Ask:
        _check_names(ChatRequest, parameters)
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        body = read_chat_request({"messages": turns, **parameters})
        return self._desk.ask(ask_of_chat, body, self._name())

    def _name(self) -> str:
        """What the next request is called on tape."""
        return f"python-{next(self._numbers)}"

    async def _whole(self, ask: Ask) -> Any:
        answers = self._desk.admit(ask)
        try:
            found = [_answer(news) for news in await gather(answers)]
        finally:
            self._desk.leave(answers)
        return found[0] if len(found) == 1 else found

    async def _scores(
        self, context: str, continuations: Sequence[str], model: str | None
    ) -> list[Score]:
        asks = [self._scoring(context, text, model) for text in continuations]
        return list(await asyncio.gather(*map(self._score, asks)))

    def _scoring(self, context: str, continuation: str, model: str | None) -> Ask:
        kept = context.rstrip(" ")
        before = self._tokenizer.encode(kept)
        tokens = self._tokenizer.encode(context + continuation)
        if not before or len(tokens) <= len(before):
            raise ApiError("Neither the context nor a continuation may be empty.", param="context")
        parameters = Parameters(max_tokens=0, logprobs=1, score_from=len(before))
        return Ask((tuple(tokens),), parameters, self._name(), prompt_param="context", model=model)

    async def _score(self, ask: Ask) -> Score:
        (answer,) = answers = self._desk.admit(ask)
        try:
            await gather(answers)
        finally:
            self._desk.leave(answers)
        tokens = tuple(it for it in answer.scores if it is not None)
        greedy = all(it.logprob >= it.top[0][1] for it in tokens)
        return Score(sum(it.logprob for it in tokens), greedy, tokens)

    def _pieces(self, ask: Ask) -> Iterator[str]:
        answers, feed = self._do(self._begin(ask))
        try:
            while (news := self._do(_next(feed))) is not None:
                yield from _texts(news)
        finally:
            self._loop.call_soon_threadsafe(self._desk.leave, answers)

    async def _apieces(self, ask: Ask) -> AsyncIterator[str]:
        answers, feed = await self._wait(self._begin(ask))
        try:
            while (news := await self._wait(_next(feed))) is not None:
                for text in _texts(news):
                    yield text
        finally:
            self._loop.call_soon_threadsafe(self._desk.leave, answers)

    async def _begin(self, ask: Ask) -> tuple[list[Streamed], Feed]:
        answers = self._desk.admit(ask)
        if len(answers) > 1:
            self._desk.leave(answers)
            raise ApiError("Only one answer can be streamed at once: leave n at 1.", param="n")
        return answers, news_of(answers)

    def _do(self, work: Coroutine[Any, Any, Made]) -> Made:
        """Wait for `work` on the requests' loop; an interrupt gives it up."""
        future = self._begin_work(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _wait(self, work: Coroutine[Any, Any, Made]) -> Made:
        return await asyncio.wrap_future(self._begin_work(work))

    def _begin_work(self, work: Coroutine[Any, Any, Made]) -> Future[Made]:
        if self._loop.is_closed():
            work.close()
            raise ApiError("This engine was closed: load another one.", status=503)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for task in (tasks := asyncio.all_tasks(self._loop)):
            task.cancel()
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


def _check_names(body: type[Struct], parameters: dict[str, Any]) -> None:
    """Raise TypeError for a parameter that a body has not: over HTTP they are ignored, in a program
    they are a mistake.
    """
    for name in parameters:
        if name not in body.__struct_fields__ or name == "stream":
            known = ", ".join(sorted({*body.__struct_fields__} - {"stream", "stream_options"}))
            raise TypeError(f"there is no parameter {name!r}; known are {known}")


async def _next(feed: Feed) -> News | None:
    return await anext(feed, None)


def _texts(news: News) -> list[str]:
    return [part.text for part in news.parts if isinstance(part, Text)]


def _answer(news: News) -> Answer:
    whole, answer = join(news.parts), news.answer
    assert news.finish_reason is not None
    return Answer(
        text=whole.text,
        finish_reason="tool_calls" if whole.calls else news.finish_reason,
        prompt_tokens=len(answer.prompt),
        completion_tokens=answer.completion_tokens,
        cached_tokens=answer.cached_tokens,
        reasoning=whole.reasoning,
        tool_calls=whole.calls,
        logprobs=tuple(told.logprob for told in news.tokens),
    )
