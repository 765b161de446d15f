"""Route: POST /v1/chat/completions.

Order of chunks: role, content, finish_reason, usage where asked for, [DONE]; of several answers
each has its own, told apart by `index`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ..dialects.parts import Part, Reasoning, Text, ToolCallArguments, ToolCallBegun, join
from ..submission import STOP
from .chat import ask_of_chat
from .desk import Desk
from .logprobs import chat_logprob
from .replies import DONE, Shape, answered, event
from .stream import Answer, News, Told, usage_of
from .wire import Usage
from .wire_chat import (
    AnswerMessage,
    ChatRequest,
    Choice,
    Chunk,
    ChunkChoice,
    Completion,
    Delta,
    Logprobs,
    read_chat_request,
)
from .wire_tools import CallDelta, FunctionDelta, message_call


async def chat_completions(request: Request) -> Response:
    """The handler."""
    return await answered(request, "chatcmpl-", read_chat_request, ask_of_chat, ChatShape)


class ChatShape(Shape):
    """replies.Shape of chat completions."""

    def __init__(
        self, desk: Desk, request: ChatRequest, answers: list[Answer], external_id: str
    ) -> None:
        self._desk = desk
        self._request = request
        self._answers = answers
        self._id = external_id
        self._created = int(time.time())
        self._untold: list[list[Told]] = [[] for _ in answers]
        self._called = [False] * len(answers)

    def whole(self, news: list[News]) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._answers[0].model,
            choices=[self._choice(told) for told in news],
            usage=usage_of(self._answers),
            system_fingerprint=self._desk.fingerprint,
        )

    def _choice(self, news: News) -> Choice:
        whole = join(news.parts)
        calls = [message_call(call) for call in whole.calls]
        content = whole.text or (None if calls else "")
        reasoning = whole.reasoning or UNSET
        message = AnswerMessage(content, "assistant", None, reasoning, calls or UNSET)
        assert news.finish_reason is not None
        reason = finish_reason(news.finish_reason, called=bool(calls))
        return Choice(news.answer.index, message, reason, self._logprobs(news.tokens))

    def first(self) -> Iterable[bytes]:
        for answer in self._answers:
            yield self._event(ChunkChoice(answer.index, Delta(role="assistant", content="")))

    def told(self, news: News) -> Iterable[bytes]:
        index = news.answer.index
        untold = self._untold[index]
        untold += news.tokens
        for part in news.parts:
            # The tokens go with the first part that comes after them.
            logprobs = self._logprobs(untold) if untold else None
            yield self._event(ChunkChoice(index, delta_of(part), None, logprobs))
            untold.clear()
            self._called[index] |= isinstance(part, ToolCallBegun)
        if news.finish_reason is not None:
            logprobs = self._logprobs(untold) if untold else None
            reason = finish_reason(news.finish_reason, called=self._called[index])
            yield self._event(ChunkChoice(index, Delta(), reason, logprobs))

    def last(self) -> Iterable[bytes]:
        if self._request.include_usage:
            yield self._chunk([], usage_of(self._answers))
        yield DONE

    def _logprobs(self, tokens: list[Told]) -> Logprobs | None:
        if not self._request.logprobs:
            return None
        tokenizer = self._desk.tokenizer
        return Logprobs([chat_logprob(tokenizer, told.logprob) for told in tokens])

    def _event(self, choice: ChunkChoice) -> bytes:
        return self._chunk([choice], None if self._request.include_usage else UNSET)

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> bytes:
        model, fingerprint = self._answers[0].model, self._desk.fingerprint
        chunk = Chunk(self._id, self._created, model, choices, fingerprint, usage=usage)
        return event(chunk)


def delta_of(part: Part) -> Delta:
    """What a part adds to the message."""
    match part:
        case Text():
            return Delta(content=part.text)
        case Reasoning():
            return Delta(reasoning_content=part.text)
        case ToolCallBegun(index, id, name):
            call = CallDelta(index, FunctionDelta("", name), id, "function")
        case ToolCallArguments(index, json):
            call = CallDelta(index, FunctionDelta(json))
    return Delta(tool_calls=[call])


def finish_reason(reason: str, *, called: bool) -> str:
    """OpenAI's word for how an answer ended: one that calls tools waits for their results."""
    return "tool_calls" if called and reason == STOP else reason
