"""Messages: a body in Anthropic's shape to an Ask: turns as templates take them, and parameters.

Never waits and never touches the engine. A last message of the assistant's is how the answer
begins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kernel.tokenizer import Tokenizer

from ..dialects.dialect import Prompt, dialect_of
from .asking import Ask
from .wire_grammar import grammar_of
from .wire_messages import Block, Counted, Message, MessagesRequest
from .wire_sampling import check_vocabulary


def ask_of_messages(request: MessagesRequest, tokenizer: Tokenizer, external_id: str) -> Ask:
    """What the engine is asked for by a checked body. Raises ApiError (400)."""
    check_vocabulary(request, tokenizer)
    prompt = prompt_of(request, tokenizer)
    return Ask(
        prompts=(prompt.tokens,),
        parameters=request.parameters(grammar=prompt.grammar),
        external_id=external_id,
        namespace=request.namespace,
        splitter=prompt.splitter,
        ignore_eos=bool(request.ignore_eos),
        model=request.model,
    )


def prompt_of(request: Counted, tokenizer: Tokenizer) -> Prompt:
    """The prompt as the model's template makes it. Raises ApiError (400)."""
    names = {
        block.id: block.name
        for message in request.messages
        for block in _blocks(message.content)
        if block.type == "tool_use"
    }
    turns = [turn for message in request.messages for turn in _turns(message, names)]
    if request.system:
        turns.insert(0, {"role": "system", "content": _text(request.system)})
    prefill = ""
    if turns[-1]["role"] == "assistant" and "tool_calls" not in turns[-1]:
        prefill = turns.pop()["content"]
    extra: dict[str, Any] = {}
    if request.thinking is not None:
        # Templates that can be told have one of these names for it.
        thinks = request.thinking.type != "disabled"
        extra = {"enable_thinking": thinks, "thinking": thinks}
    return dialect_of(tokenizer).prompt(
        turns,
        request.offered,
        request.choice,
        parallel=request.parallel,
        grammar=grammar_of(request),
        prefill=prefill,
        extra=extra,
    )


def _turns(message: Message, names: dict[str | None, str | None]) -> Iterator[dict[str, Any]]:
    """A message's turns: a result of a tool is one of its own, before what the user says."""
    blocks = _blocks(message.content)
    for block in blocks:
        if block.type == "tool_result":
            result = {"role": "tool", "content": _text(block.content or "")}
            name = names.get(block.tool_use_id)
            yield result | {"tool_call_id": block.tool_use_id} | ({"name": name} if name else {})
    said = [block for block in blocks if block.type != "tool_result"]
    if not said and blocks:
        return
    turn: dict[str, Any] = {"role": message.role, "content": _text(said)}
    if thoughts := "".join(block.thinking or "" for block in said):
        turn["reasoning_content"] = thoughts
    if calls := [_call(block) for block in said if block.type == "tool_use"]:
        turn["tool_calls"] = calls
    yield turn


def _call(block: Block) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _blocks(content: str | list[Block]) -> list[Block]:
    return [Block("text", content)] if isinstance(content, str) else content


def _text(content: str | list[Block]) -> str:
    return "".join(block.text or "" for block in _blocks(content))
