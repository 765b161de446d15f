"""Route: POST /v1/responses.

A response is a list of output items: reasoning, messages and calls, in the order in which the model
said them. `Output` makes them of an answer's parts, and the events that tell of it; a response that
is not streamed is the same items without the events.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kernel.tokenizer import Tokenizer

from ..dialects.parts import Part, Reasoning, Text, ToolCallArguments, ToolCallBegun, join
from ..submission import LENGTH
from .desk import Desk
from .replies import Shape, answered
from .responses import ask_of_responses
from .stream import Answer, News
from .wire import ApiError
from .wire_responses import (
    CallItem,
    ErrorField,
    IncompleteDetails,
    InputDetails,
    MessageItem,
    OutputDetails,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseBody,
    ResponsesRequest,
    ResponsesUsage,
    read_responses_request,
)

Event = tuple[str, dict[str, Any]]
"""An event's type without `response.`, and its fields."""


async def responses(request: Request) -> Response:
    """The handler."""
    return await answered(
        request, "resp_", read_responses_request, ask_of_responses, ResponsesShape
    )


class Output:
    """The output items of one response, and the events of their making."""

    def __init__(self, key: str) -> None:
        """key: what the items' ids have in common."""
        self._key = key
        self.items: list[OutputItem] = []
        self._open: OutputItem | None = None

    def add(self, part: Part) -> Iterator[Event]:
        """Take the next part."""
        item = self._open
        match part:
            case ToolCallBegun():
                call = CallItem(self._id("fc"), part.id, part.name)
                yield from self._begin(call)
            case ToolCallArguments():
                assert isinstance(item, CallItem)
                item.arguments += part.json
                yield "function_call_arguments.delta", self._at(delta=part.json)
            case Text():
                if not isinstance(item, MessageItem):
                    item = MessageItem(self._id("msg"), [])
                    yield from self._begin(item)
                    item.content.append(OutputText(""))
                    yield "content_part.added", self._at(content_index=0, part=OutputText(""))
                item.content[0].text += part.text
                fields = self._at(content_index=0, delta=part.text, logprobs=[])
                yield "output_text.delta", fields
            case Reasoning():
                if not isinstance(item, ReasoningItem):
                    item = ReasoningItem(self._id("rs"), [])
                    yield from self._begin(item)
                    item.content.append(ReasoningText(""))
                    yield "content_part.added", self._at(content_index=0, part=ReasoningText(""))
                item.content[0].text += part.text
                yield "reasoning_text.delta", self._at(content_index=0, delta=part.text)

    def end(self, status: str = "completed") -> Iterator[Event]:
        """The open item, if there is one, is done."""
        item, self._open = self._open, None
        if item is None:
            return
        item.status = status
        match item:
            case CallItem():
                fields = self._at(arguments=item.arguments, name=item.name)
                yield "function_call_arguments.done", fields
            case MessageItem():
                (text,) = item.content
                yield "output_text.done", self._at(content_index=0, text=text.text, logprobs=[])
                yield "content_part.done", self._at(content_index=0, part=text)
            case ReasoningItem():
                (thought,) = item.content
                yield "reasoning_text.done", self._at(content_index=0, text=thought.text)
                yield "content_part.done", self._at(content_index=0, part=thought)
        yield "output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def _begin(self, item: OutputItem) -> Iterator[Event]:
        yield from self.end()
        self.items.append(item)
        self._open = item
        yield "output_item.added", {"output_index": len(self.items) - 1, "item": item}

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._key}_{len(self.items)}"

    def _at(self, **fields: object) -> dict[str, Any]:
        """Fields of an event about the last item."""
        return {"item_id": self.items[-1].id, "output_index": len(self.items) - 1, **fields}


class ResponsesShape(Shape):
    """replies.Shape of responses."""

    def __init__(
        self, desk: Desk, request: ResponsesRequest, answers: list[Answer], external_id: str
    ) -> None:
        (answer,) = answers
        self._model = answer.model
        self._tokenizer = desk.tokenizer
        self._request = request
        self._answer = answer
        self._id = external_id
        self._created = int(time.time())
        self._output = Output(external_id.removeprefix("resp_"))
        self._parts: list[Part] = []
        self._events = 0

    def whole(self, news: list[News]) -> ResponseBody:
        (told,) = news
        for _ in self._take(told):
            pass
        return self._ended(told.finish_reason)

    def first(self) -> Iterable[bytes]:
        for kind in ("created", "in_progress"):
            yield self._event(kind, {"response": self._body("in_progress", [])})

    def told(self, news: News) -> Iterable[bytes]:
        for kind, fields in self._take(news):
            yield self._event(kind, fields)
        if news.finish_reason is not None:
            response = self._ended(news.finish_reason)
            yield self._event(response.status, {"response": response})

    def failed(self, error: ApiError) -> Iterable[bytes]:
        for kind, fields in self._output.end("incomplete"):
            yield self._event(kind, fields)
        response = self._body("failed", self._output.items)
        response.error = ErrorField("server_error", str(error))
        yield self._event("failed", {"response": response})

    def _take(self, news: News) -> Iterator[Event]:
        self._parts += news.parts
        for part in news.parts:
            yield from self._output.add(part)
        if news.finish_reason is not None:
            cut = news.finish_reason == LENGTH
            yield from self._output.end("incomplete" if cut else "completed")

    def _ended(self, reason: str | None) -> ResponseBody:
        cut = reason == LENGTH
        body = self._body("incomplete" if cut else "completed", self._output.items)
        body.incomplete_details = IncompleteDetails("max_output_tokens") if cut else None
        body.completed_at = None if cut else int(time.time())
        body.usage = usage_of(self._answer, join(self._parts).reasoning, self._tokenizer)
        return body

    def _body(self, status: str, output: list[OutputItem]) -> ResponseBody:
        asked = self._request
        parameters = asked.parameters()
        plain: dict[str, Any] = {"format": {"type": "text"}}
        return ResponseBody(
            id=self._id,
            created_at=self._created,
            model=self._model,
            status=status,
            output=output,
            temperature=parameters.temperature,
            top_p=parameters.top_p,
            tools=[tool.for_template()["function"] | _FUNCTION for tool in asked.offered],
            tool_choice="auto" if asked.tool_choice is None else asked.tool_choice,
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            text=msgspec.to_builtins(asked.text) if asked.text and asked.text.format else plain,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            metadata=asked.metadata or {},
            user=asked.user,
            reasoning={"effort": asked.reasoning and asked.reasoning.effort, "summary": None},
        )

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        kind = f"response.{kind}"
        data = msgspec.json.encode({"type": kind, "sequence_number": self._events, **fields})
        self._events += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


_FUNCTION = {"type": "function", "strict": False}


def usage_of(answer: Answer, reasoning: str, tokenizer: Tokenizer) -> ResponsesUsage:
    """Tokens of a whole answer."""
    prompt, completion = len(answer.prompt), answer.completion_tokens
    thought = len(tokenizer.encode(reasoning, add_special_tokens=False)) if reasoning else 0
    return ResponsesUsage(
        input_tokens=prompt,
        input_tokens_details=InputDetails(answer.cached_tokens),
        output_tokens=completion,
        output_tokens_details=OutputDetails(min(thought, completion)),
        total_tokens=prompt + completion,
    )
