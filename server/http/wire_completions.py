"""Bodies of /v1/completions, in OpenAI's shapes, and what may stand in them.

Never touches the engine, a tokenizer or a socket.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Struct, UnsetType

from .wire import ApiError, Fields, Usage, check_range, read_body
from .wire_sampling import Sampling, check_sampling

LOGPROBS_MAX = 5
DEFAULT_TOKENS = 16
"""OpenAI's max_tokens where a body names none."""

Prompt = str | list[str | int | list[int]]
"""A text, texts, token ids, or lists of token ids; never mixed."""


class CompletionRequest(Sampling, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Prompt
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | None = None

    @property
    def answer_tokens_max(self) -> int | None:
        """max_tokens, which is 16 here where it is not given."""
        return DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens


class CompletionLogprobs(Struct):
    """Of the tokens of a choice's text, or of what a chunk adds to it, in four equal lists.

    token_logprobs, top_logprobs: null for the first token of an echoed prompt, which nothing
    predicts. text_offset: where in the choice's text each begins, in characters.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Struct):
    """One answer, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class TextCompletion(Struct):
    """The whole body, or one event of a stream. usage: as in a chat's chunk."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET


_decoder = msgspec.json.Decoder(CompletionRequest)


def read_completion_request(body: bytes | Fields) -> CompletionRequest:
    """The request in a body, or of its fields, checked. Raises ApiError (400), with the field's
    name in `param`.
    """
    request = read_body(_decoder, body)
    check_sampling(request)
    check_range("logprobs", request.logprobs, 0, LOGPROBS_MAX)
    if request.suffix:
        raise ApiError("suffix is not supported: leave it out.", param="suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ApiError(
            f"best_of is {request.best_of}; only n ({request.n or 1}) is supported.",
            param="best_of",
        )
    return request
