"""Asking: one streamed chat with any OpenAI-compatible server, and when each part of it came.

Owns the request's body and the reading of its stream. Never counts by text: tokens are what the
server's usage says, beside the number of pieces that arrived.
"""

from __future__ import annotations

import time
from typing import Any

import httpx
import msgspec
from attrs import define, field
from msgspec import Struct

from replay.serve_load_client import events

REASON_CHARACTERS = 160

Message = dict[str, str]


@define
class Answer:
    """What came of one request; times are seconds of time.perf_counter.

    phase: the part of its load that it belongs to; "" where there is but one. pieces_s: when each
    piece of text came. failure: why there is no whole answer; "" where there is. cached_tokens: of
    the prompt, where the server says so.
    """

    sent_s: float
    phase: str = ""
    ended_s: float = 0.0
    pieces_s: list[float] = field(factory=list)
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    failure: str = ""

    @property
    def tokens(self) -> int:
        """Of the answer so far: those that usage names, else its pieces."""
        return self.output_tokens or len(self.pieces_s)


class _Delta(Struct):
    content: str | None = None


class _Choice(Struct):
    delta: _Delta | None = None


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_chunk = msgspec.json.Decoder(_Chunk)


class Asker:
    """Chats with one server. A context: its connections are closed at the end."""

    def __init__(self, address: str, model: str) -> None:
        """address: without /v1; model: the name to ask for. `answers` are all, in their order."""
        self._url = f"{address}/v1/chat/completions"
        self._model = model
        self._http = httpx.AsyncClient(timeout=None, limits=httpx.Limits(keepalive_expiry=2.0))
        self.answers: list[Answer] = []

    async def __aenter__(self) -> Asker:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, messages: list[Message], tokens: int, phase: str = "") -> Answer:
        """Send messages, read the answer of at most `tokens` up. Never raises for a server's fault:
        the answer says what it was.
        """
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = Answer(time.perf_counter(), phase)
        self.answers.append(answer)
        try:
            async with self._http.stream("POST", self._url, json=body) as response:
                if response.status_code != 200:
                    said = (await response.aread()).decode("utf-8", "replace")
                    answer.failure = f"status {response.status_code}: {said[:REASON_CHARACTERS]}"
                else:
                    await _read(response, answer)
        except httpx.HTTPError as error:
            answer.failure = f"the connection broke: {str(error) or type(error).__name__}"
        answer.ended_s = time.perf_counter()
        return answer


async def _read(response: httpx.Response, answer: Answer) -> None:
    text = []
    async for data in events(response.aiter_bytes()):
        if data == b"[DONE]":
            continue
        now_s = time.perf_counter()
        chunk = _chunk.decode(data)
        if chunk.error:
            answer.failure = str(chunk.error)[:REASON_CHARACTERS]
        if chunk.usage is not None:
            answer.prompt_tokens = chunk.usage.prompt_tokens
            answer.output_tokens = chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            answer.cached_tokens = (details and details.cached_tokens) or 0
        for choice in chunk.choices:
            if choice.delta is not None and choice.delta.content:
                answer.pieces_s.append(now_s)
                text.append(choice.delta.content)
    answer.text = "".join(text)
