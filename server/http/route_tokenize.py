"""Routes: POST /tokenize and /detokenize, GET /tokenizer_info, in vLLM's shapes; no engine here."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from kernel.tokenizer import Tokenizer

from .chat import prompt_tokens
from .logprobs import token_text
from .prompts import check_tokens
from .routing import desk_of, json_response, read_body
from .wire import ApiError
from .wire import read_body as decode
from .wire_chat import Message, check_messages


class TokenizeRequest(Struct, kw_only=True):
    """Body of POST /tokenize: one of prompt and messages.

    add_special_tokens (a start token before a prompt) is true where absent; messages get what the
    chat template puts in. return_token_strs: what each token is, too.
    """

    prompt: str | None = None
    messages: list[Message] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class Tokenized(Struct):
    """The answer. max_model_len: as in /v1/models."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class TokenizerInfo(Struct):
    """What a client needs to make prompts itself; chat_template: its source, in Jinja."""

    tokenizer_class: str
    vocab_size: int
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None


class DetokenizeRequest(Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class Detokenized(Struct):
    """The answer: special tokens are written out, but for a start token."""

    prompt: str


_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(request: Request) -> Response:
    """POST /tokenize."""
    desk = desk_of(request)
    body = await read_body(request, desk.max_body_bytes)
    asked = decode(_tokenize, body)
    desk.check_model(asked.model)
    tokens, names = await desk.aside(len(body), _tokenized, asked, desk.tokenizer)
    return json_response(Tokenized(len(tokens), desk.model.max_model_len, tokens, names))


def _tokenized(
    asked: TokenizeRequest, tokenizer: Tokenizer
) -> tuple[list[int], list[str] | UnsetType]:
    """Tokens, and their texts where these are asked for."""
    tokens = _tokens_of(asked, tokenizer)
    if not asked.return_token_strs:
        return tokens, UNSET
    return tokens, [token_text(tokenizer, token) for token in tokens]


def _tokens_of(asked: TokenizeRequest, tokenizer: Tokenizer) -> list[int]:
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError("Send either prompt or messages.", param="prompt")
    if asked.messages is not None:
        check_messages(asked.messages)
        return list(prompt_tokens(asked.messages, tokenizer))
    assert asked.prompt is not None
    return tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens is not False)


async def detokenize(request: Request) -> Response:
    """POST /detokenize."""
    desk = desk_of(request)
    body = await read_body(request, desk.max_body_bytes)
    asked = decode(_detokenize, body)
    desk.check_model(asked.model)
    check_tokens(asked.tokens, desk.tokenizer, "tokens")
    text = await desk.aside(len(body), desk.tokenizer.prompt_text, asked.tokens)
    return json_response(Detokenized(text))


async def tokenizer_info(request: Request) -> Response:
    """GET /tokenizer_info."""
    tokenizer = desk_of(request).tokenizer
    named, end = tokenizer.named_tokens, None
    if tokenizer.end_tokens:
        end = tokenizer.prompt_text(tokenizer.end_tokens[-1:])
    return json_response(
        TokenizerInfo(
            tokenizer_class="PreTrainedTokenizerFast",
            vocab_size=tokenizer.vocab_size,
            chat_template=tokenizer.chat_template or None,
            bos_token=named.get("bos_token"),
            eos_token=named.get("eos_token", end),
        )
    )
