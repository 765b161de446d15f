"""Chat: a chat body to an Ask: the prompt as the model's template makes it, and parameters.

Never waits and never touches the engine. Without max_tokens an answer may take the rest of the
context; more than that rest is cut to it. A prompt must leave room for one token at least.
"""

from __future__ import annotations

from typing import Any

from msgspec import structs

from kernel.tokenizer import Tokenizer
from statemachine.records import NO_LOGPROBS

from ..dialects.dialect import dialect_of
from .asking import Ask
from .wire_chat import ChatRequest, Message
from .wire_grammar import grammar_of
from .wire_sampling import check_vocabulary
from .wire_tools import choice_of, tools_of


def ask_of_chat(request: ChatRequest, tokenizer: Tokenizer, external_id: str) -> Ask:
    """What the engine is asked for by a checked body. Raises ApiError (400)."""
    check_vocabulary(request, tokenizer)
    logprobs = (request.top_logprobs or 0) if request.logprobs else NO_LOGPROBS
    prompt = dialect_of(tokenizer).prompt(
        [turn_of(message) for message in request.messages],
        tools_of(request.tools),
        choice_of(request.tool_choice),
        parallel=request.parallel_tool_calls is not False,
        grammar=grammar_of(request),
        extra=template_variables(request),
    )
    return Ask(
        prompts=(prompt.tokens,),
        parameters=request.parameters(logprobs=logprobs, grammar=prompt.grammar),
        external_id=external_id,
        n=request.n or 1,
        namespace=request.namespace,
        splitter=prompt.splitter,
        ignore_eos=bool(request.ignore_eos),
        model=request.model,
    )


def prompt_tokens(messages: list[Message], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The prompt as the model's template makes it, answer not begun. Raises ApiError (400)."""
    return dialect_of(tokenizer).prompt([turn_of(message) for message in messages]).tokens


def turn_of(message: Message) -> dict[str, Any]:
    """A message as chat templates take it."""
    # "developer" is OpenAI's newer word for "system"; models were trained on the older one.
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": message.text()}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    if message.tool_calls:
        turn["tool_calls"] = [structs.asdict(call) for call in message.tool_calls]
        for call in turn["tool_calls"]:
            call["function"] = structs.asdict(call["function"])
    return turn


def template_variables(request: ChatRequest) -> dict[str, Any]:
    """What the template is told beside messages and tools; most templates ask for none of it."""
    effort = request.reasoning_effort
    given = {"reasoning_effort": effort} if effort else {}
    return given | (request.chat_template_kwargs or {})
