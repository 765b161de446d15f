"""Chat: a request's body to a Submission: prompt tokens, sampling parameters, who may share rows.

Owns the defaults. Never waits and never touches the engine.

Defaults are OpenAI's: temperature 1, top_p 1. The seed is drawn for each request that names none,
and stands in its parameters. Without max_tokens an answer may take the rest of the context; more
than that rest is cut to it. A prompt must leave room for one token at least.
"""

from __future__ import annotations

import os

from kernel.errors import TemplateError
from kernel.tokenizer import Tokenizer
from statemachine.events import Namespace
from statemachine.records import Parameters

from .submission import Submission
from .wire import ApiError, ChatRequest, Message

SEED_MASK = 2**64 - 1


def prompt_tokens(request: ChatRequest, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The prompt as the model's template makes it, answer not begun. Raises ApiError (400)."""
    turns = [{"role": _role(turn), "content": turn.text()} for turn in request.messages]
    try:
        tokens = tokenizer.apply_chat_template(turns)
    except TemplateError as error:
        raise ApiError(f"{_sentence(str(error))}", param="messages") from None
    if not tokens:
        raise ApiError("The messages make an empty prompt; send some text.", param="messages")
    return tuple(tokens)


def submission_of(
    request: ChatRequest,
    tokens: tuple[int, ...],
    *,
    context_tokens: int,
    end_tokens: tuple[int, ...],
    external_id: str,
) -> Submission:
    """What the engine gets for a checked request. Raises ApiError (400, context_length_exceeded).

    context_tokens: the most that prompt and answer may have together.
    """
    room = context_tokens - len(tokens)
    if room < 1:
        raise ApiError(
            f"The prompt has {len(tokens)} tokens, but prompt and answer may have "
            f"{context_tokens} together; shorten the messages.",
            param="messages",
            code="context_length_exceeded",
        )
    parameters = Parameters(
        max_tokens=min(request.answer_tokens_max or room, room),
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(request.top_k or 0, 0),
        min_p=request.min_p or 0.0,
        seed=random_seed() if request.seed is None else request.seed & SEED_MASK,
        end_tokens=end_tokens,
        stop=request.stops,
    )
    return Submission(tokens, parameters, external_id, Namespace(salt=_salt(request)))


def random_seed() -> int:
    """64 bits from the system."""
    return int.from_bytes(os.urandom(8), "little")


def _role(turn: Message) -> str:
    # "developer" is OpenAI's newer word for "system"; models were trained on the older one.
    return "system" if turn.role == "developer" else turn.role


def _salt(request: ChatRequest) -> str:
    return request.salt or request.cache_salt or request.prompt_cache_key or ""


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."
