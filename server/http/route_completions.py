"""Route: POST /v1/completions.

Order of chunks: the prompt where it is to be echoed, text, finish_reason, usage where asked for,
[DONE]; of several answers each has its own, told apart by `index` (prompt times n plus copy).
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from kernel.batch import Logprob

from ..dialects.parts import join
from .completions import ask_of_completion
from .desk import Desk
from .logprobs import completion_logprobs, echoed
from .replies import DONE, Shape, answered, event
from .stream import Answer, News, Told, usage_of
from .wire import Usage
from .wire_completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    TextCompletion,
    read_completion_request,
)


async def completions(request: Request) -> Response:
    """The handler."""
    return await answered(
        request, "cmpl-", read_completion_request, ask_of_completion, CompletionShape
    )


class CompletionShape(Shape):
    """replies.Shape of completions."""

    def __init__(
        self, desk: Desk, request: CompletionRequest, answers: list[Answer], external_id: str
    ) -> None:
        self._desk = desk
        self._request = request
        self._answers = answers
        self._id = external_id
        self._created = int(time.time())
        self._echo = ["" for _ in answers]
        if request.echo:
            texts = {it.prompt: desk.tokenizer.decode(it.prompt) for it in answers if not it.copy}
            self._echo = [texts[it.prompt] for it in answers]
        self._due = [bool(request.echo) for _ in answers]
        self._untold: list[list[Told]] = [[] for _ in answers]

    def whole(self, news: list[News]) -> TextCompletion:
        return self._body([self._choice(told) for told in news], usage_of(self._answers))

    def _choice(self, news: News) -> CompletionChoice:
        answer = news.answer
        told = [] if not answer.scores else echoed(self._desk.tokenizer, answer)
        told += self._placed(answer, news.tokens)
        text = self._echo[answer.index] + join(news.parts).text
        return CompletionChoice(answer.index, text, self._logprobs(told), news.finish_reason)

    def told(self, news: News) -> Iterable[bytes]:
        index, reason = news.answer.index, news.finish_reason
        untold = self._untold[index]
        untold += news.tokens
        text = join(news.parts).text
        if self._due[index] and (text or reason is not None):
            # Before the first token, and so after the last of the prompt's scores.
            self._due[index] = False
            prompt = echoed(self._desk.tokenizer, news.answer) if news.answer.scores else []
            choice = CompletionChoice(index, self._echo[index], self._logprobs(prompt))
            yield self._event(choice)
        if text:
            yield self._event(CompletionChoice(index, text, self._take(news.answer)))
        if reason is not None:
            logprobs = self._take(news.answer) if untold else None
            yield self._event(CompletionChoice(index, "", logprobs, reason))

    def last(self) -> Iterable[bytes]:
        if self._request.include_usage:
            yield event(self._body([], usage_of(self._answers)))
        yield DONE

    def _take(self, answer: Answer) -> CompletionLogprobs | None:
        placed = self._placed(answer, self._untold[answer.index])
        self._untold[answer.index].clear()
        return self._logprobs(placed)

    def _placed(self, answer: Answer, tokens: list[Told]) -> list[tuple[int, Logprob | None, int]]:
        base = len(self._echo[answer.index])
        return [(told.logprob.token, told.logprob, base + told.start) for told in tokens]

    def _logprobs(self, told: list[tuple[int, Logprob | None, int]]) -> CompletionLogprobs | None:
        asked = self._request.logprobs
        if asked is None:
            return None
        return completion_logprobs(self._desk.tokenizer, told, top=asked > 0)

    def _event(self, choice: CompletionChoice) -> bytes:
        return event(self._body([choice], None if self._request.include_usage else UNSET))

    def _body(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> TextCompletion:
        model, fingerprint = self._answers[0].model, self._desk.fingerprint
        return TextCompletion(self._id, self._created, model, choices, fingerprint, usage=usage)
