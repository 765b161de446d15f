"""Hermes: tools, calls and their results in plain words, for templates that know none of them.

Owns these words. The models that were trained on them (Hermes 2 Pro, Qwen2.5) have the same in
their templates; others follow them as well as they follow instructions.

Source: the function calling format of NousResearch's Hermes 2 Pro.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .tools import Tool

INTRODUCTION = """You may call functions to answer the user. These are the functions, as JSON:
<tools>
{tools}
</tools>

To call one, write its name and its arguments as JSON between these tags, once for each call:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>"""


def in_words(
    turns: Sequence[Mapping[str, Any]], tools: Sequence[Tool], *, system: bool = True
) -> list[dict[str, Any]]:
    """`turns` with roles system, user and assistant only, tools and calls in their text.

    The tools stand in the system message, or before what the user says first if not `system`.
    """
    found: list[dict[str, Any]] = []
    for turn in turns:
        role, content = turn["role"], turn.get("content") or ""
        if role == "tool":
            result = f"<tool_response>\n{content}\n</tool_response>"
            if found and found[-1].get("results"):
                found[-1]["content"] += "\n" + result
            else:
                found.append({"role": "user", "content": result, "results": True})
        elif turn.get("tool_calls"):
            calls = [_call(call["function"]) for call in turn["tool_calls"]]
            found.append({"role": role, "content": "\n".join(filter(None, [content, *calls]))})
        else:
            found.append(dict(turn))
    if tools:
        _introduce(found, tools, "system" if system else "user")
    return [{key: turn[key] for key in turn if key != "results"} for turn in found]


def _call(function: Mapping[str, Any]) -> str:
    name = json.dumps(function["name"], ensure_ascii=False)
    arguments = function["arguments"] or "{}"
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _introduce(turns: list[dict[str, Any]], tools: Sequence[Tool], role: str) -> None:
    lines = (json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools)
    words = INTRODUCTION.format(tools="\n".join(lines))
    if not turns or turns[0]["role"] not in ("system", role):
        turns.insert(0, {"role": role, "content": words})
    elif role == "system":
        turns[0]["content"] = f"{turns[0]['content']}\n\n{words}"
    else:
        turns[0]["content"] = f"{words}\n\n{turns[0]['content']}"
