"""Chat: a chat body to an Ask: the prompt as the model's template makes it, and parameters.

Never waits and never touches the engine. Without max_tokens an answer may take the rest of the
context; more than that rest is cut to it. A prompt must leave room for one token at least.
"""

from __future__ import annotations

from kernel.errors import TemplateError
from kernel.tokenizer import Tokenizer
from statemachine.records import NO_LOGPROBS

from .asking import Ask
from .wire import ApiError
from .wire_chat import ChatRequest, Message
from .wire_grammar import grammar_of
from .wire_sampling import check_vocabulary


def ask_of_chat(request: ChatRequest, tokenizer: Tokenizer, external_id: str) -> Ask:
    """What the engine is asked for by a checked body. Raises ApiError (400)."""
    check_vocabulary(request, tokenizer)
    logprobs = (request.top_logprobs or 0) if request.logprobs else NO_LOGPROBS
    return Ask(
        prompts=(prompt_tokens(request.messages, tokenizer),),
        parameters=request.parameters(logprobs=logprobs, grammar=grammar_of(request)),
        external_id=external_id,
        n=request.n or 1,
        namespace=request.namespace,
        ignore_eos=bool(request.ignore_eos),
    )


def prompt_tokens(messages: list[Message], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The prompt as the model's template makes it, answer not begun. Raises ApiError (400)."""
    turns = [{"role": _role(turn), "content": turn.text()} for turn in messages]
    try:
        tokens = tokenizer.apply_chat_template(turns)
    except TemplateError as error:
        raise ApiError(f"{_sentence(str(error))}", param="messages") from None
    if not tokens:
        raise ApiError("The messages make an empty prompt; send some text.", param="messages")
    return tuple(tokens)


def _role(turn: Message) -> str:
    # "developer" is OpenAI's newer word for "system"; models were trained on the older one.
    return "system" if turn.role == "developer" else turn.role


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."
