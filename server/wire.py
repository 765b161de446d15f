"""Wire: the bodies that HTTP clients send and get, in OpenAI's shapes.

Owns their types, what may stand in them, and the words of a refusal. Never touches the engine, a
tokenizer or a socket. Unknown fields are ignored, for clients send many; fields that would change
the answer and are not served yet are refused, never dropped silently.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

STOPS_MAX = 4
STOP_CHARACTERS_MAX = 1000
ROLES = ("system", "developer", "user", "assistant", "tool")


class ApiError(Exception):
    """A refusal in OpenAI's shape; `status` is HTTP's, `param` the field at fault."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code

    def body(self) -> bytes:
        """{"error": {"message", "type", "param", "code"}}."""
        error = {
            "message": str(self),
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})


class ContentPart(Struct):
    """One part of a message's content; only text is served."""

    type: str
    text: str | None = None


class Message(Struct):
    """One turn of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None

    def text(self) -> str:
        """The content as one string; its parts joined as they are."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or "" for part in self.content or ())


class StreamOptions(Struct):
    """include_usage: one more chunk, with usage and no choices, before the end."""

    include_usage: bool | None = None


class ResponseFormat(Struct):
    """Only plain text is served."""

    type: str = "text"


class ChatRequest(Struct):
    """Body of POST /v1/chat/completions. null and absent mean the same everywhere."""

    messages: list[Message]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    user: str | None = None
    salt: str | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    logprobs: bool | None = None
    response_format: ResponseFormat | None = None
    tool_choice: Any = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def answer_tokens_max(self) -> int | None:
        """max_completion_tokens where given (max_tokens is its old name), else max_tokens."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings, as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class PromptDetails(Struct):
    """cached_tokens: prompt tokens whose rows were computed before."""

    cached_tokens: int


class Usage(Struct):
    """Tokens of the prompt as the template made it, and of the answer as it was delivered."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class AnswerMessage(Struct):
    """The answer."""

    content: str
    role: str = "assistant"
    refusal: None = None


class Choice(Struct):
    """The one choice of a completion."""

    message: AnswerMessage
    finish_reason: str
    index: int = 0
    logprobs: None = None


class Completion(Struct):
    """Body of an answer that is not streamed."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    object: str = "chat.completion"


class Delta(Struct, omit_defaults=True):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(Struct):
    """The one choice of a chunk."""

    delta: Delta
    finish_reason: str | None = None
    index: int = 0
    logprobs: None = None


class Chunk(Struct):
    """One event of a stream. usage: absent unless asked for, then null up to the last."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET


class Model(Struct):
    """A model that is served."""

    id: str
    created: int
    object: str = "model"
    owned_by: str = "mlxtape"


class ModelList(Struct):
    """Body of GET /v1/models."""

    data: list[Model]
    object: str = "list"


_chat_decoder = msgspec.json.Decoder(ChatRequest)


def read_chat_request(body: bytes) -> ChatRequest:
    """The request in `body`, checked. Raises ApiError (400), with the field's name in `param`."""
    try:
        request = _chat_decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise ApiError("The body is nested too deeply.", code="invalid_json") from None
    _check_messages(request.messages)
    check_ranges(request)
    _check_stops(request.stops)
    _check_served(request)
    return request


_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")


def _wrong_type(message: str) -> ApiError:
    """msgspec's sentence, as a refusal that names the field."""
    match = _AT.match(message)
    what, path = (match["what"], match["path"] or "") if match else (message, "")
    if missing := _MISSING.search(what):
        param = ".".join(part for part in (path, missing["name"]) if part)
        return ApiError(f"{param} is missing.", param=param)
    what = what.replace(" | null", "").replace("`", "")
    if not path:
        return ApiError(f"The body must be a JSON object: {what}.")
    return ApiError(f"{path}: {what}.", param=path)


def _check_messages(messages: list[Message]) -> None:
    if not messages:
        raise ApiError("messages is empty; send at least one.", param="messages")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise ApiError(
                f"messages[{index}].role is {message.role!r}; it must be {' or '.join(ROLES)}.",
                param=f"messages[{index}].role",
            )
        if isinstance(message.content, list):
            _check_parts(message.content, f"messages[{index}].content")
        elif message.content is None and message.role != "assistant":
            param = f"messages[{index}].content"
            raise ApiError(f"{param} is missing.", param=param)


def _check_parts(parts: list[ContentPart], where: str) -> None:
    for index, part in enumerate(parts):
        if part.type != "text":
            raise ApiError(
                f"{where}[{index}] is of type {part.type!r}; this server takes text parts only.",
                param=f"{where}[{index}].type",
            )
        if part.text is None:
            raise ApiError(f"{where}[{index}].text is missing.", param=f"{where}[{index}].text")


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("top_k", -1, 2**31 - 1),
    ("seed", -(2**63), 2**64 - 1),
    ("max_tokens", 1, 2**31 - 1),
    ("max_completion_tokens", 1, 2**31 - 1),
)


def check_ranges(request: ChatRequest) -> None:
    """Raise ApiError (400) where a number is out of its range."""
    for name, low, high in _RANGES:
        value = getattr(request, name)
        if value is not None and not low <= value <= high:
            raise ApiError(f"{name} is {value}; it must be between {low} and {high}.", param=name)
    if request.top_p == 0:
        raise ApiError("top_p is 0; it must be above 0 (temperature 0 is greedy).", param="top_p")


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > STOPS_MAX:
        raise ApiError(
            f"stop has {len(stops)} strings; at most {STOPS_MAX} are allowed.", param="stop"
        )
    for text in stops:
        if not 1 <= len(text) <= STOP_CHARACTERS_MAX:
            raise ApiError(
                f"stop has a string of {len(text)} characters; "
                f"each must have 1 to {STOP_CHARACTERS_MAX}.",
                param="stop",
            )


def _check_served(request: ChatRequest) -> None:
    """Refuse what would change the answer and is not served yet."""
    unserved = {
        "n": request.n not in (None, 1),
        "logprobs": bool(request.logprobs),
        "response_format": request.response_format not in (None, ResponseFormat()),
        "tool_choice": request.tool_choice not in (None, "none", "auto"),
        "frequency_penalty": bool(request.frequency_penalty),
        "presence_penalty": bool(request.presence_penalty),
        "logit_bias": bool(request.logit_bias),
    }
    for name, asked in unserved.items():
        if asked:
            value = "1" if name == "n" else "its default"
            raise ApiError(
                f"{name} other than {value} is not supported; leave it out.",
                param=name,
                code="unsupported_value",
            )
