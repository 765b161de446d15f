"""Responses: a body in the shape of OpenAI's Responses API to an Ask.

Owns the way from items to turns: a call joins the assistant's turn before it, reasoning the one
behind it. Never waits and never touches the engine.
"""

from __future__ import annotations

from typing import Any

from kernel.tokenizer import Tokenizer

from ..dialects.dialect import dialect_of
from .asking import Ask
from .wire_responses import Item, Part, ResponsesRequest
from .wire_sampling import check_vocabulary


def ask_of_responses(request: ResponsesRequest, tokenizer: Tokenizer, external_id: str) -> Ask:
    """What the engine is asked for by a checked body. Raises ApiError (400)."""
    check_vocabulary(request, tokenizer)
    effort = request.reasoning.effort if request.reasoning else None
    prompt = dialect_of(tokenizer).prompt(
        turns_of(request),
        request.offered,
        request.choice,
        parallel=request.parallel_tool_calls is not False,
        grammar=request.grammar,
        extra={"reasoning_effort": effort} if effort else {},
    )
    return Ask(
        prompts=(prompt.tokens,),
        parameters=request.parameters(grammar=prompt.grammar),
        external_id=external_id,
        namespace=request.namespace,
        splitter=prompt.splitter,
        prompt_param="input",
        ignore_eos=bool(request.ignore_eos),
        model=request.model,
    )


def turns_of(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Instructions and input as chat templates take them."""
    turns: list[dict[str, Any]] = []
    if request.instructions:
        turns.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*turns, {"role": "user", "content": request.input}]
    names: dict[str | None, str | None] = {}
    thoughts = ""
    for item in request.input:
        match item.type:
            case "reasoning":
                thoughts += text_of(item.content)
                continue
            case "function_call_output":
                turn = {"role": "tool", "content": text_of(item.output)}
                name = names.get(item.call_id)
                turns.append(
                    turn | {"tool_call_id": item.call_id} | ({"name": name} if name else {})
                )
                continue
            case "function_call":
                names[item.call_id] = item.name
                if thoughts or not turns or turns[-1]["role"] != "assistant":
                    turns.append({"role": "assistant", "content": ""})
                turns[-1].setdefault("tool_calls", []).append(_call(item))
            case _:
                role = "system" if item.role == "developer" else item.role
                turns.append({"role": role, "content": text_of(item.content)})
        if thoughts and turns[-1]["role"] == "assistant":
            turns[-1]["reasoning_content"] = thoughts
        thoughts = ""
    return turns


def _call(item: Item) -> dict[str, Any]:
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def text_of(content: str | list[Part] | None) -> str:
    """The content as one string; its parts joined as they are."""
    if isinstance(content, str):
        return content
    return "".join(part.text or "" for part in content or ())
