"""Routes: POST /v1/messages and POST /v1/messages/count_tokens, in Anthropic's shapes.

Order of events: message_start, ping, then for each block content_block_start, its deltas and
content_block_stop, and message_delta, message_stop at the end. Refusals have Anthropic's shape too
(error_shape.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from ..dialects.parts import Part, Reasoning, Text, ToolCallArguments, ToolCallBegun
from ..submission import LENGTH
from .desk import Desk
from .error_shape import error_event
from .messages import ask_of_messages, prompt_of
from .replies import Shape, answered
from .routing import desk_of, json_response, read_body
from .stream import Answer, News
from .wire import ApiError
from .wire_messages import (
    AnswerBlock,
    MessageAnswer,
    MessagesRequest,
    MessagesUsage,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    read_count_request,
    read_messages_request,
)

BROKEN_INPUT = "INVALID_JSON"
"""The key under which arguments stand that are no JSON object (Anthropic's advice for these)."""


async def messages(request: Request) -> Response:
    """The handler of POST /v1/messages."""
    shape = partial(MessagesShape, request.scope)
    return await answered(request, "msg_", read_messages_request, ask_of_messages, shape)


async def count_tokens(request: Request) -> Response:
    """The handler of POST /v1/messages/count_tokens."""
    desk = desk_of(request)
    body = await read_body(request, desk.max_body_bytes)
    asked = read_count_request(body)
    desk.check_model(asked.model)
    prompt = await desk.aside(len(body), prompt_of, asked, desk.tokenizer)
    return json_response({"input_tokens": len(prompt.tokens)})


class MessagesShape(Shape):
    """replies.Shape of messages. The blocks of a stream and of a whole answer are made alike."""

    def __init__(
        self,
        scope: Scope,
        _desk: Desk,
        _request: MessagesRequest,
        answers: list[Answer],
        external_id: str,
    ) -> None:
        (answer,) = answers
        self._model = answer.model
        self._answer = answer
        self._id = external_id
        self._scope = scope
        self._block = -1
        """The block that is open, from 0."""
        self._kind: type[Part] | None = None
        self._called = False

    def whole(self, news: list[News]) -> MessageAnswer:
        (told,) = news
        message = self._message(blocks_of(told.parts))
        message.stop_reason = self._stop_reason(told.parts, told.finish_reason)
        message.stop_sequence = self._answer.stopped_by
        return message

    def _message(self, content: list[AnswerBlock]) -> MessageAnswer:
        return MessageAnswer(self._id, self._model, content, self._usage())

    def _usage(self) -> MessagesUsage:
        answer = self._answer
        fresh_tokens = len(answer.prompt) - answer.cached_tokens
        return MessagesUsage(fresh_tokens, answer.completion_tokens, answer.cached_tokens)

    def _stop_reason(self, parts: list[Part], reason: str | None) -> str:
        self._called |= any(isinstance(part, ToolCallBegun) for part in parts)
        if reason == LENGTH:
            return "max_tokens"
        if self._answer.stopped_by is not None:
            return "stop_sequence"
        return "tool_use" if self._called else "end_turn"

    def first(self) -> Iterable[bytes]:
        yield _event("message_start", message=self._message([]))
        yield _event("ping")

    def told(self, news: News) -> Iterable[bytes]:
        for part in news.parts:
            yield from self._part(part)
        reason = self._stop_reason(news.parts, news.finish_reason)
        if news.finish_reason is None:
            return
        yield from self._close()
        end = {"stop_reason": reason, "stop_sequence": self._answer.stopped_by}
        yield _event("message_delta", delta=end, usage=self._usage())
        yield _event("message_stop")

    def _part(self, part: Part) -> Iterable[bytes]:
        match part:
            case ToolCallBegun():
                yield from self._open(ToolCallArguments, ToolUseBlock(part.id, part.name, {}))
            case ToolCallArguments():
                yield self._delta("input_json_delta", partial_json=part.json)
            case Text():
                if self._kind is not Text:
                    yield from self._open(Text, TextBlock(""))
                yield self._delta("text_delta", text=part.text)
            case Reasoning():
                if self._kind is not Reasoning:
                    yield from self._open(Reasoning, ThinkingBlock(""))
                yield self._delta("thinking_delta", thinking=part.text)

    def _open(self, kind: type[Part], block: AnswerBlock) -> Iterable[bytes]:
        yield from self._close()
        self._block += 1
        self._kind = kind
        yield _event("content_block_start", index=self._block, content_block=block)

    def _close(self) -> Iterable[bytes]:
        if self._kind is not None:
            self._kind = None
            yield _event("content_block_stop", index=self._block)

    def _delta(self, kind: str, **what: str) -> bytes:
        return _event("content_block_delta", index=self._block, delta={"type": kind, **what})

    def failed(self, error: ApiError) -> Iterable[bytes]:
        yield error_event(error, self._scope)


def blocks_of(parts: list[Part]) -> list[AnswerBlock]:
    """The blocks that the parts of a whole answer make, in their order."""
    blocks: list[AnswerBlock] = []
    arguments: dict[int, list[str]] = {}
    for part in parts:
        last = blocks[-1] if blocks else None
        match part, last:
            case Text(), TextBlock():
                last.text += part.text
            case Text(), _:
                blocks.append(TextBlock(part.text))
            case Reasoning(), ThinkingBlock():
                last.thinking += part.text
            case Reasoning(), _:
                blocks.append(ThinkingBlock(part.text))
            case ToolCallBegun(), _:
                arguments[len(blocks)] = []
                blocks.append(ToolUseBlock(part.id, part.name, {}))
            case ToolCallArguments(), _:
                arguments[len(blocks) - 1].append(part.json)
    for at, pieces in arguments.items():
        call = blocks[at]
        assert isinstance(call, ToolUseBlock)
        call.input = input_of("".join(pieces))
    return blocks


def input_of(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {BROKEN_INPUT: arguments}


def _event(kind: str, **fields: object) -> bytes:
    data = msgspec.json.encode({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
