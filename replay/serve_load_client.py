"""Serve-load client: a recorded request as one streamed completion of an OpenAI-compatible server.

Owns the body that is sent, what is read of the stream, and the words for what goes wrong. Source of
the protocol: OpenAI's API reference (Completions), and for fields that are not OpenAI's
(return_token_ids, stop_token_ids, ignore_eos, top_k, min_p, repetition_penalty, priority,
cache_salt) that of vLLM, whose names others took over. httpx is imported when a client is made.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from attrs import define, field
from msgspec import Struct

from statemachine.records import RequestArrived

from .errors import Unusable

if TYPE_CHECKING:
    import httpx

ANSWER_BYTES = 64 << 20
"""The longest stream that is read."""
REASON_CHARACTERS = 300
SEED_TOP = 1 << 63
LOGPROBS_MAX = 5
"""More are refused for completions; none change an answer."""
FOR_ALL = (401, 403, 404, 405)
"""Statuses that every request would get."""


@define
class Measured:
    """What came back. Times are microseconds since it was sent.

    tokens: ids, where the server tells them. left: whether it was given up on purpose. failure: its
    kind and a sentence; "" where it was answered.
    """

    text: list[str] = field(factory=list)
    tokens: list[int] | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    first_us: int | None = None
    whole_us: int = 0
    gaps_us: list[int] = field(factory=list)
    left: bool = False
    failure: str = ""
    reason: str = ""


class Failed(Exception):
    """A request that was not answered; kind is for counting, the message for a person."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _Choice(Struct):
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Model(Struct):
    id: str


class _Models(Struct):
    data: list[_Model]


_chunk = msgspec.json.Decoder(_Chunk)


def body_of(
    arrived: RequestArrived, model: str, prompt: str | None, openai_only: bool
) -> dict[str, Any]:
    """A request's body. prompt: its text; None sends the token ids.

    What is off is sent as well where a server may have defaults of its own.
    """
    given = arrived.parameters
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(arrived.tokens) if prompt is None else prompt,
        "max_tokens": given.max_tokens,
        "temperature": given.temperature,
        "top_p": given.top_p,
        # 64 bits with a sign: the same bits to us, and what others take.
        "seed": given.seed - 2 * SEED_TOP if given.seed >= SEED_TOP else given.seed,
        "frequency_penalty": given.frequency_penalty,
        "presence_penalty": given.presence_penalty,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if given.stop:
        body["stop"] = list(given.stop)
    if given.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in given.logit_bias}
    if given.logprobs >= 0:
        body["logprobs"] = min(given.logprobs, LOGPROBS_MAX)
    if openai_only:
        return body
    body |= {
        "top_k": given.top_k or -1,
        "min_p": given.min_p,
        "repetition_penalty": given.repetition_penalty,
        "return_token_ids": True,
    }
    if given.end_tokens:
        body["stop_token_ids"] = list(given.end_tokens)
    else:
        body["ignore_eos"] = True
    if given.priority:
        body["priority"] = given.priority
    if arrived.namespace.salt:
        body["cache_salt"] = arrived.namespace.salt
    return body


def base_of(url: str) -> str:
    """The address that /completions and /models stand behind. Raises Unusable."""
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of brackets, or of a port
        right = False
    if not right:
        raise Unusable(f"{url} is no server's address: write it as http://HOST:PORT")
    base = url.rstrip("/")
    return base if base.endswith("/v1") else base + "/v1"


