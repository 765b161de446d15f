"""Replies: the answers of an Ask as one JSON body, or as a stream of server-sent events.

Owns the response's life and what the request's log line says of the answers; on every way out the
desk is told that they are over. What is written is the endpoint's business: its `Shape`.

The status is sent with the first news, so that a request which fails before it gets a status of
its own; one that fails later gets an error event, and no [DONE].
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol, TypeVar

import msgspec
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kernel.tokenizer import Tokenizer

from ..logs import note
from .asking import Ask
from .desk import Desk
from .routing import desk_of, read_body, response_id
from .stream import Answer, Feed, News, gather, news_of, usage_of, while_connected
from .wire import ApiError
from .wire_sampling import Sampling

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"
TOLD_BYTES = 16
"""Bytes of a body that take as long to read as a token's log-probability takes to be written."""

Body = TypeVar("Body", bound=Sampling)

log = structlog.get_logger()


class Shape(Protocol):
    """How an endpoint writes the answers of one request; only it knows their types.

    Events are bytes as they are sent (`event` makes them). An endpoint that never streams has
    `whole` only.
    """

    def whole(self, news: list[News]) -> object:
        """The body of a response that is not streamed, for msgspec: all news of each answer."""

    def first(self) -> Iterable[bytes]:
        """Events before any news."""
        return ()

    def told(self, news: News) -> Iterable[bytes]:
        """Events that news of one answer make."""
        return ()

    def last(self) -> Iterable[bytes]:
        """Events once all answers have ended."""
        return ()

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """Events of a failure in the middle; nothing follows them."""
        return (error_event(error),)


class Unheard(Response):
    """No response at all: the client has gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return


class Exchange:
    """One admitted request and its response."""

    def __init__(self, desk: Desk, answers: list[Answer], shape: Shape, external_id: str) -> None:
        self._desk = desk
        self._answers = answers
        self._shape = shape
        self._id = external_id

    async def respond(self, receive: Receive, *, stream: bool) -> Response:
        """Wait for the answers, or for their beginning if they are streamed.

        Raises ApiError, ClientDisconnect.
        """
        streaming = False
        try:
            if stream:
                feed = news_of(self._answers)
                first = await while_connected(receive, anext(feed))
                streaming = True
                return EventStream(self, first, feed)
            whole = await while_connected(receive, gather(self._answers))
            # Log-probabilities are most of what is written: those of a long prompt take a while.
            told = sum(len(news.tokens) + len(news.answer.scores) for news in whole)
            body = await self._desk.aside(told * TOLD_BYTES, self._body, whole)
            return Response(body, media_type="application/json")
        finally:
            if not streaming:
                self.end()

    def _body(self, whole: list[News]) -> bytes:
        return msgspec.json.encode(self._shape.whole(whole))

    async def events(self, first: News, feed: Feed) -> AsyncIterator[bytes]:
        """The stream's bytes, event by event."""
        shape = self._shape
        try:
            for data in (*shape.first(), *shape.told(first)):
                yield data
            async for news in feed:
                for data in shape.told(news):
                    yield data
            for data in shape.last():
                yield data
        except ApiError as error:
            for data in shape.failed(error):
                yield data
        except Exception:
            log.exception("stream failed", id=self._id)
            message = "The server failed in the middle of this answer; its log says why."
            failure = ApiError(message, kind="server_error", code="internal_error")
            for data in shape.failed(failure):
                yield data

    def end(self) -> None:
        """The response is over, in whatever way: tell the desk, and the request's log line."""
        answers = self._answers
        self._desk.leave(answers)
        usage = usage_of(answers)
        note(
            id=self._id,
            request=answers[0].request,
            answers=len(answers),
            prompt=usage.prompt_tokens,
            cached=usage.prompt_tokens_details.cached_tokens,
            tokens=usage.completion_tokens,
            finish=",".join(sorted({answer.outcome for answer in answers})),
        )


async def answered(
    request: Request,
    prefix: str,
    read: Callable[[bytes], Body],
    ask_of: Callable[[Body, Tokenizer, str], Ask],
    shape_of: Callable[[Desk, Body, list[Answer], str], Shape],
) -> Response:
    """The way of every endpoint that streams: a body is read, an Ask is made of it and admitted,
    and its answers are written. `prefix` is that of the response's id. Raises ApiError,
    ClientDisconnect.
    """
    desk = desk_of(request)
    data = await read_body(request, desk.max_body_bytes)
    body = read(data)
    desk.check_model(body.model)
    external_id = response_id(request, prefix)
    ask = await desk.aside(len(data), desk.ask, ask_of, body, external_id, slow=body.slow)
    answers = desk.admit(ask)
    exchange = Exchange(desk, answers, shape_of(desk, body, answers, external_id), external_id)
    return await exchange.respond(request.receive, stream=bool(body.stream))


class EventStream(StreamingResponse):
    """Streamed answers: whichever way it ends (client gone, too), the exchange ends."""

    def __init__(self, exchange: Exchange, first: News, feed: Feed) -> None:
        self._exchange = exchange
        events = exchange.events(first, feed)
        super().__init__(events, headers=STREAM_HEADERS, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except ClientDisconnect:
            pass
        finally:
            self._exchange.end()


def event(data: object) -> bytes:
    """An event that carries a struct as JSON."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """An event that carries a refusal in OpenAI's shape."""
    return b"data: " + error.body() + b"\n\n"
