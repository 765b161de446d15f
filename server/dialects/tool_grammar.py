"""Tool grammar: a forced call as llguidance's Lark terms, one function a kind of notation.

Owns how a tool's schema becomes a grammar. Which notation a model has is tool_formats.py's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from kernel.grammar import WHITESPACE

from .tools import Tool

Spell = Callable[[str], str]
"""A text with markers to its Lark terms: one token where the vocabulary has it so."""


_PLAIN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_term(schema: dict[str, Any], *, spaced: bool = False) -> str:
    """A Lark term that matches JSON of `schema` (llguidance's %json), in one line unless spaced."""
    written = {"whitespace_pattern": WHITESPACE} if spaced else _PLAIN
    return f"%json {json.dumps({**schema, 'x-guidance': written})}"


VALUE_RULES = (
    'parameter_text[suffix="\\n</parameter>\\n"]: /(.|\\n)*/',
    'invoke_text[suffix="</parameter>\\n"]: /(.|\\n)*/',
    'argument_text[suffix="</arg_value>\\n"]: /(.|\\n)*/',
)


def json_call(
    tool: Tool, spell: Spell, *, before: str = "", behind: str = "", key: str = "arguments"
) -> str:
    """One JSON object of name and arguments (`key`), between two texts."""
    schema = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, key: {"type": "object", **tool.parameters}},
        "required": ["name", key],
        "additionalProperties": False,
    }
    return f"{spell(before)} {json_term(_with_definitions(schema, tool))} {spell(behind)}"


def _with_definitions(schema: dict[str, Any], tool: Tool) -> dict[str, Any]:
    """References of a tool's schema go to its root: the definitions have to stand there."""
    names = ("$defs", "definitions")
    return schema | {name: tool.parameters[name] for name in names if name in tool.parameters}


def named_call(tool: Tool, spell: Spell, *, before: str, behind: str = "") -> str:
    """Arguments as JSON behind a text with the tool's NAME in it."""
    arguments = json_term({"type": "object", **tool.parameters})
    return f"{spell(before.replace('NAME', tool.name))} {arguments} {spell(behind)}"


def _tagged_call(
    tool: Tool, spell: Spell, *, head: str, key: str, text_rule: str, close: str, end: str
) -> str:
    terms = [spell(head.replace("NAME", tool.name))]
    required = tool.parameters.get("required", [])
    for name, schema in tool.parameters.get("properties", {}).items():
        value = text_rule
        if not isinstance(schema, dict) or schema.get("type") != "string" or "enum" in schema:
            whole = schema if isinstance(schema, dict) else {}
            value = f"{json_term(_with_definitions(whole, tool))} {spell(close)}"
            if whole.get("type") == "string":
                value = "(" + " | ".join(spell(str(one) + close) for one in whole["enum"]) + ")"
        member = f"{spell(key.replace('KEY', name))} {value}"
        terms.append(member if name in required else f"({member})?")
    return " ".join([*terms, spell(end)])


FUNCTION_TAGGED = partial(
    _tagged_call,
    head="<tool_call>\n<function=NAME>\n",
    key="<parameter=KEY>\n",
    text_rule="parameter_text",
    close="\n</parameter>\n",
    end="</function>\n</tool_call>",
)
INVOKE_TAGGED = partial(
    _tagged_call,
    head='<minimax:tool_call>\n<invoke name="NAME">\n',
    key='<parameter name="KEY">',
    text_rule="invoke_text",
    close="</parameter>\n",
    end="</invoke>\n</minimax:tool_call>",
)
ARGUMENT_TAGGED = partial(
    _tagged_call,
    head="<tool_call>NAME\n",
    key="<arg_key>KEY</arg_key>\n<arg_value>",
    text_rule="argument_text",
    close="</arg_value>\n",
    end="</tool_call>",
)