class Client:
    """Connections to one server. Close it at the end."""

    def __init__(self, url: str, key: str, timeout_s: float) -> None:
        """timeout_s: the longest silence. Raises Unusable: no such address, or no httpx."""
        self.base = base_of(url)
        try:
            import httpx
        except ImportError:
            raise Unusable(
                "serve-load needs httpx, which is not installed: pip install 'mlxtape[load]'"
            ) from None
        headers = {"Accept-Encoding": "identity"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        # As many connections as requests. Servers close idle ones after seconds: be faster.
        limits = httpx.Limits(keepalive_expiry=2.0)
        self._http = httpx.AsyncClient(
            headers=headers, limits=limits, timeout=httpx.Timeout(timeout_s, pool=None)
        )
        self._errors = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError)
        self._silence = httpx.TimeoutException

    async def close(self) -> None:
        await self._http.aclose()

    async def find_model(self, given: str) -> str:
        """The name to ask for: the given one, or the first that the server has. Raises Unusable."""
        try:
            response = await self._http.get(f"{self.base}/models")
        except self._errors as error:
            raise Unusable(
                f"no server answers at {self.base} ({_said(error)}): start one, or check the "
                "address"
            ) from error
        if response.status_code in (401, 403):
            raise Unusable(
                f"the server refuses the key ({response.status_code}): give one with --api-key or "
                "in OPENAI_API_KEY"
            )
        if given:
            return given
        try:
            found = msgspec.json.decode(response.content, type=_Models).data
        except msgspec.MsgspecError:
            found = []
        if response.status_code != 200 or not found:
            raise Unusable(
                f"{self.base}/models names no model (status {response.status_code}): is this an "
                "OpenAI-compatible server? --model NAME says which one to ask for"
            )
        return found[0].id

    async def complete(self, content: bytes, measured: Measured) -> None:
        """Send one body and read its stream into `measured`, which is filled as it comes.

        Raises Failed, and Unusable where no request would be answered.
        """
        headers = {"Content-Type": "application/json"}
        sent_s = time.monotonic()
        try:
            async with self._http.stream(
                "POST", f"{self.base}/completions", content=content, headers=headers
            ) as response:
                if response.status_code != 200:
                    raise await self._refusal(response)
                await _read(response, measured, sent_s)
        except self._silence as error:
            raise Failed(
                "timeout", f"the server was silent for too long ({_said(error)})"
            ) from error
        except self._errors as error:
            raise Failed("connection", f"the connection broke ({_said(error)})") from error

    async def _refusal(self, response: httpx.Response) -> Exception:
        status, data = response.status_code, bytearray()
        async for piece in response.aiter_bytes():
            data += piece
            if len(data) > ANSWER_BYTES >> 10:
                break
        said = _reason(bytes(data))
        if status in FOR_ALL:
            return Unusable(
                f"{self.base}/completions answers {status}, so no request can be sent: {said}"
            )
        return Failed(f"HTTP {status}", f"status {status}: {said}")


async def _read(response: httpx.Response, measured: Measured, sent_s: float) -> None:
    newest_us, ended = 0, False
    async for data in events(response.aiter_bytes()):
        # The rest is read too: a connection whose answer was not read up cannot be used again.
        if ended or data == b"[DONE]":
            ended = True
            continue
        measured.whole_us = _since_us(sent_s)
        try:
            chunk = _chunk.decode(data)
        except msgspec.MsgspecError as error:
            raise Failed("stream", f"an event of the stream makes no sense: {error}") from error
        if chunk.error:
            raise Failed("stream", f"the answer broke off: {_reason(data)}")
        if chunk.usage is not None:
            measured.prompt_tokens = chunk.usage.prompt_tokens
            measured.completion_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices or ():
            if choice.text or choice.token_ids:
                now_us = _since_us(sent_s)
                if measured.first_us is None:
                    measured.first_us = now_us
                else:
                    measured.gaps_us.append(now_us - newest_us)
                newest_us = now_us
            if choice.text:
                measured.text.append(choice.text)
            if choice.token_ids is not None:
                measured.tokens = measured.tokens or []
                measured.tokens += choice.token_ids
            measured.finish_reason = choice.finish_reason or measured.finish_reason
    if not ended and measured.finish_reason is None:
        raise Failed("stream", "the stream stopped before its end")


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events, in lines that end with \\n or \\r\\n. Raises Failed.

    (httpx's own lines end at U+2028 too, which may stand inside of an answer.) Source: WHATWG HTML,
    9.2.6.
    """
    data: list[bytes] = []
    async for line in _lines(pieces):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            yield b"\n".join(data)
            data = []
    if data:
        yield b"\n".join(data)


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    held, size = bytearray(), 0
    async for piece in pieces:
        held += piece
        size += len(piece)
        if size > ANSWER_BYTES:
            raise Failed("stream", f"the answer is longer than {ANSWER_BYTES >> 20} MiB")
        if b"\n" in piece:
            *lines, held = held.split(b"\n")
            for line in lines:
                yield bytes(line).removesuffix(b"\r")
    yield bytes(held)


def _since_us(sent_s: float) -> int:
    return round((time.monotonic() - sent_s) * 1e6)


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


def _reason(data: bytes) -> str:
    """What an error's body says, in one line."""
    try:
        found: Any = msgspec.json.decode(data)
    except msgspec.MsgspecError:
        found = data.decode("utf-8", "replace")
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    text = found if isinstance(found, str) else msgspec.json.encode(found).decode()
    return " ".join(text.split())[:REASON_CHARACTERS] or "no reason given"
